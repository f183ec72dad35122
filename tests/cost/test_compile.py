"""The compiled path: the same costs as the plain one, whatever the model and the situation."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from math import inf, isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import compile, kernel, model
from kvpolicy.cost.compile import MAX_MASK_WORDS, arrays
from kvpolicy.cost.forest import Forest, Nodes
from kvpolicy.cost.intervals import PREDICTED, Intervals
from kvpolicy.cost.laws import Channel, LinearLaw, RecomputeRoofline, SwapRoofline
from kvpolicy.cost.model import FittedModel
from kvpolicy.events import KINDS, Cost, Preemption
from kvpolicy.features import FEATURES
from kvpolicy.training.family import FAMILIES
from tests.synthetic import fitted_model, options_for, situation

pytest.importorskip("numba")


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Before anything is timed by hypothesis."""
    compile.compiled_pair()


NUMBERS = [field.name for field in fields(Cost)]


def grown(trees: int, leaves: int, seed: int, used: Sequence[str] = FEATURES) -> Forest:
    """A forest of random trees: any feature, any depth, thresholds where situations are."""
    rng = random.Random(seed)
    feature: list[int] = []
    threshold: list[float] = []
    children: tuple[list[int], list[int]] = ([], [])
    leaf: list[float] = []
    roots: list[int] = []

    def grow(count: int) -> int:
        if count == 1:
            leaf.append(rng.gauss(0.0, 0.5 / trees))
            return -len(leaf)
        at = len(feature)
        feature.append(FEATURES.index(rng.choice(used)))
        threshold.append(rng.choice([rng.uniform(0, 8), rng.uniform(0, 4000), 10 ** rng.uniform(3, 9)]))
        for side in children:
            side.append(0)
        left = rng.randrange(1, count)
        children[0][at], children[1][at] = grow(left), grow(count - left)
        return at

    for _ in range(trees):
        roots.append(grow(rng.randint(1, leaves)))
    return Forest(Nodes(tuple(feature), tuple(threshold), *map(tuple, children), tuple(leaf), tuple(roots)))


@cache
def made(seed: int, trees: int = 100, leaves: int = 31) -> FittedModel:
    """A model of random coefficients, ranges, forests and intervals, of every kind of law."""
    rng = random.Random(seed)
    few, many = rng.uniform(0, 0.01), rng.uniform(1e-9, 1e-5)
    again = RecomputeRoofline(
        few, few / 2, many, many / 1e4, rng.choice([0.0, few]), rng.choice([0.0, few]), rng.random(),
        rng.choice([0.0, many]), rng.choice([0.0, many / 1e4]), rng.choice([100.0, 4096.0]),
        rng.choice([64.0, 2048.0, inf]),
    )  # fmt: skip
    copies = [Channel(few, many / 1e5, many / 10) for _ in range(2)]
    swap = SwapRoofline(*copies, few, few, *(rng.random() for _ in range(5)))
    linear = LinearLaw(few, {name: 10 ** rng.uniform(-9, -5) for name in rng.sample(FEATURES, 6)})
    kinds = dict(zip(KINDS, (again, swap) if seed % 3 else (linear, linear), strict=True))
    forests = {kind: grown(trees, leaves, seed + i) for i, kind in enumerate(KINDS) if trees and rng.random() < 0.9}
    top = {name: rng.choice([10 ** rng.uniform(1, 9), 1e12]) for name in FEATURES}
    spans = {name: (rng.choice([0.0, 0.0, high / 100]), high) for name, high in top.items()}
    loads = tuple(tuple(sorted(rng.sample(range(1, 40), rng.randrange(3)))) for _ in range(3))
    bins = sum(len(edges) + 1 for edges in loads)

    def rooms() -> dict[str, tuple[tuple[float, float], ...]]:
        return {of: tuple((rng.random(), rng.choice([rng.random(), inf])) for _ in range(bins)) for of in PREDICTED}

    growth = {of: rng.choice([0.0, rng.random(), inf]) for of in PREDICTED}
    intervals = Intervals((100, 1000), loads, rooms(), rooms(), growth, (30,) * bins)
    return replace(
        fitted_model("analytic"), laws=kinds, residuals=forests, ranges=dict.fromkeys(KINDS, spans),
        floor_s={kind: rng.choice([1e-6, 1e-2]) for kind in KINDS}, intervals=intervals,
        carried={kind: rng.random() < 0.5 for kind in KINDS}, victim_delays=rng.choice([{}, kinds]),
        others_share={kind: rng.random() for kind in KINDS},
    )  # fmt: skip


