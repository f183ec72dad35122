"""What can be done with a victim, and why not more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.events import Cause
from kvpolicy.policy import feasible_options, why_no_swap
from tests.synthetic import situation

VICTIM = replace(situation(100, 32), cause="memory", free_host_blocks=4)


@pytest.mark.parametrize(
    ("cause", "computed_tokens", "refused", "free_host_blocks", "why"),
    [
        ("memory", 100, "", 4, ""),
        ("forced", 100, "", 4, ""),
        ("memory", 100, "", 3, "host_full"),
        ("memory", 100, "not_loadable", 3, "not_loadable"),
        ("memory", 0, "not_loadable", 4, "nothing_computed"),
        ("reset", 0, "not_loadable", 3, "reset"),
    ],
)
def test_the_first_reason_is_told(
    cause: Cause, computed_tokens: int, refused: str, free_host_blocks: int, why: str
) -> None:
    one = replace(VICTIM, cause=cause, computed_tokens=computed_tokens, free_host_blocks=free_host_blocks)
    assert why_no_swap(one, refused) == why


@pytest.mark.parametrize("free_host_blocks", [0, 3, 4, 5])
@pytest.mark.parametrize("computed_tokens", [0, 100])
def test_a_swap_is_an_option_where_nothing_speaks_against_it(free_host_blocks: int, computed_tokens: int) -> None:
    one = replace(VICTIM, free_host_blocks=free_host_blocks, computed_tokens=computed_tokens)
    kinds = [option.kind for option in feasible_options(one)]
    assert kinds == (["recompute"] if why_no_swap(one) else ["recompute", "swap"])
