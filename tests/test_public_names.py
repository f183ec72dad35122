"""What `import kvpolicy` offers: nouns, then the steps of the loop; loaded on first use, and known to type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import kvpolicy
from kvpolicy.lazy_names import lazy_names

ROOT = Path(__file__).resolve().parent.parent

NOUNS = (
    "Preemption", "Option", "Cost", "Decision", "Outcome", "Trace", "Policy", "Order", "CostModel", "Request",
    "Workload", "HardwareModel", "Server", "KVPolicyError", "load_policy", "load_order", "load_cost_model",
    "read_trace", "open_workload",
)  # fmt: skip
OF_ONES_OWN = ("PricedPolicy", "LearningPolicy", "Feedback", "Progress", "Rank", "View", "Family")
ARGUMENTS = (
    "FittedModel", "Objective", "Estimation", "Serving", "Run", "Criterion", "Question", "Measurement",
    "ServerSettings",
)  # fmt: skip
RESULTS = (
    "TrainReport", "LogTrainReport", "CalibrateReport", "EvaluationReport", "OffPolicyReport", "SweepReport", "Advice",
    "Explanation", "ShadowSavings",
)  # fmt: skip
VERBS = (
    "train", "evaluate", "simulate", "recommend", "explain", "calibrate", "profile", "check", "serve", "demo",
    "offline_demo", "characterize", "report", "import_profile", "shadow_savings",
)  # fmt: skip
NAMES = (*NOUNS, *OF_ONES_OWN, *ARGUMENTS, *RESULTS, *VERBS)
UNNAMED = {
    "Report": "what an engine's integration returns", "Checked": "the same", "StudyReport": "read as text",
    "BenchReport": "the same", "DemoReport": "the same",
    "Imported": "read as text",
}  # fmt: skip
"""Types in the signatures of verbs that nobody has to make or to name, and why."""
RARE = {"EngineTime", "ModelShape", "SimulatedLink"}
"""Arguments of `import_profile` that it makes of files and texts."""


def test_the_public_names_are_these_and_no_others() -> None:
    assert kvpolicy.__all__ == ["__version__", *NAMES]
    assert set(kvpolicy.__all__) <= set(dir(kvpolicy))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_what_the_type_checker_takes_it_for(name: str) -> None:
    home, _, there = stub()[name].rpartition(".")
    assert getattr(kvpolicy, name) is getattr(import_module(home), there)


def named_in(hint: Any) -> set[str]:
    """Classes of this package in a type hint."""
    inner = set().union(*map(named_in, get_args(hint)))
    ours = isinstance(hint, type) and hint.__module__.partition(".")[0] == "kvpolicy"
    return inner | ({hint.__name__} if ours else set())


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_verb_takes_and_returns_has_a_public_name(verb: str) -> None:
    hints = get_type_hints(getattr(kvpolicy, verb))
    assert hints
    assert set().union(*map(named_in, hints.values())) <= {*NAMES, *UNNAMED, *RARE}


def stub() -> dict[str, str]:
    """Full name of what each name of the stub stands for."""
    tree = ast.parse((ROOT / "kvpolicy" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def test_the_stub_names_all_of_them() -> None:
    assert sorted(stub()) == sorted(kvpolicy.__all__)


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvpolicy' has no attribute 'no_such_thing'"):
        _ = kvpolicy.no_such_thing
    with pytest.raises(ImportError, match="no_such_thing"):
        exec("from kvpolicy import no_such_thing")


def test_importing_the_package_loads_none_of_its_parts() -> None:
    """Nor does listing what it offers."""
    code = "import sys, kvpolicy; dir(kvpolicy); print(*(name for name in sys.modules if name.startswith('kvpolicy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) == {"kvpolicy", "kvpolicy.lazy_names", "kvpolicy.version"}


def test_a_name_may_be_called_otherwise_where_it_lives() -> None:
    load, names = lazy_names("kvpolicy", {"join": "posixpath", "absolute": "posixpath:abspath"})
    assert load("absolute") is import_module("posixpath").abspath
    assert {"join", "absolute", "__version__"} <= set(names())
