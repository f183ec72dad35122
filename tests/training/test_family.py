"""Families: one's own is trained, stored, evaluated and served like those that are here."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from sklearn.base import clone
from sklearn.utils import estimator_checks

import kvpolicy
from kvpolicy import cost
from kvpolicy.cost.laws import LinearLaw
from kvpolicy.extensions import ExtensionError
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.training.family import FAMILIES, Family, family_of
from tests.synthetic import CostLaw, make_trace, options_for, situation
from tests.synthetic_logs import make_log
from tests.training.own_family import Corrected, PerToken

OWN = "python:tests.training.own_family:PerToken"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("family") / "trace"
    make_trace(seed=1, states=120, law=CostLaw(bend=0.4)).write(folder)
    return [folder]


def test_a_family_of_ones_own_is_trained_stored_and_evaluated(traces: list[Path], tmp_path: Path) -> None:
    report = kvpolicy.train(traces, tmp_path / "model", OWN)
    assert report.family == PerToken().label and report.family.startswith("per-token@")
    stored = kvpolicy.load_cost_model(tmp_path / "model")
    assert stored.digest == report.digest == report.model.digest
    assert isinstance(stored, cost.FittedModel) and stored.provenance.family == report.family
    assert all(isinstance(law, LinearLaw) and len(law.used) == 1 for law in stored.laws.values())
    judged = kvpolicy.evaluate(traces, [f"cheapest:{tmp_path / 'model'}", "always-swap", Cheapest("own", report.model)])
    by_name, swap, itself = judged.policies
    assert by_name.mean_regret_s.value == itself.mean_regret_s.value < swap.mean_regret_s.value


def test_trees_correct_the_laws_of_any_family(traces: list[Path]) -> None:
    plain = kvpolicy.train(traces, family=PerToken())
    corrected = kvpolicy.train(traces, family="python:tests.training.own_family:Corrected,name=corrected")
    assert not any(plain.trees.values()) and corrected.trees["recompute"]
    errors = [report.held_out["recompute"]["mean_error"] for report in (plain, corrected)]
    assert errors[1] < errors[0]


def test_a_log_is_learned_from_as_well(tmp_path: Path) -> None:
    make_log(1, decisions=600, policy="random:0.3").write(tmp_path / "log")
    report = kvpolicy.train([tmp_path / "log"], family=OWN)
    assert (report.out, report.family) == ("", PerToken().label)
    victim = situation(500)
    short, long = (report.model.predict(each, options_for(each)) for each in (victim, situation(2000)))
    assert all(after.engine_s > before.engine_s for before, after in zip(short, long, strict=True))
    values = report.to_dict()
    assert "model" not in values and json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("family", ["analytic", "boosted"])
def test_a_model_that_is_not_stored_is_the_one_that_would_be(traces: list[Path], tmp_path: Path, family: str) -> None:
    kept, stored = kvpolicy.train(traces, family=family), kvpolicy.train(traces, tmp_path / "model", family)
    assert kept.digest == stored.digest == kept.model.digest == kvpolicy.load_cost_model(tmp_path / "model").digest
    assert (kept.out, stored.out) == ("", str(tmp_path / "model"))
    assert kept.model.name == f"{family}@{kept.digest[:12]}"
    assert "cost model in memory (" in kept.text() and f"cost model {tmp_path / 'model'} (" in stored.text()
    victim = situation(700)
    assert kept.model.predict(victim, options_for(victim)) == stored.model.predict(victim, options_for(victim))
    by_name = {name: value for name, value in kept.to_dict().items() if name != "out"}
    assert by_name == {name: value for name, value in stored.to_dict().items() if name != "out"}
    assert "model" not in by_name and json.dumps(by_name, allow_nan=False)


def test_a_carried_model_is_in_the_report_too(traces: list[Path], tmp_path: Path) -> None:
    kvpolicy.train(traces, tmp_path / "model", "analytic")
    make_trace(seed=2, states=20, name="there").write(tmp_path / "there")
    report = kvpolicy.calibrate(tmp_path / "model", [tmp_path / "there"], states=4)
    assert report.out == "" and report.model.digest == report.digest
    stored = kvpolicy.calibrate(tmp_path / "model", [tmp_path / "there"], tmp_path / "carried", states=4)
    assert stored.digest == report.digest == kvpolicy.load_cost_model(tmp_path / "carried").digest
    assert "model" not in report.to_dict() and json.dumps(report.to_dict(), allow_nan=False)


def test_another_version_of_a_family_is_another_label() -> None:
    assert family_of(f"{OWN},factor=2").label != family_of(OWN).label == PerToken().label
    assert [family_of(name).label for name in FAMILIES] == ["boosted", "linear", "analytic"]


EVERY_FAMILY = (*FAMILIES.values(), PerToken(), PerToken(2.0, "twice"), Corrected())


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: str(family.name))
@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_get_params_invariance,
        estimator_checks.check_set_params,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_mixin_order,
    ],
)
def test_scikit_learn_agrees(family: Family, check: Any) -> None:
    """With what an estimator is before its fit; no family is fitted itself."""
    check(type(family).__name__, family)


def test_a_family_goes_by_its_parameters() -> None:
    family = PerToken(2.0)
    assert family.get_params() == {"factor": 2.0, "name": "per-token"} and not FAMILIES["boosted"].get_params()
    copy = clone(family)
    assert copy is not family and copy.label == family.label and repr(copy) == "PerToken(factor=2.0)"
    assert copy.set_params(factor=3.0).label == PerToken(3.0).label != family.label
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        family.set_params(depth=3)


class Converting(PerToken):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(2 * factor)


def test_a_constructor_that_does_more_than_store_is_found() -> None:
    with pytest.raises(RuntimeError, match="either does not set or modifies parameter factor"):
        clone(Converting())


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: str(family.name))
def test_a_fit_leaves_the_family_as_it_is_and_a_clone_learns_the_same(traces: list[Path], family: Family) -> None:
    before = dict(vars(family))
    model = kvpolicy.train(traces, family=family).model
    assert vars(family) == before
    assert kvpolicy.train(traces, family=clone(family)).digest == model.digest
    with pytest.raises(FrozenInstanceError):
        model.laws = {}  # type: ignore[misc]
    one = situation(500)
    assert len(model.predict(one, options_for(one))) == 2


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("python:tests.training.own_family:Nothing", "family per-token: the law of swap is None, should be a SwapRoof"),
        ("python:tests.training.own_family:Endless", "the law of recompute: constant_s is inf, should be a finite"),
        ("python:tests.training.own_family:Costs", r"Costs takes \(.*missing a required argument"),
        (
            "python:tests.training.own_family:PerTokens",
            r"no 'PerTokens' \(it has Corrected, Endless, Nothing, PerToken",
        ),
    ],
)
def test_what_is_wrong_with_a_family_is_named(traces: list[Path], family: str, says: str) -> None:
    with pytest.raises(ExtensionError, match=says):
        kvpolicy.train(traces, family=family)


def test_a_name_that_is_no_family_lists_those_that_are(traces: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'forest', should be one of boosted, linear, analytic or python:MODULE:FACT"):
        kvpolicy.train(traces, family="forest")


def test_an_installed_package_offers_families_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Any = tmp_path / "own_family-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-family\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[kvpolicy.families]\nmedian = tests.training.own_family:PerToken\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert family_of("median,factor=3").label == PerToken("3").label
