"""How many of a victim's blocks are still on the device when it is resumed: expected at its preemption, learned from
what was found. The plugin and the built-in simulator have one :class:`Survival` per engine core."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, expm1
from typing import NamedTuple

from kvpolicy.events import Cause, Preemption

PRIOR_TOKENS = 256.0
"""Tokens written during an absence, before any was observed: about the length of an answer."""
PRIOR_WEIGHT = 2.0
"""Number of absences that the prior counts for."""
DECAY = 0.97
"""Weight of an absence over that of the next one: about the last 33 count."""
MIN_TOKENS = 1.0
"""The mean stays above 0 even where every victim is resumed at once."""
MIN_ENDS = 0.01
"""Where no absence has ended for long, the mean is bounded as if this share of one had."""
SMALL_RATIO, LARGE_RATIO = 1e-6, 600.0
"""Ratios beyond which a limit makes the mean half of itself, or no difference."""


@dataclass(slots=True)
class Absences:
    """Maximum likelihood estimate of the mean of exponentially distributed tokens, some of them cut off."""

    tokens: float = PRIOR_WEIGHT * PRIOR_TOKENS
    ends: float = PRIOR_WEIGHT

    @property
    def mean_tokens(self) -> float:
        """Tokens that are written until a victim is resumed."""
        return self.tokens / max(self.ends, MIN_ENDS)

    def mean_below(self, limit_tokens: float) -> float:
        """Mean of the absences that last less than ``limit_tokens``."""
        mean = self.mean_tokens
        ratio = limit_tokens / mean
        if ratio < SMALL_RATIO:
            return limit_tokens / 2
        return mean if ratio > LARGE_RATIO else mean - limit_tokens / expm1(ratio)

    def add(self, tokens: float, ended: bool) -> None:
        """``ended``: whether the absence ended after ``tokens``; otherwise it is only known that it lasted longer."""
        self.tokens = max(DECAY * self.tokens + tokens, MIN_TOKENS)
        self.ends = DECAY * self.ends + ended


class AtRisk(NamedTuple):
    """A preempted request's blocks in the queue of free blocks."""

    cause: Cause
    block_size: int
    hashed_blocks: int
    first_tokens: int
    """Tokens that can be written before the first of the blocks that may be lost is taken."""
    all_tokens: int
    """Tokens after which all of them are."""


