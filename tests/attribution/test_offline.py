"""The definition of overhead: worked by hand, against known laws, and on traces that are not whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.attribution.step_time_fit import PARTS, fit_step_time, with_aftermath
from kvpolicy.regression.nnls import nonnegative_fit, robust_nonnegative_fit
from kvpolicy.trace import Header, Trace, TraceError

FIXED_S, TOKEN_S, DECODE_S, READ_S, PAIR_S = 2e-3, 3e-5, 1e-4, 1e-7, 2e-9
Row = dict[str, Any]


def law(tokens: float, decodes: float, reads: float, pairs: float) -> float:
    return FIXED_S + TOKEN_S * tokens + DECODE_S * decodes + READ_S * reads + PAIR_S * pairs


def step(number: int, start_s: float, parts: tuple[int, int, int, int], extra_s: float = 0.0, **more: Any) -> Row:
    tokens, decodes, reads, pairs = parts
    row: Row = {
        "step": number,
        "start_s": start_s,
        "duration_s": (law(*parts) if tokens else 0.0) + extra_s,
        "device_s": None,
        "scheduled_tokens": tokens,
        "scheduled_requests": max(1, decodes) if tokens else 0,
        "decode_requests": decodes,
        "kv_read_tokens": reads,
        "chunk_context": pairs,
        "running_requests": decodes,
        "waiting_requests": 0,
        "used_blocks": 10,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "saves": 0,
        "loads": 0,
        "repeated": [],
    }
    return row | more


def chained(rows: list[Row], start_s: float) -> list[Row]:
    """The rows one right after the other."""
    for row in rows:
        row["start_s"] = start_s
        start_s += row["duration_s"]
    return rows


def calm_steps(count: int, rng: np.random.Generator, noise: float = 0.0) -> list[Row]:
    rows = []
    for number in range(count):
        decodes = int(rng.integers(1, 9))
        reads = int(rng.integers(50, 1500)) * decodes
        chunk = int(rng.integers(2, 900)) if rng.random() < 0.4 else 0
        row = step(number, 0.0, (decodes + chunk, decodes, reads, chunk * (chunk + 1) // 2))
        row["duration_s"] *= float(np.exp(noise * rng.standard_normal()))
        rows.append(row)
    return chained(rows, 100.0)


def outcome(preemption_id: str, **more: Any) -> Row:
    row: Row = {
        "preemption_id": preemption_id,
        "ended": "resumed",
        "closed_s": 0.0,
        "victim_delay_s": 0.01,
        "wait_blocks_s": 0.0,
        "local_hit_tokens": 0,
        "loaded_tokens": 0,
        "recomputed_tokens": 0,
        "first_step": 300,
        "last_step": 300,
        "engine_s": None,
        "others_delay_s": None,
    }
    return row | more


def transfer(preemption_id: str, number: int, direction: str, start_s: float, end_s: float) -> Row:
    return {
        "preemption_id": preemption_id, "generation": 0, "step": number, "direction": direction, "tier": "host",
        "bytes": 1 << 20, "segments": 16, "segment_bytes": 1 << 16, "pinned": False, "queued_bytes": 0,
        "submit_s": start_s, "start_s": start_s, "end_s": end_s, "ok": True,
    }  # fmt: skip


def header(run: str = "run") -> Header:
    return Header(
        run_id=run, source="profile", created="2024-01-01T00:00:00+00:00", engine="test", hardware={"device": "cpu"},
        geometry={"layers": 4}, block_size=32, block_bytes=1 << 17, device_blocks=64, host_blocks=64, policy="pinned",
    )  # fmt: skip


def made(cores: dict[str, dict[str, list[Row]]]) -> Trace:
    tables: dict[str, list[Any]] = {}
    for core, contents in cores.items():
        for name, rows in contents.items():
            tables.setdefault(name, []).append(traces.with_core(traces.from_rows(name, rows), core))
    return Trace({core: header(core) for core in cores}, {n: pa.concat_tables(t) for n, t in tables.items()})


def repeated(preemption_id: str, tokens: int, reads: int, pairs: int, decodes: int) -> Row:
    return {
        "preemption_id": preemption_id, "tokens": tokens, "kv_read_tokens": reads, "chunk_context": pairs,
        "decodes": decodes,
    }  # fmt: skip


def costs(trace: Trace) -> dict[str, tuple[Any, Any]]:
    return {row["preemption_id"]: (row["engine_s"], row["others_delay_s"]) for row in trace.rows("outcomes")}


def test_fit_recovers_a_known_law() -> None:
    rows = calm_steps(600, np.random.default_rng(1))
    model = step_time_models(made({"a": {"steps": rows}}))["a"]
    assert model.fixed_s == pytest.approx(FIXED_S, rel=1e-6)
    assert model.per_part_s == pytest.approx((TOKEN_S, DECODE_S, READ_S, PAIR_S, 0.0, 0.0), rel=1e-6, abs=1e-12)
    assert model.error.mean_relative < 1e-6
    assert model.fitted_on == "core a"
    assert model.steps == 600


def test_fit_with_noise_and_outliers_stays_near_the_law_and_says_its_error() -> None:
    rng = np.random.default_rng(2)
    rows = calm_steps(2000, rng, noise=0.05)
    for row in rows[::50]:
        row["duration_s"] *= 20.0
    model = step_time_models(made({"a": {"steps": chained(rows, 100.0)}}))["a"]
    parts = np.array([[8.0, 8.0, 4000.0, 0.0], [500.0, 4.0, 900.0, 120_000.0]])
    assert model.predict(parts) == pytest.approx([law(*row) for row in parts], rel=0.03)
    typical = [row["duration_s"] for row in rows]
    assert 0.02 < model.error.mean_relative < 0.2
    assert 0 < model.error.mean_s < np.mean(typical)


def test_no_part_of_a_step_gets_cheaper_by_growing() -> None:
    rng = np.random.default_rng(3)
    design = np.column_stack([np.ones(200), rng.random((200, 3))])
    falling = 1.0 + design @ np.array([0.0, 2.0, -0.5, 0.0])
    found = nonnegative_fit(design, falling, np.ones(200))
    assert found.min() >= 0
    assert found[2] == 0
    best = np.sum((falling - design @ found) ** 2)
    for _ in range(500):  # nothing near it that is allowed is better
        other = np.maximum(0.0, found + 0.05 * rng.standard_normal(4))
        assert np.sum((falling - design @ other) ** 2) >= best - 1e-9


def test_fit_does_not_depend_on_the_unit_of_time() -> None:
    rng = np.random.default_rng(4)
    design = np.column_stack([np.ones(300), rng.random((300, 2))])
    seconds = design @ np.array([1.0, 2.0, 0.5]) * np.exp(0.1 * rng.standard_normal(300))
    assert robust_nonnegative_fit(design, 1e-4 * seconds) == pytest.approx(
        1e-4 * robust_nonnegative_fit(design, seconds), rel=1e-5
    )


def test_an_empty_step_costs_nothing() -> None:
    model = fit_step_time(with_aftermath(np.tile([4.0, 4.0, 100.0, 0.0], (30, 1))), np.full(30, 2e-3), "core a")
    assert model.predict(np.zeros((1, len(PARTS)))) == [0.0]


def test_a_recompute_costs_what_its_repeated_tokens_add() -> None:
    """400 tokens again with one new one, beside 3 decodes: what is left is a step of 4 decodes."""
    calm = calm_steps(300, np.random.default_rng(5))
    pairs = 401 * 402 // 2
    preempting = step(300, 0, (3, 3, 600, 0), preemptions=1)
    again = step(
        301, 0, (404, 3, 600, pairs), recomputed_tokens=400, scheduled_requests=4,
        repeated=[repeated("p", 400, -401, pairs, -1)],
    )  # fmt: skip
    rows = chained([*calm, preempting, again], 100.0)
    found = costs(attribute(made({"a": {"steps": rows, "outcomes": [outcome("p", recomputed_tokens=400)]}})))
    wanted = law(404, 3, 600, pairs) - law(4, 4, 1001, 0)
    assert found["p"][0] == pytest.approx(wanted, rel=1e-6)
    assert found["p"][1] == pytest.approx(3 * wanted, rel=1e-6)  # three others sat through it


def test_a_swap_costs_the_time_its_copies_add_and_an_overlapped_load_the_slowdown() -> None:
    calm = calm_steps(300, np.random.default_rng(6))
    saving = step(300, 0, (2, 2, 500, 0), extra_s=4e-3, preemptions=1, saves=1)
    loading = step(301, 0, (2, 2, 502, 0), extra_s=5e-4, loads=1)
    still = step(302, 0, (2, 2, 504, 0), extra_s=2e-4)
    after = step(303, 0, (3, 3, 900, 0))
    rows = chained([*calm, saving, loading, still, after], 100.0)
    at = saving["start_s"]
    moves = [
        transfer("p", 300, "save", at, at + 4e-3),
        transfer("p", 301, "load", loading["start_s"] + 1e-4, still["start_s"] + 1e-4),
    ]
    trace = made({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", loaded_tokens=400)]}})
    assert costs(attribute(trace))["p"] == (pytest.approx(4.7e-3, rel=1e-5), pytest.approx(2 * 4.7e-3, rel=1e-5))


def test_waiting_for_a_load_with_nothing_to_compute_is_all_extra() -> None:
    calm = calm_steps(300, np.random.default_rng(7))
    saving = step(300, 0, (0, 0, 0, 0), extra_s=1e-3, preemptions=1, saves=1)
    polls = [step(301 + i, 0, (0, 0, 0, 0), extra_s=1e-3) for i in range(3)]
    rows = chained([*calm, saving, *polls], 100.0)
    at = saving["start_s"]
    moves = [transfer("p", 300, "save", at, at + 9e-4), transfer("p", 301, "load", at + 1.1e-3, at + 3.5e-3)]
    found = costs(
        attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", loaded_tokens=9)]}}))
    )
    assert found["p"] == (pytest.approx(4e-3), 0.0)


COLD_S = (1e-3, 4e-4)


def cold(rows: list[Row]) -> list[Row]:
    """Every prefill of 256 tokens and more makes the two steps after it slower."""
    for before, lost_s in zip((1, 2), COLD_S, strict=True):
        for row, earlier in zip(rows[before:], rows, strict=False):
            chunk = earlier["scheduled_tokens"] - earlier["decode_requests"]
            row["duration_s"] += lost_s * min(1.0, chunk / 256)
    return chained(rows, 100.0)


def test_the_caches_a_prefill_leaves_cold_are_part_of_the_law_and_of_a_recompute() -> None:
    calm = calm_steps(600, np.random.default_rng(22))
    calm += [step(600 + i, 0, (4, 4, 800, 0)) for i in range(20)]
    preempting = step(620, 0, (3, 3, 600, 0), preemptions=1)
    again = step(
        621, 0, (404, 3, 600, 0), recomputed_tokens=400, scheduled_requests=4,
        repeated=[repeated("p", 400, -401, 0, -1)],
    )  # fmt: skip
    after = [step(622 + i, 0, (4, 4, 1005 + 4 * i, 0)) for i in range(20)]
    rows = cold([*calm, preempting, again, *after])
    trace = made({"a": {"steps": rows, "outcomes": [outcome("p", recomputed_tokens=400, first_step=620)]}})
    assert step_time_models(trace)["a"].per_part_s[4:] == pytest.approx(COLD_S, rel=1e-6)
    wanted = law(404, 3, 600, 0) - law(4, 4, 1001, 0) + sum(COLD_S)
    assert costs(attribute(trace))["p"][0] == pytest.approx(wanted, rel=1e-6)
    assert costs(attribute(trace))["p"][1] == pytest.approx(3 * wanted, rel=1e-6)


def test_a_shared_step_is_split_by_what_each_did_in_it() -> None:
    """In one step p recomputes 100 tokens (d0's price 3 ms) and a save of q takes 1 ms: 3 to 1."""
    calm = calm_steps(300, np.random.default_rng(8))
    shared = step(
        300, 0, (103, 3, 600, 0), extra_s=1e-3, preemptions=1, saves=1, recomputed_tokens=100, scheduled_requests=4,
        repeated=[repeated("p", 100, 0, 0, 0)],
    )  # fmt: skip
    rows = chained([*calm, shared], 100.0)
    moves = [transfer("q", 300, "save", shared["start_s"], shared["start_s"] + 1e-3)]
    ends = [outcome("p", recomputed_tokens=100), outcome("q")]
    found = costs(attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": ends}})))
    extra = 100 * TOKEN_S + 1e-3
    assert found["p"] == (pytest.approx(0.75 * extra, rel=1e-5), pytest.approx(3 * 0.75 * extra, rel=1e-5))
    assert found["q"] == (pytest.approx(0.25 * extra, rel=1e-5), pytest.approx(4 * 0.25 * extra, rel=1e-5))


def test_shares_of_many_preemptions_add_up_to_what_the_steps_took_too_long() -> None:
    rng = np.random.default_rng(9)
    rows, extra = calm_steps(400, rng), 0.0
    moves: list[Row] = []
    ends: dict[str, int] = {}
    for number in range(400, 460):
        ids = [f"p{number % 7}", f"p{number % 3}"]
        added = float(rng.random() * 1e-2)
        row = step(number, 0, (204, 4, 800, 0), extra_s=added, recomputed_tokens=200)
        row["repeated"] = [repeated(ids[0], 150, 0, 0, 0), repeated(ids[1] + "-other", 50, 0, 0, 0)]
        extra += added + 200 * TOKEN_S
        for part in row["repeated"]:
            name = part["preemption_id"]
            ends[name] = ends.get(name, 0) + part["tokens"]
        rows.append(row)
    rows = chained(rows, 100.0)
    for row in rows[400::5]:
        moves.append(transfer("p0", 300, "save", row["start_s"], row["start_s"] + 1e-4))
    closed = [outcome(name, recomputed_tokens=tokens) for name, tokens in ends.items()]
    found = costs(attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": closed}})))
    assert sum(cost for cost, _ in found.values() if cost is not None) == pytest.approx(extra, rel=1e-6)


def test_a_slow_stretch_of_the_machine_is_nobodys_cost() -> None:
    """Everything takes 1.5 times as long for a while; in the middle of it a save takes 4 ms."""
    rows = calm_steps(400, np.random.default_rng(20))
    rows[250] = step(250, 0, (2, 2, 500, 0), preemptions=1, saves=1)
    for row in rows[200:300]:
        row["duration_s"] *= 1.5
    rows[250]["duration_s"] += 4e-3
    rows = chained(rows, 100.0)
    at = rows[250]["start_s"]
    moves = [transfer("p", 250, "save", at, at + 4e-3)]
    found = costs(
        attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", first_step=250)]}}))
    )
    assert found["p"][0] == pytest.approx(4e-3, rel=0.02)


def test_a_save_reported_late_belongs_to_the_step_of_its_preemption() -> None:
    calm = calm_steps(300, np.random.default_rng(21))
    saving = step(300, 0, (2, 2, 500, 0), extra_s=4e-3, preemptions=1, saves=1)
    rows = chained([*calm, saving, step(301, 0, (2, 2, 502, 0))], 100.0)
    at = saving["start_s"]
    moves = [transfer("p", 301, "save", at, at + 4e-3)]
    found = costs(attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p")]}})))
    assert found["p"][0] == pytest.approx(4e-3, rel=1e-5)


def test_undisturbed_means_no_copy_in_flight_either() -> None:
    """Steps that a transfer overlaps are slow here; were they fitted on, the law would come out wrong."""
    rows = calm_steps(400, np.random.default_rng(10))
    for row in rows[100:200]:
        row["duration_s"] *= 3
    rows = chained(rows, 100.0)
    moves = [transfer("p", 100, "load", rows[100]["start_s"] + 1e-5, rows[200]["start_s"] - 1e-5)]
    model = step_time_models(made({"a": {"steps": rows, "transfers": moves}}))["a"]
    assert model.steps == 298  # nor the two that find the caches cold
    assert model.per_part_s[0] == pytest.approx(TOKEN_S, rel=1e-6)


def test_a_preemption_with_missing_records_gets_no_cost() -> None:
    calm = calm_steps(300, np.random.default_rng(11))
    again = step(300, 0, (53, 3, 600, 0), recomputed_tokens=50, repeated=[repeated("p", 50, 0, 0, 0)])
    rows = chained([*calm, again], 100.0)
    ends = [
        outcome("p", recomputed_tokens=80),  # 30 of them in a step that was dropped
        outcome("q", loaded_tokens=64),  # no transfer
        outcome("r", first_step=999),  # it was preempted in a step that is not there
        outcome("s", first_step=200),  # nothing lost, nothing copied: it cost nothing
    ]
    moves = [transfer("r", 300, "save", 1.0, 1.1)]
    found = costs(attribute(made({"a": {"steps": rows, "transfers": moves, "outcomes": ends}})))
    assert found["p"] == found["q"] == found["r"] == (None, None)
    assert found["s"] == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))


def test_each_core_has_its_own_law_unless_it_has_too_few_steps() -> None:
    rng = np.random.default_rng(12)
    fast, slow, few = calm_steps(300, rng), calm_steps(300, rng), calm_steps(30, rng)
    for row in slow:
        row["duration_s"] *= 2
    models = step_time_models(made({"f": {"steps": fast}, "s": {"steps": chained(slow, 1.0)}, "x": {"steps": few}}))
    assert models["s"].fixed_s == pytest.approx(2 * models["f"].fixed_s, rel=1e-6)
    assert models["x"].fitted_on == "3 cores"
    assert models["x"].steps == 630


def test_steps_that_contradict_themselves_are_refused_by_row() -> None:
    rows = calm_steps(100, np.random.default_rng(13))
    rows[7]["duration_s"] = -1e-3
    with pytest.raises(TraceError, match=r"steps of core a, row 7: duration_s is -0.001"):
        step_time_models(made({"a": {"steps": rows}}))
    again = step(100, 0, (20, 3, 600, 0), repeated=[repeated("p", 50, 0, 0, 0)], recomputed_tokens=50)
    rows = chained([*calm_steps(100, np.random.default_rng(13)), again], 100.0)
    with pytest.raises(TraceError, match=r"row 100 \(step 100\): repeated holds more tokens"):
        attribute(made({"a": {"steps": rows, "outcomes": [outcome("p")]}}))
    with pytest.raises(TraceError, match="5 undisturbed steps on core a, at least 20"):
        step_time_models(made({"a": {"steps": rows[:5]}}))


def test_a_trace_without_steps_or_outcomes_is_left_as_it_is() -> None:
    assert attribute(made({})).tables == {}
    rows = calm_steps(100, np.random.default_rng(14))
    assert attribute(made({"a": {"steps": rows}})).table("outcomes").num_rows == 0
    assert costs(attribute(made({"a": {"outcomes": [outcome("p")]}})))["p"] == (None, None)
