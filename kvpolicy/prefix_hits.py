"""How much of the prompts was found in a cache, by the tier that held it, when requests were first admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Sums over requests, in tokens of their prompts. A later admission, after a preemption, does not count."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    """Found in the prefix cache of the device."""
    host_tokens: int = 0
    """Found in host memory, behind those found on the device."""
    file_tokens: int = 0
    """Found in files, behind those found in host memory."""
    loaded_tokens: int = 0
    """Of those found in host memory and files, the ones that were loaded; the others were computed."""

    @property
    def found_tokens(self) -> int:
        """On all tiers together."""
        return self.device_tokens + self.host_tokens + self.file_tokens

    @classmethod
    def total(cls, parts: Iterable[PrefixHits]) -> PrefixHits:
        """The sums over all of these."""
        return cls(*(sum(column) for column in zip(*(astuple(part) for part in (cls(), *parts)), strict=True)))


def hit_rates(runs: Sequence[Sequence[Sequence[float]]], parts: int) -> list[float | None]:
    """The share of tokens looked up that were found, in each of so many equal parts of the runs' time, over all of
    them; None for a part without a lookup.

    ``runs``: of each run readings of (seconds since its begin, tokens looked up so far, those found), in order.
    """
    looked_up, found = [0.0] * parts, [0.0] * parts
    for run in runs:
        end_s, before = run[-1][0], (0.0, 0.0)
        for at_s, queries, hits in run:
            place = min(parts - 1, int(parts * at_s / end_s)) if end_s else 0
            looked_up[place] += queries - before[0]
            found[place] += hits - before[1]
            before = queries, hits
    return [hits / queries if queries > 0 else None for queries, hits in zip(looked_up, found, strict=True)]


NO_HITS = PrefixHits()


class PrefixHitTally:
    """Accumulates :class:`PrefixHits`."""

    __slots__ = ("_device", "_file", "_host", "_loaded", "_prompt")

    def __init__(self) -> None:
        self._prompt = self._device = self._host = self._file = self._loaded = 0

    def admitted(
        self, prompt_tokens: int, device_tokens: int, host_tokens: int = 0, file_tokens: int = 0, loaded_tokens: int = 0
    ) -> None:
        """Count the first admission of a request; see :class:`PrefixHits` for the tokens."""
        self._prompt += prompt_tokens
        self._device += device_tokens
        self._host += host_tokens
        self._file += file_tokens
        self._loaded += loaded_tokens

    def hits(self) -> PrefixHits:
        return PrefixHits(self._prompt, self._device, self._host, self._file, self._loaded)
