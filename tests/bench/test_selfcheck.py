"""The self-check of measured costs: twins over equal steps, verdicts by interval."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.trace import Header, Trace
from kvpolicy_vllm.bench.selfcheck import judge, self_checks


def test_the_self_check_judges_by_its_interval() -> None:
    rng = random.Random(2)
    cost = [0.010 + rng.gauss(0, 1e-4) for _ in range(12)]
    around = [value + rng.gauss(0, 1e-4) for value in cost]
    assert judge("swap", 32, around, cost).verdict == "agrees"
    assert judge("swap", 32, [value + 1e-3 for value in around], cost).verdict == "disagrees"
    wild = [value + rng.gauss(0, 0.02) for value in cost]
    assert judge("swap", 32, wild, cost).verdict == "cannot tell"
    few = judge("swap", 32, around[:9], cost[:9])
    assert (few.verdict, few.low_s, few.high_s) == ("cannot tell", None, None)


def step(number: int, duration_s: float, tokens: int) -> dict[str, Any]:
    counts = (
        "scheduled_requests", "decode_requests", "kv_read_tokens", "chunk_context", "running_requests",
        "waiting_requests", "used_blocks", "recomputed_tokens", "preemptions", "saves", "loads",
    )  # fmt: skip
    row: dict[str, Any] = dict.fromkeys(counts, 0)
    row |= {"step": number, "start_s": float(number), "duration_s": duration_s, "device_s": None, "repeated": []}
    return row | {"scheduled_tokens": tokens}


def window(arm: str, repeat: int, first: int, last: int, discarded: str = "") -> dict[str, Any]:
    return {
        "state_id": "check-swap-b32", "arm": arm, "repeat": repeat, "cause": "forced", "first_step": first,
        "last_step": last, "duration_s": 1.0, "preemption_id": None if arm == "none" else f"p{repeat}",
        "discarded": discarded,
    }  # fmt: skip


def outcome(repeat: int, engine_s: float) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("local_hit_tokens", "loaded_tokens", "recomputed_tokens", "first_step", "last_step"), 0
    )
    row |= dict.fromkeys(("closed_s", "victim_delay_s", "wait_blocks_s"), 0.0)
    return row | {"preemption_id": f"p{repeat}", "ended": "resumed", "engine_s": engine_s, "others_delay_s": 0.0}


def test_a_twin_is_compared_over_as_many_working_steps_as_both_have() -> None:
    """Disturbed: 2, 12, 0.5 (idle), 2 and 2 ms, then a tail of 9; its twin four times 2: the difference is 10.5."""
    steps, windows, outcomes = [], [], []
    for pair in range(12):
        at = 100 * pair
        disturbed = ((2e-3, 4), (12e-3, 400), (0.5e-3, 0), (2e-3, 4), (2e-3, 4), (9e-3, 1))
        steps += [step(at + i, *one) for i, one in enumerate(disturbed)]
        steps += [step(at + 50 + i, 2e-3, 4) for i in range(4)]
        windows += [window("swap", pair, at, at + 5), window("none", pair, at + 50, at + 53)]
        outcomes.append(outcome(pair, 10.4e-3 if pair % 2 else 10.6e-3))
    windows.append(window("swap", 99, 0, 3, discarded="another request was preempted"))
    rows = {"steps": steps, "windows": windows, "outcomes": outcomes}
    tables = {name: traces.with_core(traces.from_rows(name, some), "core-a") for name, some in rows.items()}
    (result,) = self_checks(Trace({"core-a": header()}, tables))
    assert (result.arm, result.block_size, result.pairs, result.verdict) == ("swap", 32, 12, "agrees")
    assert result.attributed_s == pytest.approx(10.5e-3)
    assert result.low_s is not None
    assert result.high_s is not None
    assert result.low_s + result.high_s == pytest.approx(0.0, abs=1e-9)


def header() -> Header:
    return Header(
        run_id="a", source="profile", created="2024-01-01T00:00:00Z", engine="test", hardware={}, geometry={},
        block_size=32, block_bytes=1, device_blocks=1, host_blocks=1, policy="pinned",
    )  # fmt: skip
