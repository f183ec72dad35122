"""Observers of preemptions, the dispatch of events to them, and two observers: of what survives, and of metrics.

The controller reports events; an observer has a method for each event it follows. A disabled observer is not added. An
observer that fails starts afresh or, after repeated failures, is dropped, without an effect on steps or requests.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from inspect import isfunction
from typing import Any

from kvpolicy.attribution import LiveCost
from kvpolicy.attribution.ledger import Ledger, OpenPreemption, Step
from kvpolicy.events import Cause, Decision, Outcome, Preemption
from kvpolicy.order import Choice
from kvpolicy.policy import Policy
from kvpolicy.policy.decision import HOST_TIER
from kvpolicy.survival import AllOrNothing, Survival
from kvpolicy_vllm.plugin.host_copies import CopyBook, Settled
from kvpolicy_vllm.plugin.messages import Forward, StepJobs

MAX_OBSERVED = 1000
MAX_PRICED = 4096
"""Predicted costs that await the measured ones; beyond it the oldest are dropped."""
MAX_FAILURES = 5
"""An observer is dropped after this many failures without success in between."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The preemption that a decision is about."""

    preemption_id: str
    request_id: str
    generation: int
    """Number of the request's earlier preemptions."""
    step: int
    labels: Mapping[str, Any]
    """Labels from a tool that pins the option; empty otherwise."""


@dataclass(slots=True)
class Pending:
    """A decision with what is executed so far; not final, since a save may still fail."""

    situation: Preemption
    decision: Decision
    identity: Identity


class Observer:
    """Base class of observers: follows the events whose methods are overridden.

    ``request`` and ``scheduler`` are vLLM's objects, ``output`` is vLLM's output of a step. Times are seconds on the
    controller's clock.
    """

    trouble = "following preemptions failed"
    given_up = "following preemptions failed too often in a row: it is given up"
    failures = 0

    def arrived(self, request: Any, now: float) -> None:
        """A new request."""

    def preempted(self, request: Any) -> None:
        """A request is about to lose its blocks, for any decision."""

    def displacing(self, order: str, choice: Choice, id_of: Callable[[int], str], step: int, now: float) -> None:
        """Requests are about to be displaced in the order of service ``order``, a label. ``id_of``: a request's id, by
        its number in ``choice``."""

    def decided(self, pending: Pending) -> None:
        """A decision was made and is being executed."""

    def undecided(self, cause: Cause) -> None:
        """Deciding failed: the request is recomputed."""

    def executed(self, pending: Pending) -> None:
        """What is executed is final: a recompute was chosen, or the first save was confirmed, failed or forgotten, or
        nothing had to be saved."""

    def fell_back(self, reason: str) -> None:
        """A swap became a recompute after all."""

    def copies_begin(self, jobs: StepJobs, preemptions: Mapping[int, str]) -> None:
        """Copies are handed to the workers. ``preemptions``: by ``copy_id`` of the jobs."""

    def copied(self, settled: Settled, step: int) -> None:
        """All ranks have finished a job."""

    def loaded(self, request_id: str, tokens: int) -> None:
        """Tokens of a request are back from the host pool."""

    def prompt_loaded(self, request_id: str, tokens: int) -> None:
        """Tokens of a request were loaded from what others left in host memory."""

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        """A preemption ended: its request is back at the token it had reached, was preempted again, or is gone."""

    def measured(self, cost: LiveCost) -> None:
        """The full cost of a resumed preemption is known."""

    def repeated(self, step: Step[OpenPreemption]) -> None:
        """A scheduled step recomputes lost tokens."""

    def scheduled(self, step: Step[OpenPreemption], output: Any, scheduler: Any) -> None:
        """A step was scheduled; computed tokens are advanced past it."""

    def done(self, step: Step[OpenPreemption], output: Any, scheduler: Any, began_s: float, now: float) -> None:
        """A step's output is back."""

    def forwards_timed(self, forwards: Sequence[Forward]) -> None:
        """Ranks know how long forward passes took. While an observer follows this, they are timed."""

    def ended(self, request: Any, now: float) -> None:
        """A request ended, finished or aborted."""

    def idle(self) -> None:
        """The engine has no work left and may be stopped without warning: start writing what is to be kept."""

    def begin_afresh(self) -> bool:
        """After a failure: drop unfinished work. Return False where the observer failed too often: it is dropped."""
        self.failures += 1
        return self.failures < MAX_FAILURES

    def retire(self) -> bool:
        """Another observer takes its place, between two steps: have what is still to be written be written, and do not
        wait for it. Return whether :meth:`close` is to be called when the engine shuts down."""
        self.close()
        return False

    def close(self) -> None:
        """The engine shuts down: write what is still to be written."""


