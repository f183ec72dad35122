"""Rows of `benchmarks/family_survival.py`, one of each load, and the shares that their victims have together.

A load is the requests of one seed, the same for every model and setting. The JSON file has what all rows were run with,
and a row for every model, setting, length of outputs and seed. `tools/family_tables.py` reads it, too, without vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.errors import InputError
from kvpolicy.evaluation.bounds import Resamples
from kvpolicy.stats import RESAMPLES, proportion_interval, widened_tail

DEFAULT, DENSE, WHOLE = "default", "retention None", "hybrid manager off"
"""Settings of vLLM: its defaults, windows and states cached at the end of every block, and windows stored whole."""
MIN_LOADS = 5
"""An interval over fewer loads is not given."""

Key = tuple[str, str, int, int]
Made = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Of one model with one setting that served one load."""

    model: str
    setting: str
    output_tokens: int
    """On average, of the distribution that lengths are drawn from."""
    seed: int
    device_blocks: int
    block_size: int
    request_tokens: int
    """Of all prompts and outputs."""
    recomputed_tokens: int
    preemptions: int
    computed_tokens: int
    """Of all victims, when they were preempted."""
    found_tokens: int
    """Of these, on the device at resume."""
    with_hits: int
    """Victims that found anything."""
    far: int
    """Victims that had generated more than a window or a block."""
    far_computed_tokens: int
    far_found_tokens: int
    far_with_hits: int

    @property
    def key(self) -> Key:
        return self.model, self.setting, self.output_tokens, self.seed


@dataclass(frozen=True, slots=True)
class Share:
    """Of tokens, over all loads together, with its 95% interval."""

    value: float
    low: float | None
    high: float | None
    over_loads: bool
    """Whether the interval is over loads. If not, it is of so many independent victims, or there is none."""

    def text(self, number: str = ".0%") -> str:
        """The interval over loads in round brackets, that over victims in square ones."""
        value, *ends = (shown(one, number) for one in (self.value, self.low, self.high) if one is not None)
        first, last = "()" if self.over_loads else "[]"
        return f"{value} {first}{' to '.join(ends)}{last}" if ends else value


def shown(value: float, number: str) -> str:
    """With a decimal more where it would be 0 without."""
    return f"{value:.1%}" if number == ".0%" and 0 < value < 0.005 else f"{value:{number}}"


# ---- shares ----


def survival(rows: Iterable[Row]) -> Share | None:
    """Tokens found over tokens computed, of all victims. None without victims."""
    return surviving_share((row.found_tokens, row.computed_tokens, row.preemptions) for row in rows)


def far_survival(rows: Iterable[Row]) -> Share | None:
    """As :func:`survival`, of victims that had generated more than a window or a block."""
    return surviving_share((row.far_found_tokens, row.far_computed_tokens, row.far) for row in rows)


def surviving_share(loads: Iterable[tuple[int, int, int]]) -> Share | None:
    """Of each load the tokens found, those computed and the victims. The interval is a bootstrap over the loads that
    have victims, where at least MIN_LOADS found something and as many lost something. Fewer do not show how much loads
    differ, and where none found anything, a bootstrap would say from 0 to 0.

    Elsewhere it is Clopper and Pearson's for that share of the victims, rounded outwards to whole victims: it takes
    victims as independent, and each as found whole or lost whole.
    """
    having = [load for load in loads if load[2]]
    if not having:
        return None
    found, computed, victims = (sum(load[part] for load in having) for part in range(3))
    if min(sum(some > 0 for some, *_ in having), sum(some < of for some, of, _ in having)) >= MIN_LOADS:
        return Share(found / computed, *over_loads([(some, of) for some, of, _ in having]), over_loads=True)
    low, _ = proportion_interval(found * victims // computed, victims)
    _, high = proportion_interval(-(-found * victims // computed), victims)
    return Share(found / computed, low, high, over_loads=False)


def tax(rows: Iterable[Row]) -> Share:
    """Tokens computed again over tokens of all requests; below MIN_LOADS loads without an interval."""
    loads = [(row.recomputed_tokens, row.request_tokens) for row in rows]
    again, total = (sum(load[part] for load in loads) for part in range(2))
    if len(loads) < MIN_LOADS:
        return Share(again / total, None, None, over_loads=False)
    return Share(again / total, *over_loads(loads), over_loads=True)


def over_loads(loads: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Percentile bootstrap of a ratio of sums, loads drawn with replacement; the tails are those of few blocks
    (:func:`kvpolicy.stats.widened_tail`). Unlike a studentised one it stays between the least and the greatest ratio of
    a load, and needs no standard error of resamples in which all loads have a share of 0."""
    sums = resampled(len(loads)) @ np.array(loads, dtype=np.float64)
    ratios = np.sort(sums[:, 0] / sums[:, 1])
    tail = widened_tail(len(loads))
    return float(ratios[floor(tail * RESAMPLES)]), float(ratios[ceil((1 - tail) * RESAMPLES) - 1])


@cache
def resampled(loads: int) -> Floats:
    """How often each load is drawn in each resample: (resamples, loads), the same in every call."""
    return Resamples.of(np.arange(loads), np.random.default_rng(0), RESAMPLES).counts


# ---- the file ----


def read(file: Path, made: Made) -> list[Row]:
    """Rows of the file; none if there is no file. Raises InputError for one that was made otherwise, or is none of
    these."""
    if not file.exists():
        return []
    known, rows = parsed(file)
    for name, value in made.items():
        if known.get(name) != value:
            raise InputError(f"{file} is of {name} {known.get(name)}, not {value}: should be another file")
    return rows


def parsed(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """What all rows were run with, and the rows. Raises InputError for a file that holds something else."""
    try:
        known = json.loads(file.read_text())
        return known, [Row(**row) for row in known.pop("rows")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Row))
        raise InputError(f"{file}: should have rows of {names} ({error})") from error


def write(file: Path, made: Made, rows: Sequence[Row]) -> None:
    """A row a line. Atomic: a reader finds the file as it was before, or with all rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in made.items()]
    of_rows = ",\n".join(json.dumps(asdict(row)) for row in rows)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text("{\n" + ",\n".join(lines) + f',\n"rows": [\n{of_rows}\n]\n' + "}\n")
    scratch.replace(file)
