"""Who may import whom. The rule is a table; the imports are read from the sources, also those inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpolicy

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    ("events", "overflow", "rowtext", "shape"),
    ("features", "hardware", "trace", "workload", "drafts"),
    ("cost",),
    ("policy",),
    ("evaluation", "simulator", "measure", "training", "explaining"),
    ("engines",),
    ("study", "reporting"),
    ("cli_study",),
    ("cli",),
)
"""Parts of kvpolicy: each imports parts of the layers before its own, and of its own layer only itself."""

_DECIDE = {"events", "features", "drafts", "shape", "hardware", "trace", "cost", "policy"}
INTEGRATION = {
    "": set(),
    "connector": set(),
    "launch": {"policy", "engines"},
    "plugin": _DECIDE,
    "simulator": _DECIDE | {"workload", "simulator"},
    "bench": _DECIDE | {"overflow", "workload", "simulator"},
    # The whole loop in order: it profiles, and then trains and evaluates as a user would.
    "bench.demo": _DECIDE | {"workload", "simulator", "training", "evaluation"},
    # The learned policy it serves with is trained on the way.
    "bench.characterize": _DECIDE | {"overflow", "workload", "simulator", "training"},
}
"""Parts of kvpolicy_vllm, and the parts of kvpolicy each may import."""

INTEGRATION_INSIDE = {
    "": {"plugin"},
    "connector": {"plugin"},
    "launch": {"plugin"},
    "plugin": set(),
    "simulator": {"plugin"},
    "bench": {"plugin", "simulator"},
}
"""Parts of kvpolicy_vllm, and the other parts of it each may import."""

ENGINE_PACKAGES = {"vllm", "transformers", "tokenizers"}
LIVE_PATH = ("kvpolicy.events", "kvpolicy.features", "kvpolicy.cost.compiled", "kvpolicy.policy")
HEAVY = ("pandas", "sklearn", "lightgbm", "pyarrow", "torch", "vllm")


def sources(package: Path) -> Iterator[tuple[str, Path]]:
    """Module name and file of every module in a package."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imported(module: str, source: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*up, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports against the rule."""
    found = []
    for line, name in imported(module, source, is_package):
        reason = _reason(module, name)
        if reason:
            found.append(f"{module}, line {line}: imports {name}: {reason}")
    return found


def _reason(module: str, name: str) -> str:
    mine, other = module.split("."), name.split(".")
    if mine[0] == "kvpolicy":
        if other[0] == "kvpolicy_vllm" or other[0] in ENGINE_PACKAGES:
            return "the library imports neither an engine nor its integration"
        if other[0] == "torch" and mine[1:2] != ["measure"]:
            return "torch belongs to kvpolicy.measure"
        return _reason_inside(mine, other) if other[0] == "kvpolicy" else ""
    part = mine[1] if len(mine) > 1 else ""
    if other[0] == "kvpolicy":
        allowed = INTEGRATION.get(".".join(mine[1:3]), INTEGRATION[part]) | {"__version__"}
        return "" if other[1] in allowed else f"{part or 'kvpolicy_vllm'} may use {', '.join(sorted(allowed))}"
    if other[0] == "kvpolicy_vllm":
        inside = INTEGRATION_INSIDE[part] | {part}
        return "" if other[1] in inside else f"{part or 'kvpolicy_vllm'} may use {', '.join(sorted(inside))}"
    return ""


def _reason_inside(mine: list[str], other: list[str]) -> str:
    if len(mine) == 1:
        return ""  # kvpolicy/__init__.py names the public functions for type checkers; see the next test
    if len(other) == 1 or other[1].startswith("__"):
        return (
            ""
            if mine[1] in ("cli", "cli_study") or other[1:]
            else "the package itself loads everything lazily: name the part"
        )
    rank = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    unknown = next((part for part in (mine[1], other[1]) if part not in rank), None)
    if unknown:
        return f"{unknown} has no place in the layers; give it one"
    if mine[1] == other[1] or rank[other[1]] < rank[mine[1]]:
        return ""
    return f"{other[1]} is not left of {mine[1]}"


@pytest.mark.parametrize("package", ["kvpolicy", "integrations/kvpolicy_vllm"])
def test_imports_point_left(package: str) -> None:
    found = [
        fault
        for module, path in sources(ROOT / package)
        for fault in faults(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpolicy.events", "from kvpolicy.trace import Trace"),
        ("kvpolicy.cost.linear", "from kvpolicy import policy"),
        ("kvpolicy.cost.linear", "from ..policy import load"),
        ("kvpolicy.features", "import kvpolicy.hardware"),
        ("kvpolicy.policy.fixed", "def late():\n    from kvpolicy.evaluation import evaluate"),
        ("kvpolicy.cli", "import kvpolicy_vllm.launch"),
        ("kvpolicy.trace", "import vllm"),
        ("kvpolicy.cost.linear", "import torch"),
        ("kvpolicy.unheard_of", "import kvpolicy.events"),
        ("kvpolicy_vllm.plugin.scheduler", "from kvpolicy.training import train"),
        ("kvpolicy_vllm.plugin.scheduler", "from kvpolicy_vllm.bench import profile"),
        ("kvpolicy_vllm.bench.profile", "from kvpolicy.training import train"),
    ],
)
def test_the_rule_sees_what_breaks_it(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpolicy.trace", "import json\nfrom kvpolicy.events import Preemption"),
        ("kvpolicy.cost.linear", "from kvpolicy.cost.steps import fit\nfrom kvpolicy import features"),
        ("kvpolicy.cost.linear", "from .steps import fit"),
        ("kvpolicy.measure.copies", "import torch"),
        ("kvpolicy_vllm.plugin.scheduler", "import vllm\nfrom kvpolicy.policy import load"),
        ("kvpolicy_vllm.bench.profile", "from kvpolicy_vllm.plugin import settings\nfrom kvpolicy import workload"),
        ("kvpolicy_vllm.bench.demo", "from kvpolicy.training import train"),
    ],
)
def test_the_rule_lets_pass_what_keeps_it(module: str, source: str) -> None:
    assert not faults(module, source)


def _loaded_after(statement: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'integrations')]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", LIVE_PATH)
def test_a_live_decision_loads_nothing_heavy(module: str) -> None:
    assert not _loaded_after(f"import {module}") & set(HEAVY)


def test_the_package_itself_is_light() -> None:
    assert not _loaded_after("import kvpolicy, kvpolicy_vllm") & {*HEAVY, "numpy", "typer", "rich"}


def test_flags_are_written_without_an_engine() -> None:
    assert not _loaded_after("import kvpolicy_vllm.launch, kvpolicy.cli") & {"torch", "vllm", "lightgbm", "sklearn"}


def test_data_folders_hold_no_code() -> None:
    """`models` and `traces` as importable packages would collide with other people's, and data must not run."""
    files = [path for folder in ("models", "traces") for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = {".py", ".pyc", ".so", ".pkl", ".pickle", ".joblib", ".pt", ".npy"}
    assert files
    assert not [path for path in files if path.suffix in code]


def test_public_functions_are_found() -> None:
    for name in kvpolicy.__all__:
        assert getattr(kvpolicy, name) is not None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = kvpolicy.no_such_thing