@cache
def warmed(one: int | str, trees: int = 100, leaves: int = 31) -> tuple[FittedModel, FittedModel]:
    """A model as it is, and compiled."""
    plain = fitted_model(one) if isinstance(one, str) else made(one, trees, leaves)
    fast = replace(plain)
    assert fast.warm()
    return plain, fast


situations = st.builds(
    lambda tokens, size, running, batch, free, waiting, queued, shared, segment: situation(
        tokens, size, running, batch_tokens=batch, free_blocks=free, waiting_requests=waiting,
        queued_save_bytes=queued, queued_load_bytes=queued // 3, shared_blocks=min(shared, -(-tokens // size)),
        segment_bytes=segment,
    ),
    tokens=st.integers(1, 200_000) | st.integers(1, 3000),
    size=st.sampled_from([1, 16, 32, 64, 128]),
    running=st.integers(0, 8) | st.integers(0, 300),
    batch=st.integers(0, 3000) | st.integers(0, 10**6),
    free=st.integers(0, 4000),
    waiting=st.integers(0, 10**4),
    queued=st.integers(0, 10**9) | st.just(0),
    shared=st.integers(0, 40),
    segment=st.sampled_from([0, 1, 512, 4096, 10**7]),
)  # fmt: skip


def assert_same(ours: Sequence[Cost], theirs: Sequence[Cost]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other) is Cost
        for name in NUMBERS:
            mine, wanted = getattr(one, name), getattr(other, name)
            assert type(mine) is type(wanted)
            assert mine == wanted or isclose(mine, wanted, rel_tol=1e-9, abs_tol=1e-12), name


@given(one=situations, seed=st.integers(0, 11))
def test_any_model_predicts_the_same_when_compiled(one: Preemption, seed: int) -> None:
    plain, fast = warmed(seed)
    again, swap = options_for(one)
    for options in ((again, swap), (again,), (swap,), (swap, again), (again, again), (again, swap, swap), ()):
        assert_same(fast.predict(one, options), plain.predict(one, options))


@pytest.mark.parametrize("family", FAMILIES)
@given(one=situations)
def test_every_family_predicts_the_same_when_compiled(family: str, one: Preemption) -> None:
    plain, fast = warmed(family)
    assert_same(fast.predict(one, options_for(one)), plain.predict(one, options_for(one)))


@given(one=situations, seed=st.integers(0, 2))
def test_trees_that_are_too_large_for_a_table_are_walked(one: Preemption, seed: int) -> None:
    plain, fast = warmed(seed, 12, 200)
    assert_same(fast.predict(one, options_for(one)), plain.predict(one, options_for(one)))


@pytest.mark.parametrize("seed", range(4))
def test_on_the_very_thresholds_the_same_leaf_is_found(seed: int) -> None:
    """Left is where a feature equals the threshold."""
    forest = grown(33, 31, seed)
    one = replace(made(1), residuals=dict.fromkeys(KINDS, forest))
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
    forest = grown(100, 31, 0)
    n, _ = arrays(replace(made(1), residuals={"recompute": forest})._packed, [forest.nodes, None])
    assert n[kernel.OPTION + kernel.TABLE_AT] != kernel.NONE
    assert len(n) < MAX_MASK_WORDS
    large = grown(20, 40, 0)
    n, _ = arrays(replace(made(1), residuals={"recompute": large})._packed, [large.nodes, None])
    assert n[kernel.OPTION + kernel.TABLE_AT] == kernel.NONE


