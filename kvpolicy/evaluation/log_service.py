"""The service that the requests of recorded traces got, by class: what the logging policy did for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

from kvpolicy.latency import NO_SLO, ClassSummary, ClassTally, Slo
from kvpolicy.trace import Trace, TraceError
from kvpolicy.workload import DEFAULT_CLASS

UNFINISHED = ("abort", "error")
"""How requests end that were not served: they do not count."""


def log_service(traces: Sequence[Trace], slo: Slo = NO_SLO) -> dict[str, ClassSummary]:
    """By the class's name; empty for traces without served requests. Requests of traces that know no classes are of the
    default one. In a window of time those count that arrived in it.

    Rows of requests do not hold the times between tokens: of ``itl_s`` only the mean is known, and nothing of
    ``longest_gap_s``. Each engine core has a clock of its own, so a makespan is the sum of the cores'. ``slo``:
    deadlines for requests that bring none.
    """
    tallies: dict[str, dict[tuple[int, str], ClassTally]] = {}
    for number, trace in enumerate(traces):
        for row in trace.arrivals().to_pylist():
            if row["first_token_s"] is None or row["last_token_s"] is None or row["finish"] in UNFINISHED:
                continue
            if row["output_tokens"] < 1:
                raise TraceError(
                    f"table requests, request {row['request']} of core {row['core']}: output_tokens is "
                    f"{row['output_tokens']}, although it has a first token"
                )
            by_core = tallies.setdefault(row.get("class") or DEFAULT_CLASS, {})
            by_core.setdefault((number, row["core"]), ClassTally(slo)).finished(
                row["arrival_s"],
                row["first_token_s"],
                row["last_token_s"],
                row["output_tokens"],
                nan,
                row.get("ttft_deadline_s"),
                row.get("tpot_deadline_s"),
                row["prompt_tokens"],
            )
    return {name: _summary(list(tallies[name].values())) for name in sorted(tallies)}


def _summary(by_core: Sequence[ClassTally]) -> ClassSummary:
    return ClassTally.merged(by_core).summary(sum(tally.makespan_s for tally in by_core))


def service_lines(classes: Mapping[str, ClassSummary]) -> list[str]:
    """One line per class."""
    return [f"served, class {name}: {_words(service)}" for name, service in classes.items()]


def _words(service: ClassSummary) -> str:
    words = (
        f"{service.requests} requests, {service.throughput_tok_s:.1f} tokens/s; "
        f"time to first token {service.ttft_s.mean:.3g} s (p99 {service.ttft_s.p99:.3g}), "
        f"end to end {service.e2e_s.mean:.3g} s (p99 {service.e2e_s.p99:.3g}), "
        f"{service.e2e_per_token_s.mean:.3g} s per output token; fairness {service.fairness:.3g}"
    )
    if service.slo_share is None:
        return words
    return (
        f"{words}; {service.slo_share:.1%} of {service.deadline_requests} with a deadline met it, goodput "
        f"{service.goodput_req_s:.3g} requests/s"
    )
