"""Who gets a step's tokens first among the running requests: those that decode, then those whose prompt is computed.

Both schedulers give out a step's token budget in the order of the running list. By rank alone, a newcomer with a long
prompt would take all of it, chunk after chunk, and no stream would go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import TypeVar

R = TypeVar("R", bound=Hashable)
MIN_PROMPT_SHARE = 0.25
"""Share of a step's tokens that those that decode must leave to prompts, or prompts have them by rank."""


def decodes_first(
    running: Sequence[R],
    in_prefill: Container[R],
    fits: Callable[[Sequence[R]], bool],
    budget_tokens: int,
    min_chunk_tokens: int = 1,
) -> list[R] | None:
    """The running requests with those that decode before those ``in_prefill``, each group in its present order.

    None where they stand so already, and where this step's growth does not fit (``fits``, asked with the new order):
    the last of the list then loses its blocks, and that is to be the last by rank. None, too, where those that decode,
    with a token each, would leave prompts less than ``MIN_PROMPT_SHARE`` of the step's ``budget_tokens``, or less than
    ``min_chunk_tokens``, the shortest chunk that the engine computes: a prompt of the best rank would hardly go on.
    """
    prefills = [one for one in running if one in in_prefill]
    if not prefills or prefills == running[len(running) - len(prefills) :]:
        return None
    decoding = [one for one in running if one not in in_prefill]
    if budget_tokens - len(decoding) < max(MIN_PROMPT_SHARE * budget_tokens, min_chunk_tokens):
        return None
    anew = decoding + prefills
    return anew if fits(anew) else None
