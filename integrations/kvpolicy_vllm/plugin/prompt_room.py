"""Whether a step has room for a prompt that vLLM computes whole. Called by
:mod:`kvpolicy_vllm.plugin.config_refusals`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def longer_than_a_step(config: VllmConfig) -> str:
    """Why requests would wait forever, and what would be right; empty where none does.

    On a CPU without AMX vLLM computes prompts of MLA models whole, and raises the tokens that a step may compute to the
    model's length. The scheduler's own limit it leaves: that of ``--max-num-scheduled-tokens``, or, with drafted
    tokens, the lower number from before, which it has set there. A longer prompt never fits into a step. Nor does a
    request that is preempted beyond it and recomputed. vLLM 0.32 does so with and without kvpolicy.
    """
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    room = getattr(scheduler, "max_num_scheduled_tokens", None)  # not in all versions, and None without either
    if scheduler.enable_chunked_prefill or room is None or room >= longest:
        return ""
    right, beside = f"--max-num-scheduled-tokens {longest}", ""
    if config.speculative_config is not None:  # the configuration no longer tells which of two flags the limit is from
        right, beside = f"--max-num-batched-tokens {longest}, or {right} where that flag is given", "beside drafts "
    return (
        f"vLLM computes this model's prompts whole here, and {beside}at most {room} tokens in a step: a longer prompt, "
        f"or a longer request that is preempted, would wait forever, and all behind it. Give {right}, or a "
        f"--max-model-len of at most {room}"
    )
