"""What drove a choice: the parts that weigh most, and which of learning, floor and range decided it."""

from __future__ import annotations

from math import isfinite

from kvpolicy.events import Kind
from kvpolicy.explanation.breakdown import Account
from kvpolicy.policy import Objective
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE


def drivers_of(accounts: tuple[Account, Account], objective: Objective) -> tuple[str, ...]:
    """One line each, the heaviest first. ``accounts``: recompute's and swap's."""
    chosen = accounts[lowest([one.cost for one in accounts], objective)]
    other = accounts[1] if chosen is accounts[0] else accounts[0]
    found = [_margin(chosen, other, objective), *_parts(accounts), *_learned(accounts), *_floors(accounts)]
    if objective != ENGINE:
        engine = accounts[lowest([one.cost for one in accounts], ENGINE)].kind
        same = "too" if engine == chosen.kind else f"turned by {objective.text}"
        found.append(f"engine time alone would choose {engine}, {same}")
    beyond = sorted({one.feature for account in accounts for one in account.beyond})
    if beyond:
        found.append(f"extrapolated, in {', '.join(beyond)}: it rests on what was not measured")
    swap = accounts[1].cost
    if swap.log_ratio_low <= 0 <= swap.log_ratio_high:
        bounded = isfinite(swap.log_ratio_low) and isfinite(swap.log_ratio_high)
        found.append(f"in doubt: the interval of the ratio {'holds 1' if bounded else 'is unbounded'}")
    return tuple(found)


def _margin(chosen: Account, other: Account, objective: Objective) -> str:
    mine, others = objective.of(chosen.cost), objective.of(other.cost)
    if mine == others:
        return f"a tie at {mine * 1e3:.3g} ms: recompute is taken"
    return f"{chosen.kind} by {(others - mine) * 1e3:.3g} ms: {mine * 1e3:.3g} against {others * 1e3:.3g} ms"


def _parts(accounts: tuple[Account, Account]) -> list[str]:
    """The part that weighs most in a swap; a recompute has but one."""
    cost = accounts[1].cost
    name, seconds = max((("save", cost.save_s), ("load", cost.load_s)), key=lambda part: part[1])
    return [f"most of swap is its {name}: {seconds * 1e3:.3g} of {cost.engine_s * 1e3:.3g} ms"] if seconds > 0 else []


def _learned(accounts: tuple[Account, Account]) -> list[str]:
    if all(one.residual_factor == 1 for one in accounts):
        return ["physics alone: nothing learned on top here"]
    plain = _cheaper(*(max(one.law_s, one.floor_s) for one in accounts))
    factors = " and ".join(f"{one.kind} times {one.residual_factor:.3g}" for one in accounts)
    return [f"learned: {factors}; {_effect(plain, accounts, 'physics alone')}"]


def _floors(accounts: tuple[Account, Account]) -> list[str]:
    floored = [one.kind for one in accounts if one.floored]
    if not floored:
        return []
    without = _cheaper(*(one.law_s * one.residual_factor for one in accounts))
    return [f"floor taken for {' and '.join(floored)}; {_effect(without, accounts, 'without it engine time')}"]


def _effect(plain: Kind, accounts: tuple[Account, Account], what: str) -> str:
    now = accounts[lowest([one.cost for one in accounts], ENGINE)].kind
    return f"{what} says {plain} {'too' if plain == now else f', which it turns to {now}'}".replace(" ,", ",")


def _cheaper(again_s: float, swap_s: float) -> Kind:
    return "swap" if swap_s < again_s else "recompute"
