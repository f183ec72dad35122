"""Traces come back as they were written, and what is damaged is refused by file, column and row."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import trace as traces
from kvpolicy.events import CAUSES, ENDINGS, KINDS, Cost, Decision, Option, Outcome, Preemption, situation_of
from kvpolicy.hardware import EngineSpec
from kvpolicy.trace import SCHEMAS, Trace, TraceError, from_rows, read, with_core
from kvpolicy.trace.header import Header
from tests.examples import examples
from tests.synthetic import make_trace

HEADER = Header(
    run_id="run",
    source="profile",
    created="2026-01-01T00:00:00Z",
    engine="vllm 0.32.0",
    hardware={"device": "cpu"},
    geometry={},
    block_size=32,
    block_bytes=65536,
    device_blocks=128,
    host_blocks=64,
    policy="always-swap",
)


SITUATION = Preemption(
    time_s=1.5,
    computed_tokens=70,
    prompt_tokens=60,
    output_tokens=11,
    block_size=32,
    block_bytes=65536,
    segment_bytes=4096,
    held_blocks=3,
    shared_blocks=0,
    hashed_blocks=2,
    hit_blocks=0.5,
    save_blocks=3.0,
    device_blocks=128,
    free_blocks=0,
    short_blocks=1,
    host_blocks=64,
    free_host_blocks=64,
    running_requests=3,
    waiting_requests=2,
    batch_tokens=210,
    queued_save_bytes=0,
    queued_load_bytes=0,
    earlier_preemptions=0,
    priority=0,
    cause="memory",
)


OUTCOME = Outcome("p0", "resumed", 2.5, 0.5, 0.1, 0, 70, 0, 4, 9)


WORDS = {"cause": CAUSES, "executed": KINDS, "ended": ENDINGS, "direction": ("save", "load")}


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Any value of an Arrow type that a trace uses."""
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({part.name: values(part.type) for part in kind})
    if pa.types.is_floating(kind):
        return st.floats(allow_nan=False, allow_infinity=False)
    if pa.types.is_integer(kind):
        return st.integers(-(2**63), 2**63 - 1)
    return st.booleans() if pa.types.is_boolean(kind) else st.text(max_size=8)


def rows_of(name: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    columns = {}
    for column in SCHEMAS[name]:
        kind = st.sampled_from(WORDS[column.name]) if column.name in WORDS else values(column.type)
        columns[column.name] = st.none() | kind if column.nullable else kind
    return st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=4)


def decision_row() -> dict[str, Any]:
    options = (Option("recompute"), Option("swap", load_tokens=70, tier="host"))
    decision = Decision(options, (0.5, 0.5), 1, (), "random:0.5", "{}", executed="swap")
    identity = {"preemption_id": "p0", "decision_id": "d0", "request": "r", "generation": 1, "step": 4}
    return traces.decision_row(SITUATION, decision, overflow_id="o0", **identity)


