"""Production logs made up under a known law and a known policy, seeded: for tests that need a log and no engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvpolicy import policy as policies
from kvpolicy import trace as traces
from kvpolicy.events import Decision, Outcome, Preemption
from kvpolicy.policy import Policy, decide, feasible_options
from kvpolicy.trace import Header, Trace
from tests.synthetic import GEOMETRY, HARDWARE, NATIVE, CostLaw, situation, true_cost_s

BLOCK_SIZE = 32


@dataclass(frozen=True)
class LogPlan:
    """What to make up."""

    decisions: int = 400
    policy: str = "random:0.5"
    noise: float = 0.1
    """Standard deviation of log cost."""
    law: CostLaw = field(default_factory=CostLaw)
    host_full_share: float = 0.0
    tokens: tuple[int, int] = (32, 2048)
    name: str = "log"
    source: str = "production"
    loader: Callable[[str], Any] | None = None
    """Of the policy's cost model."""


def make_log(seed: int = 0, plan: LogPlan | None = None, **changes: Any) -> Trace:
    """A log as a server with ``plan.policy`` writes it, one core. ``changes`` replace fields of the plan."""
    plan = replace(plan or LogPlan(), **changes)
    rng = random.Random(seed)
    policy = policies.load(plan.policy) if plan.loader is None else policies.load(plan.policy, plan.loader)
    core = f"core-{plan.name}"
    decisions, outcomes = rows_of(plan, core, policy, rng)
    tables = {
        name: traces.with_core(traces.from_rows(name, rows), core)
        for name, rows in (("decisions", decisions), ("outcomes", outcomes))
    }
    return Trace({core: header(plan, core)}, tables)


def rows_of(
    plan: LogPlan, core: str, policy: Policy, rng: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of ``decisions`` and ``outcomes``. One to three preemptions share an overflow, and some a request."""
    state, overflow, left = policy.initial_state(), 0, 0
    decisions, outcomes = [], []
    for number in range(plan.decisions):
        if not left:
            overflow, left = overflow + 1, rng.choice((1, 1, 2, 3))
        left -= 1
        one = situation_at(plan, rng)
        decision = decide(policy, one, feasible_options(one), state, rng)
        state = policy.next_state(state, decision)
        decision = replace(decision, executed=decision.intended)
        name = f"{core}-{number}"
        decisions.append(decided(one, decision, name, f"{core}-o{overflow}", f"r{rng.randrange(plan.decisions)}"))
        cost_s = true_cost_s(plan.law, decision.intended, one) * math.exp(rng.gauss(-(plan.noise**2) / 2, plan.noise))
        outcomes.append(outcome(name, one, decision, cost_s))
    return decisions, outcomes


def situation_at(plan: LogPlan, rng: random.Random) -> Preemption:
    low, high = map(math.log, plan.tokens)
    running = rng.randrange(6)
    return situation(
        computed_tokens=round(math.exp(rng.uniform(low, high))),
        block_size=BLOCK_SIZE,
        running_requests=running,
        batch_tokens=sum(rng.randrange(50, 800) for _ in range(running)),
        free_host_blocks=0 if rng.random() < plan.host_full_share else 4096,
    )


def decided(one: Preemption, decision: Decision, name: str, overflow: str, request: str) -> dict[str, Any]:
    return traces.decision_row(
        one, decision, preemption_id=name, decision_id=f"{name}-0", request=request, generation=0, step=0,
        overflow_id=overflow,
    )  # fmt: skip


def outcome(name: str, one: Preemption, decision: Decision, cost_s: float, ended: str = "resumed") -> dict[str, Any]:
    swapped = decision.executed == "swap"
    lost = one.computed_tokens
    return traces.outcome_row(
        Outcome(name, ended, 1002.0, cost_s, 0.0, 0, lost * swapped, lost * (not swapped), 0, 1, cost_s, 0.0)  # type: ignore[arg-type]
    )


def header(plan: LogPlan, core: str) -> Header:
    return Header(
        run_id=core, source=plan.source, created="2024-01-01T00:00:00Z", engine="synthetic 1", hardware=HARDWARE,
        geometry=GEOMETRY.to_dict(), block_size=BLOCK_SIZE, block_bytes=BLOCK_SIZE * GEOMETRY.kv_bytes_per_token,
        device_blocks=4096, host_blocks=4096, policy=plan.policy, link=NATIVE, seed=0,
    )  # fmt: skip


def reworked(log: Trace, **rows: Sequence[dict[str, Any]]) -> Trace:
    """The log with tables replaced by these rows."""
    (core,) = log.headers
    by_name = {name: traces.with_core(traces.from_rows(name, some), core) for name, some in rows.items()}
    return Trace(log.headers, dict(log.tables) | by_name)
