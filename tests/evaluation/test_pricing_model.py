"""How far the cost model that priced a shadow run is to be trusted: what training said, and for what it was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy import cost
from kvpolicy.cost.store import save
from kvpolicy.datasets.threshold import Difference, LengthRule
from kvpolicy.policy.spec import model_in
from kvpolicy.trace import Trace
from tests.evaluation.test_shadow_run import costs, found, served, shadowed

__all__ = ["served"]
"""The fixture."""


def compared_model(folder: Path, high_s: float) -> Path:
    """A shipped model that did so in comparison with always-swap on 25 states."""
    shipped = cost.load("cpu-llama-native")
    held_out = {
        "against_threshold": Difference("the model", high_s - 1e-3, high_s - 2e-3, high_s, 25).stored(LengthRule(0))
    }
    provenance = replace(shipped.provenance, held_out=held_out)
    save(replace(shipped, provenance=provenance, residuals={}), {}, folder)
    return folder


def test_a_model_that_is_no_better_than_a_threshold_is_said_to_be(served: Trace, tmp_path: Path) -> None:
    """Of the policy's model, and of one that prices what the policy did not; as training says it."""
    poor, good = compared_model(tmp_path / "poor", 1e-3), compared_model(tmp_path / "good", -1e-3)
    priced = {name: costs(0.5, 1e-3, 2.0) for name in ("poor", "good", "gone")}
    one, better, gone = (
        found(shadowed(served, priced[name], policy=f"cheapest:{tmp_path / name},online=on")) for name in priced
    )
    (warning,) = one.warnings
    assert f"cost model {poor}, as it is here now, did no better than always-swap on the 25 states" in warning
    assert warning.endswith("no better than the threshold, within noise") and f"warning: {warning}" in one.text()
    assert better.warnings == () and f"cost model {tmp_path / 'gone'} cannot be read here: " in gone.warnings[0]
    given = found(shadowed(served), cost.load(poor)).warnings
    assert given[-1] == warning.replace(", as it is here now,", ""), "the one that prices is the one that was given"
    assert "prices are of another engine than the one that was recorded" in given[0]
    assert good.name not in str(given)
    assert found(shadowed(served, priced["poor"]), cost.load(poor)).warnings == (), "its prices are the policy's own"


def test_a_card_that_was_edited_is_said_to_be_however_the_model_is_named(served: Trace, tmp_path: Path) -> None:
    """And the report is made: the prices themselves can be read."""
    folder = compared_model(tmp_path / "edited", 1e-3)
    model = cost.load(folder)
    card = {"against_threshold": dict(model.provenance.held_out["against_threshold"]) | {"high_s": "little"}}
    save(replace(model, provenance=replace(model.provenance, held_out=card)), {}, tmp_path / "again")
    edited = cost.load(tmp_path / "again")
    priced = costs(0.5, 1e-3, 2.0)
    by_label = found(shadowed(served, priced, policy=f"cheapest:{tmp_path / 'again'}")).warnings
    given = found(shadowed(served), edited).warnings
    for warning in (by_label[0], given[-1]):
        assert f"cost model {tmp_path / 'again'} cannot be read here: high_s is 'little', should be a finite" in warning


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("cheapest:models/mine,online=on,objective=engine", "models/mine"),
        ("explore:mine,budget=2%", "mine"),
        ("cheapest:analytic:H100:config.json", ""),
        ("cheapest:python:package.module:Rates", ""),
        ("threshold:100", ""),
    ],
)
def test_the_model_in_a_policys_name(label: str, name: str) -> None:
    assert model_in(label) == name
