"""vLLM's scheduler as a simulator, by itself: time, texts, sessions, refusals, what it leaves behind.

Its scheduler is made by ``kvpolicy_vllm.simulator.deployment``, its worker is
``kvpolicy_vllm.simulator.virtual_worker``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Never

import pytest
import vllm.platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import Platform, PlatformEnum

from kvpolicy import policy
from kvpolicy.events import Preemption
from kvpolicy.order import OrderError
from kvpolicy.policy.base import PolicyError
from kvpolicy.policy.cheapest import Always
from kvpolicy.simulator import Server, Simulator
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.trace import Header, Trace
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.simulator import deployment
from kvpolicy_vllm.simulator.controller import ROWS
from kvpolicy_vllm.simulator.engine import VllmScheduler
from tests.order.failing import METHODS, Failing
from tests.simulator.scarce import refuse_loss, refuse_other_situation
from tests.vllm.agreement import drawn

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]


SERVER = Server(block_size=16, block_bytes=65536, device_blocks=64, host_blocks=64, max_model_len=1024)


TIMES = ConstantTimes(fixed_s=0.01, per_part_s=(0.0,) * 6)
"""Ten milliseconds a step."""


def served(*requests: Request, server: Server = SERVER) -> Trace:
    work = Workload("by hand", requests, 0)
    trace = VllmScheduler().run(work, policy.load("always-recompute"), server, TIMES, 0, MemorySink()).trace
    assert trace is not None
    return trace


def test_it_is_a_simulator() -> None:
    simulator: Simulator = VllmScheduler()
    assert simulator.name == "vllm"


def test_the_variable_that_switches_the_plugin_on_is_not_meant_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setenv("KVPOLICY", "always-swap,order=urgent")
    deployment._cached_configuration.cache_clear()
    assert len(served(Request(0.0, 20, 3)).rows("requests")) == 1 and os.environ["KVPOLICY"]


def test_little_host_memory_is_used_where_it_saves_most() -> None:
    """The plugin's own pool of host memory."""
    refuse_loss(VllmScheduler(), range(2), VllmScheduler().rules)


def test_a_victims_price_is_of_the_batch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_situation(VllmScheduler(), monkeypatch)


def test_time_passes_by_steps_alone() -> None:
    """Prefill at 1.5, then nine more tokens, ten milliseconds each; nothing before it arrives."""
    (row,) = served(Request(1.5, 20, 10)).rows("requests")
    assert (row["arrival_s"], row["first_token_s"]) == (1.5, pytest.approx(1.51))
    assert row["last_token_s"] == pytest.approx(1.60)


def test_a_request_that_comes_while_a_step_runs_waits_for_its_end() -> None:
    rows = {row["request"]: row for row in served(Request(0.0, 20, 3), Request(0.004, 20, 1)).rows("requests")}
    assert rows["1"]["arrival_s"] == 0.004
    assert rows["1"]["first_token_s"] == pytest.approx(0.02)


def test_thinking_begins_when_the_turn_before_is_through() -> None:
    turns = (Request(0.0, 20, 2, session="a"), Request(0.0, 30, 1, session="a", think_s=0.5))
    rows = {row["request"]: row for row in served(*turns).rows("requests")}
    assert rows["1"]["arrival_s"] == pytest.approx(0.02 + 0.5)


