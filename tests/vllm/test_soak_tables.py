"""Drawn schedules over several block tables, windows and states: in orders of service, under priorities, with resets,
pauses, aborts, forced preemptions and copies that fail or come late.

vLLM's scheduler alone drives the worker of `tests.vllm.symbolic`: every entry of every window and every state that a
step reads is compared with what has to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm import soak
from tests.vllm.setups import ORDERS, UNRULY, Setup
from tests.vllm.versions import INSTALLED, skip_before_tables, source_or_skip

pytestmark = pytest.mark.scheduler

FAMILIES = ("two-full", "window", "full-window", "full-windows", "two-sizes", "full-states")
TIGHT: dict[str, Any] = {"spare_blocks": 2, "requests": 60}
CASES: dict[str, dict[str, Any]] = {
    "as drawn": {},
    "in an order": TIGHT | {"scheduling": "fcfs"},
    "under priorities": TIGHT | {"scheduling": "priority", "prefix_caching": True, "harried": True},
    "with resets": TIGHT | {"resets": "weights", "harried": True, "copies_fail": True},
    "with pauses": TIGHT | {"pauses": True, "harried": True, "copies_fail": True, "resets": "cache"},
}
FEW, MANY = range(2), range(2, 22)
"""Seeds of each family and case."""
RULED = [order for order in ORDERS if order not in UNRULY]


def setups(seeds: range, layers: str, case: str) -> list[Setup]:
    """Orders are those that ship, one after the other, so that few seeds meet many."""
    first = len(CASES) * FAMILIES.index(layers) + [*CASES].index(case)
    orders = {"order": RULED} if case == "in an order" else {}
    return [
        Setup.draw(
            seed,
            layers=layers,
            **CASES[case],
            **{name: values[(first + seed) % len(values)] for name, values in orders.items()},
        )
        for seed in seeds
    ]


Outcomes = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        (INSTALLED, FEW),
        pytest.param((INSTALLED, MANY), marks=pytest.mark.slow),
        pytest.param(("0.33.0", MANY), marks=pytest.mark.slow),
    ],
    ids=["few", "many", "many on 0.33.0"],
)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of all schedules here, run in one process for each version."""
    version, seeds = request.param
    if version == INSTALLED:
        skip_before_tables("several block tables are")
    source_or_skip(version)
    drawn = {layers: [setup for case in CASES for setup in setups(seeds, layers, case)] for layers in FAMILIES}
    done = soak.run(version, [setup for some in drawn.values() for setup in some], tmp_path_factory.mktemp("tables"))
    assert not done.failed, "\n".join([str(done), *done.replays()])
    by_setup = {outcome["setup"]: outcome for outcome in done.outcomes}
    return lambda layers: [by_setup[repr(setup)] for setup in drawn[layers]]


@pytest.mark.feature("several KV cache groups")
@pytest.mark.feature("an order of service over several KV cache groups")
@pytest.mark.feature("priority scheduling over several KV cache groups")
@pytest.mark.feature("resets of the prefix cache")
@pytest.mark.feature("pauses and sleep")
@pytest.mark.soak
@pytest.mark.parametrize("layers", FAMILIES)
def test_drawn_schedules_of_every_family_are_clean(layers: str, outcomes: Outcomes) -> None:
    done = outcomes(layers)
    assert sum(outcome["swaps"] for outcome in done) > 40
    displaced = sum(outcome["displaced"] for outcome in done)
    assert displaced > 20
