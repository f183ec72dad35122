"""Somebody's own by name: what leads to it is loaded, what does not is said, and nobody runs code unasked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpolicy import extensions, load_cost_model, load_policy, policy
from kvpolicy.errors import KVPolicyError
from kvpolicy.extensions import ExtensionError, NotAllowed
from kvpolicy.policy import Policy, PolicyError
from tests.policy.ten_line_policy import Longer
from tests.synthetic import options_for, situation

SOURCE = """
from kvpolicy import Cost, CostModel, Policy

class Rule(Policy):
    def __init__(self, name="mine", tokens="512"):
        self.name, self.tokens = name, int(tokens)

    def probabilities(self, situation, options, state):
        return [1.0] + [0.0] * (len(options) - 1)

class Half(Policy):
    name = "half"

class Sevens(CostModel):
    name = "sevens"

    def predict(self, situation, options):
        return tuple(Cost(7.0, 0, 0, 7.0, 0, 7.0, 7.0) for _ in options)

def make(tokens, share="1"):
    return Rule(tokens=tokens)

def text():
    return "no policy"

def broken():
    raise ZeroDivisionError("of the factory")

READY = Rule("ready")
SEVEN = 7
"""
LOADED = "own_rules"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{LOADED}.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "wrong_code.py").write_text("raise RuntimeError('while it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in (LOADED, "needs_more", "wrong_code"):
        sys.modules.pop(name, None)


def test_a_class_a_function_and_an_object_lead_to_a_policy() -> None:
    assert load_policy("python:own_rules:Rule").name == "mine"
    assert load_policy("python:own_rules:Rule,name=other,tokens=5").tokens == 5
    assert load_policy("python:own_rules:make,tokens=9").tokens == 9
    assert load_policy("python:own_rules:READY").name == "ready"
    longer = Longer()
    assert load_policy(longer) is longer


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("python:", "should be a module and something in it"),
        ("python:own_rules", "should be a module and something in it"),
        ("python:own_rules:", "should be a module and something in it"),
        ("python:own rules:Rule", "should be a module and something in it"),
        ("python:../own_rules.py:Rule", "should be a module and something in it"),
        ("python:no_such_module:Rule", "no module 'no_such_module' on Python's path .PYTHONPATH=FOLDER"),
        ("python:own_rules.deeper:Rule", "no module 'own_rules.deeper'"),
        ("python:own_rules:Rul", r"module 'own_rules' has no 'Rul' \(it has READY, Rule\)"),
        ("python:own_rules:SEVEN", "it is 7, which is no Policy and cannot be called"),
        ("python:own_rules:text", "text makes a str, should make a Policy"),
        ("python:own_rules:Half", "Half lacks what every Policy has: probabilities"),
        ("python:own_rules:make", r"make takes \(tokens, share='1'\): missing a required argument: 'tokens'"),
        ("python:own_rules:Rule,speed=5", "got an unexpected keyword argument 'speed'"),
        ("python:own_rules:Rule,tokens", "'tokens' should be KEY=VALUE"),
        ("python:own_rules:Rule,tokens=1,tokens=2", "'tokens=2' should be KEY=VALUE, each key once"),
        ("python:own_rules:READY,tokens=1", "cannot be called"),
        ("python:own_rules:Sevens", "Sevens makes a Sevens, should make a Policy"),
    ],
)
def test_a_wrong_part_is_named(name: str, says: str) -> None:
    with pytest.raises(ExtensionError, match=says) as caught:
        load_policy(name)
    assert repr(name) in str(caught.value)
    assert "python:MODULE:FACTORY" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("python:needs_more:Rule", ModuleNotFoundError),
        ("python:wrong_code:Rule", RuntimeError),
        ("python:own_rules:broken", ZeroDivisionError),
        ("python:own_rules:make,tokens=many", ValueError),
    ],
)
def test_a_mistake_in_the_modules_own_code_is_left_as_it_is(name: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        load_policy(name)
    assert not isinstance(caught.value, KVPolicyError)
    assert caught.value.__notes__ == [f"while policy {name!r} was loaded"]


@pytest.mark.parametrize(
    "name", ["", 7, None, "a|b", "two\nlines", "x" * 201, "python:os:system", "cheapest:python:os:system"]
)
def test_what_is_called_nothing_usable_is_refused(name: object) -> None:
    class Unnamed(Longer):
        pass

    Unnamed.name = name  # type: ignore[assignment]  # what somebody might write
    with pytest.raises(ExtensionError, match="Unnamed: its name is"):
        load_policy(Unnamed())


def test_a_policy_without_a_name_or_a_state_is_refused() -> None:
    class Nameless(Policy):
        def probabilities(self, situation: object, options: object, state: object) -> list[float]:
            return [1.0]

    with pytest.raises(ExtensionError, match="policy Nameless: its name is None"):
        load_policy(Nameless())

    class Stateless(Longer):
        def initial_state(self) -> object:
            return {}

    with pytest.raises(PolicyError, match=r"policy longer: initial_state\(\) gives {}, should give a value with to_"):
        load_policy(Stateless())

    class Unrecorded(Longer):
        def initial_state(self) -> object:
            return SimpleNamespace(to_json=lambda: {"observed": 0})

    with pytest.raises(PolicyError, match=r"longer: to_json\(\) of its initial state gives {'obs.*a text of JSON"):
        load_policy(Unrecorded())


# ---- cost models ----


def test_a_cost_model_of_ones_own() -> None:
    model = load_cost_model("python:own_rules:Sevens")
    assert (model.name, model.state_ids, model.step_time, model.predicts_victim_delay) == ("sevens", set(), None, False)
    assert load_cost_model(model) is model
    chosen = load_policy("cheapest:python:own_rules:Sevens")
    assert chosen.cost_model is not None and chosen.cost_model.name == "sevens"
    assert chosen.name == chosen.label == f"cheapest:sevens@{model.digest[:12]}", "no module path is recorded"
    victim = situation()
    assert chosen.assess(victim, options_for(victim), chosen.initial_state())[1][0].engine_s == 7.0
    with pytest.raises(ValueError, match="knows none"):
        load_policy("cheapest:python:own_rules:Sevens,online=on")
    with pytest.raises(ExtensionError, match="cost model 'python:own_rules:Rule': Rule makes a Rule"):
        load_policy("minwaste:python:own_rules:Rule")


# ---- registered ----


@pytest.fixture
def registered(own: Path) -> None:
    folder = own / "own_rules-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-rules\nVersion: 1\n")
    lines = ["[kvpolicy.policies]", "mine = own_rules:Rule", "always-swap = own_rules:Rule", "none = own_rules:text"]
    (folder / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.usefixtures("registered")
def test_an_installed_package_offers_policies_by_name() -> None:
    """Installing it was the operator's choice: no module path is named, so that nothing more has to be allowed."""
    assert policy.load("mine").name == "mine"
    assert policy.load("mine,tokens=5").tokens == 5
    assert type(policy.load("always-swap")).__module__ == "kvpolicy.policy.cheapest", "what is ours stays ours"
    with pytest.raises(ExtensionError, match="policy 'none': text makes a str"):
        policy.load("none")
    with pytest.raises(ValueError, match="policy 'others' is no policy; the policies are"):
        policy.load("others")


# ---- who may name a module ----


@pytest.mark.parametrize("name", ["python:own_rules:Rule", "cheapest:python:own_rules:Sevens,objective=engine"])
def test_a_module_is_run_only_where_that_is_allowed(name: str) -> None:
    with pytest.raises(NotAllowed, match="names a module to run"):
        policy.load(name)
    assert LOADED not in sys.modules
    assert policy.load(name, allow_python=True)
    assert LOADED in sys.modules


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("python:a:b", True),
        ("cheapest:python:a:b,online=on", True),
        ("cheapest:models/python", False),
        ("always-swap", False),
        ("cpython:3", False),
    ],
)
def test_a_module_path_is_seen_anywhere_in_a_name(spec: str, found: bool) -> None:
    assert extensions.names_module(spec) == found
