"""The laws: chunk by chunk against a plain sum over steps, never falling with length, compiled as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from math import hypot, inf

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import laws
from kvpolicy.cost.laws import Channel, LinearLaw, RecomputeRoofline, SwapRoofline, law_from_dict
from kvpolicy.features import FEATURES, Features

WHOLE = RecomputeRoofline(
    fixed_s=1e-4, alone_s=2e-3, s_per_token=2e-5, s_per_pair=1e-9, weight_s=5e-3, expert_s=2e-3, expert_miss=0.9,
    s_per_kv_token=1e-7, s_per_window_pair=2e-9, window_tokens=300.0, budget_tokens=512.0,
)  # fmt: skip
SWAP = SwapRoofline(
    save=Channel(1e-4, 2e-11, 1e-6), load=Channel(2e-4, 3e-11, 2e-6), fixed_s=1e-4, alone_s=1e-3, save_share=1.0,
    load_alone_share=1.0, load_beside_share=0.02, save_queue_share=1.0, load_queue_share=0.5,
)  # fmt: skip
LINEAR = LinearLaw(1e-3, {"recomputed_tokens": 2e-5, "batch_tokens": 1e-8})
ZEROS = Features(*(0.0 for _ in FEATURES))


def victim(computed: int, kept: int = 0, running: int = 0, block_bytes: int = 2**20) -> Features:
    """Of both options at once: laws look at their own features only."""
    lost, blocks = computed - kept, -(-computed // 16)
    return ZEROS._replace(
        computed_tokens=float(computed), recomputed_tokens=float(lost), running_requests=float(running),
        recomputed_pairs=(computed * (computed + 1) - kept * (kept + 1)) / 2, save_bytes=float(blocks * block_bytes),
        load_bytes=float(blocks * block_bytes), save_segments=float(blocks * 32), load_segments=float(blocks * 32),
        queued_save_bytes=1e6, queued_load_bytes=2e6,
    )  # fmt: skip


def stepwise(law: RecomputeRoofline, x: Features) -> float:
    """The same, one step and one token after the other."""
    others, left, at = x.running_requests, x.recomputed_tokens, x.computed_tokens - x.recomputed_tokens

    def linear(tokens: float) -> float:
        return hypot(law.s_per_token * tokens, law.weight_s + law.expert_s * (1 - law.expert_miss**tokens))

    total, pairs, window_pairs, traffic = law.fixed_s, 0.0, 0.0, 0.0
    while left > 0:
        chunk = min(left, max(law.budget_tokens - others, 1))
        total += linear(others + chunk) - (linear(others) if others else -law.alone_s)
        for position in range(int(at) + 1, int(at + chunk) + 1):
            pairs += position
            window_pairs += min(position, law.window_tokens)
        at, left = at + chunk, left - chunk
        traffic += at
    compute = law.s_per_pair * pairs + law.s_per_window_pair * window_pairs
    return total + max(compute, law.s_per_kv_token * traffic)


@given(computed=st.integers(1, 3000), share=st.floats(0, 1), running=st.integers(0, 600))
def test_closed_form_is_the_sum_over_steps(computed: int, share: float, running: int) -> None:
    x = victim(computed, min(int(share * computed), computed - 1), running if running < 500 else 0)
    assert sum(WHOLE.parts(x)) == pytest.approx(stepwise(WHOLE, x), rel=1e-9)


def test_without_a_budget_one_chunk_and_without_traffic_a_line() -> None:
    plain = RecomputeRoofline(1e-3, 2e-3, 3e-5, 4e-9)
    x = victim(1000)
    assert plain.budget_tokens == inf
    assert sum(plain.parts(x)) == pytest.approx(1e-3 + 2e-3 + 3e-5 * 1000 + 4e-9 * x.recomputed_pairs)
    assert sum(plain.parts(victim(1000, running=7))) == pytest.approx(1e-3 + 3e-2 + 4e-9 * x.recomputed_pairs)


def test_few_tokens_ride_along_where_steps_wait_for_memory() -> None:
    """Beside decodes that are bound by the weights' traffic; nothing rides where the victim is alone."""
    law = RecomputeRoofline(0.0, 0.0, 2e-5, 0.0, weight_s=6e-3)
    alone, beside = (sum(law.parts(victim(64, running=running))) for running in (0, 8))
    assert alone > 6e-3
    assert beside < 64 * 2e-5 / 4
    assert sum(law.parts(victim(4096, running=8))) == pytest.approx(4096 * 2e-5, rel=0.08)


