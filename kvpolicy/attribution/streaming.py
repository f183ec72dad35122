"""What preemptions cost, measured while the engine runs: :mod:`kvpolicy.attribution.offline` with the past alone.

The definition is the same: of every step a preemption is involved in, the time beyond d0 of what the step would have
been made of without the victims' repeated tokens, split by what each of them did in it. Two things differ. d0 is that
of the cost model's traces, scaled by the pace of the last 16 undisturbed steps (offline: 8 before and 8 after). And a
step is settled as soon as no copy is in flight that may have overlapped it, since when a copy ran is known at its end.

An undisturbed step costs a few additions; nothing here allocates more than the steps that still wait for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvpolicy.attribution.step_time import AFTERMATH_STEPS, NEIGHBOURS, StepTimeModel, aftermath, step_seconds
from kvpolicy.events import Ending, Kind

Parts = tuple[float, float, float, float]
"""What a step, or somebody's part of it, is made of, in the order of :data:`kvpolicy.attribution.step_time.PARTS`."""

IDLE_S = 0.02
"""So long steps that compute nothing are taken together, seconds."""

MAX_WAITING = 512
"""So many steps wait for a copy to end; then it is given up, and what its preemption cost stays unknown."""


@dataclass(frozen=True, slots=True)
class LiveCost:
    """What one preemption cost, whole."""

    preemption_id: str
    executed: Kind | None
    """None where it is the cost of neither option alone."""
    ended: Ending
    engine_s: float
    others_delay_s: float


@dataclass(slots=True)
class _Account:
    """What a preemption cost so far."""

    engine_s: float = 0.0
    others_delay_s: float = 0.0
    tail_s: float = 0.0
    """Of ``engine_s``, what steps after its last own one took: should no other come, the victim is one of them."""
    last: int = 0
    """The last step it had to do with itself."""


@dataclass(slots=True)
class _Step:
    """A step that is not settled yet."""

    number: int
    start_s: float
    end_s: float
    parts: Parts
    requests: int
    own: dict[str, Parts]
    """By preemption, its repeated tokens; all 0 for one that only lost its blocks in it."""


@dataclass(frozen=True, slots=True)
class _Copy:
    preemption_id: str
    start_s: float
    end_s: float


