"""How well `kvpolicy profile --minutes N` spends its time: a recorded profile is replayed with less of it.

    python benchmarks/profile_budget.py [--profile FOLDER]... [--minutes M ...] [--draws N] [--json FILE] [--page FILE]

Every window of a recorded profile took some time, its set-up included. In a replay the code of `profile` says which of
them it would have measured within so many minutes; `kvpolicy train` learns from these windows and their steps alone.
No engine is started, and the figures are the same in every run.

Orders of the same measurements at the same cost in time:

--minutes   as `profile --minutes` has it: shares of the time for block sizes, the shortest and the longest victim
            first, then the middle of every gap
random      the same shares, states in uniformly random order
grid        one engine after the other, as without a limit, states in the order of their names, until the time is
            over: it goes through all lengths, so that it is one more order that does not begin with the ends

A draw holds some states out, as `train` does, and draws the random order; the others are what there is to measure.
Errors are mean |log(measured / predicted)| over the states held out, with the noise floors of the whole profile. Lost
time is what the held-out preemptions cost with the model's choices over what they cost with the better option each,
less 1. `train` needs 12 states; where there are fewer, an order has no model in that draw.

An engine's start is as long as the shortest time between two engines of the profile. The profile has to be whole.
``--page`` redraws the table that stands behind ``<!-- profile budget -->`` in a document, as docs/own-server.md.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from recorded_profile import ORDERS, Profile, Recorded, cut, replayed

import kvpolicy
from kvpolicy.cost.model import FittedModel
from kvpolicy.datasets.examples import expected_examples_of, noise_floors
from kvpolicy.datasets.profiles import State
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS
from kvpolicy.json_values import rounded
from kvpolicy.stats import student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.trace import Trace
from kvpolicy.training import split
from kvpolicy.training.error_by_count import mean_errors
from kvpolicy.training.pipeline import MIN_STATES

SHIPPED = (Path("traces/cpu-llama-simulated-link"), Path("traces/cpu-llama-native"))
LOST = "lost time"
FIGURES = (*KINDS, LOST)


@dataclass(slots=True)
class Found:
    """Of one profile with one limit and one order, a value for each draw."""

    profile: str
    minutes: float
    order: str
    states: list[int] = field(default_factory=list)
    """States that were measured."""
    recompute: list[float | None] = field(default_factory=list)
    """Mean error; None where there is no model."""
    swap: list[float | None] = field(default_factory=list)
    lost_time: list[float | None] = field(default_factory=list)

    def of(self, figure: str) -> list[float | None]:
        values: list[float | None] = getattr(self, figure.replace(" ", "_"))
        return values

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def found_of(profile: Profile, minutes: Sequence[float], draws: int) -> Iterator[Found]:
    """Limit by limit, all orders of each."""
    both = {state.name for state in profile.states}  # measured under both options: without the self-check
    for limit in minutes:
        found = {order: Found(profile.name, limit, order) for order in ORDERS}
        for draw in range(draws):
            _, held_out = split(profile.states, draw)
            names = {state.name for state in held_out}
            for order, results in found.items():
                measured = replayed(profile, names, limit, order, random.Random(f"{draw}"))
                states = both & {one.window.state_id for some in measured.values() for one in some if one.is_counted}
                model = trained(profile.trace, measured) if len(states) >= MIN_STATES else None
                results.states.append(len(states))
                errors = dict.fromkeys(FIGURES) if model is None else judged(model, held_out, profile.states)
                for figure, value in errors.items():
                    results.of(figure).append(value)
        yield from found.values()


def trained(trace: Trace, measured: Mapping[str, Sequence[Recorded]]) -> FittedModel:
    with tempfile.TemporaryDirectory() as folder:
        cut(trace, measured).write(Path(folder) / "trace")
        model: FittedModel = kvpolicy.train([Path(folder) / "trace"]).model
        return model


def judged(model: FittedModel, held_out: Sequence[State], states: Sequence[State]) -> dict[str, float | None]:
    """Every figure of :data:`FIGURES`."""
    examples = expected_examples_of(held_out)
    costs_s, best_s = 0.0, 0.0
    for number, state in enumerate(held_out):
        predicted_s = {kind: model.seconds(kind, examples[kind][number].x) for kind in KINDS}
        costs_s += state.mean_s[min(KINDS, key=predicted_s.__getitem__)]
        best_s += state.mean_s[state.faster]
    return {**mean_errors(model, examples, noise_floors(states)), LOST: costs_s / best_s - 1.0}


# ---- tables ----

HEAD = ["profile", "minutes", "states", "of", *ORDERS, "--minutes over random"]
COMMENT = "<!-- profile budget -->"
TABLE = re.compile(rf"{COMMENT}\n\n(?:(?:\|.*\n)+\n?)?")


def table(results: Sequence[Found]) -> list[list[str]]:
    """A row for each profile, limit and option: means over draws that have a model, and the ratio with its interval."""
    rows = []
    for at in range(0, len(results), len(ORDERS)):
        some = results[at : at + len(ORDERS)]
        states = " / ".join(f"{fmean(one.states):.0f}" for one in some)
        for figure in FIGURES:
            cells = [mean_text(one.of(figure)) for one in some]
            limited, shuffled = (one.of(figure) for one in some[:2])
            ratio = ratio_text(limited, shuffled) if figure in KINDS else ""
            rows.append([some[0].profile, f"{some[0].minutes:g}", states, figure, *cells, ratio])
    return rows


def drawn(page: str, results: Sequence[Found]) -> str:
    """A document with its table anew. Raises InputError where it has none, or several."""
    if len(TABLE.findall(page)) != 1:
        raise InputError(f"`{COMMENT}` should stand once, with an empty line behind it")
    lines = "".join(f"| {' | '.join(line)} |\n" for line in (HEAD, ["--"] * len(HEAD), *table(results)))
    return TABLE.sub(lambda _: f"{COMMENT}\n\n{lines}\n", page)


def mean_text(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "no model"
    return f"{fmean(known):.1%}" + ("" if len(known) == len(values) else f" ({len(known)} of {len(values)} draws)")


def ratio_text(limited: Sequence[float | None], shuffled: Sequence[float | None]) -> str:
    pairs = [(a, b) for a, b in zip(limited, shuffled, strict=True) if a is not None and b is not None]
    return student_ratio(*zip(*pairs, strict=True)).text() if pairs else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", metavar="FOLDER", help="default: those that ship")
    parser.add_argument("--minutes", type=float, nargs="+", default=[0.6, 0.7, 0.8, 1.0, 2.0], metavar="M")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.draws < 1 or not all(minutes > 0 for minutes in options.minutes):
        parser.error("--draws and --minutes should be above 0")
    try:
        results = [one for folder in options.profile or SHIPPED
                   for one in found_of(Profile.of(folder), options.minutes, options.draws)]  # fmt: skip
        kept = rounded([one.to_dict() for one in results])
        results = [Found(**one) for one in kept]
        if options.page:
            options.page.write_text(drawn(options.page.read_text(), results))
    except InputError as error:
        print(f"profile_budget: {error}", file=sys.stderr)
        return 2
    print("\n".join(aligned([HEAD, *table(results)])))
    print(f"{options.draws} draws of the same states; in brackets 95% over draws, which say nothing of other profiles")
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