def test_a_header_says_what_engine_it_was_recorded_on(tmp_path: Path) -> None:
    engine = EngineSpec(
        32, 512, block_bytes=65536, geometry={"layers": 2}, hardware={"device": "cpu"}, link={"kind": "native"}
    )
    said: dict[str, Any] = {
        "run_id": "run", "source": "production", "created": "2026-01-01T00:00:00Z", "engine": "vllm 0.32.0",
        "device_blocks": 128, "host_blocks": 64, "policy": "always-swap",
    }  # fmt: skip
    Header.recorded_on(engine, **said).write(tmp_path)
    read = Header.read(tmp_path / "header.json").engine_spec
    assert read == replace(engine, pinned=None), "a header does not say how host memory was allocated"
    assert HEADER.engine_spec.link == {"kind": "native"} and HEADER.engine_spec.token_budget is None
    with pytest.raises(ValueError, match="block_bytes"):
        Header.recorded_on(EngineSpec(), **said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace of one core with a decision and its outcome."""
    tables = {"decisions": [decision_row()], "outcomes": [traces.outcome_row(OUTCOME)]}
    arrow = {name: with_core(from_rows(name, rows), "core-0") for name, rows in tables.items()}
    Trace({"core-0": HEADER}, arrow).write(tmp_path / "trace")
    return tmp_path / "trace"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@given(data=st.data())
@examples(25)
def test_every_table_comes_back_as_it_was_written(name: str, data: st.DataObject) -> None:
    rows = data.draw(rows_of(name))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "trace"
        written = Trace({"core-0": HEADER}, {name: with_core(from_rows(name, rows), "core-0")})
        written.write(folder)
        result = read(folder)
        assert result.rows(name) == [row | {"core": "core-0"} for row in rows]
        assert result.headers == {"core-0": HEADER}
        assert result.digest() == written.digest()


def test_a_situation_survives_its_row(folder: Path) -> None:
    assert situation_of(read(folder).rows("decisions")[0]) == SITUATION


def test_parts_and_cores_add_up_and_leave_the_digest_alone(folder: Path) -> None:
    whole = read(folder)
    traces.write_part(folder / "core-0", "outcomes", 1, from_rows("outcomes", [traces.outcome_row(OUTCOME)] * 2))
    assert read(folder).table("outcomes").num_rows == 3
    assert read(folder).digest() != whole.digest()
    HEADER.write(folder / "core-1")
    assert set(read(folder).headers) == {"core-0", "core-1"}
    in_one = from_rows("outcomes", [traces.outcome_row(OUTCOME)] * 3)
    parted = read(folder)
    joined = Trace(parted.headers, {**parted.tables, "outcomes": with_core(in_one, "core-0")})
    assert joined.digest() == parted.digest()


def test_a_table_without_what_requests_say_is_read_as_before(tmp_path: Path) -> None:
    """Older traces have no classes, priorities and deadlines of requests: none are added, and the digest is theirs."""
    names = ("request", "arrival_s", "prompt_tokens", "output_tokens", "preemptions", "recomputed_tokens")
    old = dict.fromkeys(names, 1) | {"request": "r", "loaded_tokens": 0, "finish": "length"}
    old |= {"first_token_s": 1.5, "last_token_s": None}
    path = traces.write_part(tmp_path / "core-0", "requests", 0, from_rows("requests", [old]))
    HEADER.write(tmp_path / "core-0")
    assert pq.read_table(path).column_names == list(SCHEMAS["requests"].names)[:10]
    assert read(tmp_path).rows("requests") == [old | {"core": "core-0"}]
    digest = read(tmp_path).digest()
    told = {"class": "urgent", "priority": 2, "ttft_deadline_s": 0.5, "tpot_deadline_s": None}
    traces.write_part(tmp_path / "core-0", "requests", 1, from_rows("requests", [old | told]))
    both = read(tmp_path)
    assert [row["class"] for row in both.rows("requests")] == [None, "urgent"] and both.digest() != digest
    with pytest.raises(TraceError, match="row 0: priority missing"):
        from_rows("requests", [old | {"class": "urgent", "ttft_deadline_s": None, "tpot_deadline_s": None}, old | told])


def test_unknown_columns_are_kept(folder: Path) -> None:
    part = next((folder / "core-0" / "outcomes").iterdir())
    pq.write_table(pq.read_table(part).append_column("mood", pa.array(["calm"])), part)
    assert read(folder).rows("outcomes")[0]["mood"] == "calm"


def test_a_scratch_file_of_a_killed_server_is_no_part(folder: Path) -> None:
    (folder / "core-0" / "outcomes" / ".part-000001.99").write_bytes(b"half")
    assert read(folder).table("outcomes").num_rows == 1


def changed(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["loaded_tokens"]), "column loaded_tokens is missing; outcomes needs it as int64"),
        (lambda t: changed(t, "closed_s", pa.array(["x"])), "column closed_s is string, should be double"),
        (lambda t: changed(t, "first_step", pa.array([None], pa.int64())), "row 0: first_step is empty"),
        (lambda t: changed(t, "closed_s", pa.array([float("nan")])), "row 0: closed_s is not a finite number"),
        (lambda t: changed(t, "ended", pa.array(["gone"])), "row 0: ended should be one of resumed, aborted"),
    ],
)
def test_a_wrong_part_is_refused_by_file_and_column(folder: Path, change: Any, said: str) -> None:
    part = next((folder / "core-0" / "outcomes").iterdir())
    pq.write_table(change(pq.read_table(part)), part)
    with pytest.raises(TraceError) as refused:
        read(folder)
    assert str(part) in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("kept_bytes", [0, 3, 200])
def test_a_truncated_part_is_refused_by_file(folder: Path, kept_bytes: int) -> None:
    part = next((folder / "core-0" / "decisions").iterdir())
    part.write_bytes(part.read_bytes()[:kept_bytes])
    with pytest.raises(TraceError, match="damaged or not a Parquet file") as refused:
        read(folder)
    assert str(part) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a readable trace header"),
        ("[]", "schema_version is missing"),
        (json.dumps({"schema_version": 99}), "schema_version is 99, this kvpolicy reads 1"),
        (json.dumps({"schema_version": 1}), "field block_bytes is missing"),
    ],
)
def test_a_wrong_header_is_refused_by_file(folder: Path, text: str, said: str) -> None:
    (folder / "core-0" / "header.json").write_text(text)
    with pytest.raises(TraceError) as refused:
        read(folder)
    assert str(folder / "core-0" / "header.json") in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("policy", ["python:os:system", "cheapest:python:mine:Model,online=on", None])
def test_a_header_names_no_module_to_run(folder: Path, policy: object) -> None:
    """Whoever loads a policy by the name in a trace runs nothing that the trace's writer chose."""
    path = folder / "core-0" / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"policy": policy}))
    with pytest.raises(TraceError, match=r"field policy is .*, should be a policy's name, and never a module to run"):
        read(folder)


