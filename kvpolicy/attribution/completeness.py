"""Finds the preemptions whose steps are all in a trace. Partial costs are discarded.

An engine core numbers every step that it schedules. It does not record the steps that did nothing while no request was
left. A gap in the step numbers is therefore either idle time or lost rows.

A gap is certainly a loss

- between a preemption's first and last step, because the victim was in the engine all that time,
- where a request that had arrived before the gap produced a token after it, or any request produced one inside it,
  because a request was being served.

A gap is certainly no loss where the next step starts when the previous one ended, because every step takes time.

Where a server records a share of its steps, a row says how many before it were left out: these are no gap. A
preemption with a copy that overlapped steps left out is incomplete all the same.

Gaps right after a preemption's last step remain doubtful. They count as idle if the victim has a request record, which
shows that it finished, and as a loss otherwise. After a core's last row only certain losses count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.attribution.step_time_fit import AFTERMATH_STEPS

MIN_STEP_S = 1e-6
"""Shorter than any step, seconds. Clock readings closer together count as the same moment."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The recorded steps of one engine core, ascending, and the times of its requests."""

    number: Ints
    start_s: Floats
    end_s: Floats
    arrival_s: Floats
    """One per recorded request."""
    first_token_s: Floats
    """NaN for a request without tokens, as in ``last_token_s``."""
    last_token_s: Floats
    left_out: Ints | None = None
    """Steps right before each row that were not recorded on purpose; None: of none."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows and numbers of each preemption's steps; arrays of equal length."""

    first_row: Ints
    last_row: Ints
    """Row of its last step; -1 if that is not recorded."""
    first: Ints
    last: Ints
    involved_row: Ints
    """The last row it is involved in. Its copies may end after its last step."""
    recorded: Flags
    """Whether its request has a row in ``requests``."""


def unbroken(timeline: Timeline, span: Span) -> Flags:
    """Whether each preemption's steps are all recorded, including the aftermath steps that find the caches cold."""
    if not len(timeline.number):
        return np.zeros(len(span.first), dtype=np.bool_)
    before = np.cumsum(_left_out(timeline))
    rows = span.last_row - span.first_row + before[span.last_row] - before[span.first_row]
    inside = (span.last_row >= 0) & (rows == span.last - span.first)
    lost, doubtful = _holes(timeline)
    end_row = np.minimum(np.maximum(span.last_row, span.involved_row) + AFTERMATH_STEPS, len(timeline.number))
    none_lost = _sum(lost, span.last_row, end_row) == 0
    none_doubtful = span.recorded | (_sum(doubtful, span.last_row, end_row) == 0)
    return np.asarray(inside & none_lost & none_doubtful, dtype=np.bool_)


def _holes(timeline: Timeline) -> tuple[Flags, Flags]:
    """Flags for the gap after each row: (certainly a loss, possibly a loss); both false where there is no gap."""
    next_s = np.append(timeline.start_s[1:], np.inf)
    lacking = np.diff(timeline.number) != 1 + _left_out(timeline)[1:]
    hole = np.append(lacking, True) & (next_s - timeline.end_s > MIN_STEP_S)
    lost = hole & (_served_after(timeline) | _tokens_between(timeline, next_s))
    doubtful = hole & ~lost
    doubtful[-1] = False
    return lost, doubtful


def _left_out(timeline: Timeline) -> Ints:
    return np.zeros(len(timeline.number), np.int64) if timeline.left_out is None else timeline.left_out


def _served_after(timeline: Timeline) -> Flags:
    """Whether a request that had arrived by the end of each row produced a token after it."""
    order = np.argsort(timeline.arrival_s, kind="stable")
    latest_s = np.maximum.accumulate(np.append(-np.inf, np.nan_to_num(timeline.last_token_s[order], nan=-np.inf)))
    arrived = np.searchsorted(timeline.arrival_s[order], timeline.end_s, side="right")
    return np.asarray(latest_s[arrived] > timeline.end_s + MIN_STEP_S)


def _tokens_between(timeline: Timeline, next_s: Floats) -> Flags:
    """Whether a request's first or last token came after each row and before the end of the gap."""
    tokens_s = np.concatenate([timeline.first_token_s, timeline.last_token_s])
    tokens_s = np.sort(tokens_s[np.isfinite(tokens_s)])
    before, after = timeline.end_s + MIN_STEP_S, next_s + MIN_STEP_S
    return np.asarray(np.searchsorted(tokens_s, after) > np.searchsorted(tokens_s, before, side="right"))


def _sum(flags: Flags, first: Ints, end: Ints) -> Ints:
    """Number of flags set in each range ``[first, end)``."""
    cumulative = np.append(0, np.cumsum(flags))
    return np.asarray(cumulative[end] - cumulative[np.maximum(0, first)], dtype=np.int64)
