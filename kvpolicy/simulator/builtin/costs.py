"""What a preemption costs, exactly: the simulator knows what each step would have taken without it.

The definition is that of :mod:`kvpolicy.attribution.offline`: over the steps involved, duration less what the step
takes without anybody's repeated tokens; a step of which nothing is left then would not have been executed. Here the
step times are the hardware model's own, so nothing is fitted and there is no aftermath.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpolicy.attribution.ledger import Repeated
from kvpolicy.simulator.base import StepLoad, Times, load_of
from kvpolicy.simulator.builtin.live_request import Account, Copy, Step
from kvpolicy.simulator.link_queues import Sent


def without(load: StepLoad, parts: Iterable[Repeated[Account]]) -> StepLoad:
    """What is left of a step when those parts need not be computed."""
    tokens, decodes, read, pairs, prefills, before = load
    for part in parts:
        tokens -= part.tokens
        decodes -= part.decodes
        read -= part.kv_read_tokens
        pairs -= part.chunk_context
        prefills -= part.prefills
        before -= part.prefill_context
    return StepLoad(tokens, decodes, read, pairs, prefills, before)


def seconds(times: Times, load: StepLoad) -> float:
    """0 for a step that computes nothing."""
    return times.step_s(load) if load.scheduled_tokens else 0.0


def charge(step: Step, sent: Iterable[Sent[Copy]], times: Times) -> None:
    """Enter the step's extra time into the accounts of those it is due to.

    Where several share it, by what each did: seconds its copies overlapped the step, and the price of its repeated
    tokens; in equal parts where that is 0 for all of them.
    """
    weights: dict[Account, float] = {}
    for copy, transfer in sent:
        overlap_s = min(transfer.end_s, step.end_s) - max(transfer.start_s, step.began_s)
        if overlap_s > 0:
            weights[copy.account] = weights.get(copy.account, 0.0) + overlap_s
    load = load_of(step)
    own: dict[Account, list[Repeated[Account]]] = {}
    for part in step.repeated:
        own.setdefault(part.opened, []).append(part)
    for account, parts in own.items():
        price_s = max(0.0, seconds(times, load) - seconds(times, without(load, parts)))
        weights[account] = weights.get(account, 0.0) + price_s
    if not weights:
        return
    extra_s = step.end_s - step.began_s - seconds(times, without(load, step.repeated))
    total = sum(weights.values())
    for account, weight in weights.items():
        share_s = extra_s * (weight / total if total > 0 else 1.0 / len(weights))
        account.engine_s += share_s
        account.others_s += share_s * max(0, step.scheduled_requests - (account in own))