def test_no_trace_is_refused_by_folder(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        read(tmp_path / "none")
    with pytest.raises(TraceError, match=f"not a kvpolicy trace; traces are in {folder}: give one of these"):
        read(folder.parent)
    with pytest.raises(TraceError, match=r"not a kvpolicy trace$"):
        read(folder / "core-0")
    with pytest.raises(TraceError, match="given twice"):
        read(folder, folder)
    with pytest.raises(FileExistsError, match="not empty"):
        read(folder).write(folder)


def test_a_bad_row_is_named_when_it_is_written() -> None:
    good = traces.outcome_row(OUTCOME)
    with pytest.raises(TraceError, match="row 1: closed_s missing"):
        from_rows("outcomes", [good, {key: value for key, value in good.items() if key != "closed_s"}])
    with pytest.raises(TraceError, match="row 1, column first_step: wants int64"):
        from_rows("outcomes", [good, good | {"first_step": "four"}])
    with pytest.raises(TraceError, match="row 0: ended should be one of"):
        from_rows("outcomes", [good | {"ended": "vanished"}])


def test_costs_recorded_before_the_victims_delay_was_predicted_are_read(tmp_path: Path) -> None:
    costs = (Cost(1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 2.0), Cost(2.0, 1.0, 1.0, 0.0, 0.0, 1.0, 4.0, -0.1, 0.1, True, 0.25))
    options = (Option("recompute"), Option("swap", 70, "host"))
    decisions = [Decision(options[:i], (1.0,), 0, costs[:i], "p", "{}", "recompute") for i in (1, 0, 2)]
    identity = {"request": "r", "generation": 0, "step": 0, "overflow_id": "o"}
    rows = [
        traces.decision_row(SITUATION, one, preemption_id=str(i), decision_id=str(i), **identity)
        for i, one in enumerate(decisions)
    ]
    HEADER.write(tmp_path / "core-0")
    path = traces.write_part(tmp_path / "core-0", "decisions", 0, from_rows("decisions", rows))
    assert [row["costs"] for row in read(tmp_path).rows("decisions")] == [row["costs"] for row in rows]
    table = pq.read_table(path)
    was = pa.list_(pa.struct(list(SCHEMAS["decisions"].field("costs").type.value_type)[:-1]))
    older = [[{k: v for k, v in cost.items() if k != "victim_delay_s"} for cost in row["costs"]] for row in rows]
    at = table.column_names.index("costs")
    pq.write_table(table.set_column(at, pa.field("costs", was, nullable=False), pa.array(older, was)), path)
    expected = [[cost | {"victim_delay_s": None} for cost in some] for some in older]
    assert [row["costs"] for row in read(tmp_path).rows("decisions")] == expected


def test_traces_recorded_before_survival_was_expected_are_read_as_features_meant_then(folder: Path) -> None:
    """Only shared blocks survive, and a swap saves all. A table that lacks but one of the columns is damaged."""
    (part,) = folder.glob("*/decisions/part-*.parquet")
    table = pq.read_table(part)
    pq.write_table(table.drop_columns(["hit_blocks", "save_blocks"]), part)
    for row in read(folder).rows("decisions"):
        assert (row["hit_blocks"], row["save_blocks"]) == (row["shared_blocks"], row["held_blocks"]) == (0, 3)
        assert type(row["hit_blocks"]) is type(row["save_blocks"]) is float
    for name in ("hit_blocks", "save_blocks"):
        pq.write_table(table.drop_columns([name]), part)
        with pytest.raises(TraceError, match=f"column {name} is missing; decisions needs it as double"):
            read(folder)


def test_a_header_from_before_the_token_budget_reads(tmp_path: Path) -> None:
    HEADER.write(tmp_path)
    values = json.loads((tmp_path / "header.json").read_text())
    del values["token_budget"]
    (tmp_path / "header.json").write_text(json.dumps(values))
    assert Header.read(tmp_path / "header.json").token_budget is None
    (tmp_path / "header.json").write_text(json.dumps(values | {"token_budget": 0}))
    with pytest.raises(TraceError, match="token_budget is 0"):
        Header.read(tmp_path / "header.json")


def test_traces_from_before_absences_and_orders_were_recorded_read_with_the_digest_they_had(folder: Path) -> None:
    (part,) = folder.glob("*/decisions/part-*.parquet")
    table = pq.read_table(part)
    core = folder / "core-0"
    digest = read(folder).digest()
    pq.write_table(table.drop_columns(["absence_tokens"]), part)
    values = json.loads((core / "header.json").read_text())
    (core / "header.json").write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("order")}))
    old = read(folder)
    assert old.digest() == digest and situation_of(old.rows("decisions")[0]).absence_tokens is None
    assert (old.headers["core-0"].order, old.headers["core-0"].order_digest) == (None, None)
    absent = pa.array([12.5] * table.num_rows)
    pq.write_table(table.drop_columns(["absence_tokens"]).append_column("absence_tokens", absent), part)
    assert situation_of(read(folder).rows("decisions")[0]).absence_tokens == 12.5 and read(folder).digest() != digest
    pq.write_table(table, part)
    replace(HEADER, order="mlfq", order_digest="0f").write(core)
    assert read(folder).headers["core-0"].order == "mlfq" and read(folder).digest() != digest
    (core / "header.json").write_text(json.dumps(values | {"order": 3}))
    with pytest.raises(TraceError, match="order is 3, should be a text, or null"):
        read(folder)


def test_rows_of_some_columns_are_those_alone() -> None:
    trace = make_trace(states=12)
    (one, *_) = trace.rows("decisions", ("core", "arm"))
    assert one == {name: trace.rows("decisions")[0][name] for name in ("core", "arm")}
