"""A span for every decided preemption of a traced request, where vLLM exports traces by OpenTelemetry.

vLLM makes its own span of a request in the API process, which knows nothing of what preemptions cost. The engine core
has a tracer, too, and the trace headers of its requests: these spans go beside vLLM's, into the trace of the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.events import Outcome
from kvpolicy_vllm.plugin.observers import Observer, Pending, Tally, without_paths

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME = "kvpolicy.preemption"
Write = Callable[[str, int, int, dict[str, Any], Mapping[str, str]], None]
"""Takes a span's name, its beginning and end in nanoseconds since the epoch, its attributes, and the headers of the
trace that it belongs to."""


def span_writer(vllm_config: VllmConfig) -> Write | None:
    """What hands spans to vLLM's exporter, which sends them in a thread of its own; None where vLLM traces nothing."""
    if not getattr(vllm_config.observability_config, "otlp_traces_endpoint", None):
        return None
    try:  # all of 0.24 to 0.33 have them
        from vllm.tracing import extract_trace_context, instrument_manual
    except ImportError:
        return None

    def write(name: str, began_ns: int, ended_ns: int, attributes: dict[str, Any], headers: Mapping[str, str]) -> None:
        instrument_manual(name, began_ns, ended_ns, attributes, extract_trace_context(headers))

    return write


class PreemptionSpans(Observer):
    """From a preemption until the request is back at the token that it had reached, was preempted again or is gone."""

    trouble = "a preemption could not be written as a span (counted as spans_failed)"
    given_up = "writing spans of preemptions failed too often in a row: no more are written"

    def __init__(self, write: Write, tally: Tally, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._write, self._tally, self._clock_ns = write, tally, clock_ns
        self._headers: dict[str, Mapping[str, str]] = {}
        """Of the requests in the engine that have any."""
        self._open: dict[str, tuple[Pending, int, Mapping[str, str]]] = {}
        """By preemption; with its time, and its request's headers: it may close after its request has ended."""

    def arrived(self, request: Any, now: float) -> None:
        if request.trace_headers:
            self._headers[request.request_id] = request.trace_headers

    def decided(self, pending: Pending) -> None:
        headers = self._headers.get(pending.identity.request_id)
        if headers is not None:
            self._open[pending.identity.preemption_id] = pending, self._clock_ns(), headers

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        if outcome.preemption_id not in self._open:
            return
        pending, began_ns, headers = self._open.pop(outcome.preemption_id)
        self._write(NAME, began_ns, self._clock_ns(), attributes_of(pending, opened, outcome), headers)
        self.failures = 0

    def ended(self, request: Any, now: float) -> None:
        self._headers.pop(request.request_id, None)

    def begin_afresh(self) -> bool:
        self._tally.add("spans_failed")
        self._open.clear()
        return super().begin_afresh()


def attributes_of(pending: Pending, opened: OpenPreemption, outcome: Outcome) -> dict[str, Any]:
    """What was decided and why, the predicted seconds of each option, and what came of it."""
    situation, decision = pending.situation, pending.decision
    values: dict[str, Any] = {
        "cause": situation.cause,
        "computed_tokens": situation.computed_tokens,
        "policy": without_paths(decision.policy),
        "intended": decision.intended,
        "executed": opened.executed,
        "ended": outcome.ended,
        "victim_delay_s": outcome.victim_delay_s,
        "wait_blocks_s": outcome.wait_blocks_s,
        "local_hit_tokens": outcome.local_hit_tokens,
        "loaded_tokens": outcome.loaded_tokens,
        "recomputed_tokens": outcome.recomputed_tokens,
    }
    if decision.reason:
        values["reason"] = decision.reason
    for option, cost in zip(decision.options, decision.costs, strict=False):
        values[f"predicted_s.{option.kind}"] = float(cost.engine_s)
    return {f"kvpolicy.{name}": value for name, value in values.items()}
