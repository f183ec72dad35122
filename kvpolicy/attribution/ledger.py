"""The books of preempted requests: which positions they lost, what is computed again for them, and who is back.

The plugin keeps them in a server and the built-in simulator in a run. Positions are exact: the scheduler knows which
token positions of a request a step computes. A position below the highest one that the request had ever reached is
computed *again*; it is charged to the preemption that lost it, also where that one has closed since because the request
was preempted once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kvpolicy.arrays import causal_pairs
from kvpolicy.events import Ending, Kind, Outcome


@dataclass(slots=True, eq=False)
class OpenPreemption:
    """A preempted request that is not yet back at the token it had reached."""

    preemption_id: str
    request: Hashable
    executed: Kind
    tokens: int
    """Computed tokens at the preemption: the outcome closes when they are computed again."""
    preempted_s: float
    first_step: int
    admitted_s: float | None = None
    resumed: bool = False
    """Whether a step has computed anything of it since."""
    local_hit_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    last_step: int = 0
    mixed: bool = False
    """A copy failed or was not used: what the preemption costs is the cost of neither option."""
    outstanding: bool = False
    """Whether positions that it lost may still be computed again, and then are charged to it."""

    def close(self, ended: Ending, now_s: float) -> Outcome:
        """What became of it, if it ends now."""
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
    """The part of a step that computes one preemption's lost tokens again.

    Taken from the step's totals it leaves what the step would have been made of. Where the victim's last chunk also
    computes its next token, that token stays behind as the decode it would have been: hence negative parts.
    """

    opened: Opened
    tokens: int
    decodes: int
    kv_read_tokens: int
    chunk_context: int
    prefills: int
    """Chunks that go with it: not in a trace, but a step's duration may depend on it."""
    prefill_context: int
    """What goes of the context that the step's chunks begin at."""

    @property
    def preemption_id(self) -> str:
        return self.opened.preemption_id

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """In the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self[1:5]


@dataclass(slots=True, eq=False)
class Step(Generic[Opened]):
    """One scheduled step until its output is back. Fields are 0 where nobody entered them."""

    number: int
    began_s: float = 0.0
    scheduled_tokens: int = 0
    scheduled_requests: int = 0
    decode_requests: int = 0
    """Requests that compute a single token."""
    kv_read_tokens: int = 0
    """Context that those read, their new token included."""
    chunk_context: int = 0
    """(query token, context token) pairs of the other requests' chunks, the diagonal in."""
    prefill_requests: int = 0
    prefill_context: int = 0
    """Tokens that the other requests had computed before the step."""
    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    lost: list[str] = field(default_factory=list)
    """Preemptions in it: whose blocks went."""
    saves: int = 0
    loads: int = 0
    repeated: list[Repeated[Opened]] = field(default_factory=list)
    back: list[Opened] = field(default_factory=list)
    """Preempted requests that are where they were when the step's output is there."""

    def compose(self, tokens: Iterable[int], ends: Iterable[int]) -> None:
        """Enter what the step is made of. One token of a request is a decode, more are a prefill chunk.

        ``tokens``, ``ends``: by scheduled request, its new tokens and its computed tokens past this step.
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
        """What its duration depends on, in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self.scheduled_tokens, self.decode_requests, self.kv_read_tokens, self.chunk_context

    @property
    def recomputed_tokens(self) -> int:
        return sum(part.tokens for part in self.repeated)


