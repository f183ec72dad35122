"""A profile on the real engine: what it promises about its states, its windows and its being interrupted.

A profile runs ``kvpolicy_vllm.bench.inspect_model``, then ``kvpolicy_vllm.bench.measure_engine`` for each part by
``kvpolicy_vllm.bench.engine_run``, whose windows are those of ``kvpolicy_vllm.bench.measured_window``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import TOOL_COPY
from kvpolicy.settings import Measurement
from kvpolicy.trace import Trace
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.profile_results import ProfileReport
from kvpolicy_vllm.bench.run_profile import UNFINISHED, profile
from kvpolicy_vllm.bench.states import grid

SMALL = Extent((32,), 9, 2, 1, 2, 400, 3, 1200, 1024, max_extra=2)


SAME_IN_BOTH_ARMS = (
    "computed_tokens", "prompt_tokens", "output_tokens", "block_size", "block_bytes", "segment_bytes", "held_blocks",
    "shared_blocks", "hashed_blocks", "device_blocks", "free_blocks", "short_blocks", "host_blocks", "free_host_blocks",
    "running_requests", "waiting_requests", "batch_tokens", "queued_save_bytes", "queued_load_bytes",
    "earlier_preemptions", "priority", "cause",
)  # fmt: skip


OF_EARLIER_VICTIMS = ("queued_save_bytes", "free_host_blocks")
"""What victims before it in the same overflow change for the one that is measured, where they are swapped."""


class Interrupted(Exception):
    """What a test stops a profile with."""


@pytest.fixture(scope="module")
def interrupted(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], ProfileReport]:
    """A small profile, stopped in the middle of its second part, then taken up again: folder, parts begun, report."""
    out = tmp_path_factory.mktemp("profile") / "trace"

    def stop_in_the_second(part: str, done: int, of: int) -> None:
        if part.startswith("b32-pass1") and done == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        profile(out, Measurement(Path(model)), extent=SMALL, progress=stop_in_the_second)
    values = traces.read(out)
    assert len(values.headers) == 1, "the first part is done, and is a trace by itself"
    begun: list[str] = []
    report = profile(out, Measurement(Path(model)), extent=SMALL, progress=lambda part, done, of: begun.append(part))
    assert traces.read(out).headers.keys() > values.headers.keys()
    return out, begun, report


@pytest.fixture(scope="module")
def measured(interrupted: tuple[Path, list[str], ProfileReport]) -> Trace:
    return traces.read(interrupted[0])


def by_state(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    """Decisions about the victims that windows name, by state."""
    named = {row["preemption_id"] for row in trace.rows("windows")}
    result = defaultdict(list)
    for row in trace.rows("decisions"):
        if row["state_id"] is not None and row["preemption_id"] in named:
            result[row["state_id"]].append(row)
    return result


def test_an_interrupted_profile_goes_on_where_it_was(interrupted: tuple[Path, list[str], ProfileReport]) -> None:
    out, begun, _ = interrupted
    assert {part.split()[0] for part in begun} == {"b32-pass1"}, "only the part that was interrupted is measured anew"
    assert len(traces.read(out).headers) == 2
    assert not (out / UNFINISHED).exists()


def test_both_arms_find_the_same_state(measured: Trace) -> None:
    """Every decision of a state was taken in the same situation, whatever was done then and in whichever pass."""
    states = {name: rows for name, rows in by_state(measured).items() if not name.startswith("check")}
    assert len(states) == SMALL.states
    planned = {state.state_id: state for state in grid(32, SMALL.states, SMALL.span(2048), random.Random("0/grid/32"))}
    for name, rows in states.items():
        arms, several = [row["arm"] for row in rows], planned[name].victims > 1
        assert arms.count("recompute") == arms.count("swap") >= 2, name
        for field in SAME_IN_BOTH_ARMS:
            values = {
                row[field] for row in rows if not (several and field in OF_EARLIER_VICTIMS and row["arm"] == "swap")
            }
            assert len(values) == 1, f"{name}: {field} is {[row[field] for row in rows]}"


def test_at_least_half_of_the_states_are_natural(measured: Trace) -> None:
    causes = {name: rows[0]["cause"] for name, rows in by_state(measured).items()}
    assert sum(cause == "memory" for cause in causes.values()) * 2 >= len(causes)
    for rows in by_state(measured).values():
        for row in rows:
            assert (row["short_blocks"] == 1) if row["cause"] == "memory" else (row["free_blocks"] > 0)


def test_what_was_to_be_executed_was(measured: Trace) -> None:
    outcomes = {row["preemption_id"]: row for row in measured.rows("outcomes")}
    for rows in by_state(measured).values():
        for row in rows:
            outcome = outcomes[row["preemption_id"]]
            assert row["executed"] == row["arm"]
            assert row["probabilities"][row["chosen"]] == 1.0
            assert outcome["ended"] == "resumed"
            shared = row["shared_blocks"] * row["block_size"]
            lost = row["computed_tokens"] - shared
            brought_back = (lost, 0) if row["arm"] == "recompute" else (0, lost)
            assert (outcome["recomputed_tokens"], outcome["loaded_tokens"]) == brought_back
            assert outcome["local_hit_tokens"] == shared


def test_victims_share_as_many_blocks_as_their_states_say(measured: Trace) -> None:
    """Another request goes on holding them: a swap saves and does not load them."""
    planned = grid(32, SMALL.states, SMALL.span(2048), random.Random("0/grid/32"))
    assert {state.cause for state in planned if state.shared_blocks} == {"memory", "forced"}
    states = by_state(measured)
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for row in measured.rows("transfers"):
        moved[row["preemption_id"], row["direction"]] += row["bytes"]
    for state in planned:
        for row in states[state.state_id]:
            assert row["shared_blocks"] == state.shared_blocks
            if row["arm"] == "swap":
                saved, loaded = (moved[row["preemption_id"], direction] for direction in ("save", "load"))
                assert saved == row["save_blocks"] * row["block_bytes"]
                assert loaded == (row["held_blocks"] - state.shared_blocks) * row["block_bytes"]


def test_copies_are_queued_in_both_directions_as_states_say_whatever_is_done(measured: Trace) -> None:
    """And in the window without a preemption too: it shows what the copies add to steps."""
    planned = grid(32, SMALL.states, SMALL.span(2048), random.Random("0/grid/32"))
    assert {state.queued_save_share for state in planned} == {state.queued_load_share for state in planned}
    assert {state.queued_save_share for state in planned} == {0.0, 0.5, 1.0}
    states = by_state(measured)
    for state in planned:
        for row in states[state.state_id]:
            lost_blocks = row["held_blocks"] - row["shared_blocks"]
            queued_bytes = round(state.queued_save_share * lost_blocks) * row["block_bytes"]
            if state.victims > 1 and row["arm"] == "swap":
                assert row["queued_save_bytes"] > queued_bytes, "those of the victims before it, too"
            else:
                assert row["queued_save_bytes"] == queued_bytes
            assert row["queued_load_bytes"] == round(state.queued_load_share * lost_blocks) * row["block_bytes"]
    own = [row for row in measured.rows("transfers") if row["preemption_id"] == TOOL_COPY]
    assert {row["direction"] for row in own} == {"save", "load"}
    steps = {(row["core"], row["step"]): row for row in measured.rows("steps")}
    queued = {state.state_id for state in planned if state.queued_save_share}
    without = [row for row in measured.rows("windows") if row["state_id"] in queued and row["arm"] == "none"]
    assert without and all(steps[row["core"], row["first_step"]]["saves"] for row in without)


def test_what_is_in_host_memory_before_is_loaded_and_not_saved(measured: Trace) -> None:
    planned = grid(32, SMALL.states, SMALL.span(2048), random.Random("0/grid/32"))
    assert {state.cause for state in planned if state.stored} == {"memory", "forced"}
    states = by_state(measured)
    for state in planned:
        for row in states[state.state_id]:
            assert row["save_blocks"] == (0 if state.stored else row["held_blocks"])


def test_nothing_else_happens_in_a_window_that_counts(measured: Trace) -> None:
    steps = {(row["core"], row["step"]): row for row in measured.rows("steps")}
    windows = [row for row in measured.rows("windows") if not row["discarded"]]
    assert {row["arm"] for row in windows} == {"none", "recompute", "swap"}
    planned = grid(32, SMALL.states, SMALL.span(2048), random.Random("0/grid/32"))
    victims_of = {state.state_id: state.victims for state in planned}
    assert {1, 2} <= set(victims_of.values())
    for window in windows:
        inside = [steps[window["core"], number] for number in range(window["first_step"], window["last_step"] + 1)]
        victims = victims_of.get(window["state_id"], 1)
        assert sum(step["preemptions"] for step in inside) == victims * (window["arm"] != "none")
        others = {step["waiting_requests"] for step in inside}
        assert max(others) - min(others) <= victims, "only the victims wait and come back"
        assert (window["preemption_id"] is None) == (window["arm"] == "none")


def test_only_windows_that_count_have_labels(measured: Trace) -> None:
    """The warm-up preempts too; nobody can take it for a measurement."""
    counting = {row["preemption_id"] for row in measured.rows("windows") if not row["discarded"]} - {None}
    warm_up = {row["preemption_id"] for row in measured.rows("windows") if row["discarded"] == "warm-up"} - {None}
    rows = [row for row in measured.rows("decisions") if row["state_id"] is not None]
    overflows = {row["overflow_id"] for row in rows if row["preemption_id"] in counting}
    labelled = {row["preemption_id"] for row in rows}
    assert labelled >= counting and {row["overflow_id"] for row in rows} == overflows, "and other victims of theirs"
    assert warm_up
    assert not warm_up & labelled


def test_every_measured_preemption_gets_a_cost(measured: Trace) -> None:
    labelled = {row["preemption_id"] for rows in by_state(measured).values() for row in rows}
    costs = {row["preemption_id"]: row["engine_s"] for row in attribute(measured).rows("outcomes")}
    assert all(costs[name] is not None for name in labelled)
    assert len(dataset_of({"profile": measured}).states) >= SMALL.states, "the tool's copies disturb no reader"


def test_the_header_says_how_it_was_measured(interrupted: tuple[Path, list[str], ProfileReport]) -> None:
    out, _, report = interrupted
    for header in traces.read(out).headers.values():
        assert header.source == "profile"
        assert header.link == {"kind": "native"}
        assert header.geometry["layers"] == 4
        assert header.noise["windows"] == 10
        assert header.noise["variation"] > 0
        assert header.noise["above_limit"] == (header.noise["variation"] > 0.1)
        assert header.noise["above_limit"] or header.noise["repeats"] == header.noise["asked_repeats"]
        assert {check["arm"] for check in header.noise["self_check"]} == {"recompute", "swap"}
    assert "self-check: recompute, blocks of 32" in report.text()
    assert report.states == SMALL.states + 2


def test_a_model_is_computed_in_the_type_that_vllm_takes(
    interrupted: tuple[Path, list[str], ProfileReport], model: str
) -> None:
    """As a server without --dtype will: on a CPU bfloat16 for a checkpoint in float32, too."""
    out, _, report = interrupted
    assert json.loads((Path(model) / "config.json").read_text())["dtype"] == "float32"
    assert {header.geometry["dtype"] for header in traces.read(out).headers.values()} == {"bfloat16"}
    assert report.text().splitlines()[0].endswith(" discarded, in bfloat16")


def test_one_that_was_begun_in_float32_is_not_mixed_with_others(
    interrupted: tuple[Path, list[str], ProfileReport], model: str, tmp_path: Path
) -> None:
    """Whether by an earlier version, or since kvpolicy had made the model."""
    out = shutil.copytree(interrupted[0], tmp_path / "trace")
    with pytest.raises(ValueError, match="was begun with dtype 'auto', now asked for with None"):
        profile(out, Measurement(Path(model)), extent=SMALL, is_made=True)
    plan = json.loads((out / "profile.json").read_text())
    del plan["asked"]["dtype"]
    (out / "profile.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"was computed in float32, as by an earlier kvpolicy; .* give another --out"):
        profile(out, Measurement(Path(model)), extent=SMALL)


def test_other_arguments_do_not_go_on_with_it(interrupted: tuple[Path, list[str], ProfileReport], model: str) -> None:
    with pytest.raises(ValueError, match="was begun with seed 0, now asked for with 1"):
        profile(interrupted[0], Measurement(Path(model), seed=1), extent=SMALL)


def test_wrong_arguments_are_refused_before_an_engine_starts(tmp_path: Path, model: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something other than a profile"):
        profile(tmp_path / "full", Measurement(Path(model)), extent=SMALL)
    with pytest.raises(ValueError, match="link 'fast'"):
        profile(tmp_path / "new", Measurement(Path(model), link="fast"), extent=SMALL)
    with pytest.raises(ValueError, match=r"should be a model.s folder: .*config.json"):
        profile(tmp_path / "new", Measurement(tmp_path), extent=SMALL)
