"""The best simple rule by length: chosen by hand, compared by pairs, named as a policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.datasets.profiles import Sample, State
from kvpolicy.datasets.threshold import LengthRule, best_threshold, difference
from kvpolicy.errors import InputError
from kvpolicy.events import KINDS, Kind
from kvpolicy.policy import load
from tests.synthetic import situation


def state(tokens: int, recompute_s: float, swap_s: float) -> State:
    costs: dict[Kind, float] = {"recompute": recompute_s, "swap": swap_s}
    victim = situation(tokens)
    return State(
        f"s{tokens}",
        frozenset({f"core/s{tokens}"}),
        {kind: tuple(Sample(victim, kind, costs[kind], "core", i, f"{kind}-{i}") for i in range(2)) for kind in KINDS},
    )


def test_the_threshold_with_the_lowest_total_is_chosen_by_hand() -> None:
    """From 0: 5 + 5 + 5 + 5 = 20; from 200: 1 + 5 + 5 + 5 = 16; from 300: 1 + 7 + 5 + 5 = 18; from 400: 1 + 7 + 2 + 5
    = 15; never: 1 + 7 + 2 + 30 = 40."""
    states = [state(100, 1, 5), state(200, 7, 5), state(300, 2, 5), state(400, 30, 5)]
    assert best_threshold(states) == LengthRule(400)
    assert best_threshold(states[::-1]) == LengthRule(400)
    assert best_threshold(states).policy == "threshold:400"


def test_constant_rules_are_candidates_and_bear_their_own_names() -> None:
    swaps = [state(100, 5, 1), state(200, 5, 1)]
    recomputes = [state(100, 1, 5), state(200, 1, 5)]
    assert best_threshold(swaps).policy == "always-swap"
    assert best_threshold(recomputes).policy == "always-recompute"


@pytest.mark.parametrize("rule", [LengthRule(0), LengthRule(150), LengthRule(None)])
@pytest.mark.parametrize("tokens", [1, 149, 150, 5000])
def test_a_rule_takes_the_option_that_the_policy_of_its_name_takes(rule: LengthRule, tokens: int) -> None:
    one, policy = state(tokens, 1, 1), load(rule.policy)
    sample = one.samples["swap"][0]
    options = (one.samples["recompute"][0].option, sample.option)
    shares = policy.probabilities(sample.situation, options, policy.initial_state())
    assert options[list(shares).index(1.0)].kind == rule.option(tokens)


def test_a_disturbed_window_does_not_decide() -> None:
    """Swap is right at every length; in one window something else took half a second."""
    states = [state(100 * number, 5e-3 * number, 1e-3) for number in range(1, 9)]
    assert best_threshold(states).policy == "always-swap"
    calm = states[3]
    swaps = tuple(replace(sample, engine_s=s) for sample, s in zip(calm.samples["swap"], (1e-3, 0.5), strict=True))
    states[3] = State(calm.name, calm.ids, {**calm.samples, "swap": swaps})
    assert states[3].mean_s["swap"] > sum(one.mean_s["recompute"] for one in states[:4])
    assert best_threshold(states).policy == "always-swap"


def test_a_difference_counts_less_its_standard_error() -> None:
    """Swaps of 1.4 s and 3.4 s: 2.4 s, of which 1.4 count, more than the 1.2 s that swapping the other state saves."""
    noisy = state(200, 0.0, 0.0)
    swaps = tuple(replace(sample, engine_s=s) for sample, s in zip(noisy.samples["swap"], (1.4, 3.4), strict=True))
    noisy = State(noisy.name, noisy.ids, {**noisy.samples, "swap": swaps})
    assert best_threshold([state(100, 5.0, 3.8), noisy]).policy == "always-recompute"
    assert best_threshold([state(100, 5.0, 3.5), noisy]).policy == "always-swap"


def test_differences_are_paired_and_worked_by_hand() -> None:
    """Differences -1, -2, -3: mean -2, Student's half width 4.303 * 1 / sqrt(3) = 2.484."""
    tied = difference("x", [1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert (tied.mean_s, tied.low_s, tied.high_s) == pytest.approx((-2.0, -4.484, 0.484), abs=1e-3)
    assert tied.verdict == "no better than the threshold, within noise"
    assert difference("x", [1.0, 2.0, 3.0], [3.0, 4.1, 5.0]).verdict == "better than the threshold"
    assert difference("x", [3.0, 4.1, 5.0], [1.0, 2.0, 3.0]).verdict == "worse than the threshold"
    same = difference("x", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert same.verdict == "no better than the threshold: it costs the same in every state"
    assert "x less the best threshold: -2.000 s" not in tied.text()
    assert tied.text().startswith("x less the best threshold: -2000.000 ms [-4484.")


def test_no_states_are_refused() -> None:
    with pytest.raises(InputError, match="no states to choose a threshold on"):
        best_threshold([])
