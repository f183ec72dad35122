"""Who may import whom. The rule is a table; the imports are read from the sources, also those inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    ("errors", "version", "lazy_names", "arrays", "json_values"),
    ("bench_warnings", "fields", "shelf", "stats", "stored_tables", "stored_values"),
    ("events", "overflow", "prefix_hits", "shape", "regression", "extensions", "code_digest", "request_marks"),
    ("features", "hardware", "headroom", "latency", "load_growth", "order", "survival", "workload"),
    ("caching", "client", "trace"),
    ("attribution", "host_store", "tiers", "prefix_store", "server_metrics"),
    ("cost", "datasets", "server_gain"),
    ("policy", "training"),
    ("evaluation", "settings", "simulator", "explanation"),
    ("bench_settings",),
    ("integrations",),
    ("study", "reporting"),
    ("cli",),
)
"""Parts of kvpolicy: each imports parts of the layers before its own, and of its own layer only itself."""

_DECIDE = {
    "errors", "arrays", "events", "extensions", "features", "fields", "shape", "shelf", "hardware", "trace",
    "attribution", "cost", "policy", "settings", "caching", "host_store", "load_growth", "order", "request_marks",
    "survival", "tiers",
}  # fmt: skip
INTEGRATION = {
    "": {"lazy_names"},
    "connector": set(),
    "offloading": {"caching"},
    "file_offloading": {"errors", "caching", "fields", "settings", "tiers"},
    "named_chunks": {"caching"},
    "config_file": {"errors", "stored_values"},
    "given_transfer": {"errors"},
    "launch": {"errors", "integrations"},
    "integration": {"errors", "integrations", "bench_settings", "settings", "simulator"},
    "check": {"errors", "hardware", "settings"},
    "plugin": _DECIDE,
    "simulator": _DECIDE | {"latency", "workload", "simulator"},
    "bench": _DECIDE
    | {"bench_warnings", "client", "datasets", "latency", "overflow", "server_metrics", "stats", "stored_values"}
    | {"bench_settings", "simulator", "workload"},
    # The whole loop in order: it profiles, and then trains and evaluates as a user would, and fills the report that it
    # shares with the demo without an engine.
    "bench.run_demo": _DECIDE
    | {"datasets", "headroom", "stats", "stored_values", "workload", "training", "evaluation", "study"},
    "bench.load_report": {"bench_warnings", "json_values", "latency", "prefix_hits", "stats"},
    "bench.recorded_prices": {"errors", "evaluation", "bench_settings", "settings", "trace"},
    # The learned policy it serves with is trained on the way.
    "bench.run_characterize": _DECIDE
    | {"datasets", "overflow", "workload", "simulator", "training", "evaluation", "headroom"},
}
"""Parts of kvpolicy_vllm, and the parts of kvpolicy each may import."""

INTEGRATION_INSIDE = {
    "": {"plugin"},
    "connector": {"plugin"},
    "config_file": {"plugin"},
    "given_transfer": {"plugin"},
    "launch": {"config_file", "given_transfer", "plugin"},
    "integration": {"launch", "bench", "check", "simulator"},
    "check": {"launch", "plugin", "bench"},
    "offloading": set(),
    "file_offloading": {"named_chunks", "plugin"},
    "named_chunks": set(),
    "plugin": set(),
    "simulator": {"plugin"},
    "bench": {"launch", "plugin", "simulator"},
}
"""Parts of kvpolicy_vllm, and the other parts of it each may import."""

ENGINE_PACKAGES = {"vllm", "transformers", "tokenizers"}
LIVE_PATH = (
    "kvpolicy.events",
    "kvpolicy.features",
    "kvpolicy.survival",
    "kvpolicy.attribution",
    "kvpolicy.cost.forest",
    "kvpolicy.policy",
)
WITHOUT_ENGINE = (
    "kvpolicy_vllm.plugin.controller",
    "kvpolicy_vllm.plugin.cost_meter",
    "kvpolicy_vllm.plugin.learner",
    "kvpolicy_vllm.plugin.messages",
    "kvpolicy_vllm.plugin.settings",
    "kvpolicy_vllm.plugin.situation",
    "kvpolicy_vllm.plugin.trace_writer",
)
"""The plugin's logic: what it asks of a scheduler it asks of whatever it is given."""
HEAVY = ("pandas", "sklearn", "lightgbm", "pyarrow", "torch", "vllm")


def sources(package: Path) -> Iterator[tuple[str, Path]]:
    """Module name and file of every module in a package."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imported(module: str, source: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports; ``from a import b`` counts as ``a.b``.

    So does ``import_module("a.b")``: an import that a string hides is still one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*up, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = (part.value for part in node.args[:1] if isinstance(part, ast.Constant))
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports against the rule."""
    events = []
    for line, name in imported(module, source, is_package):
        reason = _reason(module, name)
        if reason:
            events.append(f"{module}, line {line}: imports {name}: {reason}")
    return events


