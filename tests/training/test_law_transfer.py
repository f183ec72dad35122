"""Laws that are carried to another machine, model or link."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.cost.laws import SWAP_FIELDS, Channel, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import Provenance
from kvpolicy.datasets.examples import examples_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.features import FEATURES, Features
from kvpolicy.training.law_transfer import SHARE_GROUPS, carry_law, rebased, scaled_by, unknown_beforehand
from tests.synthetic import GEOMETRY, CostLaw, fitted_model, make_trace

SLOWER = CostLaw(s_per_token=9e-5, s_per_pair=12e-9, fixed_s=1.2e-3, alone_s=4.5e-3)


def _place(device: str, geometry: Any) -> Provenance:
    provenance = fitted_model("analytic").provenance
    return replace(provenance, hardware={"device": device}, geometry=geometry)


def test_an_outlier_among_the_few_does_not_carry_the_law_away() -> None:
    data = dataset_of({"made": make_trace(noise=0.02, law=SLOWER)})
    few = list(examples_of(data.states)["recompute"][::12])
    law = RecomputeRoofline(0.4e-3, 1.5e-3, 3e-5, 4e-9)
    clean = carry_law(law, few, 1e-6)
    wrong = carry_law(law, [replace(few[0], engine_s=few[0].engine_s * 30), *few[1:]], 1e-6)
    for one in few:
        assert sum(clean.parts(one.x)) == pytest.approx(one.engine_s, rel=0.15)
        assert sum(wrong.parts(one.x)) == pytest.approx(sum(clean.parts(one.x)), rel=0.15)


def test_without_measurements_a_law_stays_what_it_is() -> None:
    law = RecomputeRoofline(0.4e-3, 1.5e-3, 3e-5, 4e-9)
    assert carry_law(law, [], 1e-6) == law


def test_linear_laws_are_scaled_as_a_whole() -> None:
    data = dataset_of({"made": make_trace(noise=0.0, law=SLOWER)})
    law = LinearLaw(0.4e-3, {"recomputed_tokens": 3e-5})
    carried = carry_law(law, examples_of(data.states)["recompute"][::10], 1e-6)
    assert isinstance(carried, LinearLaw)
    assert carried.per_feature_s["recomputed_tokens"] / 3e-5 == pytest.approx(carried.constant_s / 0.4e-3)
    assert carried.constant_s > 2 * law.constant_s


def test_shapes_and_sheets_are_applied_before_any_measurement() -> None:
    """Twice the layers on a device with 3.17 times the compute and 1.64 times the memory bandwidth."""
    law = RecomputeRoofline(1e-3, 2e-3, 3e-5, 4e-9, weight_s=5e-3)
    old = _place("NVIDIA A100-SXM4-80GB", GEOMETRY)
    new = _place("NVIDIA H100 80GB HBM3", replace(GEOMETRY, layers=2 * GEOMETRY.layers))
    tables = rebased(law, old, new)
    assert isinstance(tables, RecomputeRoofline)
    assert tables.s_per_token == pytest.approx(3e-5 * 2 / (989.5 / 312))
    assert tables.s_per_pair == pytest.approx(4e-9 * 2 / (989.5 / 312))
    assert tables.weight_s == pytest.approx(5e-3 * 2 / (3350 / 2039))
    assert tables.fixed_s == law.fixed_s
    assert rebased(law, old, _place("cpu", GEOMETRY)) == law


def test_windows_of_another_llm_are_known_from_its_shape() -> None:
    """4 layers of full attention before; of the 8 of the new one six see 512 tokens. Equal kernels, an equal device."""
    law = RecomputeRoofline(1e-3, 0.0, 3e-5, 4e-9)
    old = _place("cpu", GEOMETRY)
    windowed = replace(GEOMETRY, layers=8, window_layers=6, window_tokens=512)
    there = rebased(law, old, _place("cpu", windowed))
    assert isinstance(there, RecomputeRoofline)
    assert (there.s_per_pair, there.s_per_window_pair) == pytest.approx((2e-9, 6e-9))
    assert there.window_tokens == 512.0 and unknown_beforehand(there, old, _place("cpu", windowed)) == ()
    back = rebased(there, _place("cpu", windowed), old)
    assert isinstance(back, RecomputeRoofline)
    assert (back.s_per_pair, back.s_per_window_pair) == pytest.approx((4e-9, 0.0))
    only_windows = _place("cpu", replace(GEOMETRY, window_layers=4, window_tokens=512))
    to_full = rebased(rebased(law, old, only_windows), only_windows, old)
    assert isinstance(to_full, RecomputeRoofline) and to_full.s_per_pair == pytest.approx(4e-9)


def test_a_state_adds_to_the_work_of_a_token_alone() -> None:
    law = RecomputeRoofline(1e-3, 0.0, 3e-5, 4e-9)
    linear = round(3 * GEOMETRY.linear_flops_per_token)
    states = replace(GEOMETRY, state_layers=3, linear_flops=linear)
    there = rebased(law, _place("cpu", GEOMETRY), _place("cpu", states))
    assert isinstance(there, RecomputeRoofline)
    assert (there.s_per_token, there.s_per_pair) == pytest.approx((9e-5, 1e-9))


def test_what_a_mixture_or_a_window_costs_is_carried_as_well() -> None:
    law = RecomputeRoofline(
        1e-3, 0.0, 3e-5, 4e-9, 5e-3, expert_s=2e-3, expert_miss=0.75, s_per_window_pair=1e-9, window_tokens=128.0
    )
    old = _place("cpu", GEOMETRY)
    tables = rebased(law, old, _place("cpu", replace(GEOMETRY, layers=2 * GEOMETRY.layers)), budget_tokens=256.0)
    assert isinstance(tables, RecomputeRoofline)
    assert (tables.expert_s, tables.s_per_window_pair) == pytest.approx((4e-3, 2e-9))
    assert (tables.expert_miss, tables.window_tokens, tables.budget_tokens) == (0.75, 128.0, 256.0)
    assert len(unknown_beforehand(law, old, _place("cpu", replace(GEOMETRY, layers=2)))) == 2
    assert unknown_beforehand(law, old, _place("another", GEOMETRY)) == ()


@pytest.mark.parametrize(
    "law",
    [
        RecomputeRoofline(1e-3, 2e-3, 1e-5, 1e-9, weight_s=1e-2, s_per_kv_token=1e-8, budget_tokens=256.0),
        SwapRoofline(Channel(1e-4, 1e-10, 1e-7), Channel(1e-4, 2e-10, 1e-7), 1e-3, 1e-3, 1.0, 0.9, 0.3, 0.1, 0.2, 0.7),
        LinearLaw(1e-3, {"computed_tokens": 1e-6, "load_bytes": 1e-11}),
    ],
)
def test_a_scaled_law_predicts_so_much_more_everywhere(law: RecomputeRoofline | SwapRoofline | LinearLaw) -> None:
    rng = random.Random(3)
    for _ in range(20):
        x = Features(*(rng.uniform(0.0, 5000.0) for _ in FEATURES))
        assert sum(scaled_by(law, 1.7).parts(x)) == pytest.approx(1.7 * sum(law.parts(x)), rel=1e-9)


def test_every_share_of_a_swap_is_scaled() -> None:
    assert sorted(name for names in SHARE_GROUPS.values() for name in names) == sorted(SWAP_FIELDS)
