"""Spans of preemptions: through vLLM's own tracing into an exporter of OpenTelemetry, from vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvpolicy_vllm.plugin.metrics import COUNTERS
from kvpolicy_vllm.plugin.observers import MAX_FAILURES
from kvpolicy_vllm.plugin.spans import NAME
from tests.vllm import harness
from tests.vllm.test_controller import Engine, broken

pytestmark = pytest.mark.scheduler

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
TRACED = {"otlp_traces_endpoint": "http://localhost:4317"}
"""Nothing listens there: what exports to it begins with an engine's process, and here is none."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """In the place of the exporter that vLLM sets up in every process of an engine."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def preempted(engine: Engine) -> Engine:
    engine.preempt()
    engine.steps(30)
    return engine


def test_a_preemption_is_a_span_in_the_trace_of_its_request(model: str, exported: InMemorySpanExporter) -> None:
    stats = preempted(Engine(model, HEADERS, **TRACED)).controller.stats()
    spans = exported.get_finished_spans()
    assert len(spans) == harness.total(stats, "resumed") > 0
    for span in spans:
        assert span.name == NAME and span.start_time < span.end_time and span.parent is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    values: dict[str, Any] = dict(spans[0].attributes or {})
    assert values["kvpolicy.policy"] == "always-swap" and values["kvpolicy.ended"] == "resumed"
    assert values["kvpolicy.intended"] == values["kvpolicy.executed"] == "swap"
    assert values["kvpolicy.loaded_tokens"] > 0 and values["kvpolicy.victim_delay_s"] > 0
    assert "kvpolicy.reason" not in values, "it was executed as chosen"


def test_a_request_whose_last_token_comes_in_the_step_that_brings_it_back_has_its_span(
    model: str, exported: InMemorySpanExporter
) -> None:
    engine = Engine(model, HEADERS, **TRACED)
    victim = engine.scheduler.requests[engine.preempt()]
    victim.max_tokens = victim.num_output_tokens + 1
    engine.steps(30)
    assert victim.request_id not in engine.scheduler.requests
    assert len(exported.get_finished_spans()) == 1
    assert harness.total(engine.controller.stats(), "spans_failed") == 0


@pytest.mark.parametrize(("headers", "engine"), [(HEADERS, {}), (None, TRACED), ({}, TRACED)])
def test_nothing_is_written_where_nothing_is_traced(
    model: str, exported: InMemorySpanExporter, headers: dict[str, str] | None, engine: dict[str, str]
) -> None:
    assert harness.total(preempted(Engine(model, headers, **engine)).controller.stats(), "resumed") > 0
    assert not exported.get_finished_spans()


def test_an_exporter_that_fails_is_counted_and_given_up(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer", broken)
    engine = Engine(model, HEADERS, **TRACED)
    for _ in range(MAX_FAILURES + 2):
        engine.preempt()
        engine.steps(5)
    stats = engine.controller.stats()
    assert harness.total(stats, "spans_failed") == MAX_FAILURES < harness.total(stats, "resumed")
    assert "spans_failed" in COUNTERS
