"""The kernel's arithmetic: tree walks, mask tables and bins against the plain model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import compile, kernel
from kvpolicy.cost.compile import MAX_MASK_WORDS, arrays
from kvpolicy.events import KINDS
from kvpolicy.features import FEATURES
from tests.cost.random_models import plain_and_compiled, random_forest, random_model
from tests.synthetic import situation

pytest.importorskip("numba")


@pytest.mark.parametrize("seed", range(4))
def test_a_value_at_a_threshold_goes_to_the_same_leaf(seed: int) -> None:
    """Left is where a feature equals the threshold."""
    forest = random_forest(33, 31, seed)
    one = replace(random_model(1), residuals=dict.fromkeys(KINDS, forest))
    n, c = arrays(one._packed, [forest.nodes] * 2)
    at, rng = int(n[kernel.OPTION + kernel.TABLE_AT]), random.Random(seed)
    assert at != kernel.NONE
    for _ in range(300):
        row = [0.0] * len(FEATURES)
        for feature in range(len(FEATURES)):
            on = [t for t, of in zip(forest.nodes.threshold, forest.nodes.feature, strict=True) if of == feature]
            row[feature] = rng.choice(on) * rng.choice([1.0, 1.0, 1.0 + 1e-12, 1.0 - 1e-12])
        assert kernel.table_value(n, c, at, row) == pytest.approx(forest.predict(row), rel=1e-12, abs=1e-15)


def test_a_forest_too_large_for_its_table_has_none() -> None:
    forest = random_forest(100, 31, 0)
    n, _ = arrays(replace(random_model(1), residuals={"recompute": forest})._packed, [forest.nodes, None])
    assert n[kernel.OPTION + kernel.TABLE_AT] != kernel.NONE
    assert len(n) < MAX_MASK_WORDS
    large = random_forest(20, 40, 0)
    n, _ = arrays(replace(random_model(1), residuals={"recompute": large})._packed, [large.nodes, None])
    assert n[kernel.OPTION + kernel.TABLE_AT] == kernel.NONE


def test_the_plain_arithmetic_makes_the_same_pair() -> None:
    """The compiled function's own source, run as it is."""
    plain, _ = plain_and_compiled("boosted")
    nodes = [plain.residuals[kind].nodes for kind in KINDS]
    n, c = arrays(plain._packed, nodes)
    for tokens in (1, 60, 700, 5000):
        victim = situation(tokens, 32, 3)
        values = (
            victim.computed_tokens, victim.cached_tokens, victim.shared_blocks, victim.hit_blocks, victim.save_blocks,
            victim.held_blocks, victim.block_size, victim.block_bytes, victim.segment_bytes, victim.queued_save_bytes,
            victim.queued_load_bytes, victim.running_requests, victim.batch_tokens, victim.free_blocks,
            victim.waiting_requests,
        )  # fmt: skip
        ours, theirs = compile.compiled_pair()(n, c, *values), kernel.pair(n, c, *values)
        assert np.allclose(ours, theirs, rtol=1e-12, atol=0)


@given(tokens=st.integers(0, 3000) | st.sampled_from([100, 1000]), running=st.integers(0, 50), seed=st.integers(0, 5))
def test_bins_are_numbered_as_intervals_number_them(tokens: int, running: int, seed: int) -> None:
    model = random_model(seed)
    number = kernel.bin_at(model._packed.n, model._packed.c, tokens, running)
    assert number == model.intervals.bin_of(tokens, running)
