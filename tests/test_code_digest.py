"""A digest is that of the values and the code of an object: the same in every process, another after any change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.code_digest import digest_of
from kvpolicy.errors import KVPolicyError

SOURCE = """
import helpers

LIMIT = 5
NAMES = frozenset({"a", "b", "c"})
COUNT = {"calls": 0}

def doubled(value):
    return 2 * value

class Base:
    share = 0.5

class Rule(Base):
    def __init__(self, tokens, kinds=("swap",)):
        self.tokens, self.kinds = tokens, set(kinds)

    @property
    def limit(self):
        return min(LIMIT, helpers.halved(self.tokens))

    def probabilities(self, name):
        COUNT["calls"] += 1
        inner = lambda: doubled(3)
        return inner() if name in NAMES else 0
"""
HELPERS = "def halved(value):\n    return value / 2\n"

Make = Callable[..., Any]


@pytest.fixture
def make_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An object of the module with these changes, in (text, other text) pairs; ``helpers`` alike."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(*changes: tuple[str, str], helpers: str = HELPERS, **values: Any) -> Any:
        for name in ("helpers", "rules"):
            sys.modules.pop(name, None)
        source = SOURCE
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        for name, text in (("helpers", helpers), ("rules", source)):
            file = tmp_path / f"{name}.py"
            file.write_text(text)
            module = type(sys)(name)
            module.__file__ = str(file)
            sys.modules[name] = module
            exec(compile(text, str(file), "exec"), vars(module))
        return sys.modules["rules"].Rule(**({"tokens": 7} | values))

    yield make
    for name in ("helpers", "rules"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "change",
    [
        ("LIMIT = 5", "LIMIT = 6"),
        ('{"a", "b", "c"}', '{"a", "b", "d"}'),
        ("2 * value", "3 * value"),
        ("share = 0.5", "share = 0.6"),
        ("doubled(3)", "doubled(4)"),
        ("return min(", "return max("),
    ],
)
def test_any_change_of_the_code_is_another_digest(make_rule: Make, change: tuple[str, str]) -> None:
    assert digest_of(make_rule(change)) != digest_of(make_rule())


def test_code_of_another_module_counts_and_values_do(make_rule: Make) -> None:
    first = digest_of(make_rule())
    assert digest_of(make_rule(helpers=HELPERS.replace("/ 2", "/ 3"))) != first
    assert digest_of(make_rule(tokens=8)) != first
    assert digest_of(make_rule(kinds=("recompute",))) != first
    assert digest_of(make_rule(tokens=7.0)) != first


def test_what_changes_nothing_is_the_same_digest(make_rule: Make) -> None:
    first = digest_of(make_rule())
    assert digest_of(make_rule()) == first
    assert digest_of(make_rule(("LIMIT = 5", "\n\nLIMIT = 5  # moved"))) == first, "lines and comments"
    used = make_rule()
    used.probabilities("a")
    assert digest_of(used) == first, "a global that changes while it runs"


def test_it_is_that_of_what_was_loaded(make_rule: Make, tmp_path: Path) -> None:
    model = make_rule()
    first = digest_of(model)
    (tmp_path / "rules.py").write_text(SOURCE.replace("LIMIT = 5", "LIMIT = 6"))
    assert digest_of(model) == first


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(SOURCE)
    (tmp_path / "helpers.py").write_text(HELPERS)
    code = (
        "from kvpolicy.code_digest import digest_of\nfrom rules import Rule\n"
        "print(digest_of(Rule(7, ('swap', 'recompute', 'other'))))"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parent.parent)])
    result = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        result.add(done.stdout)
    assert len(result) == 1


def test_an_object_that_refers_to_itself_has_one(make_rule: Make) -> None:
    one, other = make_rule(), make_rule()
    one.me, other.me = one, [other]
    assert digest_of(one) != digest_of(other)


def test_what_it_holds_may_have_a_digest_of_its_own(make_rule: Make) -> None:
    class Model:
        def __init__(self, digest: str) -> None:
            self.digest = digest
            self.unstable = object()

    first, second, third = (make_rule() for _ in range(3))
    first.model, second.model, third.model = Model("x"), Model("x"), Model("y")
    assert digest_of(first) == digest_of(second) != digest_of(third)


def test_what_has_no_stable_form_is_a_clear_error(make_rule: Make) -> None:
    model = make_rule()
    model.numbers = (value for value in range(3))
    with pytest.raises(KVPolicyError, match=r"Rule: no digest can be made of it: .*generator.*give the class a text"):
        digest_of(model)
