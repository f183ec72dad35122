"""The matrix with Poisson arrivals near capacity: end-to-end times of the learned policy over vLLM's default.

A place's capacity is the rate at which requests finish in the middle half of a run in which all arrive at once, under
vLLM's default. The requests of every repeat then arrive at a share of it, at times drawn by the repeat's number.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from statistics import fmean
from typing import Any

from matrix_bars import Verdict
from matrix_places import LEARNED, RECOMPUTE, Place

from kvpolicy.simulator import MemorySink, Run, Summary
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.stats import student_ratio
from kvpolicy.study.cell import Cell
from kvpolicy.study.progress import bar
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, source_of, times_of
from kvpolicy.workload import Source
from kvpolicy.workload.near_capacity import arriving, middle_rate

MAX_MEAN, MAX_P99 = 1.005, 1.01
"""Of end-to-end times over vLLM's."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One place at one load; one value per repeat."""

    place: Place
    load: float
    capacity_per_s: float
    preemptions: list[int]
    mean_s: dict[str, list[float]]
    p99_s: dict[str, list[float]]

    def verdicts(self) -> list[Verdict]:
        where = f"{self.place.text()}, load {self.load:g}"
        return [
            Verdict(f"{name} e2e over vLLM's", where, student_ratio(values[LEARNED], values[RECOMPUTE]), limit, True)
            for name, values, limit in (("mean", self.mean_s, MAX_MEAN), ("p99", self.p99_s, MAX_P99))
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.place.machine,
            "workload": self.place.workload,
            "memory_share": self.place.share,
            "prefix_caching": self.place.serving.prefix_caching,
            "load": self.load,
            "capacity_per_s": self.capacity_per_s,
            "preemptions": self.preemptions,
            "e2e_mean_s": self.mean_s,
            "e2e_p99_s": self.p99_s,
        }


def served(cell: Cell, source: Source, sink: MemorySink | None = None) -> Run:
    machine, (policy, _) = machine_of(cell), policy_of(cell)
    times = times_of(cell, machine)
    return Builtin().run(source, policy, server_of(cell, machine), times, seed=cell.seed, sink=sink)


def capacity_of(place: Place) -> float:
    """Requests per second."""
    cell = place.cells(RECOMPUTE)[0]
    trace = served(cell, source_of(cell), MemorySink()).trace
    assert trace is not None
    return middle_rate([row["last_token_s"] for row in trace.rows("requests")])


def measured(place: Place, loads: Sequence[float]) -> list[Figures]:
    """All repeats of a place at every load."""
    capacity = capacity_of(place)
    figures = []
    for load in loads:
        runs = [
            _pair(*cells, load * capacity, repeat)
            for repeat, cells in enumerate(zip(place.cells(RECOMPUTE), place.cells(LEARNED), strict=True))
        ]
        figures.append(
            Figures(
                place,
                load,
                capacity,
                [sum(run[RECOMPUTE].preemptions.values()) for run in runs],
                {policy: [run[policy].e2e_s.mean for run in runs] for policy in (RECOMPUTE, LEARNED)},
                {policy: [run[policy].e2e_s.p99 for run in runs] for policy in (RECOMPUTE, LEARNED)},
            )
        )
    return figures


def _pair(default: Cell, learned: Cell, rate_per_s: float, repeat: int) -> Mapping[str, Summary]:
    source = arriving(source_of(default), rate_per_s, repeat)
    base = served(default, source).summary
    # Policies are asked at preemptions only: without one, the run would be the same.
    other = served(learned, source).summary if sum(base.preemptions.values()) else base
    return {RECOMPUTE: base, LEARNED: other}


def all_measured(places: Sequence[Place], options: argparse.Namespace) -> list[Figures]:
    loads = [options.poisson] * len(places)
    figures: list[Figures] = []
    with bar() as progress:
        if options.jobs == 0:
            found = map(measured, places, loads)
            for number, (place, one) in enumerate(zip(places, found, strict=True)):
                progress(number + 1, len(places), place.text())
                figures += one
            return figures
        with ProcessPoolExecutor(options.jobs or cpu_count()) as pool:
            for number, (place, one) in enumerate(zip(places, pool.map(measured, places, loads), strict=True)):
                progress(number + 1, len(places), place.text())
                figures += one
    return figures


def table(figures: Sequence[Figures]) -> list[str]:
    cells = [["place", "load", "requests/s", "preemptions", "mean e2e s, vLLM", "mean e2e s, learned"]]
    for one in figures:
        cells.append(
            [one.place.text(), f"{one.load:g}", f"{one.load * one.capacity_per_s:.3g}", f"{fmean(one.preemptions):.0f}"]
            + [f"{fmean(one.mean_s[policy]):.3f}" for policy in (RECOMPUTE, LEARNED)]
        )
    return aligned(cells)
