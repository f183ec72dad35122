"""Rows of a trace whose step times follow a known law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kvpolicy import trace as traces
from kvpolicy.trace import Header, Trace

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


def one_after_another(rows: list[Row], start_s: float) -> list[Row]:
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
    return one_after_another(rows, 100.0)


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


def trace_of_cores(cores: dict[str, dict[str, list[Row]]]) -> Trace:
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