def test_shared_prefixes_hit() -> None:
    """The second prefills what is not shared: 64 of 80 tokens are in the cache."""
    head = {"prefix": (1, 2), "prefix_block_tokens": 32}
    steps = served(Request(0.0, 80, 1, **head), Request(1.0, 80, 1, **head)).rows("steps")
    assert [row["scheduled_tokens"] for row in steps if row["scheduled_tokens"]] == [80, 16]
    off = served(Request(0.0, 80, 1, **head), Request(1.0, 80, 1, **head), server=replace(SERVER, prefix_caching=False))
    assert [row["scheduled_tokens"] for row in off.rows("steps") if row["scheduled_tokens"]] == [80, 80]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(0.0, 1000, 25), "request 0 has 1025 tokens.*max_model_len is 1024"),
        (Request(0.0, 1000, 24), "request 0 needs 64 blocks.*device_blocks is 40"),
    ],
)
def test_what_can_never_fit_is_refused(request_: Request, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        served(request_, server=replace(SERVER, device_blocks=40))


def test_requests_say_what_they_are() -> None:
    """In their rows, and to the scheduler: under priority the later, urgent one goes first where one can run."""
    urgent = Request(0.001, 20, 3, priority=-1, class_name="urgent", ttft_s=0.5, tpot_s=0.1)
    requests = (Request(0.0, 20, 3), Request(0.0005, 20, 3), urgent)
    server = replace(SERVER, scheduling="priority", max_running=1)
    rows = {row["request"]: row for row in served(*requests, server=server).rows("requests")}
    columns = ("class", "priority", "ttft_deadline_s", "tpot_deadline_s")
    assert [rows["2"][name] for name in columns] == ["urgent", -1, 0.5, 0.1]
    assert [rows["0"][name] for name in columns] == ["default", 0, None, None]
    assert rows["2"]["first_token_s"] < rows["1"]["first_token_s"]


def test_rules_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rules are '0.1', but vLLM 0\.\d+ is installed: give '0\.\d+'"):
        served(Request(0.0, 20, 3), server=replace(SERVER, rules="0.1"))


def test_equal_runs_give_equal_traces() -> None:
    case = drawn(3, 30)
    chooser = policy.load("random:0.5")
    traces = [VllmScheduler().run(case.work, chooser, case.server, case.times, 7, MemorySink()).trace for _ in range(2)]
    assert traces[0] is not None and traces[1] is not None
    assert traces[0].digest() == traces[1].digest()
    (header,) = traces[0].headers.values()
    assert header.engine.startswith("vllm 0.") and header.source == "simulation" and header.policy == "random:0.5"


class Wrong(Always):
    """A policy with a mistake in it."""

    def assess(self, situation: Preemption, options: object, state: object) -> Never:
        raise ZeroDivisionError("a mistake")


def test_a_policys_mistake_is_raised() -> None:
    """A server would go on and recompute; who simulates wants to know."""
    case = drawn(2, 30)
    expected = rf"policy wrong: assess failed with ZeroDivisionError: a mistake \({__file__}, line \d+\)$"
    with pytest.raises(PolicyError, match=expected):
        VllmScheduler().run(case.work, Wrong("wrong", "swap"), case.server, case.times)


@pytest.mark.parametrize("method", METHODS)
def test_an_orders_mistake_is_raised(method: str) -> None:
    case, order = drawn(2, 60), Failing(method)
    server = replace(case.server, order=order, scheduling="fcfs")
    expected = rf"^order {order.label}: {method} failed with Unpicklable: made up \(.*failing.py, line \d+\)$"
    with pytest.raises(OrderError, match=expected):
        VllmScheduler().run(case.work, policy.load("always-swap"), server, case.times)


def test_without_a_sink_there_is_a_summary_alone() -> None:
    case = drawn(2, 30)
    chooser = policy.load("always-swap")
    bare = VllmScheduler(wall=iter((0.0, 2.0)).__next__).run(case.work, chooser, case.server, case.times)
    outcome = VllmScheduler(wall=iter((0.0, 2.0)).__next__).run(
        case.work, chooser, case.server, case.times, 0, MemorySink()
    )
    assert bare.trace is None and outcome.trace is not None
    assert bare.summary == outcome.summary and bare.summary.simulator_wall_s == 2.0


def test_rows_are_handed_over_in_parts() -> None:
    class Counting(MemorySink):
        most = 0
        begun = False

        def begin(self, core: str, header: Header) -> None:
            self.begun = True
            super().begin(core, header)

        def add(self, table: str, rows: list[dict[str, object]]) -> None:
            assert self.begun
            self.most = max(self.most, len(rows))
            super().add(table, rows)

    sink = Counting()
    work = Workload("long", (Request(0.0, 10, 600), Request(20.0, 10, 900)), 0)
    VllmScheduler().run(work, policy.load("always-recompute"), SERVER, TIMES, 0, sink)
    assert sink.most == ROWS


def test_nothing_of_the_process_is_changed() -> None:
    """vLLM sets variables for the engine that it expects to start: a real one, started later, would inherit them."""
    before, level = dict(os.environ), logging.root.manager.disable
    served(Request(0.0, 20, 3), server=replace(SERVER, max_running=17))
    assert dict(os.environ) == before and logging.root.manager.disable == level


def test_a_device_that_the_plugin_does_not_serve_is_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied in a simulation: it runs beside any vLLM."""
    other = type("Other", (Platform,), {"_enum": PlatformEnum.ROCM, "device_type": "cuda", "device_name": "rocm"})
    monkeypatch.setattr(vllm.platforms, "_current_platform", other())
    served(Request(0.0, 20, 3), server=replace(SERVER, max_running=18))
