"""The work of a trace's steps under a known law, and p / d at a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.attribution.step_work import (
    Batch,
    TokenPrices,
    batch_prices,
    batches_of,
    price_ratio,
    step_work,
    token_prices,
)
from kvpolicy.headroom import NO_STEP_TIMES, headroom
from kvpolicy.trace import TraceError
from tests.attribution.step_rows import (
    DECODE_S,
    FIXED_S,
    PAIR_S,
    READ_S,
    TOKEN_S,
    law,
    one_after_another,
    step,
    transfer,
)
from tests.synthetic import situation

MODEL = StepTimeModel(
    FIXED_S, (TOKEN_S, DECODE_S, READ_S, PAIR_S, 0.0, 0.0), "core a", 100, HeldOutError(0.0, 0.0, 0.0)
)


def table(*rows: dict[str, Any]) -> pa.Table:
    return traces.from_rows("steps", one_after_another(list(rows), 0.0))


def again(name: str, tokens: int, reads: int = 0, pairs: int = 0, decodes: int = 0) -> dict[str, Any]:
    return {
        "preemption_id": name,
        "tokens": tokens,
        "kv_read_tokens": reads,
        "chunk_context": pairs,
        "decodes": decodes,
    }


def test_recomputed_tokens_cost_what_the_step_is_longer_for_them() -> None:
    """4 requests decode at 400 tokens; in the second step 100 tokens of a fifth are recomputed, for it."""
    pairs = 100 * 101 // 2
    found = step_work(
        table(step(0, 0.0, (4, 4, 400, 0)), step(1, 0.0, (104, 4, 404, pairs), repeated=[again("a-1", 100, 0, pairs)])),
        MODEL,
    )
    assert (found.work.decoded_tokens, found.work.recomputed_tokens) == (8, 100)
    assert found.work.recompute_s == pytest.approx(100 * TOKEN_S + pairs * PAIR_S)
    assert found.work.decode_s == pytest.approx(law(4, 4, 400, 0) + law(4, 4, 404, 0))
    assert found.work.busy_s == pytest.approx(law(4, 4, 400, 0) + law(104, 4, 404, pairs))
    assert found.recompute_s == {"a-1": pytest.approx(100 * TOKEN_S + pairs * PAIR_S)}


def test_the_victims_next_token_would_have_been_a_decode() -> None:
    """Its chunk of 8 lost tokens and a new one counts as no decode; without the 8 it would have been one."""
    found = step_work(table(step(0, 0.0, (9, 0, 0, 45), repeated=[again("a-1", 8, -9, 45, -1)])), MODEL)
    assert (found.work.decoded_tokens, found.work.recomputed_tokens) == (1, 8)
    assert found.work.decode_s == pytest.approx(law(1, 1, 9, 0))
    assert found.work.recompute_s == pytest.approx(law(9, 0, 0, 45) - law(1, 1, 9, 0))


def test_a_step_of_nothing_else_counts_in_full_and_is_shared_by_tokens() -> None:
    row = step(0, 0.0, (40, 0, 0, 500), repeated=[again("a-1", 30, 0, 400), again("a-2", 10, 0, 100)])
    found = step_work(table(row, step(1, 0.0, (0, 0, 0, 0), extra_s=1.0)), MODEL)
    whole_s = law(40, 0, 0, 500)
    assert found.work.recompute_s == pytest.approx(whole_s) and found.work.decode_s == 0.0
    assert found.recompute_s == {"a-1": pytest.approx(0.75 * whole_s), "a-2": pytest.approx(0.25 * whole_s)}
    assert found.work.busy_s == pytest.approx(whole_s), "a step that computes nothing is no work"


def test_prices_of_the_steps_that_ran() -> None:
    """A chunk of 100 tokens beside 4 decodes, 20 tokens in a step of their own, which count in full, and two decodes
    alone; recomputed tokens are prompt tokens like any others."""
    pairs = 100 * 101 // 2
    steps = table(
        step(0, 0.0, (104, 4, 404, pairs), repeated=[again("a-1", 50, 0, 40)]),
        step(1, 0.0, (20, 0, 0, 210)),
        step(2, 0.0, (2, 2, 200, 0)),
        step(3, 0.0, (0, 0, 0, 0)),
    )
    found = token_prices(steps, MODEL)
    assert (found.prompt_tokens, found.decoded_tokens, found.decode_steps, found.batch) == (120, 6, 2.0, 3.0)
    assert found.prompt_s == pytest.approx(100 * TOKEN_S + pairs * PAIR_S + law(20, 0, 0, 210))
    decodes_s = law(4, 4, 404, 0) + law(2, 2, 200, 0)
    assert found.price_ratio == pytest.approx(found.prompt_s / 120 / (decodes_s / 6))
    assert found + TokenPrices() == found
    unknown = token_prices(steps, None)
    assert (unknown.prompt_tokens, unknown.price_ratio, (found + unknown).prompt_s) == (120, None, None)


def test_a_repetition_of_no_tokens_costs_nothing() -> None:
    row = step(0, 0.0, (104, 4, 404, 5050), repeated=[again("a-1", 100, 0, 5050), again("a-2", 0)])
    found = step_work(table(row, step(1, 0.0, (4, 4, 408, 0), repeated=[again("a-3", 0)])), MODEL)
    spent_s = law(104, 4, 404, 5050) - law(4, 4, 404, 0)
    assert found.work.recompute_s == pytest.approx(spent_s)
    assert found.recompute_s == {"a-1": pytest.approx(spent_s), "a-2": 0.0, "a-3": 0.0}


def test_tokens_that_make_a_step_no_dearer_cost_nothing() -> None:
    """By a law in which only decodes cost, a step with the victim's new token as a decode would have been dearer."""
    odd = StepTimeModel(FIXED_S, (0.0, DECODE_S, 0.0, 0.0, 0.0, 0.0), "core a", 100, MODEL.error)
    found = step_work(table(step(0, 0.0, (9, 0, 0, 45), repeated=[again("a-1", 8, -9, 45, -1)])), odd)
    assert found.work.recompute_s == 0.0 and found.work.decode_s == pytest.approx(law(9, 0, 0, 45)), "and no more"


