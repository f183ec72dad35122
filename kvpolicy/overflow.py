"""The overflow study: its figures, and how what was measured for one is named in a trace.

Windows of table ``windows`` belong to a figure by their ``state_id``, ``FIGURE/LEVEL`` with a whole number for LEVEL.
Where requests are served to their end a window is a whole run, without a ``preemption_id``: its ``repeat`` counts runs
of a level, its ``duration_s`` is the makespan, its arm the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue

BLOCK_SIZE = "block-size"
EVICTED_TOKENS = "evicted-tokens"
SEQUENCE_LENGTH = "sequence-length"
MEMORY = "memory"
TIMELINE = "timeline"
FIGURES: tuple[str, ...] = (BLOCK_SIZE, EVICTED_TOKENS, SEQUENCE_LENGTH, MEMORY, TIMELINE)
SERVED = (MEMORY, TIMELINE)
"""Figures of whole runs; the others are of single overflows."""

LEVELS = {
    BLOCK_SIZE: "tokens per block",
    EVICTED_TOKENS: "requests evicted in one overflow",
    SEQUENCE_LENGTH: "computed tokens of the victim",
    MEMORY: "percent of the blocks that hold all requests at full length",
    TIMELINE: "percent of the blocks that hold all requests at full length",
}
"""What LEVEL counts."""


def state_id(figure: str, level: int) -> str:
    """The name of a figure's level in a trace. Raises ValueError for what is no figure."""
    if figure not in FIGURES:
        raise InputError(f"figure {figure}: should be one of {', '.join(FIGURES)}")
    return f"{figure}/{level}"


def figure_and_level(state: str) -> tuple[str, int] | None:
    """What a ``state_id`` says; None for one of a profile."""
    figure, _, level = state.partition("/")
    return (figure, int(level)) if figure in FIGURES and level.isdecimal() else None


def named(wanted: Sequence[str]) -> tuple[str, ...]:
    """The figures to measure, in their order here; ``all`` is every one that can be. Raises ValueError for others."""
    for one in wanted:
        if one not in (*FIGURES, "all"):
            raise WrongValue("figure", f"is {one}, should be {', '.join(FIGURES)} or all")
    return tuple(figure for figure in FIGURES if "all" in wanted or figure in wanted)
