"""What a server counts of its recomputed tokens, and what is found in the trace that it records, are one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kvpolicy import cost
from kvpolicy import trace as traces
from kvpolicy.attribution.ledger import OpenPreemption, Repeated, Step
from kvpolicy.attribution.offline import REPEATED_PARTS, price_models
from kvpolicy.attribution.step_time import PARTS, HeldOutError, StepTimeModel
from kvpolicy.attribution.step_work import step_work
from kvpolicy.events import Transfer
from kvpolicy_vllm.plugin.cost_meter import CostMeter
from kvpolicy_vllm.plugin.host_copies import Copy, Settled
from kvpolicy_vllm.plugin.trace_writer import TraceRecorder
from tests.attribution.step_rows import Row, calm_steps, one_after_another, repeated, step
from tests.attribution.step_rows import transfer as transfer_of

SHIPPED = "cpu-llama-native"
"""A real engine's steps, with what they recompute."""
COLD = StepTimeModel(2e-3, (3e-5, 1e-4, 1e-7, 2e-9, 4e-3, 2e-3), "core a", 100, HeldOutError(0.0, 0.0, 0.0))
WARM = replace(COLD, per_part_s=(3e-5, 1e-4, 1e-7, 2e-9, 0.0, 0.0))
NOTHING = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
)
"""vLLM's output of a step that computes nothing. Other steps have their parts already."""


class Sums(Counter[str]):
    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        self[name] += value  # type: ignore[assignment]


class Written:
    """The rows that a server hands to its trace's writer."""

    dropped, size = 0, None

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {"steps": [], "transfers": []}

    def add(self, table: str, row: Row) -> None:
        self.rows[table].append(row)

    def flush_soon(self) -> None: ...

    def close(self) -> None: ...

    def table(self, name: str) -> pa.Table:
        return traces.from_rows(name, self.rows[name])


def step_of(row: Row) -> Step[OpenPreemption]:
    """A step of a trace as the plugin has it when its output is back."""
    repeated = [
        Repeated(
            OpenPreemption(part["preemption_id"], "r", "recompute", 0, 0.0, 0), *map(part.get, REPEATED_PARTS), 0, 0
        )
        for part in row["repeated"]
    ]
    step: Step[OpenPreemption] = Step(row["step"], repeated=repeated, lost=["lost"] * row["preemptions"])
    step.scheduled_requests, step.saves, step.loads = (row[n] for n in ("scheduled_requests", "saves", "loads"))
    step.scheduled_tokens, step.decode_requests, step.kv_read_tokens, step.chunk_context = (row[n] for n in PARTS)
    if step.scheduled_tokens:
        step.scheduled_requests = max(1, step.scheduled_requests)
    return step


def settled(row: Row, copy_id: int) -> Settled:
    fields = {name: row[name] for name in Transfer.__slots__ if name in row}
    done = Transfer(**fields, copy_id=copy_id)
    return Settled(Copy(0, request_id="r", preemption_id=row["preemption_id"]), row["direction"], (done,))


def served(
    rows: Sequence[Row], model: StepTimeModel, copies: Sequence[Row] = (), share: float = 1.0
) -> tuple[Sums, Written]:
    """What a server counts of these steps, and what it records of them, with a share of the quiet ones."""
    sums, written = Sums(), Written()
    meter = CostMeter(model, lambda *event: None, sums)  # type: ignore[arg-type]
    recorder = TraceRecorder(written, str, "core", sums, lambda request: {}, step_share=share)  # type: ignore[arg-type]
    begins, ends = (sorted(enumerate(copies), key=lambda one: one[1][at]) for at in ("start_s", "end_s"))
    for row in rows:
        now, at = row["start_s"] + row["duration_s"], step_of(row)
        while begins and begins[0][1]["start_s"] < now:
            copy_id, copy = begins.pop(0)
            meter.copies_begin(None, {copy_id: copy["preemption_id"]})  # type: ignore[arg-type]
        while ends and ends[0][1]["end_s"] <= now:
            copy_id, copy = ends.pop(0)
            meter.copied(settled(copy, copy_id), row["step"])
            recorder.copied(settled(copy, copy_id), row["step"])
        scheduler = SimpleNamespace(requests={} if row.get("idle") else {"r": None})
        meter.done(at, NOTHING, scheduler, row["start_s"], now)
        recorder.done(at, NOTHING, scheduler, row["start_s"], now)
    recorder.idle()
    return sums, written


def of_core(table: pa.Table, core: str) -> pa.Table:
    return table.filter(pc.equal(table["core"], core))


def with_idle_steps(steps: Sequence[Row]) -> list[Row]:
    """The steps, numbered anew, with one before every fourth that the engine makes without requests, as to report
    metrics."""
    rows: list[Row] = []
    for index, row in enumerate(steps):
        if index % 4 == 3:
            rows.append(step(len(rows), row["start_s"], (0, 0, 0, 0), idle=True))
        rows.append(row | {"step": len(rows)})
    return rows


