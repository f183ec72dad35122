"""How well the part of a victim that survives on the device is expected at its preemption.

    python benchmarks/survival.py [--data DATA] [--tuned] [--bar ERROR] [--json FILE]

Every place (a machine by its data sheet, a workload, a share of memory) is simulated in virtual time by the built-in
engine, once with each fixed policy. At each preemption the surviving share is predicted; it is measured when the victim
is resumed. Printed are mean absolute errors, weighted by tokens: of :class:`kvpolicy.survival.Survival` as the engine
used it, of simpler rules, of two predictors that were tried instead, and of an exponential law with the mean of the
whole run, which no server knows. Constants of ``Survival`` were chosen on the places of ``--tuned``; the others had no
part in that.
DATA is a folder with public traces. Exits 1 where the error over all places is above ``--bar``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvpolicy.events import Preemption, situation_of
from kvpolicy.simulator import MemorySink
from kvpolicy.study.cell import Cell
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, simulator_of, times_of
from kvpolicy.study.workload_parts import Part
from kvpolicy.survival import Absences, Survival
from kvpolicy.workload import Request, Source, Workload, open_workload

POLICIES = ("always-recompute", "always-swap")
MIN_PREEMPTIONS = 20
"""Places with fewer say little about a predictor that learns."""


@dataclass(frozen=True, slots=True)
class Place:
    """Runs that are reported together."""

    machine: str
    workload: str
    share: float
    """Of memory for as many requests as may run, at their mean length."""
    seed: int = 0
    parts: int = 1
    """Number of parts that the workload is cut into; each is a run."""


class Event(NamedTuple):
    """A preemption and what was found on the device when its request was resumed."""

    preemption_id: str
    situation: Preemption
    hit_tokens: int
    admitted_s: float
    closed_s: float
    known: bool
    """Whether the request was resumed."""

    @property
    def found_share(self) -> float:
        return min(1.0, self.hit_tokens / self.situation.block_size / self.situation.held_blocks)


class Predictor(Protocol):
    """A rule that predicts blocks found, from what was found before."""

    def expect(self, one: Preemption) -> float: ...

    def learn(self, one: Preemption, found_blocks: float) -> None: ...


# ---- rules to compare with ----


class Nothing:
    """Nothing survives."""

    def expect(self, one: Preemption) -> float:
        return 0.0

    def learn(self, one: Preemption, found_blocks: float) -> None:
        """Nothing to learn."""


class SharedOnly(Nothing):
    """What other requests hold survives, and nothing else: what costs were predicted from before."""

    def expect(self, one: Preemption) -> float:
        return one.shared_blocks


class MeanShare(Nothing):
    """The mean share of all outcomes so far, by blocks."""

    def __init__(self) -> None:
        self.found = self.held = 0.0

    def expect(self, one: Preemption) -> float:
        return max(one.shared_blocks, one.held_blocks * self.found / self.held if self.held else 0.0)

    def learn(self, one: Preemption, found_blocks: float) -> None:
        self.found += found_blocks
        self.held += one.held_blocks


class LastShare(Nothing):
    """The share of the last outcome."""

    share = 0.0

    def expect(self, one: Preemption) -> float:
        return max(one.shared_blocks, one.held_blocks * self.share)

    def learn(self, one: Preemption, found_blocks: float) -> None:
        self.share = found_blocks / one.held_blocks


class ByLength:
    """Tried instead: the chance that an absence ends is learned for each doubling of the tokens written (a life
    table), with the chance over all as its prior."""

    def __init__(self, decay: float = 0.97) -> None:
        self.decay = decay
        self.edges = [0.0, *(32.0 * 2**power for power in range(14)), 1e18]
        self.tokens, self.ends = [0.0] * 15, [0.0] * 15

    def expect(self, one: Preemption) -> float:
        low, high = _span(one)
        rate = (sum(self.ends) + 2.0) / (sum(self.tokens) + 512.0)
        survive, lost = 1.0, 0.0
        for at, (start, stop) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            if start >= high:
                break
            hazard, stop = (self.ends[at] + 1.0) / (self.tokens[at] + 1.0 / rate), min(stop, high)
            if stop > low:
                begin = max(start, low)
                lost += survive * (exp(-hazard * (begin - start)) - exp(-hazard * (stop - start))) / hazard
            survive *= exp(-hazard * (stop - start))
        return max(one.shared_blocks, one.hashed_blocks - lost / one.block_size)

    def learn(self, one: Preemption, found_blocks: float) -> None:
        low, high = _span(one)
        lost = min(max(one.hashed_blocks - found_blocks, 0.0) * one.block_size, high - low)
        if high > low:
            self._add(low + lost if lost else low / 2, lost < high - low)

    def _add(self, tokens: float, ended: bool) -> None:
        for at, (start, stop) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            self.tokens[at] = self.decay * self.tokens[at] + max(0.0, min(tokens, stop) - start)
            self.ends[at] = self.decay * self.ends[at] + (ended and start <= tokens < stop)


class ByStep:
    """Tried instead: the length of an absence is learned in steps, in each of which every running request writes a
    token."""

    def __init__(self) -> None:
        self.absences = Absences(16.0, 2.0)

    def expect(self, one: Preemption) -> float:
        running = max(1, one.running_requests)
        mean = self.absences.mean_tokens * running
        low, high = _span(one)
        return max(
            one.shared_blocks, one.hashed_blocks - mean * (exp(-low / mean) - exp(-high / mean)) / one.block_size
        )

    def learn(self, one: Preemption, found_blocks: float) -> None:
        low, high = _span(one)
        lost = min(max(one.hashed_blocks - found_blocks, 0.0) * one.block_size, high - low)
        if high > low:
            tokens = low + lost if lost else low / 2
            self.absences.add(tokens / max(1, one.running_requests), ended=lost < high - low)


class Known:
    """An exponential law with one mean for the whole run, fitted to all its outcomes."""

    def __init__(self, mean_tokens: float) -> None:
        self.survival = Survival({"memory": Absences(mean_tokens, 1.0)})

    def expect(self, one: Preemption) -> float:
        return self.survival.hit_blocks(
            one.held_blocks, one.shared_blocks, one.hashed_blocks, one.free_blocks, one.block_size, one.cause
        )

    def learn(self, one: Preemption, found_blocks: float) -> None:
        """It knows already."""


def _span(one: Preemption) -> tuple[float, float]:
    """Tokens written before the first and the last of the blocks at risk is taken."""
    ahead = one.free_blocks + one.held_blocks - one.hashed_blocks
    return ahead * one.block_size, (ahead + max(0, one.hashed_blocks - one.shared_blocks)) * one.block_size


def fitted_mean(events: Sequence[Event]) -> float:
    """Mean tokens of an absence: tokens over ends, absences that outlast the blocks counted without an end."""
    tokens, ends = 1.0, 0
    for event in events:
        low, high = _span(event.situation)
        lost = (event.situation.hashed_blocks * event.situation.block_size) - event.hit_tokens
        if event.known and high > low:
            tokens += min(high, low + lost) if lost > 0 else low / 2
            ends += lost < high - low
    return tokens / max(1, ends)


# ---- runs ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with public traces somewhere below it")
    parser.add_argument("--tuned", action="store_true", help="the places on which constants were chosen")
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--share", type=float, action="append", help="of memory, instead of the usual ones")
    parser.add_argument("--bar", type=float, default=0.12, help="highest error over all places")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows, left_out = [], 0
    for place in places(options):
        runs = [list(events_of(place, *run, options.requests)) for run in product(POLICIES, range(place.parts))]
        if sum(event.known for events in runs for event in events) < MIN_PREEMPTIONS:
            left_out += 1
            continue
        rows.append(row_of(place, runs))
        print(f"{len(rows)}: {rows[-1]['errors']['survival']:.3f}", file=sys.stderr)
    if not rows:
        parser.error(f"no place has {MIN_PREEMPTIONS} preemptions: give more --requests or a smaller --share")
    whole = overall(rows)
    print("\n".join(table([*rows, whole])))
    print(f"left out, as they have fewer than {MIN_PREEMPTIONS} preemptions: {left_out} places")
    if options.json:
        options.json.write_text(json.dumps({"places": rows, "all": whole}, indent=2, allow_nan=False) + "\n")
    missed = whole["errors"]["survival"] > options.bar
    print(f"bar {'missed' if missed else 'met'}: {whole['errors']['survival']:.3f}, at most {options.bar:g}")
    return int(missed)


LONG_ANSWERS = "long answers"
"""A made-up workload: prompts of 50 to 400 tokens, answers of 200 to 2,000, both evenly drawn, Poisson arrivals."""


def places(options: argparse.Namespace) -> Iterator[Place]:
    n = options.requests
    if options.tuned:
        for workload in matrix().SHIPPED:
            for share in options.share or matrix().SHARES:
                yield Place("H100-SXM", f"{workload}?n={n}&context=16384", share)
        return
    workloads = [
        (LONG_ANSWERS, 1),
        (f"sessions:azure-conversation-2023?n={n // 4}&turns=4&think=10&rate=4&context=8192", 1),
        (f"sharegpt-8k?n={n}&context=4096&scale=0.5&arrivals=bursts&rate=20&on=5&off=5", 1),
        (f"deepseek-r1?n={n}&context=8192&scale=0.25&arrivals=poisson&rate=12", 1),
    ]
    for name in ("azure2023_conv*", "mooncake_conversation*") if options.data else ():
        workloads += [(f"{path}?n={3 * n}&context=16384&speed=1e6", 3) for path in sorted(options.data.rglob(name))]
    for machine in matrix().MACHINES:
        for workload, parts in workloads:
            for share in options.share or (0.3, 0.1):
                yield Place(machine, workload, share, 1, parts)


def matrix() -> Any:
    """The matrix, whose machines and shares of memory these are."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import matrix_places

    return matrix_places


