"""Cost of preemptions measured while the engine runs, by the definition of :mod:`kvpolicy.attribution.offline`.

The cost of a preemption is, over the steps it is involved in, the time beyond the step-time model d0 (what the step
would have taken undisturbed, without the victims' repeated tokens). If several preemptions share a step, its extra time
is split by what each did in it.

Two things differ from the offline attribution. d0 is that of the cost model's traces, scaled by the pace of the last 16
undisturbed steps (offline: 8 before and 8 after). And a step is settled as soon as no copy in flight may have
overlapped it, because the times of a copy are known only at its end.

An undisturbed step costs a few additions. Memory is bounded by the steps that still wait for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from kvpolicy.attribution.step_time import AFTERMATH_STEPS, NEIGHBOURS, StepTimeModel, aftermath, step_seconds
from kvpolicy.events import OTHER_COPIES, Ending, Kind

Parts = tuple[float, float, float, float]
"""Composition of a step or of a part of it, in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""

IDLE_S = 0.02
"""Maximum length of one merged step, seconds: successive steps that compute nothing are merged up to it."""

MAX_WAITING = 512
"""Steps that may wait for a copy to end. Beyond it the copy is given up and its preemption's cost stays unknown."""


@dataclass(frozen=True, slots=True)
class LiveCost:
    """The complete cost of one preemption."""

    preemption_id: str
    executed: Kind | None
    """None if this is the cost of neither option alone."""
    ended: Ending
    engine_s: float
    others_delay_s: float


@dataclass(slots=True)
class _Account:
    """Cost of a preemption so far."""

    engine_s: float = 0.0
    others_delay_s: float = 0.0
    tail_s: float = 0.0
    """The part of ``engine_s`` from aftermath steps since ``last``. If none of its own steps follow, the victim is
    among the requests of those steps."""
    last: int = 0
    """The last step it was directly involved in."""


@dataclass(slots=True)
class _Step:
    """A step that is not settled yet."""

    number: int
    start_s: float
    end_s: float
    parts: Parts
    requests: int
    own: dict[str, Parts]
    """Parts of repeated tokens by preemption; all 0 for a preemption that only lost its blocks in this step."""


@dataclass(frozen=True, slots=True)
class _Copy:
    preemption_id: str
    start_s: float
    end_s: float


