"""Online learning of a policy from the measured costs of its decisions, and the file that keeps it over restarts."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.attribution import LiveCost
from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.cost import online
from kvpolicy.cost.online import Online
from kvpolicy.errors import InputError
from kvpolicy.events import Option, Outcome, Preemption
from kvpolicy.policy import Decider, Feedback, LearningPolicy
from kvpolicy_vllm.plugin.observers import Observer, Pending, Tally
from kvpolicy_vllm.plugin.settings import TEACH

logger = logging.getLogger(f"vllm.{__name__}")

MAX_AWAITED = 4096
"""Maximum number of decisions that await their cost; beyond it the oldest are dropped."""
WRITE_EVERY_S = 5.0
CLOSE_S = 10.0
"""Seconds that shutdown waits for the disk."""


class Memory:
    """Keeps the online state in a file. A thread writes it, so that the scheduler never waits for the disk."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._latest: Online | None = None
        self._complained = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpolicy-memory", daemon=True)
        self._thread.start()

    def keep(self, learned: Online) -> None:
        self._latest = learned

    def write_soon(self) -> None:
        """Have the thread write the latest state soon, as when the engine becomes idle. Does not wait."""
        self._wake.set()

    def finish(self) -> None:
        """Have the thread write the latest state and end. Does not wait."""
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        self.finish()
        self._thread.join(timeout=CLOSE_S)
        if self._thread.is_alive():
            logger.warning("kvpolicy: what was learned was not written to %s within %g s", self._path, CLOSE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(WRITE_EVERY_S)
            self._wake.clear()  # before writing: a request meanwhile may be for a later state
            self._write()
        self._write()

    def _write(self) -> None:
        latest, self._latest = self._latest, None
        if latest is None:
            return
        try:
            online.save(latest, self._digest, self._path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("kvpolicy: cannot keep what was learned in %s: %s", self._path, error)


def remember(decider: Decider, path: Path) -> Memory:
    """Resume from the online state in ``path``, if there is one, and keep later states there.

    Raises InputError for a policy that learns nothing, :class:`kvpolicy.cost.ModelError` for a file of another kind. A
    state of another model, or a damaged one, is set aside with a warning.
    """
    policy = decider.policy
    digest = "" if policy.cost_model is None else policy.cost_model.digest
    if not isinstance(policy, LearningPolicy) or decider.learned is None:
        raise InputError(
            f"kv_connector_extra_config: online_state is {str(path)!r}, but policy {policy.name} learns "
            f"nothing while it serves; {TEACH}"
        )
    if path.exists():
        try:
            decider.state = policy.resume(online.load(path, digest))
        except online.OtherModelError as error:  # a changed model must not keep the server from starting
            aside = online.set_aside(path, error.digest)
            logger.warning("kvpolicy: %s; nothing of it is used, and it is kept as %s", error, aside.name)
        except online.DamagedError as error:  # nor must a file that a crash truncated
            aside = online.set_damaged_aside(path)
            logger.warning("kvpolicy: %s; begun afresh, and what is left of it is kept as %s", error, aside.name)
    return Memory(path, digest)


@dataclass(slots=True)
class Awaited:
    """A decision whose cost is not yet known."""

    situation: Preemption
    option: Option
    """The option to be executed."""
    victim_delay_s: float | None = None


class Learner(Observer):
    """Teaches the decider the costs of its decisions, except costs that mix both options."""

    trouble = "a preemption's cost could not be learned from (counted as measuring_failed)"
    given_up = "learning failed too often in a row: no more costs are learned from"

    def __init__(self, decider: Decider, memory: Memory | None, tally: Tally) -> None:
        self._decider = decider
        self._memory = memory
        self._tally = tally
        self._awaited: dict[str, Awaited] = {}

    def decided(self, pending: Pending) -> None:
        situation, decision = pending.situation, pending.decision
        # Steps after a reset contain other work of the reset. An option pinned by a tool is not the policy's choice.
        if situation.cause == "reset" or decision.policy != self._decider.policy.name:
            return
        option = next((candidate for candidate in decision.options if candidate.kind == decision.executed), None)
        if option is None:
            return
        self._awaited[pending.identity.preemption_id] = Awaited(situation, option)
        if len(self._awaited) > MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        awaited = self._awaited.get(outcome.preemption_id)
        if awaited is None:
            return
        # Time spent until an abort is only part of the cost, and after a failed copy the cost is neither option's.
        if opened.mixed or outcome.ended != "resumed":
            del self._awaited[outcome.preemption_id]
        else:
            awaited.victim_delay_s = outcome.victim_delay_s

    def measured(self, cost: LiveCost) -> None:
        awaited = self._awaited.pop(cost.preemption_id, None)
        if awaited is None:
            return
        self._decider.learn(Feedback(awaited.situation, awaited.option, cost.engine_s, awaited.victim_delay_s))
        self.failures = 0
        learned = self._decider.learned
        if self._memory is not None and learned is not None:
            self._memory.keep(learned)

    def idle(self) -> None:
        if self._memory is not None:
            self._memory.write_soon()

    def begin_afresh(self) -> bool:
        self._tally.add("measuring_failed")
        return super().begin_afresh()

    def retire(self) -> bool:
        if self._memory is not None:
            self._memory.finish()
        return self._memory is not None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
