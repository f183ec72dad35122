"""What a policy minimises: engine time, the victim's delay, the others' delay, or a weighted sum of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from kvpolicy.errors import InputError
from kvpolicy.events import Cost
from kvpolicy.fields import WrongValue, parsed, refuse_other

QUANTITIES = ("engine", "victim", "others")
FORM = "engine, victim, others, or a sum of these with weights, as in engine+0.5*victim+0.1*others"


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights of the three quantities, 0 or above. All are in seconds, the others' delay in request-seconds."""

    engine: float = 1.0
    victim: float = 0.0
    others: float = 0.0

    def __post_init__(self) -> None:
        for name in QUANTITIES:
            weight = getattr(self, name)
            if not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
                raise WrongValue("objective", f"has the weight {name}={weight!r}, should be a number, 0 or above")
        if not (self.engine or self.victim or self.others):
            raise WrongValue("objective", "has no weight above 0, should have at least one")

    def of(self, cost: Cost) -> float:
        """Weighted sum of a prediction. Raises InputError if it needs a victim delay that was not predicted."""
        return self.weigh(cost.engine_s, cost.victim_delay_s, cost.stall_s)

    def weigh(self, engine_s: float, victim_delay_s: float | None, others_delay_s: float | None) -> float:
        """Weighted sum; a quantity of weight 0 may be None. Raises InputError for None with a positive weight."""
        total = self.engine * engine_s
        for weight, seconds, name in ((self.victim, victim_delay_s, "victim"), (self.others, others_delay_s, "others")):
            if weight:
                if seconds is None:
                    raise InputError(f"objective: the delay of the {name} is not known")
                total += weight * seconds
        return total

    @property
    def text(self) -> str:
        """The objective as text, in the form that :meth:`parse` reads."""
        weights = [(getattr(self, name), name) for name in QUANTITIES if getattr(self, name)]
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for weight, name in weights)

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read an objective from text. Raises WrongValue, which gives the right form, for an invalid one."""
        weights = dict.fromkeys(QUANTITIES, 0.0)
        for term in text.split("+"):
            weight, star, name = term.rpartition("*")
            name = name.strip()
            if name not in weights or weights[name]:
                message = f"{text!r}: {term!r} should be one of {', '.join(QUANTITIES)}, each once: {FORM}"
                raise WrongValue("objective", message)
            weights[name] = _weight(text, weight) if star else 1.0
        return cls(**weights)


def objective_of(objective: Objective | str) -> Objective:
    """The objective itself, or the one that a text gives. Raises WrongValue for anything else."""
    parsed_objective: Objective = parsed("objective", objective, Objective)
    refuse_other("objective", parsed_objective, Objective, f"an Objective or {FORM}")
    return parsed_objective


def _weight(text: str, weight_text: str) -> float:
    try:
        weight = float(weight_text)
    except ValueError:
        weight = -1.0
    if not (isfinite(weight) and weight > 0):
        raise WrongValue("objective", f"{text!r}: {weight_text!r} should be a weight above 0: {FORM}")
    return weight


ENGINE = Objective()