NOTHING: Parts = (0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class LiveCosts:
    """Live costs of one engine core.

    Call :meth:`step` for every finished step in order, and the other methods before the step they belong to.
    """

    model: StepTimeModel
    """Step-time model (d0) of the cost model's traces."""
    given_up: int = 0
    """Preemptions whose cost stays unknown because a copy's end was never reported."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS), repr=False)
    _undisturbed: bool = True
    _step_count: int = 0
    _settled: int = -1
    """Number of the last settled step."""
    _aftermath: float = 0.0
    _second_aftermath: float = 0.0
    _unsettled: deque[_Step] = field(default_factory=deque, repr=False)
    _in_flight: dict[int, tuple[str, int]] = field(default_factory=dict, repr=False)
    """Preemption of each copy in flight, and the first step that it may overlap, by the copy's id."""
    _finished_copies: list[_Copy] = field(default_factory=list, repr=False)
    """Finished copies that may overlap unsettled steps."""
    _copied_s: float = -inf
    """Latest end of a preemption's copy."""
    _accounts: dict[str, _Account] = field(default_factory=dict, repr=False)
    _closed: dict[str, tuple[Kind | None, Ending, int]] = field(default_factory=dict, repr=False)
    """What was executed, how it ended, and the step it ended in, for closed preemptions not yet reported."""
    _early: dict[str, tuple[Kind | None, Ending]] = field(default_factory=dict, repr=False)
    """Preemptions that closed before the step in which they lost their blocks was reported."""
    _recently_involved: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=AFTERMATH_STEPS), repr=False)
    """Preemptions directly involved in the last settled steps."""

    # ---- events ----

    def copy_begins(self, copy_id: int, preemption_id: str) -> None:
        """A copy is handed to the workers. Steps from now on wait until its times are reported."""
        self._in_flight[copy_id] = preemption_id, self._step_count
        self._undisturbed = False

    def copy_ends(self, copy_id: int, preemption_id: str, start_s: float, end_s: float) -> None:
        """A copy ran from ``start_s`` to ``end_s``, on the same clock as steps."""
        self._in_flight.pop(copy_id, None)
        self._finished_copies.append(_Copy(preemption_id, start_s, end_s))
        if preemption_id not in OTHER_COPIES:
            self._copied_s = max(self._copied_s, end_s)
        del self._finished_copies[:-MAX_WAITING]  # stays bounded even if a worker's clock is wrong
        self._undisturbed = False

    def closed(self, preemption_id: str, executed: Kind | None, ended: Ending) -> None:
        """The outcome closed in the next reported step, which may be the one in which it lost its blocks."""
        if preemption_id in self._accounts:
            self._closed[preemption_id] = executed, ended, self._step_count
            self._undisturbed = False
            return
        self._early[preemption_id] = executed, ended
        if len(self._early) > MAX_WAITING:  # their steps were never reported
            del self._early[next(iter(self._early))]

    def step(
        self,
        parts: Parts,
        requests: int,
        start_s: float,
        end_s: float,
        preempted: Iterable[str] = (),
        repeated: Sequence[tuple[str, Parts]] = (),
    ) -> tuple[LiveCost, ...]:
        """Report a finished step; returns the preemptions whose cost is now complete.

        ``parts``, ``requests``: everything scheduled in it. ``preempted``: preemptions that lost their blocks in it.
        ``repeated``: by preemption, the part of it that recomputes lost tokens.
        """
        if requests == 0 and not preempted and not repeated and self._extend_idle_step(parts, start_s, end_s):
            return ()
        number = self._step_count
        self._step_count += 1
        if self._undisturbed and not preempted and not repeated:
            self._settled = number
            self._update_pace(parts, end_s - start_s)
            return ()
        self._unsettled.append(
            _Step(number, start_s, end_s, parts, requests, self._own_parts(number, preempted, repeated))
        )
        while self._unsettled and not self._may_be_overlapped(self._unsettled[0].number):
            self._settle(self._unsettled.popleft())
        if len(self._unsettled) > MAX_WAITING:
            self._give_up(self._unsettled[0].number)
        complete = tuple(self._complete_costs())
        self._undisturbed = not (
            self._unsettled or self._in_flight or self._finished_copies or self._closed or any(self._recently_involved)
        )
        return complete

    def copied_since(self, start_s: float) -> bool:
        """Whether a preemption's copy was under way at ``start_s`` or later. One whose end is not reported yet is."""
        return self._copied_s >= start_s or any(name not in OTHER_COPIES for name, _ in self._in_flight.values())

    @property
    def pace(self) -> float:
        """How many times longer than predicted the last undisturbed steps took; 1 before there were any."""
        return median(self._paces) if self._paces else 1.0

    # ---- settling ----

    def _own_parts(
        self, number: int, preempted: Iterable[str], repeated: Sequence[tuple[str, Parts]]
    ) -> dict[str, Parts]:
        own: dict[str, Parts] = {}
        for name in preempted:
            self._accounts[name] = _Account(last=number)
            own[name] = NOTHING
            if name in self._early:
                self._closed[name] = *self._early.pop(name), number
        for name, parts in repeated:
            own[name] = plus(own.get(name, NOTHING), parts)
        return own

    def _extend_idle_step(self, parts: Parts, start_s: float, end_s: float) -> bool:
        """Merge a step that computes nothing into the previous one, if both wait for a copy; returns whether it did.

        An idle engine produces a thousand such steps a second. As many stay separate as an aftermath lasts, and none
        grows beyond :data:`IDLE_S`, so that hardly any time without a copy is attributed to one.
        """
        unsettled = self._unsettled
        if parts != NOTHING or len(unsettled) < AFTERMATH_STEPS or self._step_count in self._first_steps():
            return False
        last = unsettled[-1]
        if not self._may_be_overlapped(last.number) or last.end_s != start_s or end_s - last.start_s > IDLE_S:
            return False
        if any(
            unsettled[-steps_back].parts != NOTHING or unsettled[-steps_back].own
            for steps_back in range(1, AFTERMATH_STEPS + 1)
        ):
            return False
        last.end_s = end_s
        return True

    def _may_be_overlapped(self, number: int) -> bool:
        return bool(self._in_flight) and min(self._first_steps()) <= number

    def _first_steps(self) -> list[int]:
        return [first for _, first in self._in_flight.values()]

    def _give_up(self, number: int) -> None:
        """Treat copies in flight that may overlap step ``number`` as lost, and their preemptions' costs as unknown."""
        for copy_id, (name, first) in list(self._in_flight.items()):
            if first <= number:
                del self._in_flight[copy_id]
                self._discard(name)

    def _discard(self, name: str) -> None:
        self.given_up += self._accounts.pop(name, None) is not None
        self._closed.pop(name, None)

    def _update_pace(self, parts: Parts, duration_s: float) -> None:
        """Update the pace with an undisturbed step."""
        model = self.model
        expected = step_seconds(model.fixed_s, model.per_part_s, parts, self._aftermath, self._second_aftermath)
        if expected > 0.0:
            self._paces.append(duration_s / expected)
        self._second_aftermath, self._aftermath = self._aftermath, aftermath(parts[0], parts[1])

    def _settle(self, step: _Step) -> None:
        copy_s = self._copy_seconds(step)
        direct = frozenset(step.own) | frozenset(copy_s)
        sharers = direct.union(*self._recently_involved) if step.parts[0] > 0 else direct
        self._settled = step.number
        self._recently_involved.append(direct)
        if not sharers:
            self._update_pace(step.parts, step.end_s - step.start_s)
            return
        extra_s, prices = self._extra_s(step)
        weights = {name: copy_s.get(name, 0.0) + prices.get(name, 0.0) for name in sharers}
        total = sum(weights.values())
        for name, weight in weights.items():
            share = weight / total if total > 0 else 1.0 / len(weights)
            account = self._accounts.get(name)
            if account is not None:
                _charge(account, step, name, share * extra_s, name in direct)

    def _copy_seconds(self, step: _Step) -> dict[str, float]:
        """Seconds that each preemption's copies overlapped the step."""
        if not self._finished_copies:
            return {}
        copy_s: dict[str, float] = {}
        for copy in self._finished_copies:
            if copy.start_s < step.end_s and step.start_s <= copy.end_s:
                seconds = min(copy.end_s, step.end_s) - max(copy.start_s, step.start_s)
                copy_s[copy.preemption_id] = copy_s.get(copy.preemption_id, 0.0) + max(0.0, seconds)
        self._finished_copies = [copy for copy in self._finished_copies if copy.end_s >= step.end_s]
        return copy_s

    def _extra_s(self, step: _Step) -> tuple[float, dict[str, float]]:
        """Seconds beyond d0 without all victims' repeated tokens, and the d0 price of each victim's tokens."""
        model, remaining = self.model, step.parts
        prices: dict[str, float] = {}
        for name, repeated in step.own.items():
            remaining = (
                remaining[0] - repeated[0],
                remaining[1] - repeated[1],
                remaining[2] - repeated[2],
                remaining[3] - repeated[3],
            )
            prices[name] = max(0.0, sum(part * s for part, s in zip(repeated, model.per_part_s, strict=False)))
        expected = step_seconds(model.fixed_s, model.per_part_s, remaining, self._aftermath, self._second_aftermath)
        self._second_aftermath, self._aftermath = self._aftermath, aftermath(remaining[0], remaining[1])
        return step.end_s - step.start_s - self.pace * expected, prices

    def _complete_costs(self) -> Iterable[LiveCost]:
        in_flight = {name for name, _ in self._in_flight.values()}
        for name, (executed, ended, number) in list(self._closed.items()):
            account = self._accounts[name]
            if name not in in_flight and self._settled >= max(number, account.last + AFTERMATH_STEPS):
                del self._accounts[name], self._closed[name]
                delay_s = account.others_delay_s - account.tail_s
                yield LiveCost(name, executed, ended, account.engine_s, delay_s)


def _charge(account: _Account, step: _Step, name: str, seconds: float, is_own: bool) -> None:
    account.engine_s += seconds
    if not is_own:
        account.others_delay_s += seconds * step.requests
        account.tail_s += seconds
        return
    takes_part = step.own.get(name, NOTHING)[0] > 0
    account.others_delay_s += seconds * max(0, step.requests - takes_part)
    account.tail_s, account.last = 0.0, step.number


def plus(first: Parts, second: Parts) -> Parts:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]
