"""The checks against published results can fail, and compare what they say they compare."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import astuple, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvpolicy.errors import InputError
from kvpolicy.trace import SCHEMAS, Trace, TraceError, from_rows, with_core
from tests.synthetic import make_trace

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def script(name: str) -> Any:
    return import_module(name)


def test_a_missed_bar_and_a_statement_that_does_not_hold_end_with_status_1(tmp_path: Path) -> None:
    lines = script("published_lines")
    good, bad = lines.Line("a", 100.0, 104.0, 0.05), lines.Line("a", 100.0, 94.0, 0.05)
    unbarred = lines.Line("a", 100.0, 10.0)
    holds, fails = lines.Statement("b", True), lines.Statement("b", False)
    assert lines.status([good, unbarred], [holds]) == 0
    assert lines.status([good, bad], [holds]) == 1 and lines.status([good], [fails]) == 1
    lines.write(tmp_path / "new" / "file.json", [bad], [holds])
    (row,) = json.loads((tmp_path / "new" / "file.json").read_text())["lines"]
    assert row["met"] is False and row["error"] == pytest.approx(-0.06)


def test_the_watermark_study_simulates_what_the_request_says() -> None:
    study = script("published_watermark")
    requests = list(study.lengths(0))
    assert len(requests) == 450 and {request.loop.concurrency for request in requests} == {128}
    assert min(request.prompt_tokens for request in requests) >= 800
    assert 5700 < max(request.output_tokens for request in requests) <= 6000
    times, block_bytes = study.gb200_times()
    server = study.server_of(0.05, block_bytes)
    assert server.block_bytes * (server.device_blocks + 1) == pytest.approx(16 * 2**30, rel=1e-3)
    assert "GB200" in times.source and not server.prefix_caching and server.watermark == 0.05


def test_the_watermark_study_misses_its_bars_where_the_watermark_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("published_watermark")
    monkeypatch.setattr(study, "REQUESTS", 140)
    (run,) = study.simulated(0.0, 1)
    lines, statements = study.compared([[run]] * len(study.PUBLISHED))
    assert script("published_lines").status(lines, statements) == 1
    assert [statement.holds for statement in statements] == [True, False, False]


def test_the_study_of_two_gpus_judges_means_and_leaves_out_prompts_that_nobody_computed() -> None:
    study = script("published_two_gpus")
    cases = {(512, 1, 128): (0.2, 0.05), (512, 2, 128): (0.4, 0.05), (512, 64, 128): (0.8, 0.05)}
    study.simulated = lambda times, case: (0.19 * case[1], 0.04)
    lines = list(study.lines_of(None, cases, "made up"))
    assert [line.published for line in lines] == [200, 50, 400, 50, 50]
    statements = list(study.statements_of(lines, "made up"))
    assert [statement.holds for statement in statements] == [True, True, False, False]
    assert "5.0%, signed -5.0%, 1 of 1" in statements[0].figures


def test_the_shares_that_fit_a_device_are_found_and_those_of_another_are_not_its_own() -> None:
    study = script("published_sheets")

    class MadeUp(study.Judged):
        """Its tables are a data sheet's steps under other shares."""

        def __init__(self, place: Any, shares: list[float]) -> None:
            self.place = place
            self._shape = study.ModelShape.from_config(dict(place.config))
            self.kinds, loads = zip(*study.steps(), strict=True)
            self._loads = np.array(loads, dtype=float)
            self.measured = self.by_sheet(study.with_shares(shares))

    first, second = MadeUp(study.PLACES[0], [0.5, 0.3, 0.9, 0.8]), MadeUp(study.PLACES[1], [0.9, 0.7, 0.4, 0.3])
    arms = {arm: study.outcome(first, arm, assumed) for arm, assumed in study.arms(first, [second])}
    found = list(arms["shares fitted here"]["shares"].values())
    assert found == pytest.approx([0.5, 0.3, 0.9, 0.8], rel=0.02)
    assert not any(study.off(list(arms.values()), "shares fitted here"))
    assert all(study.off(list(arms.values()), "shares of the other devices"))
    # 2 ms more a step, and not less.
    assert arms["as it is"]["errors"]["decodes"][1] > arms["without 2 ms a step"]["errors"]["decodes"][1]


