"""A model's predictions through compiled arithmetic. Importing it needs numba, and calling it nothing heavier."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.cost.compile import compiled_pair
from kvpolicy.cost.forest import Nodes
from kvpolicy.cost.kernel import Predictor
from kvpolicy.cost.masks import arrays
from kvpolicy.cost.packed import Packed
from kvpolicy.drafts import draft_of
from kvpolicy.events import Cost, Option, Preemption

_cost = draft_of(Cost)


def predictor(packed: Packed, forests: Sequence[Nodes | None], with_delay: bool) -> Predictor:
    """``predict`` of a packed model: for recompute, for swap, or for both in that order. ``forests`` by kind."""
    pair = compiled_pair()
    n, c = arrays(packed, forests)

    def predict(situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...] | None:
        count = len(options)
        if not 1 <= count <= 2:
            return None
        swap_alone = options[0].kind == "swap"
        if count == 2 and (swap_alone or options[1].kind != "swap"):
            return None
        # Unpacked at once and passed on one by one: slices of a tuple would take as long as the forest.
        (
            usable, ratio_low, ratio_high, again_s, again_1, again_2, again_3, again_stall, again_low, again_high,
            again_out, again_delay, swap_s, swap_1, swap_2, swap_3, swap_stall, swap_low, swap_high, swap_out,
            swap_delay,
        ) = pair(
            n, c, situation.computed_tokens, situation.shared_blocks, situation.held_blocks, situation.block_size,
            situation.block_bytes, situation.segment_bytes, situation.queued_save_bytes, situation.queued_load_bytes,
            situation.running_requests, situation.batch_tokens, situation.free_blocks, situation.waiting_requests,
        )  # fmt: skip
        if not usable:
            return None
        if not swap_alone:
            recompute = _cost(
                again_s, again_1, again_2, again_3, again_stall, again_low, again_high, 0.0, 0.0, again_out,
                again_delay if with_delay else None,
            )  # fmt: skip
            if count == 1:
                return (recompute,)
        else:
            ratio_low = ratio_high = 0.0
        swap = _cost(
            swap_s, swap_1, swap_2, swap_3, swap_stall, swap_low, swap_high, ratio_low, ratio_high, swap_out,
            swap_delay if with_delay else None,
        )  # fmt: skip
        return (swap,) if swap_alone else (recompute, swap)

    return predict