@pytest.mark.parametrize("name", ["batch_tokens", "computed_tokens", "shared_blocks", "block_bytes", "held_blocks"])
@pytest.mark.parametrize("value", [float("nan"), inf, -1e9])
def test_what_is_no_number_is_refused_compiled_as_plain(name: str, value: float) -> None:
    plain, fast = warmed(1)
    one = replace(situation(), **{name: value})
    said = []
    for each in (plain, fast):
        try:
            said.append(str(each.predict(one, options_for(one))))
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_the_plain_arithmetic_makes_the_same_pair() -> None:
    """The compiled function's own source, run as it is."""
    plain, _ = warmed("boosted")
    nodes = [plain.residuals[kind].nodes for kind in KINDS]
    n, c = arrays(plain._packed, nodes)
    for tokens in (1, 60, 700, 5000):
        one = situation(tokens, 32, 3)
        given = (
            one.computed_tokens, one.shared_blocks, one.held_blocks, one.block_size, one.block_bytes,
            one.segment_bytes, one.queued_save_bytes, one.queued_load_bytes, one.running_requests, one.batch_tokens,
            one.free_blocks, one.waiting_requests,
        )  # fmt: skip
        ours, theirs = compile.compiled_pair()(n, c, *given), kernel.pair(n, c, *given)
        assert np.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_without_numba_it_stays_right_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    one, cold = situation(500), replace(fitted_model("boosted"))
    monkeypatch.setattr(model, "import_module", missing)
    assert cold.warm() is False
    assert cold.predict(one, options_for(one)) == fitted_model("boosted").predict(one, options_for(one))


def test_another_arithmetic_has_another_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile._stamp()
    assert before == compile._stamp() > 0
    monkeypatch.setattr(kernel, "HASH_SHIFT", 26)
    assert compile._stamp() != before


def _child(code: str, **environment: str) -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "integrations")])} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


DECIDE = """
import random, sys
from kvpolicy.policy import decide, feasible_options, load
from kvpolicy.events import Preemption
policy = load("cheapest:cpu-llama-native")
assert policy.cost_model.warm()
from kvpolicy.cost.compile import compiled_pair
assert len(compiled_pair().signatures) == 1
one = Preemption(
    1.0, 500, 492, 8, 32, 65536, 16384, 16, 0, 15, 4096, 0, 1, 4096, 4096, 3, 0, 900, 0, 0, 0, 0, "memory"
)
before = set(sys.modules)
decision = decide(policy, one, feasible_options(one), policy.initial_state(), random.Random(0))
print(len(decision.costs), " ".join(sorted({name.split(".")[0] for name in sys.modules})))
assert set(sys.modules) == before, set(sys.modules) - before
assert len(compiled_pair().signatures) == 1  # nothing was compiled on the way
"""


def test_a_decision_loads_nothing_that_trains() -> None:
    """Nor anything else: all of it was there when the engine had started."""
    count, *loaded = _child(DECIDE).split()
    assert count == "2"
    assert "numba" in loaded
    assert not {"sklearn", "lightgbm", "pandas", "pyarrow", "torch", "vllm"} & set(loaded)


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same() -> None:
    """numba then refuses to keep it: no locator available."""
    nowhere = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n"
    assert _child(nowhere + DECIDE).startswith("2 ")


def test_a_damaged_cache_is_no_trouble(tmp_path: Path) -> None:
    assert _child(DECIDE, NUMBA_CACHE_DIR=str(tmp_path)).startswith("2 ")
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:-20])
    assert _child(DECIDE, NUMBA_CACHE_DIR=str(tmp_path)).startswith("2 ")


@given(tokens=st.integers(0, 3000) | st.sampled_from([100, 1000]), running=st.integers(0, 50), seed=st.integers(0, 5))
def test_bins_are_numbered_as_intervals_number_them(tokens: int, running: int, seed: int) -> None:
    one = made(seed)
    found = kernel.bin_at(one._packed.n, one._packed.c, tokens, running)
    assert found == one.intervals.bin_of(tokens, running)