def source_of(place: Place, part: int, requests: int) -> Source:
    if place.workload == LONG_ANSWERS:
        rng, now_s, made = random.Random(place.seed), 0.0, []
        for _ in range(requests):
            now_s += rng.expovariate(10.0)
            made.append(Request(now_s, rng.randint(50, 400), rng.randint(200, 2000)))
        return Workload(LONG_ANSWERS, tuple(made), place.seed)
    text = place.workload if place.parts > 1 else f"{place.workload}&seed={place.seed}"
    source = open_workload(text)
    return source if place.parts == 1 else Part(source, part, place.parts)


def events_of(place: Place, policy_name: str, part: int, requests: int) -> Iterator[Event]:
    """The preemptions of one run, in order."""
    source = source_of(place, part, requests)
    serving = matrix().serving_of(place.machine)
    lengths = [request.total_tokens for request in source]
    mean_blocks = sum(lengths) / len(lengths) / serving.block_size
    blocks = max(
        round(place.share * min(serving.max_num_seqs, len(lengths)) * mean_blocks),
        max(lengths) // serving.block_size + 2,
    )
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(matrix().MACHINES[place.machine]))
        hardware = f"{place.machine}:{config}"
        cell = Cell(place.workload, policy_name, blocks, "native", place.seed, hardware, "builtin", serving)
        machine = machine_of(cell)
        policy, server, times = policy_of(cell)[0], server_of(cell, machine), times_of(cell, machine)
        trace = simulator_of("builtin").run(source, policy, server, times, place.seed, MemorySink()).trace
    assert trace is not None
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes")}
    for row in sorted(trace.rows("decisions"), key=lambda row: int(row["preemption_id"].rsplit("-", 1)[1])):
        outcome = outcomes[row["preemption_id"]]
        admitted_s = row["time_s"] + outcome["wait_blocks_s"]
        known, closed_s = outcome["ended"] != "aborted", outcome["closed_s"]
        yield Event(
            row["preemption_id"], situation_of(row), outcome["local_hit_tokens"], admitted_s, closed_s, known
        )  # fmt: skip


