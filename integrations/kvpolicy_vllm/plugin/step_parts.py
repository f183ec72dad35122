"""What a scheduled step is made of, read off vLLM's output of it without going through all of its requests."""

from __future__ import annotations

from typing import Any

from kvpolicy.arrays import causal_pairs
from kvpolicy.attribution.ledger import Step


def fill_parts(step: Step[Any], output: Any) -> None:
    """Enter a step's parts, once.

    One token of a request is a decode, more are a prefill chunk. The positions at which requests begin in this step
    are in the output: where everybody decodes, their sum is all that is needed.
    """
    if step.scheduled_requests:  # another observer has asked before
        return
    scheduled = output.num_scheduled_tokens
    cached, decodes = output.scheduled_cached_reqs, len(scheduled)
    step.scheduled_requests, step.scheduled_tokens = decodes, output.total_num_scheduled_tokens
    begun = sum(cached.num_computed_tokens)
    for new in output.scheduled_new_reqs:
        begun += new.num_computed_tokens
    if step.scheduled_tokens > decodes:
        chunks = [(request_id, tokens) for request_id, tokens in scheduled.items() if tokens > 1]
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, tokens in chunks:
            begin = begins[request_id]
            step.chunk_context += causal_pairs(begin, begin + tokens)
            begun -= begin
        decodes -= len(chunks)
    step.decode_requests, step.kv_read_tokens = decodes, begun + decodes
