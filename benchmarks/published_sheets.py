"""Step times by a data sheet alone beside step times from published tables of the same device and LLM.

    python benchmarks/published_sheets.py --profiles DATA/profiles [--json FILE]

A data sheet gives peak rates; the share of each that is reached is assumed (`kvpolicy.cost.analytic.Assumptions`, from
AIConfigurator's kernels of A100 and H100), and so are 2 ms a step. Here the steps that they make are held against
LLMServingSim's tables of a whole model on an H100 and an RTX 4090, and AIConfigurator's and Vidur's of an A100: decode
batches, prompts, chunks behind a context, and decodes beside a chunk. The tables hold no time of the engine's own, so
each kind is judged without the 2 ms, too. Then the shares that fit each place best, and what the shares that fit the
*other* devices best would do there: whether better assumptions are to be had from what is published.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matrix_places import LLAMA_3_1_8B
from published_two_gpus import ALL_REDUCES, LLAMA_2_70B, TABLES
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

import kvpolicy
from kvpolicy.arrays import Floats, causal_pairs
from kvpolicy.cost.analytic import ASSUMED, Assumptions, untrained
from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware import EngineSpec
from kvpolicy.hardware.sheets import device_sheet
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.hardware.law_times import law_times
from kvpolicy.simulator.hardware.table_times import TableTimes

BAR = 0.1
"""On the median of each kind of step."""
SHARES = ("linear_share", "attention_share", "weight_share", "kv_share")
KINDS = ("decodes", "prompts", "chunks behind a context", "decodes beside a chunk")


@dataclass(frozen=True)
class Place:
    """A device, an LLM on so many of them, and the tables that were measured there."""

    name: str
    device: str
    config: Mapping[str, Any]
    tables: tuple[str, ...]
    ranks: int = 1
    all_reduce: str | None = None


PLACES = (
    Place("H100, Llama-3.1-8B", "H100-SXM", LLAMA_3_1_8B, (
            "lss_H100_Llama-3.1-8B_tp1_layers.csv.gz", "aiconf_h100_sxm_vllm0.24.0_context_attention_perf.parquet",
            "aiconf_h100_sxm_vllm0.24.0_generation_attention_perf.parquet",
        ),
    ),
    Place(
        "RTX 4090, Llama-3.1-8B",
        "RTX-4090",
        LLAMA_3_1_8B,
        tuple(f"lss_RTX4090_Llama-3.1-8B_tp1_{part}.csv.gz" for part in ("dense", "attention", "per_sequence")),
    ),
    Place(
        "A100, Llama-3.1-8B, kernels alone",
        "A100-SXM-80GB",
        LLAMA_3_1_8B,
        tuple(f"aiconf_a100_sxm_vllm0.14.0_{part}_perf.parquet"
              for part in ("gemm", "context_attention", "generation_attention")),
    ),
    Place("two A100s, Llama-2-70B", "A100-SXM-80GB", LLAMA_2_70B, TABLES, 2, ALL_REDUCES["dgx"]),
)  # fmt: skip


def steps() -> Iterator[tuple[str, StepLoad]]:
    """(kind, step), within what the tables hold."""
    for requests, context in itertools.product((1, 8, 32, 128, 256), (256, 1024, 4096)):
        if requests * context <= 300_000:
            yield KINDS[0], StepLoad(requests, requests, requests * context, 0, 0, 0)
    for tokens in (128, 512, 1024, 2048):
        yield KINDS[1], StepLoad(tokens, 0, 0, int(causal_pairs(0, tokens)), 1, 0)
        for before in (2048, 8192):
            pairs = int(causal_pairs(before, before + tokens))
            yield KINDS[2], StepLoad(tokens, 0, 0, pairs, 1, before)
    for requests, tokens in itertools.product((32, 128), (512, 1920)):
        pairs = int(causal_pairs(0, tokens))
        yield KINDS[3], StepLoad(requests + tokens, requests, requests * 1024, pairs, 1, 0)


class Judged:
    """The steps of one place by its tables, and by its data sheet under any assumptions."""

    def __init__(self, place: Place, profiles: Path) -> None:
        self.place = place
        self._shape = ModelShape.from_config(dict(place.config))
        with tempfile.TemporaryDirectory() as folder:
            tables = [profiles / name for name in place.tables]
            all_reduce = None if place.all_reduce is None else profiles / place.all_reduce
            model = kvpolicy.import_profile(
                tables, Path(folder), self._shape, place.ranks, link="pcie5", all_reduce=all_reduce
            ).model
        self.kinds, loads = zip(*steps(), strict=True)
        self._loads = np.array(loads, dtype=float)
        self.measured: Floats = TableTimes(model).steps_s(self._loads)

    def by_sheet(self, assumed: Assumptions) -> Floats:
        model = untrained(
            self._shape, device_sheet(self.place.device), engine=EngineSpec(ranks=self.place.ranks), assumed=assumed
        )
        return law_times(model).steps_s(self._loads)

    def errors(self, assumed: Assumptions) -> dict[str, Floats]:
        """Relative errors by kind of step."""
        error = self.by_sheet(assumed) / self.measured - 1
        return {kind: error[np.array(self.kinds) == kind] for kind in KINDS}


def with_shares(shares: Sequence[float], step_s: float = 0.0) -> Assumptions:
    named = {
        name: replace(getattr(ASSUMED, name), value=float(value)) for name, value in zip(SHARES, shares, strict=True)
    }
    return replace(ASSUMED, step_s=replace(ASSUMED.step_s, value=step_s), **named)


def fitted(places: Sequence[Judged]) -> Assumptions:
    """The shares with the least mean absolute error of the logarithm; each place, and each kind there, counts alike."""

    def loss(logs: Floats) -> float:
        errors = [
            np.abs(np.log1p(error)).mean() for one in places for error in one.errors(with_shares(np.exp(logs))).values()
        ]
        return float(np.mean(errors))

    begin = np.log([getattr(ASSUMED, name).value for name in SHARES])
    bounds = [(np.log(0.05), 0.0)] * len(SHARES)
    best = minimize(
        loss, begin, method="Nelder-Mead", bounds=bounds, options={"maxiter": 2000, "xatol": 1e-3, "fatol": 1e-5}
    )
    return with_shares(np.exp(best.x))


def arms(place: Judged, others: Sequence[Judged]) -> Iterator[tuple[str, Assumptions]]:
    yield "as it is", ASSUMED
    yield "without 2 ms a step", with_shares([getattr(ASSUMED, name).value for name in SHARES])
    yield "shares of the other devices", fitted(others)
    yield "shares fitted here", fitted([place])


def outcome(place: Judged, arm: str, assumed: Assumptions) -> dict[str, Any]:
    """Shares, and quartiles of the relative errors by kind of step, of one arm at a place."""
    quartiles = {kind: np.quantile(error, (0.25, 0.5, 0.75)).tolist() for kind, error in place.errors(assumed).items()}
    shares = {name: getattr(assumed, name).value for name in SHARES}
    return {"place": place.place.name, "arm": arm, "shares": shares, "errors": quartiles}


def shown(outcomes: Sequence[dict[str, Any]]) -> Table:
    title = f"{outcomes[0]['place']}: error of the data sheet's steps, median (quartiles)"
    table = Table("", *KINDS, "shares", title=title)
    for row in outcomes:
        cells = (f"{middle:+.0%} ({low:+.0%}, {high:+.0%})" for low, middle, high in row["errors"].values())
        table.add_row(row["arm"], *cells, " ".join(f"{share:.2f}" for share in row["shares"].values()))
    return table


def off(outcomes: Sequence[dict[str, Any]], arm: str) -> list[bool]:
    """Of each place and kind, whether the median is beyond the bar."""
    return [abs(row["errors"][kind][1]) > BAR for row in outcomes if row["arm"] == arm for kind in KINDS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, required=True, help="folder with the tables")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console = Console(width=150)
    try:
        judged = [Judged(place, options.profiles) for place in PLACES]
    except (KVPolicyError, OSError) as error:
        parser.exit(2, f"published_sheets.py: error: {error}\n")
    outcomes: list[dict[str, Any]] = []
    for one in judged:
        others = [other for other in judged if other.place.device != one.place.device]
        here = [outcome(one, arm, assumed) for arm, assumed in arms(one, others)]
        console.print(shown(here))
        outcomes += here
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    for arm in dict.fromkeys(row["arm"] for row in outcomes):
        beyond = off(outcomes, arm)
        console.print(f"{arm}: {sum(beyond)} of {len(beyond)} medians are off by more than {BAR:.0%}")
    return int(any(off(outcomes, "as it is")))


if __name__ == "__main__":
    sys.exit(main())
