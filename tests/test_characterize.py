"""What `kvpolicy characterize` is going to measure, before any engine starts."""

from __future__ import annotations

import pytest

from kvpolicy.overflow import BLOCK_SIZE, MEASURED, SEQUENCE_LENGTH, figure_and_level
from kvpolicy_vllm.bench.characterize import QUICK, study_parts, study_states


@pytest.mark.parametrize("device", [False, True])
def test_every_pass_measures_everything_once_and_every_other_one_backwards(device: bool) -> None:
    parts = study_parts(QUICK, MEASURED, device)
    passes = [[part for part in parts if part[1].number == number] for number in range(QUICK.passes)]
    kinds = [[(figure, part.block_size, part.pin_memory) for figure, part in some] for some in passes]
    assert kinds[1] == kinds[0][::-1] and len(set(kinds[0])) == len(kinds[0])
    pageable = [one for one in kinds[0] if not one[2]]
    assert len(pageable) == (len(QUICK.block_sizes) if device else 0)
    assert len({f"{figure}-{part.name}" for figure, part in parts}) == len(parts)


def test_only_what_is_wanted_is_measured() -> None:
    assert {figure for figure, _ in study_parts(QUICK, [SEQUENCE_LENGTH], False)} == {SEQUENCE_LENGTH}


def test_states_are_natural_and_named_after_figure_and_level() -> None:
    states = study_states(QUICK, SEQUENCE_LENGTH, 32)
    assert [figure_and_level(state.state_id) for state in states] == [(SEQUENCE_LENGTH, n) for n in QUICK.lengths]
    assert all(state.cause == "memory" and len(state.other_prompts) == 15 for state in states)
    (two,) = study_states(QUICK, BLOCK_SIZE, 64)
    assert figure_and_level(two.state_id) == (BLOCK_SIZE, 64) and len(two.other_prompts) == 1
    assert two.prompt_tokens + two.decoded_tokens == QUICK.block_size_tokens
