"""Exact cost of preemptions: the simulator knows what each step would have taken undisturbed.

The definition is that of :mod:`kvpolicy.attribution.offline`: summed over the steps involved, the duration less what
the step takes without repeated tokens. A step of which nothing is left then would not have been executed and counts in
full. Step times are those of the hardware model, so nothing is fitted and there is no aftermath.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpolicy.attribution.ledger import Repeated
from kvpolicy.simulator.base import StepLoad, Times, load_of
from kvpolicy.simulator.builtin.live_request import Account, CopyJob, Step
from kvpolicy.simulator.link_queues import RunningCopy


def without(load: StepLoad, parts: Iterable[Repeated[Any]]) -> StepLoad:
    """The load of a step less these repeated parts."""
    tokens, decodes, read_tokens, pairs, prefills, prefill_context = load
    for part in parts:
        tokens -= part.tokens
        decodes -= part.decodes
        read_tokens -= part.kv_read_tokens
        pairs -= part.chunk_context
        prefills -= part.prefills
        prefill_context -= part.prefill_context
    return StepLoad(tokens, decodes, read_tokens, pairs, prefills, prefill_context)


def seconds(times: Times, load: StepLoad) -> float:
    """Seconds of a step; 0 where it computes nothing."""
    return times.step_s(load) if load.scheduled_tokens else 0.0


def charge(step: Step, running_copies: Iterable[RunningCopy[CopyJob]], times: Times) -> None:
    """Charge the step's extra time to the preemptions that caused it.

    Several preemptions share it in proportion to the seconds that their copies overlapped the step plus the seconds of
    their repeated tokens; equally where these are 0 for all of them.
    """
    weights: dict[Account | None, float] = {}
    """Copies from and to the cache take their part, which is charged to nobody."""
    for job, transfer in running_copies:
        overlap_s = min(transfer.end_s, step.end_s) - max(transfer.start_s, step.began_s)
        if overlap_s > 0:
            account = job.account
            weights[account] = weights.get(account, 0.0) + overlap_s
    load = load_of(step)
    parts_by_account: dict[Account, list[Repeated[Account]]] = {}
    for part in step.repeated:
        parts_by_account.setdefault(part.opened, []).append(part)
    for account, parts in parts_by_account.items():
        price_s = max(0.0, seconds(times, load) - seconds(times, without(load, parts)))
        weights[account] = weights.get(account, 0.0) + price_s
    if not weights:
        return
    extra_s = step.end_s - step.began_s - seconds(times, without(load, step.repeated))
    total = sum(weights.values())
    for account, weight in weights.items():
        if account is None:
            continue
        share_s = extra_s * (weight / total if total > 0 else 1.0 / len(weights))
        account.engine_s += share_s
        account.others_s += share_s * max(0, step.scheduled_requests - (account in parts_by_account))
