"""The judge of online adaptation: a policy that learns nothing meets none of its demands but the one to do no harm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvpolicy import cost
from kvpolicy.datasets.profiles import read_dataset

ROOT = Path(__file__).resolve().parent.parent
NAME = "cpu-llama-simulated-link"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("online_adaptation", ROOT / "benchmarks" / "online_adaptation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["online_adaptation"] = module  # its dataclasses look there for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["online_adaptation"]


@pytest.fixture(scope="module")
def field(bench: ModuleType) -> object:
    return bench.Field(NAME, cost.load(NAME), read_dataset([ROOT / "traces" / NAME]).states)


def test_a_policy_that_learns_nothing_meets_only_to_do_no_harm(bench: ModuleType, field: object) -> None:
    for demand in bench.DEMANDS:
        assert demand.judge(field, bench.deaf(field), 1).met is (not demand.beyond_deaf), demand.name


def test_learning_is_judged_on_the_link_whose_options_change_places(bench: ModuleType, field: object) -> None:
    found = {demand.name: bench.judged(field, demand, bench.learning, 1) for demand in bench.DEMANDS}
    assert not {name for name, one in found.items() if one.void}
    assert all(one.without for name, one in found.items() if not name.startswith("nothing"))
    assert found["link 5x slower: caught within 50"].met


def test_where_the_model_misses_by_itself_its_predictions_are_not_judged(bench: ModuleType) -> None:
    name = "cpu-llama-native"
    scattered = bench.Field(name, cost.load(name), read_dataset([ROOT / "traces" / name]).states)
    found = {demand.name: bench.judged(scattered, demand, bench.learning, 1) for demand in bench.DEMANDS}
    assert "is missed by" in found["link 5x slower: caught within 50"].void
    assert "is missed by" in found["link 2x faster, 5% outliers x20"].void
    assert not found["nothing drifts, 2000 preemptions"].void


def test_states_too_high_do_not_make_up_for_those_too_low(bench: ModuleType) -> None:
    assert bench.missed_by([-1.0, 1.0]) == 1.0


@pytest.mark.parametrize(
    ("met", "void", "wanted"), [(True, "", True), (False, "", False), (True, "met without learning", False)]
)
def test_it_passes_where_every_demand_is_judged_and_met(bench: ModuleType, met: bool, void: str, wanted: bool) -> None:
    fine = bench.Verdict("trace", "first", "", True)
    assert bench.passed([fine, bench.Verdict("trace", "second", "", met, void=void)]) is wanted
    assert bench.passed([fine, bench.Verdict("other", "first", "", False, void="met without learning")])