class Ledger(Generic[Opened]):
    """Open preemptions of one engine core, and for each request the positions it has lost."""

    def __init__(self) -> None:
        self._open: dict[Any, Opened] = {}
        self._lost: dict[Any, list[tuple[int, Opened]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def lost(self) -> Mapping[Any, list[tuple[int, Opened]]]:
        """By request, lowest first: (computed tokens at a preemption, that preemption).

        More than one where a request was preempted again before it was back. What a step schedules of these requests
        is to be counted.
        """
        return self._lost

    def of(self, request: Hashable) -> Opened | None:
        return self._open.get(request)

    def preempted(self, opened: Opened) -> Outcome | None:
        """Open one; returns the outcome of the request's earlier preemption if that was still open."""
        request, earlier = opened.request, self._open.get(opened.request)
        self._open[request] = opened
        self._lost[request] = [(opened.tokens, opened), *self._beyond(request, opened.tokens)]
        opened.outstanding = True
        return None if earlier is None else earlier.close("superseded", opened.preempted_s)

    def gone(self, request: Hashable, now_s: float) -> Outcome | None:
        """The request finished or was aborted; returns the outcome of its preemption if that was still open."""
        for _, who in self._lost.pop(request, ()):
            who.outstanding = False
        left = self._open.pop(request, None)
        return None if left is None else left.close("aborted", now_s)

    def count(self, step: Step[Opened], request: Hashable, start: int, end: int) -> None:
        """Enter what of positions ``start`` to ``end``, which the step computes of a request in :attr:`lost`, is
        computed again, and whether the request will be back."""
        opened = self._open.get(request)
        if opened is not None and not opened.resumed:
            opened.resumed, opened.local_hit_tokens = True, max(0, start - opened.loaded_tokens)
        position = start
        for tokens, who in self._lost[request]:
            stop = min(end, tokens)
            if position >= stop:
                continue
            who.recomputed_tokens += stop - position
            who.last_step = step.number
            step.repeated.append(_repeated(who, position, stop, start, end))
            position = stop
        if opened is not None and end >= opened.tokens:
            opened.last_step = step.number
            step.back.append(self._open.pop(request))
        left = self._beyond(request, end)
        if left:
            self._lost[request] = left
        else:
            del self._lost[request]

    def _beyond(self, request: Hashable, reached: int) -> list[tuple[int, Opened]]:
        """What stays lost of a request that has ``reached`` so many tokens; the others are outstanding no more."""
        left = []
        for tokens, who in self._lost.get(request, ()):
            if tokens > reached:
                left.append((tokens, who))
            else:
                who.outstanding = False
        return left


def _repeated(who: Opened, start: int, stop: int, chunk_start: int, chunk_end: int) -> Repeated[Opened]:
    """Positions ``start`` to ``stop`` of a chunk, as what goes when they need not be computed."""
    tokens = stop - start
    if chunk_end - chunk_start == 1:  # the step counted this one token as a decode
        return Repeated(who, tokens, 1, chunk_end, 0, 0, 0)
    if stop == chunk_end - 1:  # one new token remains of the chunk: it would have been a decode
        return Repeated(who, tokens, -1, -chunk_end, causal_pairs(start, chunk_end), 1, start)
    if stop == chunk_end:  # nothing remains, whoever the earlier positions are charged to
        return Repeated(who, tokens, 0, 0, causal_pairs(start, stop), 1, start)
    return Repeated(who, tokens, 0, 0, causal_pairs(start, stop), 0, -tokens)


class StepClock:
    """When steps began and ended: from update to update, where the engine was not idle between.

    A gap longer than the step itself is no part of it: the engine was paused, or its weights were changed.
    """

    def __init__(self) -> None:
        self._updated_s: float | None = None
        self._was_busy = False
        self._left_out_s = 0.0

    def leave_out(self, seconds: float) -> None:
        """Of the time since the last update, that much is no part of the next step."""
        self._left_out_s += seconds

    def began_s(self, step: Step[Any], now_s: float, busy: bool) -> float:
        """When ``step``, whose output is back, began. ``busy``: whether anybody is left to be served."""
        began_s = step.began_s
        if self._updated_s is not None and (self._was_busy or self._updated_s > began_s):
            since_s = min(self._updated_s + self._left_out_s, now_s)
            began_s = since_s if began_s - since_s <= now_s - began_s else began_s
        self._updated_s, self._was_busy, self._left_out_s = now_s, busy, 0.0
        return began_s
