"""Traces in which another part of each victim survives than was expected, and costs are those of what was lost."""

from __future__ import annotations

import random

from kvpolicy.events import situation_of
from kvpolicy.features import with_hits
from kvpolicy.trace import Trace
from tests.synthetic import CostLaw, changed, true_cost_s

LAW = CostLaw()


def with_survivors(trace: Trace, seed: int = 0) -> Trace:
    """Half of every victim is expected to survive; from nothing to all of its hashed blocks do, as often."""
    rng = random.Random(seed)
    decisions, found = [], {}
    for row in trace.rows("decisions"):
        hit_tokens = rng.randint(0, row["hashed_blocks"]) * row["block_size"]
        row = row | {"hit_blocks": row["hashed_blocks"] / 2}
        cost_s = true_cost_s(LAW, row["executed"], with_hits(situation_of(row), hit_tokens))
        found[row["preemption_id"]] = {"local_hit_tokens": hit_tokens, "engine_s": cost_s}
        decisions.append(row)
    outcomes = [row | found[row["preemption_id"]] for row in trace.rows("outcomes")]
    return changed(changed(trace, "decisions", decisions), "outcomes", outcomes)
