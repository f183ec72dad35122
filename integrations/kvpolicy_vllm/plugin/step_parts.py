"""Reads the parts of a scheduled step from vLLM's output, without a loop over all of its requests."""

from __future__ import annotations

from typing import Any

from kvpolicy.arrays import causal_pairs
from kvpolicy.attribution.ledger import Step


def fill_parts(step: Step[Any], output: Any) -> None:
    """Fill in the step's parts; does nothing on a second call.

    One token of a request is a decode, several are a prefill chunk. The output holds the positions at which requests
    start in this step: where all requests decode, only their sum is needed.
    """
    if step.scheduled_requests:  # another observer has filled it already
        return
    scheduled = output.num_scheduled_tokens
    cached, decodes = output.scheduled_cached_reqs, len(scheduled)
    total, chunk_context = output.total_num_scheduled_tokens, 0
    start_sum = sum(cached.num_computed_tokens)
    for new in output.scheduled_new_reqs:
        start_sum += new.num_computed_tokens
    if total > decodes:
        chunks = [(request_id, tokens) for request_id, tokens in scheduled.items() if tokens > 1]
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, tokens in chunks:
            start = starts[request_id]
            chunk_context += causal_pairs(start, start + tokens)
            start_sum -= start
        decodes -= len(chunks)
    # All at once: a step whose parts cannot be read stays without any.
    step.scheduled_requests, step.scheduled_tokens = len(scheduled), total
    step.decode_requests, step.kv_read_tokens, step.chunk_context = decodes, start_sum + decodes, chunk_context