def _reason(module: str, name: str) -> str:
    mine, other = module.split("."), name.split(".")
    if mine[0] == "kvpolicy":
        if other[0] == "kvpolicy_vllm" or other[0] in ENGINE_PACKAGES:
            return "the library imports neither an engine nor its integration"
        if other[0] == "torch":
            return "the library computes without torch; the integration has it"
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
        return "" if mine[1] == "cli" or other[1:] else "the package itself loads everything lazily: name the part"
    rank = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    unknown = next((part for part in (mine[1], other[1]) if part not in rank), None)
    if unknown:
        return f"{unknown} has no place in the layers; give it one"
    if mine[1] == other[1] or rank[other[1]] < rank[mine[1]]:
        return ""
    return f"{other[1]} is not left of {mine[1]}"


@pytest.mark.parametrize("package", ["kvpolicy", "integrations/kvpolicy_vllm"])
def test_imports_point_left(package: str) -> None:
    results = [
        fault
        for module, path in sources(ROOT / package)
        for fault in faults(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not results, "\n".join(results)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpolicy.events", "from kvpolicy.trace import Trace"),
        ("kvpolicy.training.law_fits", "from kvpolicy import policy"),
        ("kvpolicy.training.law_fits", "from ..policy import load"),
        ("kvpolicy.features", "import kvpolicy.hardware"),
        ("kvpolicy.policy.cheapest", "def late():\n    from kvpolicy.evaluation import evaluate"),
        ("kvpolicy.cli", "import kvpolicy_vllm.launch"),
        ("kvpolicy.trace", "import vllm"),
        ("kvpolicy.training.law_fits", "import torch"),
        ("kvpolicy.training.law_fits", "from importlib import import_module\nimport_module('kvpolicy.policy')"),
        ("kvpolicy.unheard_of", "import kvpolicy.events"),
        ("kvpolicy_vllm.plugin.scheduler", "from kvpolicy.training import train"),
        ("kvpolicy_vllm.plugin.scheduler", "from kvpolicy_vllm.bench import profile"),
        ("kvpolicy_vllm.bench.run_profile", "from kvpolicy.training import train"),
    ],
)
def test_the_rule_sees_what_breaks_it(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpolicy.trace", "import json\nfrom kvpolicy.events import Preemption"),
        ("kvpolicy.training.law_fits", "from kvpolicy.attribution.offline import fit\nfrom kvpolicy import features"),
        ("kvpolicy.training.law_fits", "from .steps import fit"),
        ("kvpolicy_vllm.plugin.scheduler", "import vllm\nfrom kvpolicy.policy import load"),
        ("kvpolicy_vllm.bench.run_profile", "from kvpolicy_vllm.plugin import settings\nfrom kvpolicy import workload"),
        ("kvpolicy_vllm.bench.run_demo", "from kvpolicy.training import train"),
    ],
)
def test_the_rule_lets_pass_what_keeps_it(module: str, source: str) -> None:
    assert not faults(module, source)


Graph = dict[str, set[str]]


def files_imported(files: dict[str, tuple[str, bool]]) -> Graph:
    """By file, named as a module, the files it imports itself. ``files``: source, and whether it is a package's."""
    graph: Graph = {}
    for module, (source, is_package) in files.items():
        names = (name for _, name in imported(module, source, is_package))
        graph[module] = {result for name in names if (result := _file_of(name, files)) and result != module}
    return graph


def _file_of(name: str, files: Container[str]) -> str:
    """The file that holds ``name``, a module or something in one; empty for what is none of ours."""
    return next((result for result in (name, name.rpartition(".")[0]) if result in files), "")


def circle(graph: Graph) -> list[str]:
    """Files that import one another in a circle, the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def below(path: list[str]) -> list[str]:
        for following in sorted(graph[path[-1]] - done):
            if following in path:
                return [*path[path.index(following) :], following]
            if result := below([*path, following]):
                return result
        done.add(path[-1])
        return []

    return next((result for module in sorted(graph) if (result := below([module]))), [])


def test_no_files_import_one_another_in_a_circle() -> None:
    files = {
        module: (path.read_text(), path.name == "__init__.py")
        for package in ("kvpolicy", "integrations/kvpolicy_vllm")
        for module, path in sources(ROOT / package)
    }
    assert len(files) > 100
    assert not (result := circle(files_imported(files))), " -> ".join(result)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("from kvpolicy.reporting.other import name", "from kvpolicy.reporting import one"),
        ("import kvpolicy.reporting.other", "import kvpolicy.reporting.one"),
        ("from kvpolicy.reporting.other import name", "def late():\n    import_module('kvpolicy.reporting.one')"),
        ("from .other import name", "importlib.import_module('kvpolicy.reporting.one').name"),
    ],
)
def test_a_circle_of_files_is_found(one: str, other: str) -> None:
    files = {
        "kvpolicy.reporting": ("from kvpolicy.reporting.one import name", True),
        "kvpolicy.reporting.one": (one, False),
        "kvpolicy.reporting.other": (other, False),
    }
    cycle = circle(files_imported(files))
    assert cycle == ["kvpolicy.reporting.one", "kvpolicy.reporting.other", "kvpolicy.reporting.one"]
    files["kvpolicy.reporting.other"] = ("from kvpolicy.events import Kind", False)
    assert circle(files_imported(files)) == []


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


def test_the_plugins_logic_loads_no_engine() -> None:
    assert not _loaded_after(f"import {', '.join(WITHOUT_ENGINE)}") & {"torch", "vllm", "lightgbm", "sklearn", "pandas"}


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
