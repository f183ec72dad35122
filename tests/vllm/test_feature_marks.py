"""What the support matrix says of a test is what the test is marked with, and it has all of its cases. Seen of those
that are collected with this one: the marks of parameters, and which they are, are not known before."""

from __future__ import annotations

import pytest

from tests.feature_record import (
    MARKS,
    NEWEST_ENGINE,
    RECORD,
    WITHOUT_VLLM,
    collected,
    installed_version,
    read,
    unbacked,
    unrecorded,
)

NUMBERED_TESTS = frozenset(
    {
        "tests/vllm/test_connectors_beside.py::test_every_position_is_right_whoever_loads",
        "tests/vllm/test_engines_beside.py::test_a_node_that_only_decodes",
        "tests/vllm/test_engines_beside.py::test_beside_lmcache",
        "tests/vllm/test_engines_beside.py::test_prompts_computed_by_another_engine",
        "tests/vllm/test_exactness.py::test_two_tensor_parallel_workers",
        "tests/vllm/test_measured_families.py::test_a_model_is_learned_and_explains_itself",
        "tests/vllm/test_measured_families.py::test_a_model_of_another_kind_of_layers_is_refused",
        "tests/vllm/test_measured_families.py::test_a_profile_says_what_the_layers_are",
        "tests/vllm/test_measured_families.py::test_a_server_chooses_by_it_and_changes_no_token",
        "tests/vllm/test_measured_families.py::test_all_that_a_victim_needs_is_lost_and_moved",
        "tests/vllm/test_measured_families.py::test_states_are_reached_by_lack_of_memory_and_by_force",
        "tests/vllm/test_own_server.py::test_two_ranks_from_nothing_to_a_learned_policy",
        "tests/vllm/test_refusals.py::test_devices_it_has_no_copies_for",
        "tests/vllm/test_refusals.py::test_diffusion_models",
        "tests/vllm/test_refusals.py::test_groups_it_does_not_serve",
        "tests/vllm/test_refusals.py::test_models_it_does_not_serve",
        "tests/vllm/test_refusals.py::test_refused_by_name",
        "tests/vllm/test_refusals.py::test_states_on_a_model_runner_that_overwrites_them",
        "tests/vllm/test_refusals.py::test_version_out_of_range",
        "tests/vllm/test_run_characterize.py::test_two_ranks_with_a_file_of_flags",
        "tests/vllm/test_same_schedule.py::test_aborts_and_resets_at_any_moment",
        "tests/vllm/test_same_schedule.py::test_always_recompute_is_stock",
        "tests/vllm/test_same_schedule.py::test_only_loaded_requests_keep_their_places",
        "tests/vllm/test_soak.py::test_drawn_schedules_are_clean",
        "tests/vllm/test_soak_files.py::test_nothing_wrong_is_found_and_nothing_stays",
        "tests/vllm/test_soak_tables.py::test_drawn_schedules_of_every_family_are_clean",
        "tests/vllm/test_symbolic.py::test_a_pause_that_clears_caches_waits_for_loads",
        "tests/vllm/test_symbolic.py::test_every_position_is_right",
        "tests/vllm/test_symbolic.py::test_no_block_is_given_away_before_it_is_saved_where_a_step_overwrites_it_first",
        "tests/vllm/test_symbolic.py::test_nothing_of_old_weights_is_read_after_a_reset",
        "tests/vllm/test_table_admission.py::test_whoever_others_are_displaced_for_comes_in",
        "tests/vllm/test_vision.py::test_a_failed_load_is_a_recompute",
        "tests/vllm/test_vision.py::test_a_picture_matters",
        "tests/vllm/test_vision.py::test_a_swap_changes_no_bit",
        "tests/vllm/test_vision.py::test_the_same_text_with_another_picture_shares_nothing",
    }
)
"""Tests of which a row of 0.32 has a number in the place of its cases' names, or lacks some: they were recorded before
names were, and leave this list when they are recorded again. Nothing may come to it."""


def test_every_recorded_feature_is_still_marked(request: pytest.FixtureRequest) -> None:
    rows, marks = read(RECORD), request.config.stash[MARKS]
    if not marks.keys() & {row["test"] for row in rows}:
        pytest.skip("no test of the record was collected beside this one")
    assert not unbacked(rows, marks), "record these tests again: python -m pytest -p tests.feature_record TEST..."


def test_every_case_is_recorded(request: pytest.FixtureRequest) -> None:
    """Those of the long suite, too, so that a "yes" of the matrix is that of all its cases. What was skipped is on the
    page."""
    if installed_version() != NEWEST_ENGINE:
        pytest.skip(f"not every case is recorded on another version than {NEWEST_ENGINE}")
    cases = {key: names for key, names in collected(request.config).items() if key[1] in (NEWEST_ENGINE, WITHOUT_VLLM)}
    if not cases:
        pytest.skip("no test with a feature was collected beside this one")
    rows = read(RECORD)
    named = [
        test
        for test in NUMBERED_TESTS & {test for *_, test in cases}
        if not unrecorded(rows, {key: names for key, names in cases.items() if key[2] == test})
    ]
    assert not named, f"take these out of NUMBERED_TESTS, as all of their cases are recorded: {sorted(named)}"
    missing = unrecorded(rows, {key: names for key, names in cases.items() if key[2] not in NUMBERED_TESTS})
    assert not missing, "\n".join(["record these: python -m pytest -p tests.feature_record TEST...", *missing])
