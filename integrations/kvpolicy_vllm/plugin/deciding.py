"""Which option is taken: the policy in charge, its state, and what it learns from what became of its decisions."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy import policy as policies
from kvpolicy.attribution import LiveCost, StepTimeModel
from kvpolicy.cost import CostModel, online
from kvpolicy.cost.online import Online
from kvpolicy.errors import InputError
from kvpolicy.events import Decision, Kind, Option, Outcome, Preemption
from kvpolicy.hardware import EngineSpec
from kvpolicy.policy import Feedback, LearningPolicy, Policy, PolicyState
from kvpolicy_vllm.plugin.settings import Settings

logger = logging.getLogger(__name__)

TEACH = "give it online=on, as in cheapest:COST_MODEL,online=on"
Loader = Callable[[str], CostModel]
MOST_AWAITED = 4096
"""Decisions whose cost may be outstanding; the oldest beyond are no longer learned from."""
KEEP_EVERY_S = 5.0
CLOSE_S = 10.0
"""So long the end of a server waits for the disk."""


@dataclass(slots=True)
class Awaited:
    """A decision whose cost is not yet known."""

    situation: Preemption
    option: Option
    """As it was to be executed."""
    victim_delay_s: float | None = None


class Memory:
    """Keeps what was learned online in a file, written by a thread: the scheduler never waits for the disk."""

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
        """Have the thread write the latest state, as where the engine has nothing left to do. Does not wait."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=CLOSE_S)
        if self._thread.is_alive():
            logger.warning("kvpolicy: what was learned was not written to %s within %g s", self._path, CLOSE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(KEEP_EVERY_S)
            self._wake.clear()  # before it is written: what is asked for meanwhile may be of a later state
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


class Judge:
    """One per engine core. ``engine``: what a cost model is checked against. ``policy``: decides in place of
    the one that the settings name, and is not checked: a simulated engine is of no shape of its own.

    Raises as :func:`kvpolicy.policy.load` and the model's ``check_fit`` do.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineSpec,
        loader: Loader,
        rank: int,
        draw_seed: int,
        policy: Policy | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._loader = loader
        self._rng = random.Random(draw_seed)
        self._pinned: Kind | None = None
        self.labels: Mapping[str, Any] = {}
        """Recorded with every decision that is pinned."""
        self._awaited: dict[str, Awaited] = {}
        self._memory: Memory | None = None
        self.policy: Policy = settings.load_policy(loader) if policy is None else policy
        if policy is None:
            self._check(self.policy)
        self._state: PolicyState = self.policy.initial_state()
        if settings.online_state is not None:
            self._remember(_of_rank(settings.online_state, rank))

    # ---- who decides ----

    def adopt(self, name: str) -> None:
        """Decide by another policy from now on. Raises as at start-up where it cannot be loaded or does not fit."""
        policy = self._settings.load_policy(self._loader, name)
        self._check(policy)
        self.policy, self._state = policy, policy.initial_state()
        self._awaited.clear()
        if self._memory is not None:  # the file is of the model that was
            self._memory.close()
            self._memory = None

    def pin(self, kind: Kind | None, labels: Mapping[str, Any]) -> None:
        """Take ``kind`` at every following preemption, with these labels; None: ask the policy."""
        self._pinned, self.labels = kind, labels

    @property
    def step_time(self) -> StepTimeModel | None:
        """d0 to measure costs by."""
        return None if self.policy.cost_model is None else self.policy.cost_model.step_time

    @property
    def digest(self) -> str:
        """Of the cost model; empty without one."""
        return "" if self.policy.cost_model is None else str(self.policy.cost_model.digest)

    def _check(self, policy: Policy) -> None:
        if policy.cost_model is not None:
            policy.cost_model.check_fit(self._engine)
            policy.cost_model.warm()

    # ---- deciding ----

    def decide(self, situation: Preemption, options: tuple[Option, ...]) -> Decision:
        if self._pinned is not None:
            chosen = next((i for i, option in enumerate(options) if option.kind == self._pinned), 0)
            shares = tuple(float(i == chosen) for i in range(len(options)))
            return Decision(options, shares, chosen, (), "pinned", "{}")
        decision = policies.decide(self.policy, situation, options, self._state, self._rng)
        self._state = self.policy.next_state(self._state, decision)
        return decision

    # ---- learning ----

    def executing(self, preemption_id: str, situation: Preemption, decision: Decision) -> None:
        """The decision is being executed: what it costs is worth knowing."""
        option = next((one for one in decision.options if one.kind == decision.executed), None)
        if situation.cause == "reset":  # whatever is done around a reset is in the steps after it
            return
        if self._pinned is not None or option is None or not isinstance(self.policy, LearningPolicy):
            return
        self._awaited[preemption_id] = Awaited(situation, option)
        if len(self._awaited) > MOST_AWAITED:
            del self._awaited[next(iter(self._awaited))]

    def closed(self, outcome: Outcome) -> None:
        awaited = self._awaited.get(outcome.preemption_id)
        if awaited is None:
            return
        if outcome.ended == "resumed":
            awaited.victim_delay_s = outcome.victim_delay_s
        else:  # what was spent until then is not what the option costs
            del self._awaited[outcome.preemption_id]

    def forget(self, preemption_id: str) -> None:
        """What it cost is neither option's: a copy failed, or was not used."""
        self._awaited.pop(preemption_id, None)

    def learn(self, cost: LiveCost) -> None:
        """A preemption's cost is known in full."""
        awaited = self._awaited.pop(cost.preemption_id, None)
        if awaited is None or not isinstance(self.policy, LearningPolicy):
            return
        feedback = Feedback(awaited.situation, awaited.option, cost.engine_s, awaited.victim_delay_s)
        self._state = self.policy.observe(self._state, feedback)
        learned = self.policy.learned(self._state)
        if self._memory is not None and learned is not None:
            self._memory.keep(learned)

    def _remember(self, path: Path) -> None:
        if not isinstance(self.policy, LearningPolicy) or self.policy.learned(self._state) is None:
            raise InputError(
                f"kv_connector_extra_config: online_state is {str(path)!r}, but policy {self.policy.name} learns "
                f"nothing while it serves; {TEACH}"
            )
        if path.exists():
            try:
                self._state = self.policy.resume(online.load(path, self.digest))
            except online.OtherModelError as error:  # a new model is no reason not to serve
                aside = online.set_aside(path, error.digest)
                logger.warning("kvpolicy: %s; nothing of it is used, and it is kept as %s", error, aside.name)
            except online.DamagedError as error:  # nor is a file that a crash cut off
                aside = online.set_damaged_aside(path)
                logger.warning("kvpolicy: %s; begun afresh, and what is left of it is kept as %s", error, aside.name)
        self._memory = Memory(path, self.digest)

    def keep_soon(self) -> None:
        """The engine has nothing left to do, and may be ended without warning: have what was learned written."""
        if self._memory is not None:
            self._memory.write_soon()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


def _of_rank(path: Path, rank: int) -> Path:
    """Data-parallel engine cores learn apart: each but the first has the rank in its file's name."""
    return path if rank == 0 else path.with_name(f"{path.stem}-{rank}{path.suffix}")
