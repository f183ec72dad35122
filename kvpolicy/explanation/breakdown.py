"""One option's predicted cost, broken down into the parts it was computed from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from kvpolicy.cost import FittedModel
from kvpolicy.events import Cost, Kind, Option, Preemption
from kvpolicy.features import FEATURES, features_of
from kvpolicy.policy.decision import HOST_TIER, RECOMPUTE


@dataclass(frozen=True, slots=True)
class Beyond:
    """A feature outside the range that the model was trained on, ``low`` to ``high``."""

    feature: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A predicted cost and its parts.

    ``cost.engine_s`` is ``law_s`` or, where that is more, ``floor_s``, times ``residual_factor``.
    """

    kind: Kind
    cost: Cost
    law_save_s: float
    law_load_s: float
    law_recompute_s: float
    floor_s: float
    """The noise floor: the lowest cost that the model's traces could distinguish from none."""
    residual_factor: float
    """Learned correction of the physical law; 1 where none was learned, or where it is left out beyond its range."""
    beyond: tuple[Beyond, ...]

    @property
    def law_s(self) -> float:
        return self.law_save_s + self.law_load_s + self.law_recompute_s

    @property
    def floored(self) -> bool:
        return self.law_s < self.floor_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"law_s": self.law_s, "floored": self.floored}


def time_text(seconds: float, unit_of: str = "") -> str:
    """Three significant digits in milliseconds, or in seconds from one on, whole from a thousand on.

    ``unit_of``: what stands before the unit, as ``request-``.
    """
    if not isfinite(seconds):
        return "unbounded"
    if seconds < 0.9995:  # what would be written as 1000 ms
        return f"{seconds * 1e3:.3g} {unit_of}ms"
    return f"{seconds:.3g} {unit_of}s" if seconds < 999.5 else f"{seconds:,.0f} {unit_of}s"


def options_of(situation: Preemption) -> tuple[Option, Option]:
    """Both options, as if the host pool had free slots."""
    return RECOMPUTE, Option("swap", situation.computed_tokens, HOST_TIER)


def breakdowns_of(model: FittedModel, situation: Preemption) -> tuple[Breakdown, Breakdown]:
    """Breakdowns of recompute and swap."""
    options = options_of(situation)
    costs = model.predict(situation, options)
    recompute, swap = (_breakdown(model, situation, *pair) for pair in zip(options, costs, strict=True))
    return recompute, swap


def _breakdown(model: FittedModel, situation: Preemption, option: Option, cost: Cost) -> Breakdown:
    kind, x = option.kind, features_of(situation, option)
    parts = model.laws[kind].parts(x)
    beyond = tuple(Beyond(name, x[FEATURES.index(name)], *model.ranges[kind][name]) for name in model.outside(kind, x))
    floor_s = model.floor_s[kind]
    return Breakdown(kind, cost, *parts, floor_s, cost.engine_s / max(sum(parts), floor_s), beyond)