UPKEEP = ("begin_afresh", "retire", "close")
EVENTS = tuple(name for name, method in vars(Observer).items() if isfunction(method) and name not in UPKEEP)


class Observers:
    """The observers of one engine core. An event goes to those that follow it, in the order in which they were added.

    ``complain``: called with a message while an exception is handled.
    """

    def __init__(self, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._all: tuple[Observer, ...] = ()
        self._given_up: tuple[Observer, ...] = ()
        self._retired: tuple[Observer, ...] = ()
        self._to_close: list[Observer] = []
        self._following: dict[str, tuple[Callable[..., None], ...]] = dict.fromkeys(EVENTS, ())
        self.follow_steps = False
        """Whether an observer follows steps beyond the tokens they recompute."""

    def add(self, *observers: Observer) -> None:
        self._follow((*self._all, *observers))

    def replace(self, kind: type[Observer], observer: Observer | None) -> None:
        """Retire the observer of that kind, if there is one, and add ``observer`` instead, unless it is None."""
        for present in (*self._all, *self._given_up):
            if isinstance(present, kind) and present.retire():
                self._retired += (present,)
        self._given_up = tuple(present for present in self._given_up if not isinstance(present, kind))
        others = tuple(present for present in self._all if not isinstance(present, kind))
        self._follow(others if observer is None else (*others, observer))

    def tell(self, event: str, *arguments: Any) -> None:
        for follow in self._following[event]:
            try:
                follow(*arguments)
            # An error in counting, recording, measuring or learning must not stop the server.
            except Exception:  # noqa: BLE001
                self._failed(follow.__self__)  # type: ignore[attr-defined]  # a bound method of an observer

    def follows(self, event: str) -> bool:
        """Whether an observer follows the event: those that were dropped no longer do."""
        return bool(self._following[event])

    def close(self) -> None:
        _close(self._to_close, self._complain)

    def close_with(self, owner: Any) -> weakref.finalize[..., Any]:
        """Close the observers when that object is gone, or when what is returned is called.

        Until then only those are held that have something to close. Others know the engine's copies and all of it.
        """
        return weakref.finalize(owner, _close, self._to_close, self._complain)

    def _follow(self, observers: tuple[Observer, ...]) -> None:
        self._all = observers
        present = (*observers, *self._given_up, *self._retired)
        self._to_close[:] = (one for one in present if type(one).close is not Observer.close)
        for event in EVENTS:
            follow = (getattr(o, event) for o in observers if getattr(type(o), event) is not getattr(Observer, event))
            self._following[event] = tuple(follow)
        self.follow_steps = self.follows("scheduled") or self.follows("done")

    def _failed(self, observer: Observer) -> None:
        self._complain(observer.trouble)
        if not observer.begin_afresh():
            self._complain(observer.given_up)
            self._given_up += (observer,)
            self._follow(tuple(other for other in self._all if other is not observer))


def _close(observers: Sequence[Observer], complain: Callable[[str], None]) -> None:
    for observer in observers:
        with suppress(Exception):  # an error in writing is told by close()
            observer.idle()  # all begin to write before the first one waits for its disk
    for observer in observers:
        try:
            observer.close()
        except Exception:  # noqa: BLE001  # the other observers must still be closed
            complain("what was followed could not be written at the end")


# ---- what survives on the device ----


class SurvivalLearner(Observer):
    """Teaches what is expected to survive on the device what was found there."""

    trouble = "what survived of a preempted request could not be learned from"
    given_up = "learning what survives failed too often in a row: it is expected as before"

    def __init__(self, survival: Survival) -> None:
        self._survival = survival

    @staticmethod
    def of(survival: Survival) -> SurvivalLearner:
        return AbsenceLearner(survival) if isinstance(survival, AllOrNothing) else SurvivalLearner(survival)

    def decided(self, pending: Pending) -> None:
        self._survival.preempted(pending.identity.preemption_id, pending.situation)

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        # After a failed load, the tokens that were found are not known.
        known = opened.resumed and not opened.mixed
        self._survival.closed(outcome.preemption_id, outcome.local_hit_tokens if known else None)
        self.failures = 0

    def begin_afresh(self) -> bool:
        self._survival.forget()
        return super().begin_afresh()


class AbsenceLearner(SurvivalLearner):
    """The same with several block tables, where absences are learned from the tokens of the steps between."""

    def __init__(self, survival: AllOrNothing) -> None:
        super().__init__(survival)
        self._wrote = survival.wrote

    def scheduled(self, step: Step[OpenPreemption], output: Any, scheduler: Any) -> None:
        self._wrote(output.total_num_scheduled_tokens)


# ---- counting ----


@lru_cache(maxsize=1024)  # the same few are counted in every step
def key(name: str, **labels: str) -> str:
    return "|".join([name, *(f"{label}={value.replace('|', '/')}" for label, value in labels.items())])


class Tally:
    """Counters and gauges of one engine core: totals since the start, and increases since the last report."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._added: dict[str, float] = {}
        self._observed: dict[str, list[float]] = {}
        self._gauges_moved = False
        self.unreported = False
        """Whether anything changed since the last report."""

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        counter = key(name, **labels)
        self.totals[counter] = self.totals.get(counter, 0) + amount
        self._added[counter] = self._added.get(counter, 0) + amount
        self.unreported = True

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add to a histogram. Beyond :data:`MAX_OBSERVED` values between two reports, further ones are left out."""
        values = self._observed.setdefault(key(name, **labels), [])
        if len(values) < MAX_OBSERVED:
            values.append(value)
            self.unreported = True

    def set(self, name: str, value: float, **labels: str) -> None:
        gauge = key(name, **labels)
        if self.gauges.get(gauge) != value:
            self.gauges[gauge] = value
            self._gauges_moved = self.unreported = True

    def raise_by(self, name: str, amount: float, **labels: str) -> None:
        """Add to a gauge: a sum of amounts that may be negative, which a counter cannot hold."""
        self.set(name, self.gauges.get(key(name, **labels), 0.0) + amount, **labels)

    @property
    def urgent(self) -> bool:
        """Whether an idle engine should step once more to report. Not for dropped records: a step makes new ones."""
        return self._gauges_moved or any(counter != "records_dropped" for counter in self._added)

    def report(self) -> dict[str, dict[str, Any]] | None:
        """Increases of the counters and values of the histograms since the last report, and all gauges; None where
        nothing changed."""
        if not self.unreported:
            return None
        report: dict[str, dict[str, Any]] = {"counters": self._added, "gauges": dict(self.gauges)}
        if self._observed:
            report["observed"] = self._observed
        self._added, self._observed = {}, {}
        self._gauges_moved = self.unreported = False
        return report


def without_paths(label: str) -> str:
    """The label with the last name of each path in it: metrics go to whoever may read them, folders of the host do
    not. The digest of the cost model tells apart what has the same name then."""
    return re.sub(r"[^:,=@]*/([^:,=@/]+)/*", r"\1", label)


class MetricsCounter(Observer):
    """Counts preemptions for the engine's metrics. Names and labels: :mod:`kvpolicy_vllm.plugin.metrics`."""

    trouble = "preemptions could not be counted"

    def __init__(self, copies: CopyBook, ledger: Ledger[OpenPreemption]) -> None:
        self.tally = Tally()
        self._copies, self._ledger = copies, ledger
        self._shown = (-1, -1, -1)
        self._orders: set[str] = set()
        self._predicted_s: dict[str, float] = {}
        """By preemption."""

    def report(self) -> dict[str, dict[str, Any]] | None:
        """See :meth:`Tally.report`."""
        if not self.tally.unreported and self._shown == self._levels():
            return None  # true in nearly every step
        self._set_gauges()
        return self.tally.report()

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, by ``name|label=value``."""
        self._set_gauges()
        return self.tally.totals | self.tally.gauges

    @property
    def urgent(self) -> bool:
        """See :attr:`Tally.urgent`."""
        self._set_gauges()
        return self.tally.urgent

    def show_policy(self, policy: Policy, value: int) -> None:
        """Set the gauge of a policy: 1 for the present policy, 0 for a former one."""
        digest = "" if policy.cost_model is None else str(policy.cost_model.digest)
        self.tally.set("cost_model", value, policy=without_paths(policy.label), digest=digest)

    def show_service(self, order: str, shadow: bool) -> None:
        """Set the gauges of the present order, and to 0 those of former ones."""
        self._orders.add(order)
        for label in self._orders:
            self.tally.set("order", int(label == order), order=label)
        self.tally.set("shadow", int(shadow))

    def _set_gauges(self) -> None:
        self._shown = self._levels()
        pool = self._copies.pool
        if pool.cache is not None:
            self.tally.set("cached_slots", pool.cached, tier=HOST_TIER)
        self.tally.set("host_slots_used", self._copies.pool.used)
        self.tally.set("host_slots_total", self._copies.pool.total)
        self.tally.set("open_preemptions", len(self._ledger))

    def _levels(self) -> tuple[int, int, int]:
        return self._copies.pool.used, self._copies.pool.cached, len(self._ledger)

    def begin_afresh(self) -> bool:
        """Counters have no partial state, so this observer is never dropped."""
        return True

    # ---- events ----

    def undecided(self, cause: Cause) -> None:
        self.fell_back("error")
        self.tally.add("preemptions", intended="recompute", executed="recompute", cause=cause)

    def executed(self, pending: Pending) -> None:
        decision = pending.decision
        kind = decision.executed
        assert kind is not None
        self.tally.add("preemptions", intended=decision.intended, executed=kind, cause=pending.situation.cause)
        if decision.reason:
            self.fell_back(decision.reason)
        for option, cost in zip(decision.options, decision.costs, strict=False):
            if option.kind == kind:
                self.tally.add("priced_preemptions", executed=kind)
                self.tally.add("predicted_cost_microseconds", cost.engine_s * 1e6, executed=kind)
                avoidable_s = cost.engine_s - min(other.engine_s for other in decision.costs)
                self.tally.add("avoidable_cost_microseconds", avoidable_s * 1e6, executed=kind)
                if avoidable_s > 0:
                    self.tally.add("other_cheaper", executed=kind)
                self._predicted_s[pending.identity.preemption_id] = cost.engine_s
                if len(self._predicted_s) > MAX_PRICED:
                    del self._predicted_s[next(iter(self._predicted_s))]
        if any(cost.extrapolated for cost in decision.costs):
            self.tally.add("extrapolated")

    def fell_back(self, reason: str) -> None:
        self.tally.add("fallbacks", reason=reason)

    def copied(self, settled: Settled, step: int) -> None:
        slowest = settled.slowest
        self.tally.add("copy_bytes", settled.moved_bytes, direction=settled.direction)
        self.tally.add("copy_microseconds", (slowest.end_s - slowest.start_s) * 1e6, direction=settled.direction)
        self.tally.observe("copy_seconds", slowest.end_s - slowest.start_s, direction=settled.direction)

    def loaded(self, request_id: str, tokens: int) -> None:
        self.tally.add("loaded_tokens", tokens)

    def prompt_loaded(self, request_id: str, tokens: int) -> None:
        self.tally.add("cache_loaded_tokens", tokens, tier=HOST_TIER)

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        if outcome.ended != "resumed":
            self._predicted_s.pop(opened.preemption_id, None)
            return
        self.tally.add("resumed", executed=opened.executed)
        self.tally.observe("victim_delay_seconds", outcome.victim_delay_s, executed=opened.executed)
        self.tally.add("victim_delay_microseconds", outcome.victim_delay_s * 1e6, executed=opened.executed)
        self.tally.add("wait_blocks_microseconds", outcome.wait_blocks_s * 1e6, executed=opened.executed)

    def measured(self, cost: LiveCost) -> None:
        assert cost.executed is not None
        self.tally.add("measured_preemptions", executed=cost.executed)
        self.tally.raise_by("measured_cost_microseconds", cost.engine_s * 1e6, executed=cost.executed)
        predicted_s = self._predicted_s.pop(cost.preemption_id, None)
        if predicted_s is not None:
            self.tally.observe("price_error_seconds", abs(cost.engine_s - predicted_s), executed=cost.executed)

    def repeated(self, step: Step[OpenPreemption]) -> None:
        self.tally.add("recomputed_tokens", step.recomputed_tokens)
