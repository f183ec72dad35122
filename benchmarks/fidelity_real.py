"""Real runs against both simulators: calibrated on one half of the runs, judged on the other. See `fidelity.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from fidelity_record import BLOCK_SIZE, CONTEXT_TOKENS, RUNNING, STEP_TOKENS, Real, recorded_runs

from kvpolicy import policy
from kvpolicy.arrays import Floats
from kvpolicy.events import Direction
from kvpolicy.regression.nnls import relative_fit, typical_floor
from kvpolicy.simulator import Link, Server, Simulator, StepLoad, Summary, Tail
from kvpolicy.simulator.hardware.law_times import linear
from kvpolicy.stats import Ratio, bootstrap_ratio, mean_and_percentiles
from kvpolicy.trace import Header, Trace, read

Rows = list[dict[str, Any]]

PARTS = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context")
FIGURES: dict[str, Callable[[Any], float]] = {
    "mean e2e": lambda told: told.e2e_s.mean,
    "p99 e2e": lambda told: told.e2e_s.p99,
    "mean TTFT": lambda told: told.ttft_s.mean,
    "p99 TTFT": lambda told: told.ttft_s.p99,
    "mean ITL": lambda told: told.itl_s.mean,
    "p99 ITL": lambda told: told.itl_s.p99,
    "throughput": lambda told: told.throughput_tok_s,
    "preemptions": lambda told: sum(told.preemptions.values()),
    "recomputed tokens": lambda told: told.recomputed_tokens,
}
BAR = {"mean e2e": 0.03, "mean TTFT": 0.08, "preemptions": 0.05}
RANKED = ("throughput", "mean e2e", "mean TTFT")
MIN_PREEMPTIONS = 1.0
"""A mean of fewer per run is not compared in relative terms."""


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """What steps and copies took in the runs for calibration."""

    fixed_s: float
    per_part_s: tuple[float, ...]
    """In the order of :data:`kvpolicy.simulator.LOAD`."""
    copies: dict[Direction, tuple[float, float]]
    """Seconds per copy and per byte."""
    source: str
    steps: int = 0
    error: float = 0.0
    """Mean of |predicted - measured| over the mean of measured, over the steps fitted on."""

    def step_s(self, load: StepLoad) -> float:
        return linear(self.fixed_s, self.per_part_s, load)

    def steps_s(self, loads: Floats) -> Floats:
        return np.asarray(linear(self.fixed_s, self.per_part_s, loads.T), dtype=np.float64)

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        each_s, byte_s = self.copies[direction]
        return each_s + copied_bytes * byte_s


@dataclass(frozen=True, slots=True)
class RealSummary:
    """Results of a real run, by the names of :class:`kvpolicy.simulator.Summary`."""

    e2e_s: Tail
    ttft_s: Tail
    itl_s: Tail
    throughput_tok_s: float
    preemptions: dict[str, int]
    recomputed_tokens: int

    @classmethod
    def of(cls, run: Real) -> RealSummary:
        tokens = sum(request.output_tokens for request in run.requests)
        tails = [Tail(**mean_and_percentiles(values)) for values in (run.e2e_s, run.ttft_s, run.all_itl_s)]
        makespan_s = run.makespan_s - min(request.arrival_s for request in run.requests)
        return cls(*tails, tokens / makespan_s, run.preemptions, run.recomputed_tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """One engine process: what it recorded, and its calibration."""

    trace: Trace
    header: Header
    times: FittedTimes
    kept_out: tuple[Real, ...]

    @property
    def server(self) -> Server:
        return Server(
            block_size=BLOCK_SIZE,
            block_bytes=self.header.block_bytes,
            device_blocks=self.header.device_blocks - 1,
            host_blocks=self.header.host_blocks,
            token_budget=STEP_TOKENS,
            max_running=RUNNING,
            max_model_len=CONTEXT_TOKENS,
            prefix_caching=True,
            link=Link(overlapped=False),
            hardware=self.header.hardware,
            geometry=self.header.geometry,
        )


@dataclass(slots=True)
class Cell:
    """Kept-out runs of one workload under one policy, in the order of their sessions."""

    real: list[RealSummary] = field(default_factory=list)
    simulated: list[Summary] = field(default_factory=list)

    def means(self, figure: str) -> tuple[float, float]:
        take = FIGURES[figure]
        return float(np.mean([take(run) for run in self.real])), float(np.mean([take(run) for run in self.simulated]))


@dataclass(slots=True)
class Judgement:
    """One simulator against what was real."""

    engine: str
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    real_s: float = 0.0
    wall_s: float = 0.0


def judge(folder: Path, engines: Sequence[Simulator]) -> tuple[list[Session], list[Judgement]]:
    """Raises ValueError where nothing was recorded."""
    sessions = [_session(folder, number, runs) for number, runs in _by_session(recorded_runs(folder)).items()]
    return sessions, [_judged(engine, sessions) for engine in engines]


def _by_session(runs: Sequence[Real]) -> dict[int, list[Real]]:
    sessions: dict[int, list[Real]] = {}
    for run in runs:
        sessions.setdefault(run.session, []).append(run)
    return sessions


def _session(folder: Path, number: int, runs: Sequence[Real]) -> Session:
    trace = read(folder / f"session-{number}" / "trace")
    (header,) = trace.headers.values()
    known = [run for run in runs if not run.kept_out]
    times = calibrate(within(trace.rows("steps"), known), within(trace.rows("transfers"), known))
    return Session(trace, header, times, tuple(run for run in runs if run.kept_out))


def within(rows: Rows, runs: Sequence[Real]) -> Rows:
    """Rows that begin while one of these runs is served."""
    return [row for row in rows if any(run.begin_s <= row["start_s"] <= run.end_s for run in runs)]


def calibrate(steps: Rows, transfers: Rows) -> FittedTimes:
    """Compute times come from steps without copies, copy times from transfers.

    Shapes by a robust fit; then scaled so that the sum is that of the measured ones, since a mean is to be foretold.
    """
    calm = [row for row in steps if row["scheduled_tokens"] and not row["saves"] and not row["loads"]]
    design = np.array([[1.0, *(row[part] for part in PARTS), _prefills(row)] for row in calm])
    seconds = np.array([row["duration_s"] for row in calm])
    per_part = _scaled(design, seconds)
    error = float(np.abs(design @ per_part - seconds).mean() / seconds.mean())
    copies: dict[Direction, tuple[float, float]] = {
        "save": _channel(transfers, "save"),
        "load": _channel(transfers, "load"),
    }
    source = f"{len(calm)} steps and {len(transfers)} copies of real runs"
    return FittedTimes(float(per_part[0]), (*map(float, per_part[1:]), 0.0), copies, source, len(calm), error)


def _prefills(row: dict[str, Any]) -> int:
    return int(row["scheduled_requests"] - row["decode_requests"])


def _channel(transfers: Rows, direction: str) -> tuple[float, float]:
    """Seconds per copy and per byte. From saves of one size, as with prefix caching, a time per byte cannot be told:
    there it is that of both directions together."""
    rows = [row for row in transfers if row["direction"] == direction and row["ok"]]
    if not rows:
        return 0.0, 0.0
    one_size = len({row["bytes"] for row in rows}) == 1
    told_by = [row for row in transfers if row["ok"]] if one_size else rows
    each_s, byte_s = _scaled(*_copies(told_by))
    if one_size:
        each_s = fmean(row["end_s"] - row["start_s"] - byte_s * row["bytes"] for row in rows)
    return max(0.0, float(each_s)), float(byte_s)


def _copies(rows: Rows) -> tuple[Floats, Floats]:
    """Design matrix and seconds of these transfers."""
    design = np.array([[1.0, float(row["bytes"])] for row in rows])
    return design, np.array([row["end_s"] - row["start_s"] for row in rows])


def _scaled(design: Floats, seconds: Floats) -> Floats:
    fitted = relative_fit(design, seconds, typical_floor(seconds))
    return np.asarray(fitted * (seconds.sum() / (design @ fitted).sum()), dtype=np.float64)


def _judged(engine: Simulator, sessions: Sequence[Session]) -> Judgement:
    judgement = Judgement(engine.name)
    for session in sessions:
        for run in session.kept_out:
            done = engine.run(run.work, policy.load(run.policy), session.server, session.times, run.session)
            cell = judgement.cells.setdefault((run.workload, run.policy), Cell())
            cell.real.append(RealSummary.of(run))
            cell.simulated.append(done.summary)
            judgement.real_s += run.makespan_s
            judgement.wall_s += done.summary.simulator_wall_s
    return judgement


@dataclass(frozen=True, slots=True)
class Pair:
    """Two policies on one workload by one figure."""

    workload: str
    policies: tuple[str, str]
    figure: str
    real: Ratio
    simulated: float
    """Geometric mean of the same ratio."""

    @property
    def right(self) -> bool:
        return (self.real.value - 1.0) * (self.simulated - 1.0) > 0


def differing_pairs(judgement: Judgement, rng: random.Random) -> list[Pair]:
    """Pairs of policies whose real ratio's 95% interval excludes 1, by each figure of :data:`RANKED`."""
    pairs = []
    for workload in dict.fromkeys(workload for workload, _ in judgement.cells):
        policies = [name for work, name in judgement.cells if work == workload]
        for policy_name, other in combinations(policies, 2):
            for figure in RANKED:
                pair = _pair(judgement, workload, (policy_name, other), figure, rng)
                if pair is not None and pair.real.significant:
                    pairs.append(pair)
    return pairs


