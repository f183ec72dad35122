"""Steps taken in one leap are those taken one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from kvpolicy.simulator import Link, Server
from kvpolicy.workload import Request, Workload
from tests.simulator.random_runs import World, few_worlds
from tests.simulator.worlds import random_workload, run, worlds


@few_worlds
@given(worlds())
def test_leaping_changes_nothing(world: World) -> None:
    """Taken at once or one by one, steps give the same rows and the same summary."""
    same_either_way(*world)


def test_an_answer_is_found_while_it_is_generated() -> None:
    """The second request repeats what the first one is about to say: how much of it is there shows the moment."""
    first = Request(0.0, 6, 54, prefix=tuple(range(1, 11)), prefix_block_tokens=6)
    server = Server(block_size=4, block_bytes=1, device_blocks=60, host_blocks=0, prefix_caching=True)
    for arrival_s in (0.02, 0.04, 0.06, 0.08):
        second = replace(first, arrival_s=arrival_s, prompt_tokens=58, output_tokens=2)
        same_either_way(Workload("repeated", (first, second), 0), server, "always-recompute")


def test_who_leaves_the_crowd_takes_no_budget() -> None:
    """Scheduling ahead, a last token is on its way while its request still runs; a prefill gets its share of the step,
    and may need a block for it. Found by chance, 1 in 1000."""
    server = Server(
        block_size=16,
        block_bytes=1,
        device_blocks=19,
        host_blocks=2000,
        token_budget=16,
        prefix_caching=False,
        scheduling="priority",
        asynchronous=True,
        link=Link(overlapped=False),
    )
    same_either_way(random_workload(507, 25, 500.0), server, "always-swap")


def same_either_way(source: Workload, server: Server, name: str) -> None:
    (leapt, trace), (plain, other) = (run(source, server, name, leap=leap) for leap in (True, False))
    assert leapt.summary == plain.summary or math.isnan(plain.summary.itl_s.mean)
    for table in ("requests", "steps", "decisions", "outcomes", "transfers"):
        rows, others = trace.rows(table), other.rows(table)
        assert len(rows) == len(others)
        for row, one in zip(rows, others, strict=True):
            assert {k: v for k, v in row.items() if k not in COSTS} == {k: v for k, v in one.items() if k not in COSTS}
            assert [row.get(k) for k in COSTS] == pytest.approx([one.get(k) for k in COSTS], abs=1e-9)


COSTS = ("engine_s", "others_delay_s")
"""Durations less durations: rounding alone may differ."""
