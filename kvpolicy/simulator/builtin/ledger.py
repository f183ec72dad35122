"""Positions computed again, and to which preemption they are charged: as the plugin's ledger does.

A position below the highest one a request had ever reached is computed *again*. The account of the preemption that
lost it is charged, also where that one has closed since because the request was preempted once more.
"""

from __future__ import annotations

from kvpolicy.events import Ending, Outcome
from kvpolicy.simulator.builtin.live import Account, Live, Repeated, Step


def pairs(start: int, end: int) -> int:
    """(query token, context token) pairs of a prefill chunk over positions ``start`` to ``end``, the diagonal in."""
    return (end * (end + 1) - start * (start + 1)) // 2


def preempted(live: Live, account: Account) -> None:
    """Open an account; to those of fewer tokens nothing more can be charged because of it."""
    kept = [(tokens, who) for tokens, who in live.lost if tokens > account.tokens]
    through = [who for tokens, who in live.lost if tokens <= account.tokens]
    live.open = account
    live.lost = [(account.tokens, account), *kept]
    account.busy += 1
    for who in through:
        who.busy -= 1


def close(account: Account, ended: Ending, now_s: float) -> None:
    account.ended, account.closed_s = ended, now_s
    account.told_recomputed_tokens = account.recomputed_tokens


def outcome(account: Account) -> Outcome:
    """Of an account that is closed."""
    assert account.ended is not None
    admitted_s = account.closed_s if account.admitted_s is None else account.admitted_s
    wait_s = admitted_s - account.preempted_s
    return Outcome(
        preemption_id=account.preemption_id,
        ended=account.ended,
        closed_s=account.closed_s,
        victim_delay_s=account.closed_s - account.preempted_s - wait_s,
        wait_blocks_s=wait_s,
        local_hit_tokens=account.local_hit_tokens,
        loaded_tokens=account.loaded_tokens,
        recomputed_tokens=account.told_recomputed_tokens,
        first_step=account.first_step,
        last_step=max(account.first_step, account.last_step),
        engine_s=account.engine_s,
        others_delay_s=account.others_s,
    )


def count(step: Step, live: Live, start: int, end: int) -> list[Account]:
    """Enter what of a chunk is computed again, and whether the request is back.

    Returns the accounts that nothing more can be charged to.
    """
    opened = live.open
    if opened is not None and not opened.resumed:
        opened.resumed, opened.local_hit_tokens = True, max(0, start - opened.loaded_tokens)
    position = start
    for tokens, who in live.lost:
        stop = min(end, tokens)
        if position >= stop:
            continue
        who.recomputed_tokens += stop - position
        who.last_step = step.number
        live.recomputed += stop - position
        step.repeated.append(_repeated(who, position, stop, start, end))
        position = stop
    if opened is not None and end >= opened.tokens:
        opened.last_step = step.number
        step.back.append(opened)
        live.open = None
    through = [who for tokens, who in live.lost if tokens <= end]
    live.lost = [(tokens, who) for tokens, who in live.lost if tokens > end]
    return through


def _repeated(who: Account, start: int, stop: int, chunk_start: int, chunk_end: int) -> Repeated:
    """Positions ``start`` to ``stop`` of a chunk, as what goes when they need not be computed."""
    tokens = stop - start
    if chunk_end - chunk_start == 1:  # the step counted this one token as a decode
        return Repeated(who, tokens, chunk_end, 0, 1, 0, 0)
    if stop == chunk_end - 1:  # one new token remains of the chunk: it would have been a decode
        return Repeated(who, tokens, -chunk_end, pairs(start, chunk_end), -1, 1, start)
    if stop == chunk_end:  # nothing remains, whoever the earlier positions are charged to
        return Repeated(who, tokens, 0, pairs(start, stop), 0, 1, start)
    return Repeated(who, tokens, 0, pairs(start, stop), 0, 0, -tokens)
