"""Rows of the trace, with the meaning they have in a trace of the plugin; none are made without a sink."""

from __future__ import annotations

from typing import Any

from kvpolicy.attribution.ledger import Repeated
from kvpolicy.events import Outcome, Transfer
from kvpolicy.simulator.base import Sink
from kvpolicy.simulator.builtin.live import Account, Copy, Live, Step
from kvpolicy.trace import decision_row, outcome_row

BATCH_ROWS = 1000


class Journal:
    """``core``: the engine core's name in the trace."""

    def __init__(self, core: str, sink: Sink | None) -> None:
        self.core = core
        self.kept = sink is not None
        self._sink = sink
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def flush(self) -> None:
        if self._sink is not None:
            for table, rows in self._rows.items():
                self._sink.add(table, rows)
        self._rows = {}

    def _add(self, table: str, row: dict[str, Any]) -> None:
        rows = self._rows.setdefault(table, [])
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            self.flush()

    def decision(self, account: Account) -> None:
        if not self.kept:
            return
        row = decision_row(
            account.situation,
            account.decision,
            preemption_id=account.preemption_id,
            decision_id=f"{account.preemption_id}-0",
            request=name_of(account.request),
            generation=account.generation,
            step=account.first_step,
            overflow_id=f"{self.core}-{account.first_step}",
        )
        self._add("decisions", row)

    def outcome(self, outcome: Outcome) -> None:
        if self.kept:
            self._add("outcomes", outcome_row(outcome))

    def request(self, live: Live) -> None:
        if not self.kept:
            return
        row = {
            "request": name_of(live),
            "arrival_s": live.arrival_s,
            "first_token_s": live.first_s,
            "last_token_s": live.last_s,
            "prompt_tokens": live.request.prompt_tokens,
            "output_tokens": live.outputs,
            "preemptions": live.preemptions,
            "recomputed_tokens": live.recomputed,
            "loaded_tokens": live.loaded,
            "finish": "length",
        }
        self._add("requests", row)

    def transfer(self, copy: Copy, transfer: Transfer, step: int) -> None:
        if not self.kept:
            return
        row = {
            "preemption_id": copy.account.preemption_id,
            "generation": copy.copy_id,
            "step": step,
            "direction": transfer.direction,
            "tier": copy.account.option.tier,
            "bytes": transfer.bytes,
            "segments": transfer.segments,
            "segment_bytes": transfer.segment_bytes,
            "pinned": True,
            "queued_bytes": transfer.queued_bytes,
            "submit_s": transfer.submit_s,
            "start_s": transfer.start_s,
            "end_s": transfer.end_s,
            "ok": True,
        }
        self._add("transfers", row)

    def step(self, step: Step) -> None:
        if not self.kept:
            return
        row = {
            "step": step.number,
            "start_s": step.began_s,
            "duration_s": step.end_s - step.began_s,
            "device_s": None,
            "scheduled_tokens": step.scheduled_tokens,
            "scheduled_requests": step.scheduled_requests,
            "decode_requests": step.decode_requests,
            "kv_read_tokens": step.kv_read_tokens,
            "chunk_context": step.chunk_context,
            "running_requests": step.running_requests,
            "waiting_requests": step.waiting_requests,
            "used_blocks": step.used_blocks,
            "recomputed_tokens": step.recomputed_tokens,
            "preemptions": len(step.lost),
            "saves": step.saves,
            "loads": step.loads,
            "repeated": [_repeated_row(part) for part in step.repeated],
        }
        self._add("steps", row)


def name_of(live: Live) -> str:
    """A request's name in the trace: its place in the workload."""
    return str(live.number)


def _repeated_row(part: Repeated[Account]) -> dict[str, Any]:
    return {
        "preemption_id": part.preemption_id,
        "tokens": part.tokens,
        "kv_read_tokens": part.kv_read_tokens,
        "chunk_context": part.chunk_context,
        "decodes": part.decodes,
    }