# ---- figures ----


def predictions(events: Sequence[Event], rule: Predictor) -> list[float]:
    """Blocks that the rule expects, each from the outcomes of preemptions that were closed before."""
    expected, pending = [], []
    for event in events:
        now_s = event.situation.time_s
        for closed in sorted((one for one in pending if one.closed_s <= now_s), key=lambda one: one.closed_s):
            pending.remove(closed)
            if closed.known:
                rule.learn(closed.situation, closed.hit_tokens / closed.situation.block_size)
        expected.append(rule.expect(event.situation))
        pending.append(event)
    return expected


def row_of(place: Place, runs: Sequence[Sequence[Event]]) -> dict[str, Any]:
    misses: dict[str, list[tuple[int, float]]] = {}
    for events in runs:
        rules: dict[str, Predictor] = {
            "nothing": Nothing(), "shared only": SharedOnly(), "mean so far": MeanShare(), "last": LastShare(),
            "by length": ByLength(), "by step": ByStep(), "mean known": Known(fitted_mean(events)),
        }  # fmt: skip
        expected = {"survival": [event.situation.hit_blocks for event in events]}
        expected |= {name: predictions(events, rule) for name, rule in rules.items()}
        for name, blocks in expected.items():
            misses.setdefault(name, []).extend(
                (event.situation.computed_tokens, of / event.situation.held_blocks - event.found_share)
                for event, of in zip(events, blocks, strict=True)
                if event.known
            )
    tokens = sum(weight for weight, _ in misses["survival"])
    return {
        **asdict(place),
        "preemptions": len(misses["survival"]),
        "tokens": tokens,
        "found": -sum(weight * miss for weight, miss in misses["nothing"]) / tokens,
        "bias": sum(weight * miss for weight, miss in misses["survival"]) / tokens,
        "errors": {name: sum(weight * abs(miss) for weight, miss in of) / tokens for name, of in misses.items()},
    }


def overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all places, each with equal weight."""
    count = len(rows)
    return {
        "machine": "all places", "workload": "", "share": None,
        "preemptions": sum(row["preemptions"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "found": sum(row["found"] for row in rows) / count,
        "bias": sum(row["bias"] for row in rows) / count,
        "errors": {name: sum(row["errors"][name] for row in rows) / count for name in rows[0]["errors"]},
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [["machine", "workload", "memory", "preemptions", "found", "bias", *rows[0]["errors"]]]
    for row in rows:
        cells.append(
            [
                row["machine"],
                Path(row["workload"].partition("?")[0]).name,
                "" if row["share"] is None else f"{row['share']:g}",
                str(row["preemptions"]),
                f"{row['found']:.3f}",
                f"{row['bias']:+.3f}",
                *(f"{error:.3f}" for error in row["errors"].values()),
            ]
        )
    return aligned(cells)


if __name__ == "__main__":
    sys.exit(main())
