"""The overflow study: its figures, and how a trace names the measurements for each.

The ``state_id`` of a row in table ``windows`` is ``FIGURE/LEVEL``, with a whole number for LEVEL. For figures of whole
runs a window is a run without ``preemption_id``: ``repeat`` counts the runs of a level, ``duration_s`` is the makespan,
and the arm is the policy.
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
"""Unit of LEVEL, by figure."""


def state_id(figure: str, level: int) -> str:
    """The name of a figure's level in a trace. Raises InputError for an unknown figure."""
    if figure not in FIGURES:
        raise InputError(f"figure {figure}: should be one of {', '.join(FIGURES)}")
    return f"{figure}/{level}"


def figure_and_level(state: str) -> tuple[str, int] | None:
    """Figure and level in a ``state_id``; None for a state of a profile."""
    figure, _, level = state.partition("/")
    return (figure, int(level)) if figure in FIGURES and level.isdecimal() else None


def named(names: Sequence[str]) -> tuple[str, ...]:
    """The figures to measure, in the order of :data:`FIGURES`; ``all`` stands for all of them.

    Raises WrongValue for unknown names.
    """
    for name in names:
        if name not in (*FIGURES, "all"):
            raise WrongValue("figure", f"is {name}, should be {', '.join(FIGURES)} or all")
    return tuple(figure for figure in FIGURES if "all" in names or figure in names)
