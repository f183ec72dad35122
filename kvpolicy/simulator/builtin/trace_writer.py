"""Rows of the trace, with the same meaning as in a trace of the plugin; without a sink none are built."""

from __future__ import annotations

from collections.abc import Mapping

from kvpolicy.events import CACHE_COPY, Outcome, Transfer
from kvpolicy.order import Choice
from kvpolicy.policy.decision import HOST_TIER
from kvpolicy.simulator.base import Sink
from kvpolicy.simulator.builtin.live_request import Account, CopyJob, LiveRequest, Step
from kvpolicy.trace import Row, decision_row, displacement_row, outcome_row, request_row, step_row, transfer_row

BATCH_ROWS = 1000


class TraceWriter:
    """Builds trace rows and passes them to the sink in batches. ``core``: the engine core's name in the trace."""

    def __init__(self, core: str, sink: Sink | None) -> None:
        self.core = core
        self.enabled = sink is not None
        self._sink = sink
        self._rows: dict[str, list[Row]] = {}
        self._displacements = 0

    def flush(self) -> None:
        if self._sink is not None:
            for table, rows in self._rows.items():
                self._sink.add(table, rows)
        self._rows = {}

    def _add(self, table: str, row: Row) -> None:
        rows = self._rows.setdefault(table, [])
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            self.flush()

    def decision(self, account: Account) -> None:
        if not self.enabled:
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

    def displacement(
        self, choice: Choice, live_by_number: Mapping[int, LiveRequest], step: int, now_s: float, order: str
    ) -> None:
        """``live_by_number``: requests by the numbers in ``choice``."""
        if not self.enabled:
            return
        self._displacements += 1
        row = displacement_row(
            choice,
            displacement_id=f"{self.core}-{self._displacements}",
            step=step,
            time_s=now_s,
            order=order,
            name_of=lambda number: name_of(live_by_number[number]),
        )
        self._add("displacements", row)

    def outcome(self, outcome: Outcome) -> None:
        if self.enabled:
            self._add("outcomes", outcome_row(outcome))

    def request(self, live: LiveRequest) -> None:
        if not self.enabled:
            return
        row = request_row(
            request=name_of(live),
            arrival_s=live.arrival_s,
            first_token_s=live.first_s,
            last_token_s=live.last_s,
            prompt_tokens=live.request.prompt_tokens,
            output_tokens=live.outputs,
            preemptions=live.preemptions,
            recomputed_tokens=live.recomputed,
            loaded_tokens=live.loaded,
            finish="length",
            class_name=live.request.class_name,
            priority=live.request.priority,
            ttft_deadline_s=live.request.ttft_s,
            tpot_deadline_s=live.request.tpot_s,
        )
        self._add("requests", row)

    def transfer(self, job: CopyJob, transfer: Transfer, step: int) -> None:
        if self.enabled:
            preemption_id = CACHE_COPY if job.account is None else job.account.preemption_id
            self._add("transfers", transfer_row(transfer, preemption_id=preemption_id, step=step, tier=HOST_TIER))

    def step(self, step: Step) -> None:
        if self.enabled:
            self._add("steps", step_row(step, step.began_s, step.end_s))


def name_of(live: LiveRequest) -> str:
    """A request's name in the trace: its number in the workload."""
    return str(live.number)
