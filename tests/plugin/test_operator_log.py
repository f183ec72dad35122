"""The line at the start, and the line of a preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvpolicy.events import Decision, Option
from kvpolicy.order import load as load_order
from kvpolicy.policy import load
from kvpolicy_vllm.plugin.observers import Identity, Pending
from kvpolicy_vllm.plugin.operator_log import preemption_line, start_line
from kvpolicy_vllm.plugin.settings import Settings
from tests.synthetic import fitted_model, situation


def test_the_start_says_what_is_about_to_happen() -> None:
    settings = Settings("always-swap", host_gib=2.0, pin_memory=False)
    line = start_line(settings, load("always-swap"), load_order("urgent"), 64, 2048, False, "")
    assert line == "policy always-swap; order urgent; 2 GiB of host memory, 64 blocks, 2,048 tokens, pageable"
    settings = replace(settings, shadow=True, trace=Path("/t"), control=Path("/c"))
    policy = load("cheapest:linear", fitted_model)
    line = start_line(settings, policy, load_order("fcfs"), 64, None, True, "pictures")
    assert policy.cost_model is not None and policy.cost_model.digest[:12] in line
    shadow = "shadow: decides and records, every victim is recomputed; as if it had 2 GiB of host memory, 64 blocks;"
    for words in (shadow, "trace in /t", "controlled by /c", "untested: pictures"):
        assert words in line
    assert "page" not in line, "it takes none"
    settings = replace(settings, shadow=False)
    assert "64 blocks, page-locked" in start_line(settings, policy, load_order("fcfs"), 64, None, True, "")


def test_a_preemption_says_who_what_why_and_for_how_much() -> None:
    options = (Option("recompute"), Option("swap", 96, "host"))
    decision = Decision(options, (0.0, 1.0), 1, (), "always-swap", "{}", "recompute", "shadow")
    pending = Pending(situation(computed_tokens=96), decision, Identity("core-1", "r7", 0, 3, {}))
    line = preemption_line(pending)
    assert line == (
        "request r7 preempted (memory) at 96 tokens: recompute, not swap (shadow) by always-swap; no prices"
    )
    policy = load("cheapest:linear", fitted_model)
    _, costs = policy.assess(pending.situation, options, policy.initial_state())
    pending.decision = replace(decision, costs=tuple(costs), executed="swap", reason="")
    assert f"recompute {1e3 * costs[0].engine_s:.2f} ms, swap {1e3 * costs[1].engine_s:.2f} ms" in (
        preemption_line(pending)
    )
