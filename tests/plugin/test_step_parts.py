"""What a step is made of, as if all of its requests were gone through."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.attribution.ledger import OpenPreemption, Step
from kvpolicy_vllm.plugin.step_parts import fill_parts
from tests.plugin.engine import Engine


@pytest.mark.parametrize("seed", range(20))
def test_parts_equal_those_of_a_scan_over_all_requests(seed: int) -> None:
    kinds = set()

    class Watched(Engine):
        def schedule(self) -> Any:
            flight = super().schedule()
            quick: Step[OpenPreemption] = Step(0)
            plain: Step[OpenPreemption] = Step(0)
            for _ in range(2):  # two observers ask
                fill_parts(quick, flight.output)
            scheduled = flight.output.num_scheduled_tokens
            plain.compose(scheduled.values(), [self.requests[name].num_computed_tokens for name in scheduled])
            assert (quick.parts, quick.scheduled_requests) == (plain.parts, plain.scheduled_requests)
            kinds.add((plain.decode_requests > 0, plain.chunk_context > 0))
            return flight

    Watched(random.Random(seed), 2).run(120)
    assert kinds >= {(False, True), (True, False), (True, True)}


def test_a_step_that_cannot_be_read_stays_without_parts() -> None:
    """So that no observer after the first one takes half of them for the whole."""
    cached = SimpleNamespace(req_ids=["a"], num_computed_tokens=[5])
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "unknown": 7}, total_num_scheduled_tokens=8,
        scheduled_new_reqs=[], scheduled_cached_reqs=cached,
    )  # fmt: skip
    step: Step[OpenPreemption] = Step(0)
    for _ in range(2):
        with pytest.raises(KeyError):
            fill_parts(step, output)
    assert step.parts == (0, 0, 0, 0) and step.scheduled_requests == 0
