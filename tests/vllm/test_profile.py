"""A profile on the real engine: what it promises about its states, its windows and its being interrupted."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute
from kvpolicy.settings import Measurement
from kvpolicy.trace import Header, Trace
from kvpolicy_vllm.bench.job import Noise
from kvpolicy_vllm.bench.profile_parts import QUICK, Extent, parts_of
from kvpolicy_vllm.bench.profile_results import ProfileReport
from kvpolicy_vllm.bench.run_profile import UNFINISHED, profile
from kvpolicy_vllm.bench.selfcheck import judge, self_checks
from kvpolicy_vllm.bench.states import Span, State, check_states, grid, waiting_prompt_tokens

SPAN = Span(64, 1500, 7, 6000, 4096)
SMALL = Extent((32,), 6, 2, 1, 2, 400, 3, 1200, 1024, max_extra=2)

SAME_IN_BOTH_ARMS = (
    "computed_tokens", "prompt_tokens", "output_tokens", "block_size", "block_bytes", "segment_bytes", "held_blocks",
    "shared_blocks", "hashed_blocks", "device_blocks", "free_blocks", "short_blocks", "host_blocks", "free_host_blocks",
    "running_requests", "waiting_requests", "batch_tokens", "queued_save_bytes", "queued_load_bytes",
    "earlier_preemptions", "priority", "cause",
)  # fmt: skip


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
    kept = traces.read(out)
    assert len(kept.headers) == 1, "the first part is done, and is a trace by itself"
    begun: list[str] = []
    report = profile(out, Measurement(Path(model)), extent=SMALL, progress=lambda part, done, of: begun.append(part))
    assert traces.read(out).headers.keys() > kept.headers.keys()
    return out, begun, report


@pytest.fixture(scope="module")
def measured(interrupted: tuple[Path, list[str], ProfileReport]) -> Trace:
    return traces.read(interrupted[0])


def by_state(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in trace.rows("decisions"):
        if row["state_id"] is not None:
            found[row["state_id"]].append(row)
    return found


def test_an_interrupted_profile_goes_on_where_it_was(interrupted: tuple[Path, list[str], ProfileReport]) -> None:
    out, begun, _ = interrupted
    assert {part.split()[0] for part in begun} == {"b32-pass1"}, "only the part that was interrupted is measured anew"
    assert len(traces.read(out).headers) == 2
    assert not (out / UNFINISHED).exists()


def test_both_arms_find_the_same_state(measured: Trace) -> None:
    """Every decision of a state was taken in the same situation, whatever was done then and in whichever pass."""
    states = {name: rows for name, rows in by_state(measured).items() if not name.startswith("check")}
    assert len(states) == SMALL.states
    for name, rows in states.items():
        arms = [row["arm"] for row in rows]
        assert arms.count("recompute") == arms.count("swap") >= 2, name
        for field in SAME_IN_BOTH_ARMS:
            assert len({row[field] for row in rows}) == 1, f"{name}: {field} is {[row[field] for row in rows]}"


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
            lost = (row["computed_tokens"], 0) if row["arm"] == "recompute" else (0, row["computed_tokens"])
            assert (outcome["recomputed_tokens"], outcome["loaded_tokens"]) == lost


def test_nothing_else_happens_in_a_window_that_counts(measured: Trace) -> None:
    steps = {(row["core"], row["step"]): row for row in measured.rows("steps")}
    windows = [row for row in measured.rows("windows") if not row["discarded"]]
    assert {row["arm"] for row in windows} == {"none", "recompute", "swap"}
    for window in windows:
        inside = [steps[window["core"], number] for number in range(window["first_step"], window["last_step"] + 1)]
        assert sum(step["preemptions"] for step in inside) == (window["arm"] != "none")
        others = {step["waiting_requests"] for step in inside}
        assert max(others) - min(others) <= 1, "only the victim waits and comes back"
        assert (window["preemption_id"] is None) == (window["arm"] == "none")


def test_only_windows_that_count_have_labels(measured: Trace) -> None:
    """The warm-up preempts too; nobody can take it for a measurement."""
    counting = {row["preemption_id"] for row in measured.rows("windows") if not row["discarded"]} - {None}
    warm_up = {row["preemption_id"] for row in measured.rows("windows") if row["discarded"] == "warm-up"} - {None}
    labelled = {row["preemption_id"] for row in measured.rows("decisions") if row["state_id"] is not None}
    assert labelled == counting
    assert warm_up
    assert not warm_up & labelled


def test_every_measured_preemption_gets_a_cost(measured: Trace) -> None:
    labelled = {row["preemption_id"] for rows in by_state(measured).values() for row in rows}
    costs = {row["preemption_id"]: row["engine_s"] for row in attribute(measured).rows("outcomes")}
    assert all(costs[name] is not None for name in labelled)


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
    with pytest.raises(ValueError, match=r"config.json: no max_position_embeddings"):
        profile(tmp_path / "new", Measurement(tmp_path), extent=SMALL)


# ---- without an engine ----


def test_a_grid_spreads_over_everything_it_is_to_cover() -> None:
    states = grid(32, 24, SPAN, random.Random(0))
    assert len({state.state_id for state in states}) == 24
    assert sum(state.cause == "memory" for state in states) * 2 >= 24 + len(check_states(32, SPAN))
    assert {len(state.other_prompts) for state in states} == set(range(8))
    lengths = sorted(state.prompt_tokens + state.decoded_tokens for state in states)
    assert lengths[0] < 80
    assert lengths[-1] > 1200
    assert len({state.spare_blocks for state in states}) >= 3
    assert any(state.waiting for state in states)
    assert all(sum(state.other_prompts) <= SPAN.max_batch_tokens for state in states)


def test_a_grid_depends_on_its_seed_alone() -> None:
    assert grid(32, 24, SPAN, random.Random("a")) == grid(32, 24, SPAN, random.Random("a"))
    assert grid(32, 24, SPAN, random.Random("a")) != grid(32, 24, SPAN, random.Random("b"))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_nobody_who_waits_would_fit_during_a_window(size: int) -> None:
    for state in grid(size, 40, SPAN, random.Random(size)):
        free_at_most = state.victim_blocks + state.growth_blocks + state.spare_blocks
        assert not state.waiting or free_at_most < waiting_prompt_tokens(SPAN.model_tokens) / size


def test_a_state_survives_being_written_down() -> None:
    for state in grid(64, 8, SPAN, random.Random(1)):
        assert State.from_dict(state.to_dict()) == state


def test_passes_are_interleaved_over_block_sizes_and_pinning() -> None:
    assert [part.name for part in parts_of(QUICK, device=False)] == ["b32-pass0", "b64-pass0", "b64-pass1", "b32-pass1"]
    with_device = parts_of(replace(QUICK, block_sizes=(16,)), device=True)
    assert [(part.number, part.pin_memory) for part in with_device] == [(0, True), (0, False), (1, False), (1, True)]


def test_a_noisy_machine_gets_more_repeats_up_to_a_limit() -> None:
    assert Noise.of([1.0, 1.1, 1.0, 0.9, 1.0]).factor == 1
    assert Noise.of([1.0, 1.2, 1.0, 0.85, 1.0]).factor == 2
    assert Noise.of([1.0, 9.0, 1.0, 1.0, 1.0]).factor == 3


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
    (found,) = self_checks(Trace({"core-a": header()}, tables))
    assert (found.arm, found.block_size, found.pairs, found.verdict) == ("swap", 32, 12, "agrees")
    assert found.attributed_s == pytest.approx(10.5e-3)
    assert found.low_s is not None
    assert found.high_s is not None
    assert found.low_s + found.high_s == pytest.approx(0.0, abs=1e-9)


def header() -> Header:
    return Header(
        run_id="a", source="profile", created="2024-01-01T00:00:00Z", engine="test", hardware={}, geometry={},
        block_size=32, block_bytes=1, device_blocks=1, host_blocks=1, policy="pinned",
    )  # fmt: skip
