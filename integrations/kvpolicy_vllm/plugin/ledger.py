"""What preemptions cost, as it happens: tokens computed again, who is back, what each step was made of.

Positions are exact: the scheduler knows which token positions of a request a step computes. A position below the
highest one the request had ever reached is computed *again*; it is charged to the preemption that lost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.events import Ending, Kind, Outcome


@dataclass(slots=True, eq=False)
class OpenPreemption:
    """A preempted request that is not yet back at the token it had reached."""

    preemption_id: str
    request_id: str
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

    def close(self, ended: Ending, now: float) -> Outcome:
        admitted = now if self.admitted_s is None else self.admitted_s
        wait = admitted - self.preempted_s
        return Outcome(
            preemption_id=self.preemption_id,
            ended=ended,
            closed_s=now,
            victim_delay_s=now - self.preempted_s - wait,
            wait_blocks_s=wait,
            local_hit_tokens=self.local_hit_tokens,
            loaded_tokens=self.loaded_tokens,
            recomputed_tokens=self.recomputed_tokens,
            first_step=self.first_step,
            last_step=max(self.first_step, self.last_step),
        )


@dataclass(frozen=True, slots=True)
class Repeated:
    """The part of a step that computes one preemption's lost tokens again.

    Taken from the step's totals it leaves what the step would have been made of. Where the victim's last chunk also
    computes its next token, that token stays behind as the decode it would have been: hence negative parts.
    """

    preemption_id: str
    request_id: str
    tokens: int
    kv_read_tokens: int
    chunk_context: int
    decodes: int

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """In the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self.tokens, self.decodes, self.kv_read_tokens, self.chunk_context


@dataclass(slots=True)
class Step:
    """One scheduled step until its output comes back."""

    number: int
    began_s: float
    scheduled_tokens: int = 0
    scheduled_requests: int = 0
    decode_requests: int = 0
    kv_read_tokens: int = 0
    chunk_context: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    lost: list[str] = field(default_factory=list)
    """Preemptions in it: whose blocks went."""
    saves: int = 0
    loads: int = 0
    repeated: list[Repeated] = field(default_factory=list)
    back: list[OpenPreemption] = field(default_factory=list)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """What its duration depends on, in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""
        return self.scheduled_tokens, self.decode_requests, self.kv_read_tokens, self.chunk_context

    @property
    def recomputed_tokens(self) -> int:
        return sum(part.tokens for part in self.repeated)


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

    def began_s(self, step: Step, now: float, busy: bool) -> float:
        """When ``step``, whose output is back, began. ``busy``: whether anybody is left to be served."""
        began = step.began_s
        if self._updated_s is not None and (self._was_busy or self._updated_s > began):
            since = min(self._updated_s + self._left_out_s, now)
            began = since if began - since <= now - began else began
        self._updated_s, self._was_busy, self._left_out_s = now, busy, 0.0
        return began


def pairs(start: int, end: int) -> int:
    """(query token, context token) pairs of a prefill chunk over positions ``start`` to ``end``, the diagonal in."""
    return (end * (end + 1) - start * (start + 1)) // 2


class Ledger:
    """Open preemptions of one engine core, and for each request the positions it has lost."""

    def __init__(self) -> None:
        self._open: dict[str, OpenPreemption] = {}
        # Per request, lowest target first: (computed tokens at a preemption, that preemption). More than one
        # where a request was preempted again before it was back.
        self._lost: dict[str, list[tuple[int, OpenPreemption]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def of(self, request_id: str) -> OpenPreemption | None:
        return self._open.get(request_id)

    def preempted(self, opened: OpenPreemption) -> Outcome | None:
        """Open one; returns the outcome of the request's earlier preemption if that was still open."""
        earlier = self._open.get(opened.request_id)
        self._open[opened.request_id] = opened
        kept = [(tokens, who) for tokens, who in self._lost.get(opened.request_id, ()) if tokens > opened.tokens]
        self._lost[opened.request_id] = [(opened.tokens, opened), *kept]
        return None if earlier is None else earlier.close("superseded", opened.preempted_s)

    def gone(self, request_id: str, now: float) -> Outcome | None:
        """The request finished or was aborted before it was back."""
        self._lost.pop(request_id, None)
        left = self._open.pop(request_id, None)
        return None if left is None else left.close("aborted", now)

    def count(self, step: Step, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """Enter a step's repeated tokens, and who will be back when its output is there.

        ``requests``: by id, with ``num_computed_tokens`` already advanced past this step.
        """
        for request_id in self._lost.keys() & scheduled.keys() if self._lost else ():
            end = requests[request_id].num_computed_tokens
            self._count_request(step, request_id, end - scheduled[request_id], end)

    def _count_request(self, step: Step, request_id: str, start: int, end: int) -> None:
        lost = self._lost[request_id]
        opened = self._open.get(request_id)
        if opened is not None and not opened.resumed:
            opened.resumed, opened.local_hit_tokens = True, max(0, start - opened.loaded_tokens)
        position = start
        for tokens, who in lost:
            stop = min(end, tokens)
            if position >= stop:
                continue
            who.recomputed_tokens += stop - position
            who.last_step = step.number
            step.repeated.append(_repeated(who, position, stop, start, end))
            position = stop
        if opened is not None and end >= opened.tokens:
            opened.last_step = step.number
            step.back.append(self._open.pop(request_id))
        self._lost[request_id] = [(tokens, who) for tokens, who in lost if tokens > end]
        if not self._lost[request_id]:
            del self._lost[request_id]


def _repeated(who: OpenPreemption, start: int, stop: int, chunk_start: int, chunk_end: int) -> Repeated:
    """Positions ``start`` to ``stop`` of a chunk, as what goes when they need not be computed."""
    tokens = stop - start
    if chunk_end - chunk_start == 1:  # the step counted this one token as a decode
        return Repeated(who.preemption_id, who.request_id, tokens, chunk_end, 0, 1)
    if stop == chunk_end - 1:  # one new token remains of the chunk: it would have been a decode
        return Repeated(who.preemption_id, who.request_id, tokens, -chunk_end, pairs(start, chunk_end), -1)
    return Repeated(who.preemption_id, who.request_id, tokens, 0, pairs(start, stop), 0)


def compose(step: Step, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> None:
    """Enter what a step is made of. One token of a request is a decode, more are a prefill chunk."""
    for request_id, tokens in scheduled.items():
        end = requests[request_id].num_computed_tokens
        if tokens == 1:
            step.decode_requests += 1
            step.kv_read_tokens += end
        else:
            step.chunk_context += pairs(end - tokens, end)
    step.scheduled_requests = len(scheduled)
    step.scheduled_tokens = sum(scheduled.values())
