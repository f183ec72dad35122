"""Which preemptions have all their steps in a trace: a part of a cost is no cost.

An engine core numbers every step that it schedules, and leaves out of its trace those that did nothing while no
request was left. So a hole in the numbers is a loss for certain

- from a preemption's first step to its last: the victim was there all the time,
- where a request that was there before the hole brought a token after it, or any request brought one inside it:
  somebody was being served,

and for certain none where the step after it starts when the one before it ended: recorded or not, a step takes time.
What is left to doubt are holes right after a preemption's last step. They count as idle where the victim's own record
shows that it was through, as a loss where it has none. After a core's last row only what is certain counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.attribution.step_time_fit import AFTERMATH_STEPS

MIN_STEP_S = 1e-6
"""No step takes less: clock readings closer than that are the same moment."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The recorded steps of one engine core, ascending, and when its requests were served."""

    number: Ints
    start_s: Floats
    end_s: Floats
    arrival_s: Floats
    """One per recorded request."""
    first_token_s: Floats
    """NaN where there was none, as in ``last_token_s``."""
    last_token_s: Floats


@dataclass(frozen=True, slots=True)
class Span:
    """Of each preemption, the rows and numbers of its steps; arrays of one length."""

    first_row: Ints
    last_row: Ints
    """Of its last step; -1 where that is not there."""
    first: Ints
    last: Ints
    involved_row: Ints
    """The last row that it had to do with: its copies may take longer than it did."""
    recorded: Flags
    """Whether its request has a record."""


def unbroken(line: Timeline, span: Span) -> Flags:
    """Whether each preemption's steps are there, those right after them that find the caches cold included."""
    if not len(line.number):
        return np.zeros(len(span.first), dtype=np.bool_)
    inside = (span.last_row >= 0) & (span.last_row - span.first_row == span.last - span.first)
    lost, doubtful = _holes(line)
    until = np.minimum(np.maximum(span.last_row, span.involved_row) + AFTERMATH_STEPS, len(line.number))
    none_lost = _sum(lost, span.last_row, until) == 0
    none_doubtful = span.recorded | (_sum(doubtful, span.last_row, until) == 0)
    return np.asarray(inside & none_lost & none_doubtful, dtype=np.bool_)


def _holes(line: Timeline) -> tuple[Flags, Flags]:
    """For the hole after each row, if there is one: a loss for certain, and maybe a loss."""
    next_s = np.append(line.start_s[1:], np.inf)
    hole = np.append(np.diff(line.number) != 1, True) & (next_s - line.end_s > MIN_STEP_S)
    lost = hole & (_served_after(line) | _tokens_between(line, next_s))
    doubtful = hole & ~lost
    doubtful[-1] = False
    return lost, doubtful


def _served_after(line: Timeline) -> Flags:
    """Whether a request that had arrived by the end of each row brought a token after it."""
    order = np.argsort(line.arrival_s, kind="stable")
    latest_s = np.maximum.accumulate(np.append(-np.inf, np.nan_to_num(line.last_token_s[order], nan=-np.inf)))
    arrived = np.searchsorted(line.arrival_s[order], line.end_s, side="right")
    return np.asarray(latest_s[arrived] > line.end_s + MIN_STEP_S)


def _tokens_between(line: Timeline, next_s: Floats) -> Flags:
    """Whether a request's first or last token came after each row, and not of the next one."""
    tokens_s = np.concatenate([line.first_token_s, line.last_token_s])
    tokens_s = np.sort(tokens_s[np.isfinite(tokens_s)])
    before, after = line.end_s + MIN_STEP_S, next_s + MIN_STEP_S
    return np.asarray(np.searchsorted(tokens_s, after) > np.searchsorted(tokens_s, before, side="right"))


def _sum(flags: Flags, first: Ints, end: Ints) -> Ints:
    """Flags set in ``[first, end)`` of each."""
    counted = np.append(0, np.cumsum(flags))
    return np.asarray(counted[end] - counted[np.maximum(0, first)], dtype=np.int64)