def data_folder(folder: Path, rows: Sequence[tuple[int, int]]) -> Path:
    """Tables in the layouts of the studies' data: these prompts and outputs of ShareGPT and arXiv, and one conversation
    every 2 s."""
    for name in ("lengths", "traces"):
        (folder / name).mkdir(parents=True)
    for name in ("sharegpt_8k_llama2tok_even_rows", "arxiv_summarization_llama2tok_even_rows"):
        text = "\n".join(["prompt_tokens,output_tokens", *(f"{prompt},{output}" for prompt, output in rows), ""])
        (folder / "lengths" / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    arrivals = "\n".join(["arrival_s,prompt_tokens,output_tokens", *(f"{2 * i},300,40" for i in range(60)), ""])
    (folder / "traces" / "azure2023_conv_0-1800s.csv.gz").write_bytes(gzip.compress(arrivals.encode()))
    return folder


def test_the_waste_of_contiguous_room_is_what_arithmetic_says() -> None:
    study = script("published_kv_waste")
    rows = [(100, 100)] * 200
    # 7 requests with room for 2048, 100 to 200 tokens held; the last 7 run while nobody waits.
    most = study.orca("Orca, Max", rows)
    assert most.states == pytest.approx(7 * 150.5 / study.SLOTS, rel=1e-6)
    assert most.internal == pytest.approx(7 * (2048 - 200) / study.SLOTS, rel=1e-6)
    assert most.external == pytest.approx(1 - 7 * 2048 / study.SLOTS, rel=1e-6)
    assert sum(astuple(most)) == pytest.approx(1.0)
    true = study.orca("Orca, Oracle", rows)
    # Chunks of 256: 61 fit into 8192 + 4096 + 2048 + 1024 + 256.
    assert true.states == pytest.approx(61 * 150.5 / study.SLOTS, rel=1e-6) and true.internal == 0.0


def test_buddies_are_merged_again() -> None:
    memory = script("published_kv_waste").Buddies(12)
    chunks = [memory.take(tokens) for tokens in (3, 4, 2, 1)]
    assert None not in chunks and memory.take(2) is None
    chunks.append(memory.take(1))
    assert memory.take(1) is None
    for order, place in chunks:
        memory.give(order, place)
    assert memory.take(8) == (3, 0) and memory.take(4) == (2, 8)


def test_blocks_waste_the_rest_of_the_last_one_and_sharing_saves_full_blocks_of_the_prompt() -> None:
    study = script("published_kv_waste")
    assert study.saved([(33, 1)], 2) == pytest.approx(2 / 6)
    assert study.saved([(33, 1)], 2, beams_alike=True) == pytest.approx(2 / 6)
    assert study.saved([(32, 1)], 2) == pytest.approx(1 / 4)  # its last token is computed again
    waste = study.paged([(40, 60)] * 300, study.Builtin())
    assert waste.reserved == 0 and 0 < waste.internal < 16 / 40
    assert waste.states + waste.internal + waste.external == pytest.approx(1.0)


def test_the_study_of_waste_says_where_it_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that are all alike hold too little of the room for the longest one. Lengths that vary as those of the
    paper may have (exponential outputs) meet every bar."""
    study, rng = script("published_kv_waste"), random.Random(0)
    alike = data_folder(tmp_path / "alike", [(100, 200)] * 60)
    varied = data_folder(
        tmp_path / "varied", [(160, max(1, min(1500, round(rng.expovariate(1 / 338))))) for _ in range(300)]
    )
    out = tmp_path / "out.json"
    assert study.main(["--data", str(alike), "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    (missed,) = (line for line in printed.splitlines() if "Orca, Max: token states" in line)
    assert "MISSED" in missed and "Orca, Oracle: token states" in printed
    met = [line["met"] for line in json.loads(out.read_text())["lines"] if line["name"] == "Orca, Max: token states"]
    assert met == [False]
    assert study.main(["--data", str(varied)]) == 0
    printed = capsys.readouterr().out
    assert "MISSED" not in printed and "DOES NOT HOLD" not in printed and printed.count("holds: ") == 3
    with pytest.raises(SystemExit) as ended:
        study.main(["--data", str(tmp_path / "none")])
    assert ended.value.code == 2


def test_both_classes_are_served_and_every_arm_gets_the_same_requests(tmp_path: Path) -> None:
    study = script("published_two_classes")
    data = data_folder(tmp_path, [(2000, 200)] * 60)
    alone, both = (study.requests_of(data, 20.0, 2.0, offline) for offline in (False, True))
    assert len(alone.requests) == 20 and {request.priority for request in alone.requests} == {-1}
    assert max(request.arrival_s for request in alone.requests) <= 20
    assert [request for request in both.requests if request.class_name == "online"] == list(alone.requests)
    served = [
        study.serve(arm, both if arm.offline else alone, 20.0) for arm in (study.ALONE, *study.PRIORITY, study.OURS)
    ]
    assert served[0].offline_tok_s == 0 < min(one.offline_tok_s for one in served[1:])
    lines, statements = study.compared(2.0, served)
    # With memory for all, an order that displaces has nothing to win.
    assert lines[0].ours == pytest.approx(1.0, abs=0.2) and not statements[0].holds and statements[1].holds


def test_steps_are_told_apart_by_what_they_compute() -> None:
    study = script("published_overflow")
    counts = [(0, 0), (3, 0), (4, 4), (4, 4), (5, 4)]
    steps = [{"scheduled_requests": requests, "decode_requests": decodes} for requests, decodes in counts]
    batches = study.batches_of(steps)
    assert astuple(batches) == (0.25, 0.5, 0.25) and batches.decoding == 0.5
    assert not study._mixes("made up", batches).holds
    assert study.batches_of([]).decoding == 0.0


def test_the_overflow_study_counts_what_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("published_overflow")
    monkeypatch.setattr(study, "PROMPT", 150)
    monkeypatch.setattr(study, "OUTPUT", 100)
    monkeypatch.setattr(study, "WHOLE", 32 * 16)
    trace, server = study.simulated("always-swap", 12)
    moments = study.use_over_time(trace, server)
    assert len(moments) == study.MOMENTS and all(0 <= moment["device"] <= 1 + 1e-9 for moment in moments)
    saved = sum(row["end_s"] - row["start_s"] for row in trace.rows("transfers") if row["direction"] == "save")
    assert sum(moment["save"] for moment in moments) * moments[0]["until_s"] == pytest.approx(saved) and saved > 0
    assert max(moment["host KV"] for moment in moments) > 0 == pytest.approx(moments[-1]["host KV"])
    assert study.overhead_s(trace) < study.FELT_S < study.overhead_s(study.simulated("always-recompute", 12)[0])


@pytest.mark.parametrize("victims", [1, 2, 4])
def test_a_single_overflow_evicts_whom_it_should_and_copies_take_what_arithmetic_says(victims: int) -> None:
    study = script("published_overflow")
    requests = study.VICTIM_REQUESTS
    level = study.measured(7, study.Overflow(32, requests, 256, victims))
    assert level.level == 7 and level.evicted_tokens == victims * 256
    times, block_bytes = study.machine(32, requests * 256)
    blocks = 256 // 32
    one_s = sum(times.copy_s(way, blocks * block_bytes, blocks * 64, block_bytes // 64) for way in ("save", "load"))
    assert level.link_ms == pytest.approx(1e3 * victims * one_s)
    # Beside the steps of those that stay, copies take no engine time; a recompute takes the compute of its tokens.
    assert level.swap_ms == pytest.approx(0, abs=1e-6) and level.recompute_ms > 5 * victims


def test_an_overflow_that_is_another_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("published_overflow")
    monkeypatch.setattr(study.Overflow, "blocks", property(lambda overflow: 4 * 4 + 4))
    with pytest.raises(AssertionError, match="no other overflow"):
        study.measured(1, study.Overflow(16, 4, 64))


def test_sweeps_of_another_shape_do_not_hold() -> None:
    study = script("published_overflow")

    def levels(*costs: tuple[float, float]) -> Any:
        return [study.Level(at, at, *cost, 0.0) for at, cost in enumerate(costs)]

    figures = (study.STUDY_BLOCK_SIZE, study.EVICTED_TOKENS, study.SEQUENCE_LENGTH)
    as_published = (levels((10, 9), (11, 8)), levels((1, 2), (4, 3)), levels((1, 2), (4, 3)))
    assert [one.holds for one in study.of_sweeps(dict(zip(figures, as_published, strict=True)))] == [True] * 6
    other = (levels((10, 9), (14, 9)), levels((1, 2), (4, 2)), levels((1, 2), (4, 5)))
    held = [one.holds for one in study.of_sweeps(dict(zip(figures, other, strict=True)))]
    assert held == [False, False, False, True, True, False]


def test_an_overhead_that_is_rounding_is_printed_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("published_overflow")
    monkeypatch.setattr(study, "overhead_s", lambda trace: -1.98e-14)
    trace, _ = study.simulated("always-swap", 60)
    (statement,) = study._of_memory("always-swap", [study.run_of("always-swap", 60, trace)])
    assert statement.holds and statement.figures.startswith("60%: 0 s of ")


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("published_overflow", ["--trace", "nothing"], "nothing: no such folder"),
        ("published_two_gpus", ["--profiles", "nothing"], "nothing/vidur_linear_ops_a100.csv.gz: cannot be read"),
        ("published_sheets", ["--profiles", "nothing"], "nothing/lss_H100_Llama-3.1-8B_tp1_layers.csv.gz: cannot be"),
    ],
)
def test_a_folder_that_is_not_there_is_refused_in_a_line_before_anything_runs(
    name: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name).main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith(f"{name}.py: error: {reason}") and printed.err.count("\n") == 1


def test_published_times_that_are_not_in_the_table_are_refused(tmp_path: Path) -> None:
    study = script("published_two_gpus")
    (tmp_path / "times.csv").write_text("model,hardware\nother,a100\n")
    with pytest.raises(InputError, match=r"times\.csv: no rows of llama2-70b on 2 a100-80gb"):
        study.measured(tmp_path / "times.csv")


def test_a_recorded_trace_shows_the_device_by_what_it_timed(tmp_path: Path) -> None:
    """A second of steps under way, of which the device computed a quarter in one core's; the other's is not known."""
    study = script("published_overflow")
    step: dict[str, Any] = dict.fromkeys(SCHEMAS["steps"].names, 0) | {"device_s": None, "repeated": []}
    steps = [step | {"step": at, "start_s": 50 + 0.1 * at, "duration_s": 0.1, "used_blocks": 6} for at in range(10)]
    header = make_trace(states=1, repeats=1).headers.popitem()[1]
    header = replace(header, device_blocks=10, host_blocks=0)
    timed = from_rows("steps", [row | {"device_s": 0.025} for row in steps])
    tables = {"a": from_rows("steps", steps), "b": timed}
    trace = Trace(dict.fromkeys(tables, header), {"steps": pa.concat_tables(map(with_core, tables.values(), tables))})
    for core, share in {"a": 1.0, "b": 0.25}.items():
        moments = study.use_over_time(trace, header, core)
        assert [moment["device"] for moment in moments] == pytest.approx([share] * 10)
        assert [moment["device KV"] for moment in moments] == pytest.approx([0.5] * 10)
        assert moments[-1]["until_s"] == pytest.approx(1.0)
    assert [study.counted(trace, core)[0] for core in "ab"] == [
        f"{core}, a profile of single requests" for core in "ab"
    ]
    trace.write(tmp_path / "trace")
    assert study.recorded_in(tmp_path / "trace").table("steps").num_rows == 20
    Trace({"a": header}, {}).write(tmp_path / "empty")
    with pytest.raises(TraceError, match="no steps were recorded"):
        study.recorded_in(tmp_path / "empty")


def test_of_a_characterisation_the_runs_that_it_served_are_counted() -> None:
    study = script("published_overflow")
    step: dict[str, Any] = dict.fromkeys(SCHEMAS["steps"].names, 0) | {"device_s": None, "repeated": []}
    window: dict[str, Any] = dict.fromkeys(SCHEMAS["windows"].names, 0)
    window |= {"arm": "recompute", "cause": "memory", "preemption_id": None, "discarded": ""}
    spans = {
        "warm-up/12": (0, 1, -1),
        "timeline/12": (2, 4, 0),
        "sequence-length/64": (5, 6, 0),
        "memory/30": (8, 8, 1),
    }
    windows = [
        window | {"state_id": state, "first_step": first, "last_step": last, "repeat": repeat}
        for state, (first, last, repeat) in spans.items()
    ]
    rows = {"steps": [step | {"step": at} for at in range(10)], "windows": windows}
    header = make_trace(states=1, repeats=1).headers.popitem()[1]
    trace = Trace({"a": header}, {name: with_core(from_rows(name, some), "a") for name, some in rows.items()})
    name, steps = study.counted(trace, "a")
    assert name == "a, 2 served runs" and [row["step"] for row in steps] == [2, 3, 4, 8]