def test_no_more_is_charged_than_was_measured() -> None:
    """By a model whose prompt tokens are three times too dear, as where few steps hold prompts, and in a step that took
    twice its time: what is split is the time that steps took."""
    pairs = 100 * 101 // 2
    alone, beside = (
        step(0, 0.0, (4, 4, 400, 0)),
        step(1, 0.0, (104, 4, 404, pairs), repeated=[again("a-1", 100, 0, pairs)]),
    )
    found = step_work(
        table(alone, beside), replace(MODEL, per_part_s=(3 * TOKEN_S, DECODE_S, READ_S, 3 * PAIR_S, 0, 0))
    )
    work = found.work
    assert work.recompute_s is not None and work.decode_s is not None and work.busy_s is not None
    assert 100 * TOKEN_S + pairs * PAIR_S < work.recompute_s < law(104, 4, 404, pairs)
    assert work.recompute_s + work.decode_s == pytest.approx(work.busy_s)
    slow = beside | {"duration_s": 2 * law(104, 4, 404, pairs)}
    assert step_work(table(alone, slow), MODEL).recompute_s == {
        "a-1": pytest.approx(2 * (100 * TOKEN_S + pairs * PAIR_S))
    }


def beside_a_copy(name: str) -> tuple[list[dict[str, Any]], pa.Table]:
    """50 steps of 4 decodes on a machine that takes 1.2 times as long as the law, and half as long again in the ten
    that a copy overlaps. One of these recomputes 100 tokens."""
    pairs = 100 * 101 // 2
    rows = [step(number, 0.0, (4, 4, 400, 0)) for number in range(50)]
    rows[24] = step(24, 0.0, (104, 4, 400, pairs), repeated=[again("a-1", 100, 0, pairs)])
    for row in rows:
        row["duration_s"] *= 1.2 * (1.5 if 20 <= row["step"] < 30 else 1.0)
    one_after_another(rows, 0.0)
    copy = transfer(name, 20, "load", rows[20]["start_s"] + 1e-6, rows[29]["start_s"] + 1e-6)
    return rows, traces.from_rows("transfers", [copy])


