"""Online correction: worked by hand, what it never does, and that it survives a restart and nothing else does."""

from __future__ import annotations

import json
import random
from dataclasses import FrozenInstanceError, replace
from math import exp, inf, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import ModelError
from kvpolicy.cost import online as remembered
from kvpolicy.cost.online import (
    HALF_LIFE,
    SIZES,
    MeasuredCost,
    Online,
    corrected_cost,
    corrected_costs,
    estimate,
    size_of,
    weighted_median,
)
from kvpolicy.events import KINDS, Cost, Kind, Option

COSTS = (
    Cost(2e-3, 0.0, 0.0, 2e-3, 6e-3, 1e-3, 4e-3, victim_delay_s=3e-3),
    Cost(1e-3, 4e-4, 6e-4, 0.0, 3e-3, 5e-4, 2e-3, -2.0, 1.0, victim_delay_s=5e-3),
)
OPTIONS = (Option("recompute"), Option("swap", 500, "host"))


def measured(kind: Kind, by: float, tokens: float = 500, delay_by: float = 1.0) -> MeasuredCost:
    cost = COSTS[KINDS.index(kind)]
    assert cost.victim_delay_s is not None
    return MeasuredCost(kind, tokens, cost, cost.engine_s * by, cost.victim_delay_s * delay_by)


def after(*outcomes: MeasuredCost, start: Online | None = None) -> Online:
    online = start or Online()
    for one in outcomes:
        online = online.updated(one)
    return online


def factor(online: Online, kind: Kind, tokens: float = 500, quantity: int = 0) -> float:
    return online.factors[(quantity * 2 + KINDS.index(kind)) * SIZES + size_of(tokens)]


# ---- estimating ----


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_with_equal_weights_it_is_the_median(values: list[float]) -> None:
    ordered = sorted(values)
    half = len(ordered) // 2
    wanted = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    assert weighted_median(values, [1.0] * len(values)) == pytest.approx(wanted)


def test_weights_count() -> None:
    assert weighted_median([1.0, 2.0, 3.0], [1.0, 1.0, 5.0]) == 3.0
    assert weighted_median([1.0, 2.0], [3.0, 1.0]) == 1.0


def test_an_estimate_worked_by_hand() -> None:
    """Sixteen at log 5: the median is log 5 and all its scale the least one; two at 0 do not turn it."""
    error = 1.2533 * 0.05 / 4.0
    wanted = log(5) * (1 - (2 * error / log(5)) ** 2)
    assert estimate([log(5)] * 16, [1.0] * 16, 2.0) == pytest.approx(wanted)


def test_what_noise_could_have_made_is_no_correction() -> None:
    rng = random.Random(4)
    assert estimate([0.1 + rng.gauss(0, 1) for _ in range(16)], [1.0] * 16, 2.0) == 0.0
    assert estimate([], [], 2.0) == 0.0
    assert estimate([3.0], [1.0], 2.0) == 0.0


# ---- learning ----


def test_a_change_is_followed_by_the_option_that_changed_alone() -> None:
    online = after(*[measured("swap", 5.0)] * 17)
    assert factor(online, "swap") == pytest.approx(5.0, rel=0.02)
    assert factor(online, "recompute") == 1.0


def test_the_victims_delay_is_corrected_by_itself() -> None:
    online = after(*[measured("swap", 1.0, delay_by=3.0)] * 17)
    assert factor(online, "swap") == 1.0
    assert factor(online, "swap", quantity=1) == pytest.approx(3.0, rel=0.02)
    swap = corrected_costs(COSTS, OPTIONS, 500, online)[1]
    assert swap.victim_delay_s == pytest.approx(15e-3, rel=0.02)
    assert swap.engine_s == COSTS[1].engine_s


def test_a_size_that_differs_from_the_rest_is_corrected_by_itself() -> None:
    online = after(*[measured("swap", 1.0, 500), measured("swap", 4.0, 5000)] * 9)
    assert factor(online, "swap", 500) < 1.5
    assert factor(online, "swap", 5000) > 2.5


def test_outliers_are_not_chased() -> None:
    rng = random.Random(1)
    online = Online()
    for number in range(400):
        by = 20.0 if number % 20 == 7 else rng.lognormvariate(0.0, 0.2)
        online = online.updated(measured("swap", by))
        assert 0.8 <= factor(online, "swap") <= 1.25


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60), st.sampled_from([40, 500, 10**5]))
def test_corrections_are_bounded(factors: list[float], tokens: int) -> None:
    online = after(*[measured("swap", by, tokens) for by in factors])
    assert all(1 / 16.001 <= one <= 16.001 for one in online.factors)


