"""Time of a step that is in no table of operator times."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.fields import AMOUNT, WrongValue, option, validate

NOTHING = "assumed to be nothing"


@dataclass(frozen=True, slots=True)
class EngineTime:
    """The engine's own time per step, and the cost of uneven contexts, because a kernel ends with its longest one."""

    per_step_s: float = option("The engine's own time per step, s: no table holds it.", 0.0, AMOUNT, "--step-s")
    per_chunk_step_s: float = option(
        "More of it per step that computes part of a prompt, s.", 0.0, AMOUNT, "--chunk-step-s"
    )
    uneven: float = option("Share by which attention of uneven contexts takes longer than of even ones.", 0.0, AMOUNT)
    source: str = option("Where those three were measured.", NOTHING, flag="--engine-source")

    def __post_init__(self) -> None:
        validate(self)
        if self.source == NOTHING and (self.per_step_s or self.per_chunk_step_s or self.uneven):
            raise WrongValue("source", "is missing: where the engine's own time was measured")