NOTHING: Parts = (0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class LiveCosts:
    """One per engine core. Call :meth:`step` for every finished step in order, the others before the step's own."""

    model: StepTimeModel
    """d0, of the cost model's traces."""
    given_up: int = 0
    """Preemptions whose cost stays unknown because a copy's end was never told."""
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS), repr=False)
    _calm: bool = True
    _seen: int = 0
    _settled: int = -1
    """Number of the last step that is settled."""
    _before: float = 0.0
    _second_before: float = 0.0
    _waiting: deque[_Step] = field(default_factory=deque, repr=False)
    _flying: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)
    """Copies in flight, and the first step each may overlap."""
    _landed: list[_Copy] = field(default_factory=list, repr=False)
    """Copies that may overlap steps to come."""
    _accounts: dict[str, _Account] = field(default_factory=dict, repr=False)
    _closed: dict[str, tuple[Kind | None, Ending, int]] = field(default_factory=dict, repr=False)
    """What was executed, how it ended, and the step it ended in, of those not yet told."""
    _early: dict[str, tuple[Kind | None, Ending]] = field(default_factory=dict, repr=False)
    """Those that closed before the step in which they lost their blocks was told."""
    _recent: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=AFTERMATH_STEPS), repr=False)
    """Who had to do with the last settled steps."""

    # ---- what happens ----

    def copy_begins(self, preemption_id: str, direction: str) -> None:
        """A copy is handed to the workers: steps from now on wait until its times are told."""
        self._flying[preemption_id, direction] = self._seen
        self._calm = False

    def copy_ends(self, preemption_id: str, direction: str, start_s: float, end_s: float) -> None:
        """A copy ran from ``start_s`` to ``end_s``, of the same clock as steps."""
        self._flying.pop((preemption_id, direction), None)
        self._landed.append(_Copy(preemption_id, start_s, end_s))
        del self._landed[:-MAX_WAITING]  # no clock of a worker's can make this grow
        self._calm = False

    def copy_lost(self, preemption_id: str, direction: str) -> None:
        """Nobody will tell when a copy ran: what its preemption cost stays unknown."""
        if self._flying.pop((preemption_id, direction), None) is not None:
            self._forget(preemption_id)

    def closed(self, preemption_id: str, executed: Kind | None, ended: Ending) -> None:
        """Its outcome closed with the step that is told next, which may be the one it lost its blocks in."""
        if preemption_id in self._accounts:
            self._closed[preemption_id] = executed, ended, self._seen
            self._calm = False
            return
        self._early[preemption_id] = executed, ended
        if len(self._early) > MAX_WAITING:  # of steps that were never told
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
        """A step is finished; returns the preemptions whose cost is now known in full.

        ``parts`` and ``requests``: all that was scheduled in it. ``preempted``: who lost blocks in it. ``repeated``:
        by preemption, the part of it that computes lost tokens again.
        """
        if requests == 0 and not preempted and not repeated and self._idles_on(parts, start_s, end_s):
            return ()
        number = self._seen
        self._seen += 1
        if self._calm and not preempted and not repeated:
            self._settled = number
            self._keep_pace(parts, end_s - start_s)
            return ()
        self._waiting.append(_Step(number, start_s, end_s, parts, requests, self._own(number, preempted, repeated)))
        while self._waiting and not self._may_be_overlapped(self._waiting[0].number):
            self._settle(self._waiting.popleft())
        if len(self._waiting) > MAX_WAITING:
            self._give_up(self._waiting[0].number)
        done = tuple(self._finished())
        self._calm = not (self._waiting or self._flying or self._landed or self._closed or any(self._recent))
        return done

    # ---- settling ----

    def _own(self, number: int, preempted: Iterable[str], repeated: Sequence[tuple[str, Parts]]) -> dict[str, Parts]:
        own: dict[str, Parts] = {}
        for name in preempted:
            self._accounts[name] = _Account(last=number)
            own[name] = NOTHING
            if name in self._early:
                self._closed[name] = *self._early.pop(name), number
        for name, parts in repeated:
            own[name] = plus(own.get(name, NOTHING), parts)
        return own

    def _idles_on(self, parts: Parts, start_s: float, end_s: float) -> bool:
        """Whether a step that computes nothing only lengthens one that waits for a copy: an idle engine makes a
        thousand of them a second. As many stay apart as an aftermath lasts, and none grows beyond :data:`IDLE_S`, so
        that hardly any time is taken for a copy's in which there was none."""
        waiting = self._waiting
        if parts != NOTHING or len(waiting) < AFTERMATH_STEPS or self._seen in self._flying.values():
            return False
        last = waiting[-1]
        if not self._may_be_overlapped(last.number) or last.end_s != start_s or end_s - last.start_s > IDLE_S:
            return False
        if any(waiting[-n].parts != NOTHING or waiting[-n].own for n in range(1, AFTERMATH_STEPS + 1)):
            return False
        last.end_s = end_s
        return True

    def _may_be_overlapped(self, number: int) -> bool:
        return bool(self._flying) and min(self._flying.values()) <= number

    def _give_up(self, number: int) -> None:
        """Copies since step ``number`` are taken for lost, and their preemptions' costs for unknown."""
        for name, direction in [key for key, first in self._flying.items() if first <= number]:
            del self._flying[name, direction]
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.given_up += self._accounts.pop(name, None) is not None
        self._closed.pop(name, None)

    def _keep_pace(self, parts: Parts, duration_s: float) -> None:
        """Of a step that nothing of a preemption touched."""
        model = self.model
        expected = step_seconds(model.fixed_s, model.per_part_s, parts, self._before, self._second_before)
        if expected > 0.0:
            self._paces.append(duration_s / expected)
        self._second_before, self._before = self._before, aftermath(parts[0], parts[1])

    def _settle(self, step: _Step) -> None:
        copied_s = self._copied(step)
        direct = frozenset(step.own) | frozenset(copied_s)
        sharers = direct.union(*self._recent) if step.parts[0] > 0 else direct
        self._settled = step.number
        self._recent.append(direct)
        if not sharers:
            self._keep_pace(step.parts, step.end_s - step.start_s)
            return
        extra_s, prices = self._extra(step)
        weights = {name: copied_s.get(name, 0.0) + prices.get(name, 0.0) for name in sharers}
        total = sum(weights.values())
        for name, weight in weights.items():
            share = weight / total if total > 0 else 1.0 / len(weights)
            account = self._accounts.get(name)
            if account is not None:
                _book(account, step, name, share * extra_s, name in direct)

    def _copied(self, step: _Step) -> dict[str, float]:
        """By preemption, the seconds that its copies overlapped the step."""
        if not self._landed:
            return {}
        found: dict[str, float] = {}
        for copy in self._landed:
            if copy.start_s < step.end_s and step.start_s <= copy.end_s:
                seconds = min(copy.end_s, step.end_s) - max(copy.start_s, step.start_s)
                found[copy.preemption_id] = found.get(copy.preemption_id, 0.0) + max(0.0, seconds)
        self._landed = [copy for copy in self._landed if copy.end_s >= step.end_s]
        return found

    def _extra(self, step: _Step) -> tuple[float, dict[str, float]]:
        """Seconds beyond d0 with all victims' repeated tokens taken out, and d0's price of each victim's."""
        model, left = self.model, step.parts
        prices: dict[str, float] = {}
        for name, own in step.own.items():
            left = (left[0] - own[0], left[1] - own[1], left[2] - own[2], left[3] - own[3])
            prices[name] = max(0.0, sum(part * s for part, s in zip(own, model.per_part_s, strict=False)))
        expected = step_seconds(model.fixed_s, model.per_part_s, left, self._before, self._second_before)
        self._second_before, self._before = self._before, aftermath(left[0], left[1])
        pace = median(self._paces) if self._paces else 1.0
        return step.end_s - step.start_s - pace * expected, prices

    def _finished(self) -> Iterable[LiveCost]:
        flying = {name for name, _ in self._flying}
        for name, (executed, ended, number) in list(self._closed.items()):
            account = self._accounts[name]
            if name not in flying and self._settled >= max(number, account.last + AFTERMATH_STEPS):
                del self._accounts[name], self._closed[name]
                delay_s = account.others_delay_s - account.tail_s
                yield LiveCost(name, executed, ended, account.engine_s, delay_s)


def _book(account: _Account, step: _Step, name: str, seconds: float, is_own: bool) -> None:
    account.engine_s += seconds
    if not is_own:
        account.others_delay_s += seconds * step.requests
        account.tail_s += seconds
        return
    takes_part = step.own.get(name, NOTHING)[0] > 0
    account.others_delay_s += seconds * max(0, step.requests - takes_part)
    account.tail_s, account.last = 0.0, step.number


def plus(one: Parts, other: Parts) -> Parts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]
