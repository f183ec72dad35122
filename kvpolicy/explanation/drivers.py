"""What drove a choice: the largest parts of the costs, and the effect of learning, noise floor and trained range."""

from __future__ import annotations

from math import isfinite

from kvpolicy.events import Kind
from kvpolicy.explanation.breakdown import Breakdown, time_text
from kvpolicy.policy import Objective
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE


def drivers_of(breakdowns: tuple[Breakdown, Breakdown], objective: Objective) -> tuple[str, ...]:
    """Lines that say what drove the choice, the most important first. ``breakdowns``: of recompute and of swap."""
    chosen = breakdowns[lowest([breakdown.cost for breakdown in breakdowns], objective)]
    other = breakdowns[1] if chosen is breakdowns[0] else breakdowns[0]
    lines = [_margin(chosen, other, objective), *_parts(breakdowns), *_learned(breakdowns), *_floors(breakdowns)]
    if objective != ENGINE:
        engine = breakdowns[lowest([breakdown.cost for breakdown in breakdowns], ENGINE)].kind
        same = "too" if engine == chosen.kind else f"but {objective.text} changes that"
        lines.append(f"engine time alone would choose {engine}, {same}")
    extrapolated = sorted({feature.feature for breakdown in breakdowns for feature in breakdown.beyond})
    if extrapolated:
        lines.append(
            f"extrapolated, in {', '.join(extrapolated)}: the prediction rests on states that were not measured"
        )
    swap = breakdowns[1].cost
    if swap.log_ratio_low <= 0 <= swap.log_ratio_high:
        bounded = isfinite(swap.log_ratio_low) and isfinite(swap.log_ratio_high)
        lines.append(f"not significant: the interval of the ratio {'includes 1' if bounded else 'is unbounded'}")
    return tuple(lines)


def _margin(chosen: Breakdown, other: Breakdown, objective: Objective) -> str:
    chosen_s, other_s = objective.of(chosen.cost), objective.of(other.cost)
    if chosen_s == other_s:
        return f"a tie at {time_text(chosen_s)}: recompute is chosen"
    return f"{chosen.kind} by {time_text(other_s - chosen_s)}: {time_text(chosen_s)} against {time_text(other_s)}"


def _parts(breakdowns: tuple[Breakdown, Breakdown]) -> list[str]:
    """The larger part of a swap's cost; a recompute has only one part."""
    cost = breakdowns[1].cost
    name, seconds = max((("save", cost.save_s), ("load", cost.load_s)), key=lambda part: part[1])
    if seconds <= 0:
        return []
    return [f"largest part of swap: {name}, {time_text(seconds)} of {time_text(cost.engine_s)}"]


def _learned(breakdowns: tuple[Breakdown, Breakdown]) -> list[str]:
    if all(breakdown.residual_factor == 1 for breakdown in breakdowns):
        return ["physics only: no learned correction here"]
    without = _cheaper(*(max(breakdown.law_s, breakdown.floor_s) for breakdown in breakdowns))
    factors = " and ".join(f"{breakdown.kind} times {breakdown.residual_factor:.3g}" for breakdown in breakdowns)
    return [f"learned: {factors}; {_effect(without, breakdowns, 'physics only')}"]


def _floors(breakdowns: tuple[Breakdown, Breakdown]) -> list[str]:
    floored = [breakdown.kind for breakdown in breakdowns if breakdown.floored]
    if not floored:
        return []
    without = _cheaper(*(breakdown.law_s * breakdown.residual_factor for breakdown in breakdowns))
    return [f"noise floor used for {' and '.join(floored)}; {_effect(without, breakdowns, 'without it engine time')}"]


def _effect(without: Kind, breakdowns: tuple[Breakdown, Breakdown], what: str) -> str:
    chosen = breakdowns[lowest([breakdown.cost for breakdown in breakdowns], ENGINE)].kind
    return f"{what} would choose {without}{' too' if without == chosen else f', this changes it to {chosen}'}"


def _cheaper(recompute_s: float, swap_s: float) -> Kind:
    return "swap" if swap_s < recompute_s else "recompute"
