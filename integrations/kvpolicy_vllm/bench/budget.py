"""A profile's time: who is measured first, until when, and what is left out for another call. Pure.

`bench.run_profile` calls it. What is left out is kept in the profile's plan file, by state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import Part
from kvpolicy_vllm.bench.states import State


@dataclass(slots=True)
class Budget:
    """Time that a call may take."""

    end_s: float
    """By the clock; infinite where there is no limit."""
    clock: Callable[[], float]
    overhead_s: float = 0.0
    """Time that a part takes besides its states: its engine's start, warm-up and end. The largest so far."""

    @classmethod
    def of(cls, minutes: float | None, clock: Callable[[], float]) -> Budget:
        return cls(math.inf if minutes is None else clock() + 60 * minutes, clock)

    @property
    def limited(self) -> bool:
        return self.end_s < math.inf

    @property
    def over(self) -> bool:
        """Whether the time is over, or what is left would go into an engine's start."""
        return self.clock() + self.overhead_s >= self.end_s

    def share_end_s(self, parts: int) -> float | None:
        """When the next of ``parts`` parts should end, which share what is left; None without a limit."""
        return self.clock() + (self.end_s - self.clock()) / parts if self.limited else None

    def learn(self, start_s: float, measured_s: float) -> None:
        """Of a part that began at ``start_s``, ends now, and spent ``measured_s`` on its states."""
        self.overhead_s = max(self.overhead_s, self.clock() - start_s - measured_s)


def coarse_first(states: Sequence[State]) -> tuple[State, ...]:
    """The shortest victim, the longest, the one in the middle, and so on: states measured so far are spread evenly."""
    ranked = sorted(states, key=lambda state: (state.prompt_tokens + state.decoded_tokens, state.state_id))
    return tuple(ranked[number] for number in _bisected(len(ranked)))


def _bisected(total: int) -> Iterator[int]:
    """The first and the last of ``total`` numbers, then the middle of every gap, the largest gaps first."""
    yield from {0: [], 1: [0]}.get(total, [0, total - 1])
    gaps = deque([(0, total - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]


def in_time(job: Job, end_s: float | None, left_out: Mapping[str, int]) -> Job:
    """The job with an end. States that earlier parts left out come first, each group in the order of
    :func:`coarse_first`."""
    states = sorted(coarse_first(job.states), key=lambda state: -left_out.get(state.state_id, 0))
    return replace(job, states=tuple(states), end_s=end_s, in_order=True)


def making_up(job: Job, left_out: Mapping[str, int]) -> Job:
    """The job with only what was left out of its states."""
    ids = {state.state_id for state in (*job.states, *job.checks)}
    return replace(job, wanted={state_id: count for state_id, count in left_out.items() if state_id in ids})


def after(left_out: Mapping[str, int], job: Job, found: Mapping[str, int]) -> dict[str, int]:
    """What is left out once the job has left out ``found``, by state."""
    before = {state_id: count for state_id, count in left_out.items() if state_id not in (job.wanted or ())}
    return {state_id: before.get(state_id, 0) + found.get(state_id, 0) for state_id in sorted({*before, *found})}


def in_turn(parts: Sequence[Part], budget: Budget) -> tuple[Part, ...]:
    """The parts in the order in which they are measured: page-locked memory first where time is limited, as a server
    serves over it unless it is told not to."""
    return tuple(sorted(parts, key=lambda part: budget.limited and not part.pin_memory))


def next_job(
    parts: Sequence[Part],
    passes: int,
    job_of: Callable[[Part], Job],
    done: Mapping[str, str],
    left_out: Mapping[str, int],
    budget: Budget,
) -> tuple[Part, Job] | None:
    """The next part and its job: with an end where time is limited, and in a further pass only what was left out. None
    if all is measured, or the time is over. ``job_of``: the whole job of a part."""
    part = next_part(parts, passes, done, left_out)
    if part is None or (done and budget.over):
        return None
    job = job_of(part)
    if part.number >= passes:
        job = making_up(job, left_out)
    if not budget.limited and not left_out:
        return part, job
    beside = [one for one in parts if one.number == part.number and one.name not in done]
    return part, in_time(job, budget.share_end_s(max(1, len(beside))), left_out)


def next_part(parts: Sequence[Part], passes: int, done: Mapping[str, str], left_out: Mapping[str, int]) -> Part | None:
    """The first part that is not done; after the last, one of a further pass for what others left out; None if all is
    measured."""
    for part in parts:
        if part.name not in done:
            return part
    kinds = [part for part in parts if part.number == 0]
    lacking = [kind for kind in kinds if any(kind.has(state_id) for state_id in left_out)]
    for number in count(passes) if lacking else ():
        for kind in lacking:
            if (part := kind.at(number)).name not in done:
                return part
    return None
