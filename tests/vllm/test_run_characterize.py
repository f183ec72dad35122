"""The overflow study on the real engine, every figure at a tiny scale: what it measures, and that a report draws it.

Served runs are those of ``kvpolicy_vllm.bench.pressure``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy import trace as traces
from kvpolicy.evaluation.log_headroom import served_headrooms
from kvpolicy.overflow import EVICTED_TOKENS, FIGURES, MEMORY, TIMELINE
from kvpolicy.reporting.measurements import material
from kvpolicy.reporting.pipeline import report
from kvpolicy.settings import Measurement, ServerSettings
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.reach import ARMS, Reach, runs_of
from kvpolicy_vllm.bench.run_characterize import MODEL, characterize
from kvpolicy_vllm.bench.run_profile import UNFINISHED
from kvpolicy_vllm.check import check
from tests.vllm import families, harness

TINY = Reach(
    lengths=(64, 128), length_requests=3, block_sizes=(32,), block_size_tokens=96,
    victims=(1, 3), victim_tokens=64, passes=1, repeats=1,
    scale=1 / 32, served_requests=8, levels=(30, 60), served_passes=1, served_repeats=1, timeline_repeats=1,
    learning=Extent((32,), states=16, passes=1, repeats=1, check_pairs=0, max_tokens=128, max_others=3,
                    max_batch_tokens=500, model_tokens=512, max_extra=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def study(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """Stopped before the last engine starts, then taken up again: the folder, parts begun by then, what was said."""
    out = tmp_path_factory.mktemp("study") / "trace"

    def stop_in_the_last(part: str, done: int, of: int) -> None:
        if part.startswith("memory"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        characterize(out, FIGURES, Measurement(Path(model)), reach=TINY, progress=stop_in_the_last)
    begun: list[str] = []
    characterize(out, FIGURES, Measurement(Path(model)), reach=TINY, progress=lambda part, done, of: begun.append(part))
    return out, begun, str(stopped.value)


@pytest.fixture(scope="module")
def trace(study: tuple[Path, list[str], str]) -> Trace:
    return traces.read(study[0])


def windows(trace: Trace) -> list[dict[str, Any]]:
    return [row for row in trace.rows("windows") if not row["discarded"]]


def test_stopped_it_keeps_what_is_whole_and_measures_nothing_twice(study: tuple[Path, list[str], str]) -> None:
    out, begun, said = study
    assert "4 of 6 parts are measured and kept" in said
    assert {part.split()[0] for part in begun} == {"memory+timeline-b32-pass0"}
    assert not (out / UNFINISHED).exists()
    counted = Counter((row["state_id"], row["arm"], row["repeat"]) for row in windows(traces.read(out)))
    assert max(counted.values()) == 1
    single = ["sequence-length/64", "sequence-length/128", "evicted-tokens/1", "evicted-tokens/3", "block-size/32"]
    states = [*single, *(f"b32-{number:03d}" for number in range(TINY.learning.states))]
    runs = [run for figure in (MEMORY, TIMELINE) for run in runs_of(TINY, figure, 0, 0)]
    expected = {(state, arm, 0) for state in states for arm in ("none", "recompute", "swap")}
    assert set(counted) == expected | {(run.state_id, run.arm, run.repeat) for run in runs}


def test_so_many_victims_go_in_one_overflow_in_the_same_state_under_both_options(trace: Trace) -> None:
    overflows = defaultdict(list)
    for row in trace.rows("decisions"):
        if row["state_id"] is not None and row["state_id"].startswith(EVICTED_TOKENS):
            overflows[row["state_id"], row["arm"], row["overflow_id"]].append(row)
    assert sorted((state, arm) for state, arm, _ in overflows) == [
        (f"evicted-tokens/{count}", arm) for count in (1, 3) for arm in ("recompute", "swap")
    ]
    situations = defaultdict(set)
    for (state, arm, _), rows in overflows.items():
        assert len(rows) == int(state.split("/")[1])
        assert {(row["cause"], row["executed"]) for row in rows} == {("memory", arm)}
        first = rows[0]
        situations[state].add((*(row["computed_tokens"] for row in rows), first["running_requests"]))
    assert all(len(result) == 1 for result in situations.values()), situations
    ((*tokens, _),) = situations["evicted-tokens/3"]
    assert tokens == [64, 64, 64]


def test_every_policy_serves_the_same_requests_in_the_same_memory(trace: Trace) -> None:
    result = material(trace)
    assert {run.requests for run in result.runs} == {TINY.served_requests}
    for run in result.runs:
        taken = {kind for kind, count in run.preemptions.items() if count}
        assert taken == {run.arm} or (run.arm == "learned" and taken), (run.level, run.arm, run.preemptions)
        assert max(run.used_share) == 1.0, "the pool was as large as the level says"
        assert max(run.running) < TINY.served_requests
        assert run.unattributed == 0
    assert Counter((run.figure, run.arm) for run in result.runs) == {
        (figure, arm): count for figure, count in ((MEMORY, 2), (TIMELINE, 1)) for arm in ARMS
    }


def test_all_five_figures_are_drawn_from_the_trace(study: tuple[Path, list[str], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    text_report = report([study[0]], tmp_path / "report.html", tmp_path / "figures")
    assert text_report.groups[0].missing == ()
    assert {f"{figure}.{form}" for figure in FIGURES for form in ("svg", "png")} <= {
        path.name for path in text_report.figures
    }
    for figure in (MEMORY, TIMELINE):
        drawn = (tmp_path / "figures" / f"{figure}.svg").read_text()
        assert "8 requests x 47 in / 32 out" in drawn, "the scaling is printed on the figure"


@pytest.mark.slow
def test_windows_are_served_in_shares_of_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the user's own flags. A request needs ten blocks of full attention at its end, and four or five of a window:
    the memory of a level is a share of both."""
    for name, value in harness.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    llm, out = families.make("gpt-oss", tmp_path / "model"), tmp_path / "trace"
    how = Measurement(llm, vllm_flags=("--dtype", "float32", "--enforce-eager"))
    reach = replace(TINY, scale=1 / 8)
    characterize(out, (MEMORY, TIMELINE), how, reach=reach, progress=lambda part, done, of: None)
    trace = traces.read(out)
    (served,) = [header for header in trace.headers.values() if "device_blocks" in header.noise]
    tokens, size = reach.load.total_tokens, reach.load.block_size
    full, window = -(-tokens // size), -(-tokens // size) - (tokens - families.WINDOW + 1) // size
    for level in reach.levels:
        blocks = served.noise["device_blocks"][f"{MEMORY}/{level}"]
        assert blocks - 1 == max(round(level / 100 * 8 * (full + window)), 2 * full + 1)
    assert f"{8 * (full + window)} blocks of 32 tokens hold all" in served.notes
    for run in material(trace).runs:
        taken = {kind for kind, count in run.preemptions.items() if count}
        assert taken and (taken == {run.arm} or run.arm == "learned")
        assert 0.8 < max(run.used_share) <= 1.0 and run.unattributed == 0


@pytest.mark.slow
@pytest.mark.feature("a study of two ranks")
def test_two_ranks_with_a_file_of_flags(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is that of the file; each rank has half of the heads, and half of a block's bytes."""
    for name, value in harness.environment(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    file, out = tmp_path / "server.yaml", tmp_path / "trace"
    file.write_text("tensor-parallel-size: 2\ndtype: float32\nenforce-eager: true\nmax-num-batched-tokens: 640\n")
    how = Measurement(Path(model), vllm_flags=("--config", str(file)), minutes=60)
    characterize(out, ("sequence-length",), how, reach=TINY, progress=lambda part, done, of: None)
    trace = traces.read(out)
    config = json.loads((Path(model) / "config.json").read_text())
    halves = {"heads": config["num_attention_heads"] // 2, "kv_heads": config["num_key_value_heads"] // 2}
    for header in trace.headers.values():
        assert {name: header.geometry[name] for name in halves} == halves and header.token_budget == 640
    counted = Counter((row["state_id"], row["arm"]) for row in windows(trace))
    states = [f"sequence-length/{tokens}" for tokens in TINY.lengths]
    assert counted == {(state, arm): 1 for state in states for arm in ("none", "recompute", "swap")}


def test_a_server_without_flags_takes_what_is_learned(study: tuple[Path, list[str], str], model: str) -> None:
    """The model was computed in the type that vLLM takes for it."""
    learned = ServerSettings(f"cheapest:{study[0] / MODEL}", host_gib=0.5)
    assert check(model, learned, []).ok
    refused = check(model, learned, ["--dtype", "float32"]).refused
    assert "dtype is 'float32' here, it was measured on 'bfloat16'" in refused


def test_it_says_what_there_was_to_win(study: tuple[Path, list[str], str], trace: Trace) -> None:
    """For each memory that was served under recompute, priced by the model that was learned on the way."""
    found = served_headrooms(trace, cost.load(str(study[0] / MODEL)))
    assert list(found) == ["memory/30", "memory/60", "timeline/12"]
    for won in found.values():
        assert won.recomputed_tokens > 0 and won.bound is not None and won.forecast is not None
        assert 0 <= won.forecast <= won.bound
