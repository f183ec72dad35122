"""What a policy minimises: engine time, the victim's delay, the others' delay, or a weighted sum of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from kvpolicy.events import Cost
from kvpolicy.fields import WrongValue

QUANTITIES = ("engine", "victim", "others")
FORM = "engine, victim, others, or a sum of these with weights, as in engine+0.5*victim+0.1*others"


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights of the three quantities, which are all in seconds (the others' in request-seconds); none below 0."""

    engine: float = 1.0
    victim: float = 0.0
    others: float = 0.0

    def of(self, cost: Cost) -> float:
        """Raises ValueError where the delay of the victim matters and the model did not predict it."""
        return self.weigh(cost.engine_s, cost.victim_delay_s, cost.stall_s)

    def weigh(self, engine_s: float, victim_delay_s: float | None, others_delay_s: float | None) -> float:
        """The weighted sum; a quantity of weight 0 may be None. Raises ValueError for one that is needed."""
        total = self.engine * engine_s
        for weight, seconds, name in ((self.victim, victim_delay_s, "victim"), (self.others, others_delay_s, "others")):
            if weight:
                if seconds is None:
                    raise ValueError(f"objective: the delay of the {name} is not known")
                total += weight * seconds
        return total

    @property
    def text(self) -> str:
        """What :meth:`parse` makes it of again."""
        weights = [(getattr(self, name), name) for name in QUANTITIES if getattr(self, name)]
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for weight, name in weights)

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The objective of that name. Raises WrongValue, telling the form, for a wrong one."""
        weights = dict.fromkeys(QUANTITIES, 0.0)
        for term in text.split("+"):
            weight, star, name = term.rpartition("*")
            name = name.strip()
            if name not in weights or weights[name]:
                told = f"{text!r}: {term!r} should be one of {', '.join(QUANTITIES)}, each once: {FORM}"
                raise WrongValue("objective", told)
            weights[name] = _weight(text, weight) if star else 1.0
        return cls(**weights)


def _weight(text: str, given: str) -> float:
    try:
        weight = float(given)
    except ValueError:
        weight = -1.0
    if not (isfinite(weight) and weight > 0):
        raise WrongValue("objective", f"{text!r}: {given!r} should be a weight above 0: {FORM}")
    return weight


ENGINE = Objective()
