"""What a scheduled step is made of, read off vLLM's output of it without going through all of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy_vllm.plugin.ledger import Step, pairs


def fill_parts(step: Step, output: Any, requests: Mapping[str, Any]) -> None:
    """Enter a step's parts, once: nothing is done where they are there.

    One token of a request is a decode, more are a prefill chunk. ``requests``: by id, with ``num_computed_tokens``
    already advanced past this step; only those with a chunk are looked at. Where each began is in the output itself.
    """
    scheduled = output.num_scheduled_tokens
    if step.scheduled_requests or not scheduled:
        return
    step.scheduled_requests, step.scheduled_tokens = len(scheduled), output.total_num_scheduled_tokens
    begins = sum(output.scheduled_cached_reqs.num_computed_tokens)
    for new in output.scheduled_new_reqs:
        begins += new.num_computed_tokens
    decodes = len(scheduled)
    if step.scheduled_tokens > decodes:
        for request_id, tokens in [(name, tokens) for name, tokens in scheduled.items() if tokens > 1]:
            end = requests[request_id].num_computed_tokens
            step.chunk_context += pairs(end - tokens, end)
            begins -= end - tokens
            decodes -= 1
    step.decode_requests, step.kv_read_tokens = decodes, begins + decodes
