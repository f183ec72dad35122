"""Production logs made up under a known law, seeded, as numbers: for studies that need the truth.

Records come in clusters of one to three, which share luck (an overflow takes several victims at once). Costs are
skewed, and bent in a way that no linear direct model knows of; the logging policy leans towards what it thinks is
cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.arrays import Flags, Floats
from kvpolicy.evaluation.decision_log import Log
from kvpolicy.events import KINDS

POLICIES = ("always-recompute", "always-swap", "threshold")
THRESHOLD_TOKENS = 900.0
CONTEXT_TOKENS = 4096.0
MAX_S = 0.5
"""No cost is above."""
INFEASIBLE = 0.15
"""Of the records: the host pool is full."""


@dataclass(frozen=True)
class Scenario:
    """How a log comes about."""

    min_chance: float = 0.2
    """Of either action, wherever both are feasible."""
    unknown: float = 0.0
    """Of swaps, those whose cost is not known."""


def make(n: int, rng: np.random.Generator, scenario: Scenario | None = None) -> tuple[Log, dict[str, Floats]]:
    """A log of ``n`` records, and what each of :data:`POLICIES` would do, (n, K)."""
    how = scenario or Scenario()
    cluster = np.repeat(np.arange(n), rng.integers(1, 4, n))[:n]
    tokens, running, feasible = _situations(n, rng)
    mean_s = _mean_costs(tokens, running)
    believed_log_ratio = np.log(mean_s[:, 1] / mean_s[:, 0]) + rng.normal(0.0, 0.5, n)
    swap_share = np.clip(1 / (1 + np.exp(2 * believed_log_ratio)), how.min_chance, 1 - how.min_chance)
    swap = np.where(feasible[:, 1], swap_share, 0.0)
    action = (rng.random(n) < swap).astype(np.int64)
    luck = 0.7 + 0.6 * rng.random(n)[cluster]
    cost_s = mean_s[np.arange(n), action] * luck * (0.5 + 2.0 * rng.beta(1.0, 3.0, n))
    cost_s[(action == 1) & (rng.random(n) < how.unknown)] = np.nan
    x = np.column_stack([np.ones(n), tokens, tokens**2 / 2, running, tokens * running])
    return Log(cost_s, action, np.column_stack([1 - swap, swap]), feasible, cluster, x, (), (), (), {}, {}), targets(
        tokens, feasible
    )


def _situations(n: int, rng: np.random.Generator) -> tuple[Floats, Floats, Flags]:
    """Tokens, running requests, and whether each action is feasible."""
    tokens = np.minimum(np.exp(rng.normal(6.5, 0.8, n)), CONTEXT_TOKENS)
    running = rng.integers(0, 12, n).astype(np.float64)
    return tokens, running, np.column_stack([np.ones(n, bool), rng.random(n) >= INFEASIBLE])


def targets(tokens: Floats, feasible: Flags) -> dict[str, Floats]:
    """What each policy does, (n, K)."""
    policies = {"always-recompute": np.zeros(len(tokens)), "always-swap": np.ones(len(tokens))}
    policies["threshold"] = (tokens >= THRESHOLD_TOKENS).astype(np.float64)
    return {
        name: np.column_stack([1 - swap * feasible[:, 1], swap * feasible[:, 1]]) for name, swap in policies.items()
    }  # fmt: skip


def truth(draws: int, rng: np.random.Generator) -> dict[str, float]:
    """Mean cost of each policy over the situations, seconds; noise has a mean of 1 and is left out."""
    tokens, running, feasible = _situations(draws, rng)
    mean_s = _mean_costs(tokens, running)
    return {name: float((share * mean_s).sum(axis=1).mean()) for name, share in targets(tokens, feasible).items()}


def _mean_costs(tokens: Floats, running: Floats) -> Floats:
    """Seconds of each of :data:`kvpolicy.events.KINDS`, (n, K)."""
    bend = 1.0 + 0.4 * np.tanh(running - 5.0)
    recompute_s = 1e-3 + 2e-5 * tokens + 4e-9 * tokens**2
    swap_s = (6e-3 + 1e-5 * tokens) * bend
    assert KINDS == ("recompute", "swap")
    return np.column_stack([recompute_s, swap_s])