@pytest.mark.parametrize("law", [WHOLE, SWAP, LINEAR], ids=["recompute", "swap", "linear"])
@given(computed=st.integers(1, 5000), kept=st.integers(0, 400), more=st.integers(1, 3000), running=st.integers(0, 700))
def test_no_law_falls_with_the_victims_length(law: laws.Law, computed: int, kept: int, more: int, running: int) -> None:
    kept = min(kept, computed)
    shorter, longer = (sum(law.parts(victim(length, kept, running))) for length in (computed, computed + more))
    assert longer >= shorter * (1 - 1e-12)


def test_queued_bytes_are_waited_for() -> None:
    """By the saves behind them; by the loads behind them only where nobody else gives the engine work."""
    busy, alone = victim(160, running=3), victim(160)
    for x, load_wait in ((busy, 0.0), (alone, 0.5 * 3e-11 * 2e6)):
        waiting = SWAP.parts(x)
        nobody = SWAP.parts(x._replace(queued_save_bytes=0.0, queued_load_bytes=0.0))
        assert waiting[0] - nobody[0] == pytest.approx(2e-11 * 1e6)
        assert waiting[1] - nobody[1] == pytest.approx(load_wait)


@pytest.mark.parametrize("law", [WHOLE, SWAP, LINEAR, RecomputeRoofline(1e-3, 0.0, 1e-5, 0.0)])
def test_laws_survive_json(law: laws.Law) -> None:
    again = law_from_dict(json.loads(json.dumps(law.to_dict())))
    assert again == law
    assert again.coefficients == law.coefficients


def test_laws_of_older_models_are_read() -> None:
    old = {"law": "recompute_roofline", "fixed_s": 1e-3, "alone_s": 0.0, "s_per_token": 1e-5, "s_per_pair": 1e-9}
    assert law_from_dict(old) == RecomputeRoofline(1e-3, 0.0, 1e-5, 1e-9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_s": -1.0}, "weight_s"),
        ({"budget_tokens": 0}, "budget_tokens"),
        ({"budget_tokens": float("inf")}, "budget_tokens"),
        ({"expert_miss": 1.5}, "expert_miss"),
        ({"s_per_pair": None}, "s_per_pair"),
    ],
)
def test_wrong_coefficients_are_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        law_from_dict(WHOLE.to_dict() | change)


def test_the_scalar_functions_compile_as_they_are_and_agree() -> None:
    """What a compiled path of decisions will run is these very functions."""
    recompute, swap, linear = map(numba.njit, (laws.recompute_seconds, laws.swap_seconds, laws.linear_seconds))
    rng = np.random.default_rng(0)
    for _ in range(300):
        x = victim(int(rng.integers(1, 9000)), int(rng.integers(0, 50)) * 0, int(rng.integers(0, 80)))
        row = np.array(x)
        for law in (WHOLE, RecomputeRoofline(1e-3, 1e-3, 1e-5, 1e-9)):
            assert recompute(row, np.array(law.coefficients)) == pytest.approx(sum(law.parts(x)), rel=1e-12)
        assert swap(row, np.array(SWAP.coefficients)) == pytest.approx(SWAP.parts(x)[:2], rel=1e-12)
        assert linear(row, np.array(LINEAR.coefficients)) == pytest.approx(sum(LINEAR.parts(x)), rel=1e-12)


def test_a_load_holds_its_share_of_the_memory_for_as_long_as_it_takes_and_waits() -> None:
    """Of 4,000 tokens the victim has 1,000; the 2 MB before it wait, too. Alone there is nobody to use the memory."""
    held = replace(SWAP, load_held_share=1.0)
    beside = victim(1000, running=3)._replace(batch_tokens=3000.0)
    load_s = SWAP.load.seconds(beside.load_bytes, beside.load_segments)
    waits_s = SWAP.load.s_per_byte * 2e6
    difference = sum(held.parts(beside)) - sum(SWAP.parts(beside))
    assert difference == pytest.approx((load_s + waits_s) / 4)
    alone = victim(1000)
    assert held.parts(alone) == SWAP.parts(alone)
    assert held.used - SWAP.used == {"computed_tokens", "batch_tokens"}
    assert law_from_dict(held.to_dict()) == held
    earlier = {name: value for name, value in SWAP.to_dict().items() if name != "load_held_share"}
    assert law_from_dict(earlier) == SWAP, "as in models that were trained before"
