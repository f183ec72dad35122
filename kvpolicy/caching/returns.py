"""How likely, and how soon, a block is asked for again: learned from what was, by classes of blocks and by age.

As in least hit density (Beckmann, Chen and Cidon, LHD, NSDI 2018), blocks are put into classes, and for each class the
share that is asked for again is counted at every age. Blocks that are gone are counted too, so that what the cache
holds does not decide what it learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

Class = Hashable
LEVELS = 24
FIRST_AGE = 8.0
"""Age at which level 1 begins, prompts; that of each further level is the square root of 2 times as high."""
STARTS: tuple[float, ...] = (0.0, *(FIRST_AGE * 2 ** (level / 2) for level in range(LEVELS - 1)))
"""Age at which each level begins, prompts."""
PRIOR_BLOCKS = 20.0
"""Blocks that the average over all classes counts for in each of them."""
PRIOR_SHARE = 0.01
"""Share that is asked for again in a level, before anything was seen; counts for ten blocks."""
FIT_EVERY = 64
"""Prompts between two evaluations of what was counted."""
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
        self._rates: Mapping[Class, tuple[float, ...]] = {}
        self._average: tuple[float, ...] = best_rates([PRIOR_SHARE] * LEVELS)
        self._aging: tuple[deque[Visit], ...] = tuple(deque() for _ in range(LEVELS))
        """Visits by level, oldest first."""

    def visit(self, blocks: dict[Class, int]) -> Visit:
        """A prompt asks for blocks of these classes. Call :meth:`returned` first for those asked for before."""
        self._prompts += 1
        now = Visit(self._prompts, blocks)
        self._aging[0].append(now)
        for name, count in blocks.items():
            self._counts(self._reached, name)[0] += count
        self._age()
        if self._prompts % DECAY_EVERY == 0:
            for counts in (*self._reached.values(), *self._returned.values()):
                counts[:] = [DECAY * count for count in counts]
        if self._prompts % FIT_EVERY == 0:
            self._fit()
        return now

    def join(self, visit: Visit, name: Class) -> None:
        """A block of class ``name`` is of that visit, too, but was not among those that its prompt asked for."""
        visit.blocks[name] = visit.blocks.get(name, 0) + 1
        self._counts(self._reached, name)[visit.level] += 1

    def old_visit(self, name: Class) -> Visit:
        """A visit too long ago to be counted, of one block."""
        visit = Visit(0, {name: 1})
        visit.level = LEVELS - 1
        return visit

    def returned(self, visit: Visit, name: Class) -> None:
        """A block of that visit, of class ``name``, is asked for again."""
        visit.blocks[name] -= 1
        self._counts(self._returned, name)[visit.level] += 1

    def rate(self, visit: Visit, name: Class) -> float:
        """Returns per prompt that a block of that visit, of class ``name``, promises from now on."""
        return self._rates.get(name, self._average)[visit.level]

    def _age(self) -> None:
        for level in range(LEVELS - 1):
            aging, end = self._aging[level], self._prompts - STARTS[level + 1]
            while aging and aging[0].at <= end:
                visit = aging.popleft()
                visit.level = level + 1
                self._aging[level + 1].append(visit)
                for name, count in visit.blocks.items():
                    self._counts(self._reached, name)[level + 1] += count
        last = self._aging[-1]
        while last and last[0].at <= self._prompts - 2 * STARTS[-1]:
            last.popleft()

    def _fit(self) -> None:
        totals = [
            [sum(counts[level] for counts in table.values()) for level in range(LEVELS)]
            for table in (self._returned, self._reached)
        ]
        pooled = [(back + 10 * PRIOR_SHARE) / (there + 10) for back, there in zip(*totals, strict=True)]
        self._average = best_rates(pooled)
        rates = {}
        for name, reached in self._reached.items():
            returned = self._counts(self._returned, name)
            shares = [
                min(1.0, (back + PRIOR_BLOCKS * share) / (there + PRIOR_BLOCKS))
                for back, there, share in zip(returned, reached, pooled, strict=True)
            ]
            rates[name] = best_rates(shares)
        self._rates = rates

    @staticmethod
    def _counts(table: dict[Class, list[float]], name: Class) -> list[float]:
        counts = table.get(name)
        if counts is None:
            counts = table[name] = [0.0] * LEVELS
        return counts


def best_rates(shares: list[float]) -> tuple[float, ...]:
    """By level, the largest rate of return that keeping a block up to some age can have:

        max over T of P(asked for before T) / E(prompts until it is asked for, at most up to T)

    which is Gittins' index of keeping it. ``shares``: of the blocks that reach a level, those asked for in it.
    """
    found = []
    for level in range(LEVELS):
        there, back, prompts, best = 1.0, 0.0, 0.0, 0.0
        for later in range(level, LEVELS):
            length = STARTS[later + 1] - STARTS[later] if later + 1 < LEVELS else STARTS[later]
            back += there * shares[later]
            prompts += there * length * (1.0 - shares[later] / 2)
            there *= 1.0 - shares[later]
            best = max(best, back / prompts)
        found.append(best)
    return tuple(found)
