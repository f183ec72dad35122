"""The service that the requests of live runs got, in all and by class, counted as in simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvpolicy.latency import NO_SLO, ClassSummary, ClassTally, Slo
from kvpolicy.workload import Request


class Timed(Protocol):
    """A live run, with one entry per request in each sequence; :class:`kvpolicy_vllm.bench.overload.Run` is one."""

    @property
    def requests(self) -> Sequence[Request]:
        """What was asked for; empty where that is unknown."""
        ...

    @property
    def arrival_s(self) -> Sequence[float]: ...

    @property
    def ttft_s(self) -> Sequence[float]: ...

    @property
    def itl_s(self) -> Sequence[Sequence[float]]: ...

    @property
    def tokens(self) -> Sequence[Sequence[int]]: ...


def service(runs: Sequence[Timed], slo: Slo = NO_SLO, class_name: str | None = None) -> ClassSummary:
    """Of the requests of these runs, or of one class of them; the makespan is the sum of the runs'.

    ``slo``: deadlines for requests that bring none. Runs without ``requests`` count for nothing.
    """
    tallies = [_tally(run, slo, class_name) for run in runs if run.requests]
    return ClassTally.merged(tallies).summary(sum(tally.makespan_s for tally in tallies))


def service_by_class(runs: Sequence[Timed], slo: Slo = NO_SLO) -> Mapping[str, ClassSummary]:
    """The same for each class, in the order of their names."""
    names = sorted({request.class_name for run in runs for request in run.requests})
    return {name: service(runs, slo, name) for name in names}


def _tally(run: Timed, slo: Slo, class_name: str | None) -> ClassTally:
    tally = ClassTally(slo)
    for request, arrival_s, ttft_s, gaps_s, tokens in zip(
        run.requests, run.arrival_s, run.ttft_s, run.itl_s, run.tokens, strict=True
    ):
        if class_name in (None, request.class_name):
            first_s = arrival_s + ttft_s
            last_s, longest_gap_s = first_s + sum(gaps_s), max(gaps_s, default=0.0)
            tally.itl.extend(list(gaps_s), 1)
            tally.finished(arrival_s, first_s, last_s, len(tokens), longest_gap_s, request.ttft_s, request.tpot_s)
    return tally