@pytest.mark.parametrize("factor", [1.0, 2.6])
@pytest.mark.parametrize("share", [1.0, 0.05])
def test_a_server_counts_what_its_trace_says(factor: float, share: float) -> None:
    """By the same step times to the digit, also where these are off for the machine of the run by a factor, and of a
    trace without the server's idle steps and most of its quiet ones."""
    shipped = cost.load(SHIPPED).step_time
    assert shipped is not None
    scaled = tuple(factor * s for s in shipped.per_part_s)
    model = replace(shipped, fixed_s=factor * shipped.fixed_s, per_part_s=scaled)
    trace = traces.read(SHIPPED)
    for core in trace.headers:
        rows = with_idle_steps(of_core(trace.table("steps"), core).sort_by("start_s").to_pylist())
        found, written = served(rows, model, share=share)
        work = step_work(written.table("steps"), model).work
        assert work.recompute_s and found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s)
        assert 0 < found["beside_recompute_tokens"] < work.decoded_tokens
        idle = sum("idle" in row for row in rows)
        left_out = len(rows) - len(written.rows["steps"]) - idle
        assert idle and (left_out > 0) == (share < 1)


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_what_is_not_recorded_leaves_what_steps_are_expected_to_take(share: float) -> None:
    """Where two steps in five compute prompts, and leave cold caches in the next two, unless one of these is idle."""
    rows = calm_steps(3000, np.random.default_rng(3), noise=0.05)
    for number in range(20, 3000, 47):
        row, pairs = rows[number], 400 * 401 // 2
        row["repeated"] = [repeated(f"p{number}", 400, 0, pairs, 0)]
        row["scheduled_tokens"], row["chunk_context"] = row["scheduled_tokens"] + 400, row["chunk_context"] + pairs
        row["duration_s"] *= 2
    found, written = served(with_idle_steps(one_after_another(rows, 0.0)), COLD, share=share)
    work = step_work(written.table("steps"), COLD).work
    assert work.recompute_s and found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s)
    assert (len(written.rows["steps"]) < 1500) == (share < 1)


@pytest.mark.parametrize("factor", [1.0, 2.6])
def test_by_step_times_of_its_own_a_trace_says_nearly_the_same(factor: float) -> None:
    """With its copies, which lengthen steps, and without."""
    shipped = cost.load(SHIPPED).step_time
    assert shipped is not None
    model = replace(shipped, fixed_s=factor * shipped.fixed_s, per_part_s=tuple(factor * s for s in shipped.per_part_s))
    trace = traces.read(SHIPPED)
    own = price_models(trace)
    for core in trace.headers:
        steps, transfers = (of_core(trace.table(name), core) for name in ("steps", "transfers"))
        for copies in (transfers, transfers.slice(0, 0)):
            found, _ = served(steps.sort_by("start_s").to_pylist(), model, copies.to_pylist())
            work = step_work(steps, own[core], copies).work
            assert work.recompute_s
            assert found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s, rel=0.1)


def test_a_chunk_before_leaves_its_aftermath_in_a_step_that_recomputes() -> None:
    """Which then took as long for it, and not for its own tokens: the same in a server and in its trace."""
    chunk = step(0, 0.0, (304, 4, 400, 300 * 301 // 2))
    again = step(1, 0.0, (104, 4, 404, 5050), 4e-3, repeated=[repeated("a-1", 100, 0, 5050, 0)])
    later = step(2, 0.0, (54, 4, 408, 1275), 2e-3 + 4e-3 * 100 / 256, repeated=[repeated("a-2", 50, 0, 1275, 0)])
    found, written = served(one_after_another([chunk, again, later], 0.0), COLD)
    work = step_work(written.table("steps"), COLD).work
    assert work.recompute_s and found["recompute_microseconds"] == pytest.approx(1e6 * work.recompute_s)
    alone_s = 150 * 3e-5 + (5050 + 1275) * 2e-9 + 6e-3 * 150 / 256
    assert work.recompute_s == pytest.approx(alone_s), "steps took what the model expects"


@pytest.mark.parametrize(("copied", "paces"), [("a-2", (1.0, 1.0, 1.5)), ("cache", (1.5, 1.5, 1.5)), ("", (1.5,) * 3)])
def test_what_copies_add_to_steps_is_no_price_of_recomputed_tokens(copied: str, paces: tuple[float, ...]) -> None:
    """Steps take 1.3 times what the model says, and 1.5 times that where they recompute 100 tokens beside 4 decodes: in
    step 21, which a copy overlaps, in step 24, two after it, and in step 26. Slower for another reason they count in
    full: beside a copy that belongs to no preemption, and where nothing is copied."""
    rows = [step(number, 0.0, (4, 4, 400, 0)) for number in range(48)]
    for number in (21, 24, 26):
        rows[number] = step(number, 0.0, (104, 4, 400, 5050), repeated=[repeated(f"b-{number}", 100, 0, 5050, 0)])
    for row in rows:
        row["duration_s"] *= 1.3 * (1.5 if row["repeated"] else 1.0)
    one_after_another(rows, 0.0)
    copies = [transfer_of(copied, 20, "load", rows[20]["start_s"] + 1e-6, rows[22]["start_s"] + 1e-6)]
    found, written = served(rows, WARM, copies if copied else [])
    work = step_work(written.table("steps"), WARM, written.table("transfers")).work
    added_s, decodes_s = (100 * 3e-5 + 5050 * 2e-9), 2e-3 + 4 * (3e-5 + 1e-4) + 400 * 1e-7
    assert found["recompute_microseconds"] == pytest.approx(1e6 * 1.3 * sum(paces) * added_s)
    assert found["beside_recompute_microseconds"] == pytest.approx(1e6 * 1.3 * sum(paces) * decodes_s)
    assert work.recompute_s == pytest.approx(1.3 * sum(paces) * added_s)
    assert work.decode_s == pytest.approx(1.3 * (45 + sum(paces)) * decodes_s)