@dataclass(slots=True)
class Survival:
    """Expects and learns how many blocks survive. Every call takes constant time, on average.

    The blocks of a victim go to the end of the queue of free blocks, its last block first; those without a hash go to
    its beginning. Blocks are taken from the beginning: by the requests that go on running, one for as many tokens as
    fit into it. The victim is resumed when other requests end and leave it memory. The more requests run, the faster
    they take blocks, and the sooner one of them ends: what matters is the number of tokens written in between. That
    number is taken as exponentially distributed with the mean of recent absences, so that

        expected loss = integral of exp(-t / mean) over the tokens t that take the victim's blocks.

    Where nothing survived, the absence is known only to have lasted longer than the blocks did. That is clear once the
    queue is empty while the victim still waits, often long before it is resumed.

    Preemptions by tools, and those for more urgent requests, are learned from by themselves. After a reset nothing is
    in the prefix cache.
    """

    absences: dict[Cause, Absences] = field(
        default_factory=lambda: {"memory": Absences(), "forced": Absences(), "displaced": Absences()}
    )
    _at_risk: dict[str, AtRisk] = field(default_factory=dict)
    """By preemption, as long as its outcome is of interest."""
    _waiting: dict[str, None] = field(default_factory=dict)
    """The preemptions among them whose requests are not admitted yet."""

    def hit_blocks(
        self, held_blocks: int, shared_blocks: int, hashed_blocks: int, free_blocks: int, block_size: int, cause: Cause
    ) -> float:
        """Held blocks expected to be found on the device at resume; never fewer than the shared ones. Pure."""
        if cause == "reset":
            return float(shared_blocks)
        first_tokens, all_tokens = _span(held_blocks, shared_blocks, hashed_blocks, free_blocks, block_size)
        mean = self.absences[cause].mean_tokens
        lost_tokens = mean * (exp(-first_tokens / mean) - exp(-all_tokens / mean))
        return max(float(shared_blocks), hashed_blocks - lost_tokens / block_size)

    def hit_tokens(self, hashed_tokens: int, cause: Cause) -> float | None:
        """Tokens expected to be found on the device at resume, where they do not follow from blocks; None where each
        block is ``block_size`` of them. Pure."""
        return None

    def absence_tokens(self, cause: Cause) -> float | None:
        """Tokens expected to be written until a request preempted for this cause has blocks again; None after a reset,
        when nothing is expected. Pure."""
        return None if cause == "reset" else self.absences[cause].mean_tokens

    def preempted(self, preemption_id: str, situation: Preemption) -> None:
        """A request was preempted. Without a free block, those that still wait have lost all that could be lost."""
        if situation.free_blocks == 0:
            for waiting in self._waiting:
                self._learn(waiting, 0)
            self._waiting.clear()
        if situation.cause == "reset":
            return
        size, hashed = situation.block_size, situation.hashed_blocks
        span = _span(situation.held_blocks, situation.shared_blocks, hashed, situation.free_blocks, size)
        self._at_risk[preemption_id] = AtRisk(situation.cause, size, hashed, *span)
        self._waiting[preemption_id] = None

    def admitted(self, preemption_id: str) -> None:
        """The request has blocks again, so that nothing more of it is lost."""
        self._waiting.pop(preemption_id, None)

    def closed(self, preemption_id: str, hit_tokens: int | None) -> None:
        """The preemption ended. ``hit_tokens``: found on the device at resume; None where that is not known."""
        self._waiting.pop(preemption_id, None)
        if hit_tokens is None:
            self._at_risk.pop(preemption_id, None)
        else:
            self._learn(preemption_id, hit_tokens)

    def forget(self) -> None:
        """The prefix cache was emptied: what will be found there says nothing of absences."""
        self._at_risk.clear()
        self._waiting.clear()

    def _learn(self, preemption_id: str, hit_tokens: int) -> None:
        risk = self._at_risk.pop(preemption_id, None)
        if risk is None or risk.first_tokens == risk.all_tokens:
            return
        lost_tokens = (risk.hashed_blocks - hit_tokens // risk.block_size) * risk.block_size
        absences = self.absences[risk.cause]
        if lost_tokens >= risk.all_tokens - risk.first_tokens:
            absences.add(risk.all_tokens, ended=False)
        elif lost_tokens > 0:
            absences.add(risk.first_tokens + lost_tokens, ended=True)
        else:
            absences.add(absences.mean_below(risk.first_tokens), ended=True)


@dataclass(slots=True)
class Share:
    """Share of recent victims that found what they could; 0 before any was seen."""

    found: float = 0.0
    seen: float = PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self.found / self.seen

    def add(self, found: bool) -> None:
        self.found, self.seen = DECAY * self.found + found, DECAY * self.seen + 1.0


@dataclass(slots=True)
class AllOrNothing(Survival):
    """What survives where a request has several block tables, as with windows and states.

    It finds tokens again only where every table has what they need. At its preemption an engine knows for how many
    tokens that is so (``hashed_tokens``): none once a request has written more than a window or a block of states, the
    prompt's last boundary before that. One block less, and nothing is found. So these tokens, and ``hashed_blocks``,
    the blocks that need not be loaded then, are expected times the share of recent victims that found all of theirs.

    How long victims are away cannot be told from what they find. An engine counts the tokens that it writes
    (:meth:`wrote`), and absences are learned from those between a preemption and its admission.
    """

    shares: dict[Cause, Share] = field(
        default_factory=lambda: {"memory": Share(), "forced": Share(), "displaced": Share()}
    )
    _findable: dict[str, tuple[Cause, int]] = field(default_factory=dict)
    """By preemption: its cause, and the tokens that were findable at it."""
    _away: dict[str, tuple[Cause, int]] = field(default_factory=dict)
    """By preemption, until the request has blocks again: its cause, and the tokens that had been written by then."""
    _written_tokens: int = 0

    def wrote(self, tokens: int) -> None:
        """A step was scheduled that writes so many tokens to the device."""
        self._written_tokens += tokens

    def share(self, cause: Cause) -> float:
        """Share of the victims that are expected to find all that was findable."""
        return 0.0 if cause == "reset" else self.shares[cause].value

    def hit_blocks(
        self, held_blocks: int, shared_blocks: int, hashed_blocks: int, free_blocks: int, block_size: int, cause: Cause
    ) -> float:
        return hashed_blocks * self.share(cause)

    def hit_tokens(self, hashed_tokens: int, cause: Cause) -> float:
        return hashed_tokens * self.share(cause)

    def preempted(self, preemption_id: str, situation: Preemption) -> None:
        """A request was preempted. One that could find nothing says nothing of what is found."""
        if situation.cause == "reset":
            return
        self._away[preemption_id] = situation.cause, self._written_tokens
        if situation.hashed_tokens:
            self._findable[preemption_id] = situation.cause, situation.hashed_tokens

    def admitted(self, preemption_id: str) -> None:
        self._back(preemption_id, True)

    def closed(self, preemption_id: str, hit_tokens: int | None) -> None:
        self._back(preemption_id, False)
        findable = self._findable.pop(preemption_id, None)
        if findable is not None and hit_tokens is not None:
            cause, tokens = findable
            self.shares[cause].add(hit_tokens >= tokens)

    def forget(self) -> None:
        self._findable.clear()
        self._away.clear()

    def _back(self, preemption_id: str, admitted: bool) -> None:
        """``admitted``: whether it has blocks again; otherwise it ended before it had any, and only lasted longer."""
        away = self._away.pop(preemption_id, None)
        if away is not None:
            cause, before = away
            self.absences[cause].add(self._written_tokens - before, ended=admitted)


def _span(
    held_blocks: int, shared_blocks: int, hashed_blocks: int, free_blocks: int, block_size: int
) -> tuple[int, int]:
    """Tokens that can be written before the first of the blocks at risk is taken, and after which all of them are."""
    ahead_blocks = free_blocks + held_blocks - hashed_blocks
    return ahead_blocks * block_size, (ahead_blocks + max(0, hashed_blocks - shared_blocks)) * block_size