def _pair(
    judgement: Judgement, workload: str, policies: tuple[str, str], figure: str, rng: random.Random
) -> Pair | None:
    cell, other_cell = (judgement.cells[workload, name] for name in policies)
    if len(cell.real) != len(other_cell.real) or len(cell.real) < 2:
        return None
    take = FIGURES[figure]
    real = bootstrap_ratio([take(a) for a in cell.real], [take(b) for b in other_cell.real], rng)
    logs = [math.log(take(a) / take(b)) for a, b in zip(cell.simulated, other_cell.simulated, strict=True)]
    return Pair(workload, policies, figure, real, math.exp(math.fsum(logs) / len(logs)))


def errors(judgement: Judgement, figure: str) -> list[float]:
    """Relative, by cell; without cells that have nothing to compare."""
    pairs = [cell.means(figure) for cell in judgement.cells.values()]
    least = MIN_PREEMPTIONS if figure == "preemptions" else 0.0
    return [simulated / real - 1.0 for real, simulated in pairs if real > least]


def as_dict(sessions: Sequence[Session], judgements: Sequence[Judgement]) -> dict[str, Any]:
    return {
        "sessions": [asdict(session.times) for session in sessions],
        "engines": {judgement.engine: _engine_dict(judgement) for judgement in judgements},
    }


def _engine_dict(judgement: Judgement) -> dict[str, Any]:
    cells = [
        {"workload": workload, "policy": name, "runs": len(cell.real)}
        | {figure: dict(zip(("real", "simulated"), cell.means(figure), strict=True)) for figure in FIGURES}
        for (workload, name), cell in judgement.cells.items()
    ]
    pairs = differing_pairs(judgement, random.Random(0))
    return {
        "cells": cells,
        "pairs_that_differ": len(pairs),
        "ranked_the_same": sum(pair.right for pair in pairs),
        "ranked_otherwise": [asdict(pair) for pair in pairs if not pair.right],
        "real_s": judgement.real_s,
        "wall_s": judgement.wall_s,
    }
