"""One option's predicted cost, and what it came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.cost import FittedModel
from kvpolicy.events import Cost, Kind, Option, Preemption
from kvpolicy.features import FEATURES, features_of
from kvpolicy.policy.decision import HOST_TIER, RECOMPUTE


@dataclass(frozen=True, slots=True)
class Beyond:
    """A feature outside what the model was trained on."""

    feature: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Account:
    """What was predicted, and from what.

    ``cost.engine_s`` is the law's seconds, or the floor where that is more, times ``residual_factor``.
    """

    kind: Kind
    cost: Cost
    law_save_s: float
    law_load_s: float
    law_recompute_s: float
    floor_s: float
    """The least cost the model's traces could tell from none."""
    residual_factor: float
    """By how much what was learned changes the physics; 1 where nothing was, or left out beyond its range."""
    beyond: tuple[Beyond, ...]

    @property
    def law_s(self) -> float:
        return self.law_save_s + self.law_load_s + self.law_recompute_s

    @property
    def floored(self) -> bool:
        return self.law_s < self.floor_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"law_s": self.law_s, "floored": self.floored}


def options_of(situation: Preemption) -> tuple[Option, Option]:
    """Both, as where the host has room."""
    return RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)


def account_of(model: FittedModel, situation: Preemption) -> tuple[Account, Account]:
    """Recompute's and swap's."""
    options = options_of(situation)
    costs = model.predict(situation, options)
    again, swap = (_account(model, situation, *pair) for pair in zip(options, costs, strict=True))
    return again, swap


def _account(model: FittedModel, situation: Preemption, option: Option, cost: Cost) -> Account:
    kind, x = option.kind, features_of(situation, option)
    parts = model.laws[kind].parts(x)
    beyond = tuple(Beyond(name, x[FEATURES.index(name)], *model.ranges[kind][name]) for name in model.outside(kind, x))
    floor_s = model.floor_s[kind]
    return Account(kind, cost, *parts, floor_s, cost.engine_s / max(sum(parts), floor_s), beyond)