def test_an_option_that_is_no_longer_taken_comes_back() -> None:
    """Reversible: what was learned of swap fades while only recompute is measured."""
    online = after(*[measured("swap", 5.0)] * 17)
    online = after(*[measured("recompute", 1.0)] * int(4 * HALF_LIFE), start=online)
    assert factor(online, "swap") == 1.0


def test_a_measurement_below_the_floor_counts_as_the_floor_and_none_as_nothing() -> None:
    below = replace(measured("swap", 1.0), engine_s=-5.0, floor_s=1e-3)
    assert factor(after(*[below] * 17), "swap") == 1.0
    unknown = replace(measured("swap", 1.0), engine_s=None, victim_delay_s=None)
    online = after(*[unknown] * 17)
    assert (online.events, online.misses) == (17, ((),) * 4)


def test_the_state_is_frozen_and_its_record_short() -> None:
    before = after(*[measured("swap", 5.0)] * 3)
    told = before.to_json()
    later = before.updated(measured("recompute", 2.0))
    assert (before.to_json(), later.events) == (told, 4)
    with pytest.raises(FrozenInstanceError):
        before.events = 7  # type: ignore[misc]  # that it cannot is the promise
    assert json.loads(told)["outcomes"] == 3
    assert len(told) < 500


# ---- correcting ----


def test_a_state_that_learned_nothing_changes_nothing() -> None:
    assert corrected_costs(COSTS, OPTIONS, 500, Online()) == COSTS


def test_costs_ratios_and_parts_are_corrected_together() -> None:
    online = replace(after(*[measured("swap", 5.0)] * 17), room=(1.0, 1.0))
    by = factor(online, "swap")
    recompute, swap = corrected_costs(COSTS, OPTIONS, 500, online)
    assert recompute == COSTS[0]
    assert swap.engine_s == pytest.approx(1e-3 * by)
    assert swap.save_s + swap.load_s + swap.recompute_s == pytest.approx(swap.engine_s)
    assert (swap.low_s, swap.high_s) == (pytest.approx(5e-4 * by), pytest.approx(2e-3 * by))
    assert swap.log_ratio_low == pytest.approx(-2.0 + log(by))
    assert swap.log_ratio_high == pytest.approx(1.0 + log(by))
    assert swap.stall_s == pytest.approx(3e-3 * by)


def test_infinite_room_stays_infinite() -> None:
    wide = tuple(replace(cost, low_s=0.0, high_s=float("inf")) for cost in COSTS)
    found = corrected_costs(wide, OPTIONS, 500, after(measured("swap", 5.0)))
    assert all((cost.low_s, cost.high_s) == (0.0, float("inf")) for cost in found)


@pytest.mark.parametrize(("spread", "drift"), [(0.1, 0.0), (1.0, 0.0), (0.4, 0.002)])
def test_intervals_hold_nine_in_ten_whatever_the_spread_and_under_drift(spread: float, drift: float) -> None:
    """The room of these costs is a factor of two either way, right for none of the three."""
    rng, online, held = random.Random(2), Online(), []
    for number in range(3000):
        one = measured("swap", exp(rng.gauss(min(2.0, drift * number), spread)))
        cost = corrected_costs(COSTS, OPTIONS, 500, online)[1]
        assert one.engine_s is not None
        held.append(cost.low_s <= one.engine_s <= cost.high_s)
        online = online.updated(one)
    assert sum(held[500:]) / len(held[500:]) == pytest.approx(0.9, abs=0.02)


def test_room_worked_by_hand() -> None:
    """One held and one missed: the first makes it narrower by 1%, the second wider by 9%."""
    online = after(measured("swap", 1.0), measured("swap", 50.0))
    assert online.room == (1.0, pytest.approx(exp(-0.01 + 0.09), rel=1e-5))


UNBOUNDED = Cost(2e-3, 1e-3, 1e-3, 0.0, 0.0, 0.0, inf)
RIGHT = Cost(1e-3, 5e-4, 5e-4, 0.0, 0.0, 1e-3 * exp(-0.33), 1e-3 * exp(0.33))
"""Nine in ten of a spread of 0.2."""


@pytest.mark.parametrize("edge", [{"low_s": 0.0}, {"high_s": inf}, {"low_s": 0.0, "high_s": inf}])
def test_what_cannot_miss_moves_no_room(edge: dict[str, float]) -> None:
    open_ended = replace(COSTS[1], **edge)
    for extrapolated in (False, True):
        cost = replace(open_ended, extrapolated=extrapolated)
        online = after(*[MeasuredCost("swap", 500, cost, cost.engine_s, None)] * 50)
        assert (online.room, online.room_outside) == ((1.0, 1.0), (1.0, 1.0))


