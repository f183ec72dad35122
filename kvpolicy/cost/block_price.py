"""What a block of a prompt saves that is loaded rather than computed, by its place in the prompt: from a cost model.

It is what caching policies weigh. Constant parts, of a step or a transfer, are no block's: prices are marginal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from kvpolicy.cost.model import CostModel
from kvpolicy.events import Option, Preemption

WINDOW_TOKENS = 2048
"""The marginal cost of a token is taken over so many, behind as many others: between them lies a whole step's worth."""
STARTS = (0, *(2**power for power in range(7)))
"""Windows in front of the block at which prices are evaluated; in between they are linear, beyond them they rise as
between the last two."""


def block_price(
    model: CostModel, block_size: int, block_bytes: int, segment_bytes: int | None = None, running: int = 0
) -> Callable[[int], float]:
    """Seconds saved by loading a block rather than computing it, by its index in the prompt; 0 where a load costs more.

    All blocks have the same bytes, so that the order of these prices is also that of the prices per byte.
    ``running``: requests that decode beside, each with as many tokens as a window has.
    """
    window = max(1, WINDOW_TOKENS // block_size)
    at = [start * window for start in STARTS]

    def cost_s(kind: str, before: int, blocks: int) -> float:
        option = Option("recompute") if kind == "recompute" else Option("swap", (before + blocks) * block_size, "host")
        situation = _hit(before, before + blocks, block_size, block_bytes, segment_bytes or block_bytes, running)
        (cost,) = model.predict(situation, (option,))
        return cost.recompute_s if kind == "recompute" else cost.load_s

    def marginal_s(kind: str, before: int) -> float:
        return (cost_s(kind, before, 2 * window) - cost_s(kind, before, window)) / window

    shift = (3 * window - 1) / 2  # the second window is what is priced; this is the mean index of its blocks
    places = [place + shift for place in at]
    prices = [marginal_s("recompute", place) - marginal_s("swap", place) for place in at]

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
