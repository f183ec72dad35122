"""A family of one's own: seconds per token by the median state, which shrugs at states that went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from kvpolicy.cost.laws import Law, LinearLaw
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.family import Costs, Family

LENGTH = {"recompute": "recomputed_tokens", "swap": "save_bytes"}


class PerToken(Family):
    """``factor``: as a number, or as a text, which is how a module path gives it."""

    def __init__(self, factor: float | str = 1.0, name: str = "per-token") -> None:
        self.factor = factor
        self.name = name

    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        laws: dict[Kind, Law] = {}
        for kind in KINDS:
            name = LENGTH[kind]
            slopes = [max(example.engine_s, 0.0) / getattr(example.x, name) for example in costs.examples[kind]]
            laws[kind] = LinearLaw(costs.floor_s[kind], {name: float(self.factor) * median(slopes)})
        return laws


class Corrected(PerToken):
    """The same, with trees on what a law per token misses."""

    trees = True


class Nothing(PerToken):
    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return {"recompute": LinearLaw(1.0, {})}


class Endless(PerToken):
    def fit_laws(self, costs: Costs) -> Mapping[Kind, Law]:
        return dict.fromkeys(KINDS, LinearLaw(float("inf"), {}))