def test_what_copies_add_to_steps_is_no_price_of_what_these_compute() -> None:
    """It is what a swap costs. With it, the bound is what the run would have won without its preemptions."""
    rows, copies = beside_a_copy("a-2")
    found = step_work(table(*rows), MODEL, copies)
    lost_s = 1.2 * (100 * TOKEN_S + 100 * 101 // 2 * PAIR_S)
    assert found.work.decode_s == pytest.approx(1.2 * 50 * law(4, 4, 400, 0))
    assert found.recompute_s == {"a-1": pytest.approx(lost_s)}
    assert found.work.busy_s is not None
    swap_s = found.work.busy_s - 1.2 * 50 * law(4, 4, 400, 0) - lost_s
    bound = headroom(replace(found.work, swap_s=swap_s), None).bound
    assert bound == pytest.approx(found.work.busy_s / (1.2 * 50 * law(4, 4, 400, 0)) - 1)
    prices = token_prices(table(*rows), MODEL, copies)
    assert (prices.decode_s, prices.prompt_s) == (pytest.approx(found.work.decode_s), pytest.approx(lost_s))


def test_without_steps_beside_no_copy_the_model_says_how_long_they_take() -> None:
    rows, copies = beside_a_copy("a-2")
    found = step_work(table(*rows[20:30]), MODEL, None)
    assert found.work.decode_s == pytest.approx(1.8 * 10 * law(4, 4, 400, 0))
    rows, copies = beside_a_copy("a-2")
    found = step_work(traces.from_rows("steps", rows[20:30]), MODEL, copies)
    assert found.work.decode_s == pytest.approx(10 * law(4, 4, 400, 0))


def test_copies_that_belong_to_no_preemption_are_no_cost_of_swaps() -> None:
    """Prompts that are stored in host memory slow steps down with or without preemptions."""
    rows, copies = beside_a_copy("cache")
    found = step_work(table(*rows), MODEL, copies)
    assert found.work.decode_s == pytest.approx(1.2 * (40 + 1.5 * 10) * law(4, 4, 400, 0))


def test_a_step_after_some_that_were_left_out_is_no_slower_than_those_around_it() -> None:
    """It has the aftermath of what was left out, if any, and none of the chunk that was recorded before."""
    cold = replace(MODEL, per_part_s=(TOKEN_S, DECODE_S, READ_S, PAIR_S, 2e-3, 1e-3))
    rows = [step(number, 0.0, (4, 4, 400, 0), weight=1.0, left_out=0) for number in (*range(8), *range(40, 48))]
    rows[7] = step(7, 0.0, (304, 4, 400, 45150), weight=1.0, left_out=0)
    rows[8] |= {"left_out": 32, "duration_s": law(4, 4, 400, 0) + 2e-3}
    assert step_work(table(*rows), cold).work.decode_s == pytest.approx(16 * law(4, 4, 400, 0))


def test_an_idle_step_that_was_not_recorded_leaves_no_aftermath() -> None:
    """One step of a server without requests: the chunk before it is the second step before the next one."""
    cold = replace(MODEL, per_part_s=(TOKEN_S, DECODE_S, READ_S, PAIR_S, 2e-3, 1e-3))
    rows = [
        step(0, 0.0, (304, 4, 400, 45150)),
        step(2, 0.0, (4, 4, 400, 0), 1e-3),
        step(3, 0.0, (4, 4, 400, 0)),
    ]
    assert step_work(table(*rows), cold).work.decode_s == pytest.approx(3 * law(4, 4, 400, 0))


def test_without_a_model_seconds_are_unknown() -> None:
    found = step_work(table(step(0, 0.0, (9, 0, 0, 45), repeated=[again("a-1", 8, -9, 45, -1)])), None)
    assert (found.work.decode_s, found.work.recompute_s, found.recompute_s) == (None, None, {})
    assert step_work(table(step(0, 0.0, (4, 4, 400, 0))), None).work.recompute_s == 0.0, "nothing was recomputed"


def test_a_step_that_repeats_more_than_it_computes_is_refused() -> None:
    with pytest.raises(TraceError, match=r"steps, row 1 \(step 7\): repeated holds more tokens than scheduled_tokens"):
        step_work(
            table(step(6, 0.0, (1, 1, 10, 0)), step(7, 0.0, (5, 0, 0, 15), repeated=[again("a-1", 6, 0, 15)])), MODEL
        )


def test_the_aftermath_belongs_to_the_step_that_leaves_it() -> None:
    """Half a chunk of 256 tokens: half of 3 ms, in the two steps after it."""
    cold = StepTimeModel(FIXED_S, (TOKEN_S, DECODE_S, READ_S, PAIR_S, 2e-3, 1e-3), "core a", 100, MODEL.error)
    assert cold.own_s(128, 0, 0, 0) == pytest.approx(MODEL.own_s(128, 0, 0, 0) + 1.5e-3)
    parts = np.array([[132.0, 4.0, 400.0, 9000.0], [4.0, 4.0, 404.0, 0.0], [4.0, 4.0, 408.0, 0.0]])
    assert cold.predict(parts).sum() == pytest.approx(cold.own_s(*parts.T).sum())


def test_a_recomputed_token_over_a_decoded_one() -> None:
    """8 requests of 100 tokens: a step of law(8, 8, 808, 0) for 8 tokens; 50 more tokens attend to each other."""
    ratio = price_ratio(MODEL, Batch(8, 800, 50))
    p, d = TOKEN_S + PAIR_S * 51 / 2, law(8, 8, 808, 0) / 8
    assert ratio == pytest.approx(p / d)
    assert price_ratio(MODEL, Batch(64, 6400, 50)) > ratio, "a decoded token is cheaper in a larger batch"


def test_prices_of_the_measured_batches() -> None:
    found = batch_prices(MODEL, [Batch(8, 800, 50), Batch(64, 6400, 50), Batch(2, 200, 50)])
    assert (found.min_requests, found.max_requests) == (2, 64)
    assert found.lowest == price_ratio(MODEL, Batch(2, 200, 50))
    assert found.highest == price_ratio(MODEL, Batch(64, 6400, 50))
    told = found.sentence()
    assert told.startswith(f"beside 2 to 64 requests a recomputed token takes {100 * found.lowest:.2g}% to ")
    assert f"at most {10 * found.highest:.2g}% of throughput is to be won by choosing better" in told
    assert "beside 1 request a recomputed token takes" in batch_prices(MODEL, [Batch(1, 9, 50)] * 2).sentence()


def test_what_a_profile_lacks_is_said() -> None:
    alone = situation(100, running_requests=0, batch_tokens=0)
    beside = situation(100, running_requests=3, batch_tokens=600)
    assert batches_of([alone, beside]) == [Batch(3, 600, 100)]
    assert batch_prices(MODEL, batches_of([alone])).sentence() == (
        "how much of throughput is to be won by choosing better is not known: nothing ran beside a victim."
    )
    assert NO_STEP_TIMES in batch_prices(None, [Batch(8, 800, 50)]).sentence()