@pytest.mark.parametrize(("share", "extrapolated"), [(0.5, False), (0.95, False), (0.95, True)])
def test_intervals_hold_beside_outcomes_whose_predictions_are_unbounded(share: float, extrapolated: bool) -> None:
    rng, online, held = random.Random(3), Online(), []
    endless = replace(UNBOUNDED, extrapolated=extrapolated)
    for _ in range(6000):
        by = exp(rng.gauss(0, 0.2))
        if rng.random() < share:
            online = online.updated(MeasuredCost("swap", 9000, endless, endless.engine_s * by, None))
            continue
        cost = corrected_cost(RIGHT, online, KINDS.index("swap"), size_of(500))
        held.append(cost.low_s <= RIGHT.engine_s * by <= cost.high_s)
        online = online.updated(MeasuredCost("swap", 500, RIGHT, RIGHT.engine_s * by, None))
    assert sum(held) / len(held) == pytest.approx(0.9, abs=0.03)


def test_extrapolated_predictions_have_room_of_their_own() -> None:
    far = replace(COSTS[1], extrapolated=True)
    online = after(*[MeasuredCost("swap", 500, far, far.engine_s * 50 * (-1) ** i, None) for i in range(9)])
    assert online.room == (1.0, 1.0) and online.room_outside[1] > 2.0
    assert corrected_costs(COSTS, OPTIONS, 500, replace(online, misses=Online().misses)) == COSTS
    outside = corrected_costs((COSTS[0], far), OPTIONS, 500, replace(online, misses=Online().misses))
    assert outside[1].high_s == pytest.approx(1e-3 * 2 ** online.room_outside[1])
    assert outside[1].log_ratio_high == pytest.approx(log(0.5) + online.room_outside[1] * (1.0 - log(0.5)))


# ---- over a restart ----


@pytest.fixture
def learned() -> Online:
    return after(*[measured("swap", 5.0), measured("recompute", 0.7, 5000)] * 12)


def test_what_is_kept_is_what_was_learned(learned: Online, tmp_path: Path) -> None:
    file = tmp_path / "new" / "learned.json"
    remembered.save(learned, "abc", file)
    found = remembered.load(file, "abc")
    assert found == learned
    assert found.to_json() == learned.to_json()
    assert [one.name for one in file.parent.iterdir()] == ["learned.json"]


def test_another_models_memory_is_refused_and_can_be_set_aside(learned: Online, tmp_path: Path) -> None:
    file, digest = tmp_path / "learned.json", "abc" * 8
    remembered.save(learned, digest, file)
    with pytest.raises(remembered.OtherModelError, match=rf"learned.json: model_digest is '{digest}', should be 'def'"):
        remembered.load(file, "def")
    aside = remembered.set_aside(file, digest)
    assert [one.name for one in tmp_path.iterdir()] == [aside.name] == ["learned.json.other-abcabcabcabc"]
    assert remembered.load(aside, digest) == learned


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema_version", 1, "schema_version is 1, should be 2"),
        ("model_digest", "../abc", r"model_digest is '\.\./abc'"),
        ("outcomes", -1, "outcomes holds -1"),
        ("outcomes", True, "outcomes holds True"),
        ("misses", [], r"misses is \[\]"),
        ("misses", {}, r"misses.engine_recompute should be a list"),
        ("room", None, "room is None"),
        ("room", {"recompute": 1.0, "swap": 0}, "room.swap is 0"),
        ("room_outside", {"recompute": 1.0}, "room_outside.swap is None"),
    ],
)
def test_a_damaged_memory_is_refused_by_field(
    learned: Online, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    file = tmp_path / "learned.json"
    remembered.save(learned, "abc", file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ModelError, match=rf"learned.json: .*{message}"):
        remembered.load(file, "abc")


@pytest.mark.parametrize("row", [[0, 0], [0, 99, 0.1], [99, 0, 0.1], [0, 0, "x"], [0, 0, 50.0], 7])
def test_a_damaged_miss_is_refused_by_field(learned: Online, tmp_path: Path, row: Any) -> None:
    file = tmp_path / "learned.json"
    remembered.save(learned, "abc", file)
    card = json.loads(file.read_text())
    card["misses"]["engine_swap"][2] = row
    file.write_text(json.dumps(card))
    with pytest.raises(ModelError, match=r"learned.json: field misses.engine_swap holds"):
        remembered.load(file, "abc")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weights": 1}', "\x00", '{"outcomes": 1' + "0" * 400 + "}", '{"room": NaN}']
)
def test_what_is_no_memory_is_refused_by_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "learned.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=r"learned.json: "):
        remembered.load(file, "abc")
    with pytest.raises(ModelError, match=r"gone.json: cannot be read"):
        remembered.load(tmp_path / "gone.json", "abc")
