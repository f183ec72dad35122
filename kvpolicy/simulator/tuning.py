"""The threshold of ``threshold:TOKENS`` that serves a workload best, by simulation.

Every candidate serves the same workloads (common random numbers), so that candidates are compared pair by pair. The
winner of many noisy comparisons looks better than it is: it is chosen on every second workload, and what is said of it
comes from the others. A grid is searched in full: nothing promises that the measure has one minimum only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvpolicy.policy import load
from kvpolicy.simulator.base import Server, Simulator, Summary, Times
from kvpolicy.stats import student_interval
from kvpolicy.workload import Source

Measure = Callable[[Summary], float]

FEWEST_SEEDS = 4
"""Two to choose by and two to judge by."""


def mean_e2e_s(summary: Summary) -> float:
    """Mean time from arrival to the last token, seconds."""
    return summary.e2e_s.mean


@dataclass(frozen=True, slots=True)
class Candidate:
    """One threshold over the workloads it was judged by."""

    tokens: int
    mean: float
    """Of the measure."""
    beyond_best: float
    """Mean difference to the chosen one, workload by workload."""
    low: float
    high: float
    """95% interval of that difference (Student's t, pairs); both 0 for the chosen one."""

    @property
    def tied(self) -> bool:
        """Whether it is not told from the chosen one."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True, slots=True)
class Tuned:
    """What threshold to take, and what it is told apart from."""

    tokens: int
    candidates: tuple[Candidate, ...]
    """In ascending order."""
    seeds_to_choose: int
    seeds_to_judge: int

    @property
    def policy(self) -> str:
        return f"threshold:{self.tokens}"

    @property
    def ties(self) -> tuple[int, ...]:
        """Other thresholds that are not told from the chosen one."""
        return tuple(one.tokens for one in self.candidates if one.tied and one.tokens != self.tokens)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"policy": self.policy, "ties": list(self.ties)}

    def text(self) -> str:
        lines = [
            f"{self.policy}: the least of {len(self.candidates)} on {self.seeds_to_choose} workloads; on "
            f"{self.seeds_to_judge} others, beside it (95%, in pairs):"
        ]
        for one in self.candidates:
            told = "chosen" if one.tokens == self.tokens else "tied" if one.tied else ""
            lines.append(
                f"  {one.tokens:>9} {one.mean:>12.6g}  {one.beyond_best:+.4g} [{one.low:+.4g}, {one.high:+.4g}]  {told}"
            )
        better = [one.tokens for one in self.candidates if one.high < 0]
        if better:
            lines.append(f"lower on the others than the one chosen: {', '.join(map(str, better))}; use more seeds")
        return "\n".join(lines)


def tune_threshold(
    simulator: Simulator,
    workload: Callable[[int], Source],
    server: Server,
    times: Times,
    candidates: Sequence[int],
    seeds: Sequence[int],
    measure: Measure = mean_e2e_s,
) -> Tuned:
    """The candidate with the least mean ``measure``; ties go to the smaller threshold.

    ``workload``: the requests of a seed, the same at every call. ``candidates``: tokens from which on a victim is
    swapped; 0 swaps always, more than any victim has never. Raises ValueError for candidates or seeds that are too
    few or there twice, and as the simulator does.
    """
    _refuse(candidates, seeds)
    ordered = sorted(candidates)
    found = {
        tokens: [
            measure(simulator.run(workload(seed), load(f"threshold:{tokens}"), server, times, seed).summary)
            for seed in seeds
        ]
        for tokens in ordered
    }
    best = min(ordered, key=lambda tokens: fmean(found[tokens][::2]))
    judged = tuple(_beside(tokens, found[tokens][1::2], found[best][1::2]) for tokens in ordered)
    return Tuned(best, judged, len(seeds) - len(seeds) // 2, len(seeds) // 2)


def _beside(tokens: int, mine: Sequence[float], best: Sequence[float]) -> Candidate:
    differences = [one - other for one, other in zip(mine, best, strict=True)]
    return Candidate(tokens, fmean(mine), *student_interval(differences))


def _refuse(candidates: Sequence[int], seeds: Sequence[int]) -> None:
    if len(set(candidates)) < 2 or len(set(candidates)) < len(candidates) or min(candidates) < 0:
        raise ValueError(f"candidates are {list(candidates)}, should be two or more numbers of tokens, none twice")
    if len(seeds) < FEWEST_SEEDS or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds are {list(seeds)}, should be {FEWEST_SEEDS} or more, none twice")
