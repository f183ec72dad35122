"""How likely, and how soon, a block is asked for again: learned from what was, by classes of blocks and by age.

As in least hit density (Beckmann, Chen and Cidon, LHD, NSDI 2018), blocks are put into classes, and for each class the
share that is asked for again is counted at every age. Blocks that are gone are counted too, so that what the cache
holds does not decide what it learns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import ceil

Class = Hashable
LEVELS = 24
FIRST_AGE = 8.0
"""Age at which level 1 begins, prompts; that of each further level is the square root of 2 times as high."""
STARTS: tuple[float, ...] = (0.0, *(FIRST_AGE * 2 ** (level / 2) for level in range(LEVELS - 1)))
"""Age at which each level begins, prompts."""
ENDS = (*STARTS[1:], 2 * STARTS[-1])
REACHED = tuple(enumerate(map(ceil, STARTS)))[1:]
"""Each level but the first, with the whole number of prompts after which a visit is of that level."""
PRIOR_BLOCKS = 20.0
"""Blocks that the average over all classes counts for in each of them."""
PRIOR_SHARE = 0.01
"""Share that is asked for again in the first level, before anything was seen."""
PRIOR = tuple(PRIOR_SHARE * (1 - start / end) for start, end in zip(STARTS, ENDS, strict=True))
"""That of every level, which counts for ten blocks. Over the length of the level it is a rate that falls as the age at
which the level ends rises: as long as nothing is known, what was used last stays."""
FIT_EVERY, FIT_AFTER = 64, 4
"""What was counted is evaluated whenever there are a quarter more prompts than at the last time, from the first one on,
and after 64 more at the latest: each prompt changes the first rates, few change later ones."""
DECAY_EVERY, DECAY = 512, 0.9
"""After so many prompts, what was counted before has this weight."""


class Visit:
    """The blocks that one prompt asked for and that no prompt asked for since, by class."""

    __slots__ = ("at", "blocks", "level")

    def __init__(self, at: int, blocks: dict[Class, int]) -> None:
        self.at, self.blocks, self.level = at, blocks, 0


class Returns:
    """Counts, for every class and level of age, the blocks that reached it and those asked for again in it.

    Every call takes a time that does not grow with the number of blocks, on average.
    """

    def __init__(self) -> None:
        self._prompts = 0
        self._reached: dict[Class, list[float]] = {}
        self._returned: dict[Class, list[float]] = {}
        self._rates: Mapping[Class, Rates] = {}
        self._average = Rates(lambda: PRIOR)
        self._next_fit = 1
        self.latest = Visit(0, {})
        """That of the last prompt."""
        self._aging: dict[int, Visit] = {0: self.latest}
        """Visits that have not reached the last level, by prompt."""

    def visit(self, blocks: dict[Class, int]) -> Visit:
        """A prompt asks for blocks of these classes. Call :meth:`returned` first for those asked for before."""
        self._prompts += 1
        now = self.latest = Visit(self._prompts, blocks)
        self._aging[now.at] = now
        for name, count in blocks.items():
            self._counts(self._reached, name)[0] += count
        self._age()
        if self._prompts % DECAY_EVERY == 0:
            for counts in (*self._reached.values(), *self._returned.values()):
                counts[:] = [DECAY * count for count in counts]
        if self._prompts == self._next_fit:
            self._next_fit += min(FIT_EVERY, max(1, self._prompts // FIT_AFTER))
            self._fit()
        return now

    def join(self, visit: Visit, name: Class) -> None:
        """A block of class ``name`` is of that visit, too, but was not among those that its prompt asked for."""
        visit.blocks[name] = visit.blocks.get(name, 0) + 1
        self._counts(self._reached, name)[visit.level] += 1

    def old_visit(self, name: Class) -> Visit:
        """A visit of one block that has reached the last level."""
        visit = Visit(0, {})
        visit.level = LEVELS - 1
        self.join(visit, name)
        return visit

    def leave(self, visit: Visit, name: Class) -> None:
        """A block of class ``name`` is not of that visit, whose level it has joined at."""
        visit.blocks[name] -= 1
        reached = self._counts(self._reached, name)
        reached[visit.level] = max(0.0, reached[visit.level] - 1)

    def returned(self, visit: Visit, name: Class, blocks: int = 1) -> None:
        """So many blocks of that visit, of class ``name``, are asked for again."""
        left = visit.blocks.pop(name) - blocks
        if left:
            visit.blocks[name] = left
        self._counts(self._returned, name)[visit.level] += blocks

    def rate(self, visit: Visit, name: Class) -> float:
        """Returns per prompt that a block of that visit, of class ``name``, promises from now on."""
        return self._rates.get(name, self._average)[visit.level]

    def _age(self) -> None:
        """One visit reaches each level with every prompt."""
        now, aging, reached = self._prompts, self._aging, self._reached
        for level, age in REACHED:
            visit = aging.get(now - age)
            if visit is None:  # nor was there a prompt before
                break
            visit.level = level
            for name, count in visit.blocks.items():
                reached[name][level] += count
        aging.pop(now - REACHED[-1][1], None)

    def _fit(self) -> None:
        returned, reached = _totals(self._returned), _totals(self._reached)
        pooled = [
            min(1.0, (back + 10 * prior) / (there + 10))
            for back, there, prior in zip(returned, reached, PRIOR, strict=True)
        ]
        self._average = Rates(lambda: pooled)
        rates = {}
        for name, there in self._reached.items():
            rates[name] = Rates(partial(_smoothed, [*self._counts(self._returned, name)], [*there], pooled))
        self._rates = rates

    @staticmethod
    def _counts(table: dict[Class, list[float]], name: Class) -> list[float]:
        counts = table.get(name)
        if counts is None:
            counts = table[name] = [0.0] * LEVELS
        return counts


def _totals(table: Mapping[Class, Sequence[float]]) -> Sequence[float]:
    """By level, the sum over all classes."""
    return [sum(counts) for counts in zip(*table.values(), strict=True)] or [0.0] * LEVELS


def _smoothed(returned: Sequence[float], reached: Sequence[float], pooled: Sequence[float]) -> list[float]:
    """By level, the share of a class's blocks that is asked for again. ``pooled``: that of all classes."""
    return [
        min(1.0, (back + PRIOR_BLOCKS * share) / (there + PRIOR_BLOCKS))
        for back, there, share in zip(returned, reached, pooled, strict=True)
    ]


class Rates(dict[int, float]):
    """:func:`best_rate` by level, each found when it is first asked for: most levels of most classes never are.

    ``shares``: gives those of a class, as they were when it was fitted.
    """

    def __init__(self, shares: Callable[[], Sequence[float]]) -> None:
        super().__init__()
        self._find_shares = shares
        self._shares: Sequence[float] = ()

    def __missing__(self, level: int) -> float:
        if not self._shares:
            self._shares = self._find_shares()
        rate = self[level] = best_rate(self._shares, level)
        return rate


def best_rate(shares: Sequence[float], level: int) -> float:
    """The largest rate of return that keeping a block of that level up to some age can have:

        max over T of P(asked for before T) / E(prompts until it is asked for, at most up to T)

    which is Gittins' index of keeping it. ``shares``: of the blocks that reach a level, those asked for in it.
    """
    there, back, prompts, best = 1.0, 0.0, 0.0, 0.0
    for later in range(level, LEVELS):
        length = ENDS[later] - STARTS[later]
        back += there * shares[later]
        prompts += there * length * (1.0 - shares[later] / 2)
        there *= 1.0 - shares[later]
        best = max(best, back / prompts)
    return best
