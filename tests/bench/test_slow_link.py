"""A link on which a copy takes as long as what swap saves over the native one."""

from __future__ import annotations

import pytest

from kvpolicy_vllm.bench.slow_link import Costs, slow_link


def linear_costs(swap_share: float) -> list[Costs]:
    """Recompute at 10,000 tokens a second, swap at a share of that; lengths with median 400."""
    lengths = (100, 200, 300, 400, 533, 800, 1600)
    return [Costs(tokens, tokens / 1e4, swap_share * tokens / 1e4) for tokens in lengths]


def test_a_copy_of_the_median_length_takes_what_swap_saves() -> None:
    """The 5 states nearest 400 are all but the outermost; their mean is 446.6 tokens, 44.66 ms against 4.466 ms."""
    link = slow_link(linear_costs(0.1), bytes_per_token=4096)
    assert link is not None
    extra_s = (200 + 300 + 400 + 533 + 800) / 5 / 1e4 * 0.9
    assert link.seconds(400 * 4096) == pytest.approx(extra_s, rel=0.05)  # two digits each
    assert link.latency_s == pytest.approx(extra_s / 2, rel=0.05)
    shorter, longer = link.seconds(100 * 4096), link.seconds(1600 * 4096)
    assert shorter > 0.9 * 100 / 1e4, "a shorter copy takes more than it saves"
    assert longer < 0.9 * 1600 / 1e4, "a longer one takes less"


def test_an_expensive_swap_has_no_slow_link() -> None:
    assert slow_link(linear_costs(1.1), bytes_per_token=4096) is None


def test_a_link_needs_states() -> None:
    with pytest.raises(ValueError, match="4 states"):
        slow_link(linear_costs(0.1)[:4], bytes_per_token=4096)
