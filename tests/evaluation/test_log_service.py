"""The service that a log's requests got, by hand, and in the report; the same as the simulator said of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.evaluation import OffPolicyReport
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.log_service import log_service, service_lines
from kvpolicy.latency import Slo
from kvpolicy.simulator import FolderSink, Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.trace import Trace, TraceError, from_rows, request_row, with_core
from tests.simulator.worlds import LINEAR, random_workload, run


def trace(core: str, *requests: dict[str, Any]) -> Trace:
    rows = [
        request_row(**{"request": str(number), "prompt_tokens": 9, "preemptions": 0, "recomputed_tokens": 0,
                       "loaded_tokens": 0, "finish": "stop"} | values)
        for number, values in enumerate(requests)
    ]  # fmt: skip
    return Trace({}, {"requests": with_core(from_rows("requests", rows), core)})


def served(arrival_s: float, first_s: float | None, last_s: float | None, tokens: int, **more: Any) -> dict[str, Any]:
    times = {"arrival_s": arrival_s, "first_token_s": first_s, "last_token_s": last_s, "output_tokens": tokens}
    return times | more


def test_each_class_by_hand() -> None:
    """Two cores, whose clocks have nothing to do with each other; who was aborted was not served."""
    one = trace(
        "a",
        served(100.0, 101.0, 104.0, 4, class_name="chat", ttft_deadline_s=2.0),
        served(101.0, 104.0, 106.0, 3, class_name="chat", ttft_deadline_s=2.0),
        served(100.0, 102.0, 103.0, 2),
        served(0.0, 1.0, 1.0, 1, class_name="chat", finish="abort"),
        served(0.0, None, None, 0, class_name="chat"),
    )
    other = trace("b", served(1.0, 2.0, 5.0, 2, class_name="chat"))
    told = log_service([one, other])
    assert list(told) == ["chat", "default"]
    chat = told["chat"]
    assert (chat.requests, chat.output_tokens, chat.makespan_s) == (3, 9, 6.0 + 4.0)
    assert (chat.ttft_s.mean, chat.e2e_s.mean) == pytest.approx((5 / 3, 13 / 3))
    assert chat.itl_s.mean == pytest.approx((3 + 2 + 3) / 6)
    assert (chat.deadline_requests, chat.slo_share, chat.goodput_req_s) == (2, 0.5, 0.1)
    assert math.isnan(chat.itl_s.p99) and math.isnan(chat.longest_gap_s.mean), "rows do not say"
    assert told["default"].e2e_per_token_s.mean == 1.5
    assert log_service([one], Slo(tpot_s=1.0))["default"].slo_share == 1.0
    lines = service_lines(told)
    assert lines[0].startswith("served, class chat: 3 requests, 0.9 tokens/s; time to first token 1.67 s (p99")
    assert lines[0].endswith("; 50.0% of 2 with a deadline met it, goodput 0.1 requests/s") and lines[1].endswith(
        "fairness 1"
    )
    assert log_service([trace("c")]) == {}
    older = one.table("requests").drop_columns(["class", "priority", "ttft_deadline_s", "tpot_deadline_s"])
    assert {name: told.requests for name, told in log_service([Trace({}, {"requests": older})]).items()} == {
        "default": 3
    }


def test_rows_say_what_the_simulator_said() -> None:
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)
    result, recorded = run(random_workload(7, 40, 60.0), server, "always-swap")
    told = log_service([recorded])
    assert list(told) == list(result.summary.classes)
    for name, one in told.items():
        other = result.summary.classes[name]
        assert (one.ttft_s, one.e2e_s, one.fairness) == (other.ttft_s, other.e2e_s, pytest.approx(other.fairness))
        assert one.itl_s.mean == pytest.approx(other.itl_s.mean)
        assert one.by_prompt_length == other.by_prompt_length != ()


def test_the_report_on_a_log_has_the_classes(tmp_path: Path) -> None:
    server = Server(block_size=16, block_bytes=1 << 16, device_blocks=24, host_blocks=100)
    policy = kvpolicy.load_policy("random:0.5")
    Builtin().run(random_workload(7, 60, 60.0), policy, server, LINEAR, sink=FolderSink(tmp_path / "log"))
    report = kvpolicy.evaluate([tmp_path / "log"], ["always-swap"])
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))["classes"]
    assert list(told) == ["default", "urgent"] and told["urgent"]["longest_gap_s"]["mean"] is None
    assert told["urgent"]["e2e_s"]["p99"] > 0 and "served, class urgent: " in report.text()
    for one in told.values():
        bins = one["by_prompt_length"]
        assert len(bins) > 1 and sum(part["requests"] for part in bins) == one["requests"]


def test_deadlines_judge_the_service_and_no_policy(tmp_path: Path) -> None:
    """Goodput by class is what the simulator said of the run, under the same deadlines; no estimate changes."""
    server = Server(block_size=16, block_bytes=1 << 16, device_blocks=24, host_blocks=100)
    policy, slo = kvpolicy.load_policy("random:0.5"), Slo(ttft_s=0.05, tpot_s=0.01)
    served = random_workload(7, 60, 60.0)
    run = Builtin().run(served, policy, server, LINEAR, sink=FolderSink(tmp_path / "log"), slo=slo)
    plain, judged = (kvpolicy.evaluate([tmp_path / "log"], ["always-swap"], how=Estimation(slo=given))
                     for given in (None, slo))  # fmt: skip
    assert isinstance(plain, OffPolicyReport) and isinstance(judged, OffPolicyReport)
    for name, simulated in run.summary.classes.items():
        of_log = judged.classes[name]
        assert (of_log.deadline_requests, of_log.slo_share) == (simulated.deadline_requests, simulated.slo_share)
        assert of_log.deadline_requests == of_log.requests > 0 and of_log.slo_share not in (0.0, 1.0)
    assert plain.classes != judged.classes and plain.policies == judged.policies
    assert "with a deadline met it, goodput" in judged.text()


def test_a_first_token_without_tokens_is_refused() -> None:
    with pytest.raises(TraceError, match="table requests, request 0 of core a: output_tokens is 0"):
        log_service([trace("a", served(1.0, 2.0, 3.0, 0))])
