"""What a block of a prompt saves that is loaded rather than computed, by its place in the prompt: from predicted costs.

It is what caching policies weigh, in a server and in the simulators. Constant parts, of a step or a transfer, are no
block's: prices are marginal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from kvpolicy.events import Cost, Option, Preemption

WINDOW_TOKENS = 2048
"""The marginal cost of a token is taken over so many, behind as many others: between them lies a whole step's worth."""
STARTS = (0, *(2**power for power in range(7)))
"""Windows in front of the block at which prices are evaluated; in between they are linear, beyond them they rise as
between the last two."""
SAMPLED_AT = tuple(2**power - 1 for power in range(18))
"""Indices of blocks whose prices stand for all, where prices are handed on."""
RENEWED_STEPS = 256
"""Steps for which prices, and which lengths are worth storing, are remembered: predictions change with the batch and by
what is learned."""
Predict = Callable[[Preemption, Sequence[Option]], Sequence[Cost]]
"""Gives one cost per option, as a cost model's ``predict`` does, or none at all."""


class Beside:
    """The most requests that ran at once lately, for which blocks are priced: one quiet step says little of those that
    come."""

    def __init__(self) -> None:
        self._most = self._most_before = 0

    def add(self, running: int) -> None:
        """So many run in a step."""
        if running > self._most:
            self._most = running

    def renew(self) -> None:
        """Prices are predicted anew: what was before the last time counts no longer."""
        self._most, self._most_before = 0, self._most

    @property
    def most(self) -> int:
        """At least 1."""
        return max(1, self._most, self._most_before)


def equal_price(index: int) -> float:
    """Where nothing predicts costs, all blocks save the same."""
    return 1.0


def block_price(
    predict: Predict, block_size: int, block_bytes: int, segment_bytes: int | None = None, running: int = 1
) -> Callable[[int], float]:
    """Seconds saved by loading a block rather than computing it, by its index in the prompt; 0 where a load costs more.
    :func:`equal_price` where ``predict`` gives no costs.

    All blocks have the same bytes, so that the order of these prices is also that of the prices per byte.
    ``running``: requests that decode beside, each with as many tokens as a window has. The engine waits for a load that
    is all it has to do, and a cache that has to choose seldom serves one request alone.
    """
    window = max(1, WINDOW_TOKENS // block_size)
    at = [start * window for start in STARTS]

    def saved_s(before: int, blocks: int) -> float | None:
        options = Option("recompute"), Option("swap", (before + blocks) * block_size, "host")
        situation = _hit(before, before + blocks, block_size, block_bytes, segment_bytes or block_bytes, running)
        costs = predict(situation, options)
        return costs[0].recompute_s - costs[1].load_s if costs else None

    prices = []
    for before in at:
        two, one = saved_s(before, 2 * window), saved_s(before, window)
        if two is None or one is None:
            return equal_price
        prices.append((two - one) / window)

    shift = (3 * window - 1) / 2  # the second window is what is priced; this is the mean index of its blocks
    return _linear([place + shift for place in at], prices)


def read_first(price: Callable[[int], float], read_s: float) -> Callable[[int], float]:
    """Seconds saved by a block, by its index, that is in host memory only after so many seconds, as one of files."""
    return lambda index: max(0.0, price(index) - read_s)


def sampled(price: Callable[[int], float]) -> tuple[float, ...]:
    """Prices at :data:`SAMPLED_AT`, from which :func:`interpolated` makes the others."""
    return tuple(map(price, SAMPLED_AT))


def interpolated(prices: Sequence[float]) -> Callable[[int], float]:
    """Seconds saved by a block, by its index, from what :func:`sampled` gave: linear in between, and beyond."""
    return _linear(SAMPLED_AT, prices)


def _linear(places: Sequence[float], prices: Sequence[float]) -> Callable[[int], float]:
    """At least 0, linear between the places and beyond them."""

    def price(index: int) -> float:
        right = min(max(1, bisect_right(places, index)), len(places) - 1)
        left = right - 1
        slope = (prices[right] - prices[left]) / (places[right] - places[left])
        price_s: float = prices[left] + slope * (index - places[left])
        return max(0.0, price_s)

    return price


def _hit(before: int, blocks: int, block_size: int, block_bytes: int, segment_bytes: int, running: int) -> Preemption:
    """A prompt of so many blocks, the first ``before`` of which are on the device, and all in host memory."""
    return Preemption(
        time_s=0.0,
        computed_tokens=blocks * block_size,
        prompt_tokens=blocks * block_size,
        output_tokens=0,
        block_size=block_size,
        block_bytes=block_bytes,
        segment_bytes=segment_bytes,
        held_blocks=blocks,
        shared_blocks=before,
        hashed_blocks=blocks,
        hit_blocks=before,
        save_blocks=0.0,
        device_blocks=4 * blocks,
        free_blocks=2 * blocks,
        short_blocks=0,
        host_blocks=4 * blocks,
        free_host_blocks=2 * blocks,
        running_requests=running,
        waiting_requests=0,
        batch_tokens=running * WINDOW_TOKENS,
        queued_save_bytes=0,
        queued_load_bytes=0,
        earlier_preemptions=0,
        priority=0,
        cause="memory",
    )
