"""Fits of a known law: found again, also through noise and outliers; linear and boosted against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvpolicy.cost.laws import Channel, RecomputeRoofline, SwapRoofline
from kvpolicy.datasets.examples import Example, examples_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.family import FAMILIES, Costs, Family, laws_of
from kvpolicy.training.law_fits import _cost_fit, fit_analytic, fit_linear, load_notes
from tests.synthetic import GEOMETRY, CostLaw, make_trace, without

LAW = CostLaw()


FLOORS = dict.fromkeys(KINDS, 1e-6)


def test_without_noise_the_law_itself_is_found() -> None:
    data = dataset_of({"made": make_trace(noise=0.0)})
    laws = fit_analytic(examples_of(data.states), data.transfers, FLOORS)
    recompute, swap = laws["recompute"], laws["swap"]
    assert isinstance(recompute, RecomputeRoofline)
    assert isinstance(swap, SwapRoofline)
    assert recompute.fixed_s == pytest.approx(LAW.fixed_s, rel=1e-4)
    assert recompute.alone_s == pytest.approx(LAW.alone_s, rel=1e-4)
    assert recompute.s_per_token == pytest.approx(LAW.s_per_token, rel=1e-4)
    assert recompute.s_per_pair == pytest.approx(LAW.s_per_pair, rel=1e-4)
    assert swap.save.seconds(1e6, 8) == pytest.approx(LAW.copy_s(1e6, 8), rel=1e-4)
    assert swap.save_share * swap.save.seconds(1e6, 8) + swap.load_beside_share * swap.load.seconds(
        1e6, 8
    ) == pytest.approx(1.5 * LAW.copy_s(1e6, 8), rel=1e-3)


def test_windows_take_their_share_of_a_pairs_time_within_and_beyond_them() -> None:
    """Three of four layers attend to 512 tokens; of what no victim up to 500 tokens can show, the shape tells."""
    true = RecomputeRoofline(
        0.4e-3, 1.5e-3, 3e-5, 1e-8, s_per_window_pair=3e-8, window_tokens=512.0
    )  # of 4e-8 s per pair within the window, one in four layers sees the rest
    geometry = replace(GEOMETRY, window_layers=3, window_tokens=512)

    def fitted(longest: int) -> RecomputeRoofline:
        examples = examples_of(dataset_of({"made": make_trace(noise=0.0, tokens=(32, longest))}).states)
        priced = tuple(replace(one, engine_s=sum(true.parts(one.x))) for one in examples["recompute"])
        law = fit_analytic({**examples, "recompute": priced}, (), FLOORS, geometry=geometry)["recompute"]
        assert isinstance(law, RecomputeRoofline)
        return law

    far = examples_of(dataset_of({"made": make_trace(noise=0.0, tokens=(4000, 8000))}).states)["recompute"]
    for law in (fitted(500), fitted(2048)):
        assert law.s_per_pair == pytest.approx(1e-8, rel=0.01)
        assert law.s_per_window_pair == pytest.approx(3e-8, rel=0.01) and law.window_tokens == 512.0
        for one in far:
            assert sum(law.parts(one.x)) == pytest.approx(sum(true.parts(one.x)), rel=0.01)


def test_costs_alone_calibrate_the_copies_where_no_transfer_was_recorded() -> None:
    data = dataset_of({"made": without(make_trace(noise=0.0), "transfers")})
    examples = examples_of(data.states)
    swap = fit_analytic(examples, data.transfers, FLOORS)["swap"]
    for example in examples["swap"]:
        assert sum(swap.parts(example.x)) == pytest.approx(example.engine_s, rel=0.02)


def test_outliers_and_costs_below_zero_do_not_carry_the_fit_away() -> None:
    rng = np.random.default_rng(0)
    design = np.column_stack([np.ones(400), rng.uniform(1, 1000, 400)])
    seconds = design @ np.array([1e-3, 2e-5]) * np.exp(0.05 * rng.standard_normal(400))
    seconds[::40] *= 30
    seconds[5::80] = -2e-3
    assert _cost_fit(design, seconds, 1e-4) == pytest.approx([1e-3, 2e-5], rel=0.1)


@pytest.mark.parametrize("family", ["analytic", "linear"])
def test_noise_as_large_as_the_costs_does_not_make_them_nothing(family: str) -> None:
    """Single preemptions on a busy machine: many cost less than nothing, some next to nothing, their mean is right."""
    examples = examples_of(dataset_of({"made": make_trace(noise=0.0)}).states)
    rng = np.random.default_rng(0)
    noisy = {
        kind: tuple(replace(one, engine_s=one.engine_s * rng.normal(1.0, 0.8)) for one in some for _ in range(20))
        for kind, some in examples.items()
    }
    fitted = fit_analytic(noisy, (), FLOORS) if family == "analytic" else fit_linear(noisy, FLOORS)
    for kind in KINDS:
        assert sum(one.engine_s < 0 for one in noisy[kind]) > 100
        predicted_s = sum(sum(fitted[kind].parts(one.x)) for one in examples[kind])
        assert predicted_s == pytest.approx(sum(one.engine_s for one in examples[kind]), rel=0.25)


def test_one_regime_alone_is_not_split_in_two() -> None:
    """Two states in which nobody else runs cannot tell what that costs; they must not make a load free there."""
    data = dataset_of({"made": make_trace(noise=0.0)})
    examples = examples_of(data.states)
    busy = {
        kind: tuple(Example(one.x._replace(running_requests=3), one.engine_s) for one in some)
        for kind, some in examples.items()
    }
    swap = fit_analytic(busy, data.transfers, FLOORS)["swap"]
    assert isinstance(swap, SwapRoofline)
    assert swap.load_alone_share == swap.load_beside_share
    assert swap.alone_s == 0.0


def test_linear_coefficients_are_never_below_zero() -> None:
    """Costs that fall with the batch: the coefficient stays at 0 rather than go below."""
    data = dataset_of({"made": make_trace()})
    falling = {
        kind: tuple(replace(one, engine_s=one.engine_s / (1 + one.x.batch_tokens / 100)) for one in some)
        for kind, some in examples_of(data.states).items()
    }
    for law in fit_linear(falling, FLOORS).values():
        assert "batch_tokens" not in law.per_feature_s  # type: ignore[attr-defined]  # a LinearLaw
        assert law.constant_s >= 0  # type: ignore[attr-defined]
        assert min(law.per_feature_s.values()) > 0  # type: ignore[attr-defined]


QUEUED_BYTES = (0.0, 0.0, 0.0, 4e6, 8e6)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("direction", ["save", "load"])
def test_queued_bytes_enter_every_family(family: Family, direction: str) -> None:
    """A copy that waits 1 ns for each byte queued before it, with nobody else to run meanwhile."""
    name = f"queued_{direction}_bytes"
    examples: dict[Kind, tuple[Example, ...]] = {}
    for kind, some in examples_of(dataset_of({"made": make_trace(noise=0.0)}).states).items():
        waits = [QUEUED_BYTES[number % 5] * (kind == "swap") for number in range(len(some))]
        examples[kind] = tuple(
            Example(one.x._replace(running_requests=0, **{name: size}), one.engine_s + 1e-9 * size)
            for one, size in zip(some, waits, strict=True)
        )
    law = laws_of(family, Costs(examples, FLOORS))["swap"]
    assert name in law.used
    x = examples["swap"][0].x
    waited_s = sum(law.parts(x._replace(**{name: 8e6}))) - sum(law.parts(x._replace(**{name: 0.0})))
    assert waited_s == pytest.approx(8e-3, rel=0.3)


def test_a_queue_in_two_states_shows_nothing() -> None:
    examples = examples_of(dataset_of({"made": make_trace()}).states)
    law = fit_linear(examples, FLOORS)["swap"]
    few = [replace(one, x=one.x._replace(queued_save_bytes=1e6 * (i < 2))) for i, one in enumerate(examples["swap"])]
    assert law.used == fit_linear({**examples, "swap": tuple(few)}, FLOORS)["swap"].used
    assert not law.used & {"queued_save_bytes", "queued_load_bytes"}


def test_loads_that_cannot_be_separated_from_saves_are_noted() -> None:
    examples = examples_of(dataset_of({"made": make_trace(states=30)}).states)["swap"]
    alike = [replace(example, x=example.x._replace(load_bytes=example.x.save_bytes)) for example in examples]
    apart = [
        replace(example, x=example.x._replace(load_bytes=example.x.save_bytes * (1 + i % 3)))
        for i, example in enumerate(examples)
    ]
    free = SwapRoofline(Channel(1e-3, 1e-9, 0.0), Channel(1e-3, 1e-9, 0.0), 0.0, 0.0, 2.0, 0.0, 0.0)
    assert "attributes all of the cost to saves" in " ".join(load_notes(free, alike))
    assert load_notes(free, apart) == ()
    assert load_notes(replace(free, load_beside_share=0.5), alike) == ()


@pytest.mark.parametrize("with_transfers", [True, False])
def test_an_example_counts_by_its_weight_as_if_it_were_repeated(with_transfers: bool) -> None:
    """A tenth of the states cost three times as much, and weigh nine times as much."""
    data = dataset_of({"made": make_trace(noise=0.0)})
    transfers = data.transfers if with_transfers else ()
    weighted, repeated, once = ({}, {}, {})  # type: ignore[var-annotated]
    for kind, some in examples_of(data.states).items():
        dear = [replace(one, engine_s=3 * one.engine_s, weight=9.0) for one in some[::10]]
        once[kind] = tuple(replace(one, weight=1.0) for one in dear) + some
        weighted[kind] = (*dear, *some)
        repeated[kind] = tuple(replace(one, weight=1.0) for one in dear for _ in range(9)) + some
    for fits in (lambda examples: fit_analytic(examples, transfers, FLOORS), lambda e: fit_linear(e, FLOORS)):
        by_weight, by_repeats, unweighted = map(fits, (weighted, repeated, once))
        for kind in KINDS:
            x = weighted[kind][0].x
            seconds, expected, other = (sum(laws[kind].parts(x)) for laws in (by_weight, by_repeats, unweighted))
            assert seconds == pytest.approx(expected, rel=0.02)
            assert seconds > 1.1 * other
