"""Which steps a long-lived trace keeps: all that a preemption touched, and a drawn share of the quiet ones.

A step is kept whole where it preempts, copies or recomputes, while a copy was under way, and two steps before and after
each of these: what is attributed to a preemption is found in these (:mod:`kvpolicy.attribution.offline`). The others
are quiet. They are drawn in runs of :data:`RUN_STEPS` successive steps, each run with the given probability and by its
number alone, never by how long its steps took. A drawn quiet step has the ``weight`` 1 / probability, all others 1. So
sums with weights are what they would have been, on average over draws. ``left_out`` is the number of steps directly
before a row that were not kept: a reader tells them from lost ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from kvpolicy.attribution.step_time import AFTERMATH_STEPS
from kvpolicy.trace import Row

RUN_STEPS = 16
HOLD_S = 5.0
"""How long a quiet step waits for the report of a copy that may have overlapped it."""
MAX_HELD = 5000


@dataclass(slots=True)
class _Held:
    row: Row
    end_s: float
    kept: bool
    """Whether it is kept whatever is drawn."""


class StepSampler:
    """``share``: probability of a quiet step; ``seed``: of the draws; ``emit`` takes the rows kept, in order."""

    def __init__(self, share: float, seed: int, emit: Callable[[Row], None]) -> None:
        self._share = share
        self._seed = seed
        self._emit = emit
        self._held: deque[_Held] = deque()
        self._aftermath = 0
        self._left_out = 0
        self._run: tuple[int, bool] = (-1, False)

    def add(self, row: Row) -> None:
        """Take the row of the step that has just ended."""
        end_s = row["start_s"] + row["duration_s"]
        touched = bool(row["preemptions"] or row["saves"] or row["loads"] or row["repeated"])
        held = self._held
        if touched:
            for back in range(1, min(AFTERMATH_STEPS, len(held)) + 1):
                held[-back].kept = True
        held.append(_Held(row, end_s, touched or self._aftermath > 0))
        self._aftermath = AFTERMATH_STEPS if touched else max(0, self._aftermath - 1)
        while held and (held[0].end_s < end_s - HOLD_S or len(held) > MAX_HELD):
            self._release(held.popleft())

    def copied(self, start_s: float, end_s: float) -> None:
        """A copy has ended: the steps that it overlapped are kept, and the two before and after them."""
        held = self._held
        inside = [i for i, one in enumerate(held) if one.end_s > start_s and one.row["start_s"] < end_s]
        if not inside:
            return
        for i in range(max(0, inside[0] - AFTERMATH_STEPS), min(len(held), inside[-1] + AFTERMATH_STEPS + 1)):
            held[i].kept = True
        self._aftermath = max(self._aftermath, AFTERMATH_STEPS - (len(held) - 1 - inside[-1]))

    def release(self) -> None:
        """Decide about all steps that are held back, as when the engine idles or ends."""
        while self._held:
            self._release(self._held.popleft())

    def _release(self, held: _Held) -> None:
        if not held.kept and not self._drawn(held.row["step"] // RUN_STEPS):
            self._left_out += 1
            return
        weight = 1.0 if held.kept else 1 / self._share
        self._emit(held.row | {"weight": weight, "left_out": self._left_out})
        self._left_out = 0

    def _drawn(self, run: int) -> bool:
        if self._run[0] != run:
            digest = blake2b(f"{self._seed}/{run}".encode(), digest_size=8).digest()
            self._run = run, int.from_bytes(digest, "big") < self._share * 2**64
        return self._run[1]
