"""The compiled path: the same costs as the plain one, whatever the model and the situation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf, isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import compile, kernel, model
from kvpolicy.events import Cost, Preemption
from kvpolicy.training.family import FAMILIES
from tests.cost.random_models import plain_and_compiled
from tests.synthetic import fitted_model, options_for, situation

pytest.importorskip("numba")


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Before anything is timed by hypothesis."""
    compile.compiled_pair()


NUMBERS = [field.name for field in fields(Cost)]


situations = st.builds(
    lambda tokens, size, running, batch, free, waiting, queued, shared, hit, found, saved, segment: situation(
        tokens, size, running, batch_tokens=batch, free_blocks=free, waiting_requests=waiting,
        queued_save_bytes=queued, queued_load_bytes=queued // 3, shared_blocks=min(shared, -(-tokens // size)),
        hit_blocks=hit * -(-tokens // size), hit_tokens=None if found is None else found * tokens,
        save_blocks=saved * -(-tokens // size), segment_bytes=segment,
    ),
    tokens=st.integers(1, 200_000) | st.integers(1, 3000),
    size=st.sampled_from([1, 16, 32, 64, 128]),
    running=st.integers(0, 8) | st.integers(0, 300),
    batch=st.integers(0, 3000) | st.integers(0, 10**6),
    free=st.integers(0, 4000),
    waiting=st.integers(0, 10**4),
    queued=st.integers(0, 10**9) | st.just(0),
    shared=st.integers(0, 40),
    hit=st.floats(0, 1),
    found=st.none() | st.floats(0, 1),
    saved=st.floats(0, 1),
    segment=st.sampled_from([0, 1, 512, 4096, 10**7]),
)  # fmt: skip


def assert_same(ours: Sequence[Cost], theirs: Sequence[Cost]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other) is Cost
        for name in NUMBERS:
            mine, expected = getattr(one, name), getattr(other, name)
            assert type(mine) is type(expected)
            assert mine == expected or isclose(mine, expected, rel_tol=1e-9, abs_tol=1e-12), name


@given(one=situations, seed=st.integers(0, 11))
def test_any_model_predicts_the_same_when_compiled(one: Preemption, seed: int) -> None:
    plain, fast = plain_and_compiled(seed)
    again, swap = options_for(one)
    for options in ((again, swap), (again,), (swap,), (swap, again), (again, again), (again, swap, swap), ()):
        assert_same(fast.predict(one, options), plain.predict(one, options))


@pytest.mark.parametrize("family", FAMILIES)
@given(one=situations)
def test_every_family_predicts_the_same_when_compiled(family: str, one: Preemption) -> None:
    plain, fast = plain_and_compiled(family)
    assert_same(fast.predict(one, options_for(one)), plain.predict(one, options_for(one)))


@given(one=situations, seed=st.integers(0, 2))
def test_trees_that_are_too_large_for_a_table_are_walked(one: Preemption, seed: int) -> None:
    plain, fast = plain_and_compiled(seed, 12, 200)
    assert_same(fast.predict(one, options_for(one)), plain.predict(one, options_for(one)))


@pytest.mark.parametrize(
    "name",
    [
        "batch_tokens",
        "computed_tokens",
        "shared_blocks",
        "hit_blocks",
        "hit_tokens",
        "save_blocks",
        "block_bytes",
        "held_blocks",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), inf, -1e9])
def test_nan_and_infinity_are_refused_compiled_as_plain(name: str, value: float) -> None:
    plain, fast = plain_and_compiled(1)
    one = replace(situation(), **{name: value})
    events = []
    for each in (plain, fast):
        try:
            events.append(str(each.predict(one, options_for(one))))
        except ValueError as error:
            events.append(str(error))
    assert events[0] == events[1]


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
    1.0, 500, 492, 8, 32, 65536, 16384, 16, 0, 15, 0.0, 16.0, 4096, 0, 1, 4096, 4096, 3, 0, 900, 0, 0, 0, 0, "memory"
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
