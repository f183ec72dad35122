"""Bookkeeping of preempted requests: positions they lost, positions recomputed for them, and requests that are back.

Used by the plugin in a server and by the built-in simulator. Positions are exact, because the scheduler knows which
token positions of a request a step computes. A position below the highest one that the request had reached before is
*recomputed*. It is charged to the preemption that lost it, even if that preemption has been superseded since.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kvpolicy.arrays import causal_pairs
from kvpolicy.events import Ending, Kind, Outcome


@dataclass(slots=True, eq=False)
class OpenPreemption:
    """A preempted request that has not yet returned to the token it had reached."""

    preemption_id: str
    request: Hashable
    executed: Kind
    tokens: int
    """Computed tokens at the preemption. The outcome closes when the request has reached them again."""
    preempted_s: float
    first_step: int
    admitted_s: float | None = None
    resumed: bool = False
    """Whether a step has computed any token of the request since."""
    local_hit_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    last_step: int = 0
    mixed: bool = False
    """Whether a copy failed or was not used. The cost of the preemption is then the cost of neither option."""
    outstanding: bool = False
    """Whether positions that it lost may still be recomputed and charged to it."""

    def close(self, ended: Ending, now_s: float) -> Outcome:
        """The outcome, if the preemption ends at ``now_s``."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        wait_s = admitted_s - self.preempted_s
        return Outcome(
            preemption_id=self.preemption_id,
            ended=ended,
            closed_s=now_s,
            victim_delay_s=now_s - self.preempted_s - wait_s,
            wait_blocks_s=wait_s,
            local_hit_tokens=self.local_hit_tokens,
            loaded_tokens=self.loaded_tokens,
            recomputed_tokens=self.recomputed_tokens,
            first_step=self.first_step,
            last_step=max(self.first_step, self.last_step),
        )


Opened = TypeVar("Opened", bound=OpenPreemption)


class Repeated(NamedTuple, Generic[Opened]):
    """The part of a step that recomputes one preemption's lost tokens.

    Subtracting it from the step's totals gives the step's composition without the preemption. Where the victim's last
    chunk also computes its next token, that token remains as a decode, so parts can be negative.
    """

    opened: Opened
    tokens: int
    decodes: int
    kv_read_tokens: int
    chunk_context: int
    prefills: int
    """Prefill chunks that this part removes. Not recorded in a trace, but a step's duration may depend on it."""
    prefill_context: int
    """Tokens that this part removes from the step's ``prefill_context``."""

    @property
    def preemption_id(self) -> str:
        return self.opened.preemption_id

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """In the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self[1:5]


@dataclass(slots=True, eq=False)
class Step(Generic[Opened]):
    """One scheduled step until its output is available. Fields that were not set are 0."""

    number: int
    began_s: float = 0.0
    scheduled_tokens: int = 0
    scheduled_requests: int = 0
    decode_requests: int = 0
    """Requests that compute a single token."""
    kv_read_tokens: int = 0
    """Context tokens that those read, their new token included."""
    chunk_context: int = 0
    """(query token, context token) pairs of the other requests' chunks, including the diagonal."""
    prefill_requests: int = 0
    prefill_context: int = 0
    """Tokens that the other requests had computed before the step."""
    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    lost: list[str] = field(default_factory=list)
    """Ids of the preemptions that lost their blocks in this step."""
    saves: int = 0
    loads: int = 0
    repeated: list[Repeated[Opened]] = field(default_factory=list)
    back: list[Opened] = field(default_factory=list)
    """Preempted requests that are back at their token once the step's output is available."""

    def compose(self, tokens: Iterable[int], ends: Iterable[int]) -> None:
        """Set the composition of the step. One token of a request is a decode, more are a prefill chunk.

        ``tokens``, ``ends``: per scheduled request, its new tokens and its computed tokens after this step.
        """
        total = decodes = read = pairs = prefills = before = 0
        for new, end in zip(tokens, ends, strict=True):
            total += new
            if new == 1:
                decodes += 1
                read += end
            else:
                pairs += causal_pairs(end - new, end)
                prefills += 1
                before += end - new
        self.scheduled_tokens, self.scheduled_requests = total, decodes + prefills
        self.decode_requests, self.kv_read_tokens = decodes, read
        self.chunk_context, self.prefill_requests, self.prefill_context = pairs, prefills, before

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Counts that the duration depends on, in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self.scheduled_tokens, self.decode_requests, self.kv_read_tokens, self.chunk_context

    @property
    def recomputed_tokens(self) -> int:
        return sum(part.tokens for part in self.repeated)


