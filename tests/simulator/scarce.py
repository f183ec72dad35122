"""Displacing where host memory holds a fifth of what the device holds, and recomputing takes most of the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from kvpolicy import policy
from kvpolicy.events import Decision, Preemption
from kvpolicy.order import load
from kvpolicy.policy import Decider
from kvpolicy.simulator import ConstantTimes, Server, Simulator
from kvpolicy.workload import Request, Workload

TIMES = ConstantTimes(fixed_s=4e-3, per_part_s=(1e-4, 0.0, 0.0, 0.0, 0.0, 0.0), copy_latency_s=2e-4)
PRICED = "python:tests.priced:Priced"


def heavy_tailed(seed: int, count: int = 120) -> Workload:
    rng, at_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(60.0)
        made.append(Request(at_s, rng.randint(16, 96), round(16 * rng.paretovariate(1.2)) % 400 + 4))
    return Workload(f"heavy-tailed {seed}", tuple(made), seed)


def mean_e2e_s(simulator: Simulator, order: str, policy_name: str, seeds: Sequence[int], rules: str = "0.32") -> float:
    server = Server(16, 1 << 16, 100, 20, token_budget=512, max_running=64, order=load(order), rules=rules)
    loaded = policy.load(policy_name, allow_python=True)
    return fmean(simulator.run(heavy_tailed(seed), loaded, server, TIMES, 1).summary.e2e_s.mean for seed in seeds)


def refuse_loss(simulator: Simulator, seeds: Sequence[int], rules: str = "0.32") -> None:
    """Swapping what host memory has room for is no worse than recomputing all; and where only those are displaced whose
    price it is worth, that is better than first come, first served."""
    stock_s, recomputed_s, priced_s, worth_s = (
        mean_e2e_s(simulator, order, name, seeds, rules)
        for order, name in (
            ("fcfs", "always-recompute"), ("mlfq:base=16", "always-recompute"), ("mlfq:base=16", PRICED),
            ("mlfq:base=16,worth=price", PRICED),
        )
    )  # fmt: skip
    assert priced_s < recomputed_s
    assert worth_s < 0.97 * stock_s < priced_s, "it is a case in which displacing everybody does not pay"


def refuse_other_situation(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim's price is asked for while it runs, but is of the batch without it, as its decision is."""
    priced: dict[tuple[float, int, int], Preemption] = {}
    first: dict[float, Preemption] = {}
    price, decide = Decider.price, Decider.decide

    def of(situation: Preemption) -> tuple[float, int, int]:
        return situation.time_s, situation.prompt_tokens, situation.output_tokens

    def noting_price(self: Decider, situation: Preemption, refusal: str) -> float | None:
        priced[of(situation)] = situation
        return price(self, situation, refusal)

    def noting_decision(self: Decider, situation: Preemption, refusal: str) -> Decision:
        if situation.cause == "displaced":
            first.setdefault(situation.time_s, situation)
        return decide(self, situation, refusal)

    monkeypatch.setattr(Decider, "price", noting_price)
    monkeypatch.setattr(Decider, "decide", noting_decision)
    mean_e2e_s(simulator, "mlfq:base=16,victims=cheapest", PRICED, [1])
    found = [(situation, priced[of(situation)]) for situation in first.values() if of(situation) in priced]
    assert len(found) > 20 and all(decided == asked for decided, asked in found)