class Ledger(Generic[Opened]):
    """Open preemptions of one engine core, and the positions that each request has lost."""

    def __init__(self) -> None:
        self._open: dict[Any, Opened] = {}
        self._lost: dict[Any, list[tuple[int, Opened]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def lost(self) -> Mapping[Any, list[tuple[int, Opened]]]:
        """By request, ascending: (computed tokens at a preemption, that preemption).

        A request has several entries if it was preempted again before it was back. Call :meth:`count` for each step
        that schedules one of these requests.
        """
        return self._lost

    def open_preemption(self, request: Hashable) -> Opened | None:
        return self._open.get(request)

    def add(self, opened: Opened) -> Outcome | None:
        """Add a preemption; returns the outcome of the request's earlier preemption if that was still open."""
        request, earlier = opened.request, self._open.get(opened.request)
        self._open[request] = opened
        self._lost[request] = [(opened.tokens, opened), *self._beyond(request, opened.tokens)]
        opened.outstanding = True
        return None if earlier is None else earlier.close("superseded", opened.preempted_s)

    def remove(self, request: Hashable, now_s: float) -> Outcome | None:
        """Remove a finished or aborted request; returns the outcome of its preemption if that was still open."""
        for _, preemption in self._lost.pop(request, ()):
            preemption.outstanding = False
        opened = self._open.pop(request, None)
        return None if opened is None else opened.close("aborted", now_s)

    def count(self, step: Step[Opened], request: Hashable, start: int, end: int) -> None:
        """Record which of the positions ``start`` to ``end`` are recomputed, and whether the request will be back.

        The step computes these positions of a request in :attr:`lost`.
        """
        opened = self._open.get(request)
        if opened is not None and not opened.resumed:
            opened.resumed, opened.local_hit_tokens = True, max(0, start - opened.loaded_tokens)
        position = start
        for tokens, preemption in self._lost[request]:
            stop = min(end, tokens)
            if position >= stop:
                continue
            preemption.recomputed_tokens += stop - position
            preemption.last_step = step.number
            step.repeated.append(_repeated(preemption, position, stop, start, end))
            position = stop
        if opened is not None and end >= opened.tokens:
            opened.last_step = step.number
            step.back.append(self._open.pop(request))
        remaining = self._beyond(request, end)
        if remaining:
            self._lost[request] = remaining
        else:
            del self._lost[request]

    def _beyond(self, request: Hashable, reached: int) -> list[tuple[int, Opened]]:
        """Lost positions above ``reached`` tokens. Preemptions at or below are marked as no longer outstanding."""
        remaining = []
        for tokens, preemption in self._lost.get(request, ()):
            if tokens > reached:
                remaining.append((tokens, preemption))
            else:
                preemption.outstanding = False
        return remaining


def _repeated(preemption: Opened, start: int, stop: int, chunk_start: int, chunk_end: int) -> Repeated[Opened]:
    """The part of a step that would be absent if positions ``start`` to ``stop`` of a chunk were not recomputed."""
    tokens = stop - start
    if chunk_end - chunk_start == 1:  # the step counted this token as a decode
        return Repeated(preemption, tokens, 1, chunk_end, 0, 0, 0)
    if stop == chunk_end - 1:  # the chunk's last token is new: without the others it would have been a decode
        return Repeated(preemption, tokens, -1, -chunk_end, causal_pairs(start, chunk_end), 1, start)
    if stop == chunk_end:  # the whole chunk goes; its earlier positions may be charged to other preemptions
        return Repeated(preemption, tokens, 0, 0, causal_pairs(start, stop), 1, start)
    return Repeated(preemption, tokens, 0, 0, causal_pairs(start, stop), 0, -tokens)


class StepClock:
    """Start times of steps. A step lasts from update to update, unless the engine was idle in between.

    A gap longer than the step itself is not counted as part of it: the engine was paused, or its weights were changed.
    """

    def __init__(self) -> None:
        self._updated_s: float | None = None
        self._was_busy = False
        self._left_out_s = 0.0

    def leave_out(self, seconds: float) -> None:
        """Exclude ``seconds`` of the time since the last update from the next step."""
        self._left_out_s += seconds

    def began_s(self, step: Step[Any], now_s: float, busy: bool) -> float:
        """Start time of ``step``, whose output has arrived. ``busy``: whether any request is left to be served."""
        began_s = step.began_s
        if self._updated_s is not None and (self._was_busy or self._updated_s > began_s):
            since_s = min(self._updated_s + self._left_out_s, now_s)
            began_s = since_s if began_s - since_s <= now_s - began_s else began_s
        self._updated_s, self._was_busy, self._left_out_s = now_s, busy, 0.0
        return began_s
