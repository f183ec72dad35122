"""What somebody gave wrong is one line on the command line; a fault of this package is a traceback."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.errors import EngineFailed, InputError, KVPolicyError
from kvpolicy.study import grid
from kvpolicy.study.grid import Task

ROOT = Path(__file__).resolve().parent.parent
MODEL = "cpu-llama-native"
TRACE = ROOT / "traces" / MODEL
BARE = {
    "kvpolicy/evaluation/estimators.py",
    "kvpolicy/regression/ceilings.py",
    "kvpolicy/regression/estimator.py",
    "integrations/kvpolicy_vllm/bench/overload.py",
    "integrations/kvpolicy_vllm/bench/serve_engine.py",
    "integrations/kvpolicy_vllm/bench/plugin_switch.py",
    "integrations/kvpolicy_vllm/plugin/copiers/base.py",
}
"""Where ValueError is raised for what no user gives: a caller's mistake in Python, or scikit-learn's contract."""
PLAIN_BY_OTHERS = {
    "integrations/kvpolicy_vllm/simulator/deployment.py": "vLLM's own",
    "integrations/kvpolicy_vllm/bench/exactness.py": "zip's, for two results that are not of the same requests",
}
COMMANDS: dict[str, list[str]] = {
    "profile": ["--out", "x"],
    "train": ["t", "--out", "x"],
    "calibrate": ["--cost-model", "m", "--trace", "t", "--out", "x"],
    "evaluate": ["--trace", "t", "--policy", "always-swap"],
    "explain": ["--cost-model", "m", "--tokens", "5"],
    "demo": [],
    "import-profile": ["t.csv", "--out", "x", "--geometry", "c"],
    "simulate": ["--policy", "always-swap", "--kv-blocks", "9", "--hardware", "h", "--workload", "w"],
    "recommend": ["--workload", "w", "--hardware", "h", "--kv-blocks", "9"],
    "characterize": ["--out", "x"],
    "report": ["t"],
}
"""With arguments that parse."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for package in ("kvpolicy", "integrations/kvpolicy_vllm"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def builtin_errors(names: list[ast.expr]) -> list[str]:
    results = [name.id for name in names if isinstance(name, ast.Name)]
    return [one for one in results if issubclass(getattr(builtins, one, object), Exception)]  # type: ignore[arg-type]


def test_every_error_class_stands_beneath_the_root() -> None:
    """Classes named in the sources: importing all of them would need an engine."""
    rootless = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and builtin_errors(node.bases) and "Warning" not in node.name:
                named = [base.id for base in node.bases if isinstance(base, ast.Name)]
                rootless += [] if "KVPolicyError" in named else [f"{file}: {node.name}"]
    assert rootless == ["kvpolicy/errors.py: KVPolicyError"]


def test_what_a_user_can_give_wrong_never_ends_in_a_bare_value_error() -> None:
    raising = {
        file
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ValueError"
    }
    assert raising == BARE


def test_docstrings_name_the_error_that_is_raised() -> None:
    """A KVPolicyError is a ValueError, and callers may catch it as one; who reads what is raised finds its class."""
    documented = {
        file
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        and re.search(r"[Rr]aises?\s[^.]*\bValueError\b", ast.get_docstring(node) or "")
    }
    plugin = {file for file in documented if file.startswith("integrations/kvpolicy_vllm/plugin/")}
    assert documented - plugin <= BARE | set(PLAIN_BY_OTHERS)


def defining() -> dict[str, str]:
    """Every error class of the sources beneath the root, and its module: importing all modules takes too long."""
    found = {("KVPolicyError", "kvpolicy.errors")}
    classes = [
        (file.removeprefix("integrations/").removesuffix(".py").replace("/", "."), node)
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    before = 0
    while before < len(found):
        before, names = len(found), {name for name, _ in found}
        found |= {
            (node.name, module)
            for module, node in classes
            if any(isinstance(base, ast.Name) and base.id in names for base in node.bases)
        }
    return {f"{module}.{name}": module for name, module in found}


def below(kind: type[KVPolicyError]) -> Iterator[type[KVPolicyError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from below(one)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "kvpolicy.stored_values.FieldMissing": ("times.decode",),
    "kvpolicy.fields.WrongValue": ("order", "is 'x'"),
    "kvpolicy.request_marks.InvalidMarks": ("session",),
    "kvpolicy.tiers.block_format.Damaged": ("corrupt",),
    "kvpolicy.cost.online.OtherModelError": (Path("state.json"), "a" * 8, "b" * 8),
    "kvpolicy_vllm.check.lay_out.NotServed": ("mamba is not served", [{"layers": 3}]),
}
"""Of errors with a constructor of their own."""


def test_errors_come_back_from_worker_processes() -> None:
    modules = defining()
    for module in set(modules.values()):
        importlib.import_module(module)
    kinds = {f"{kind.__module__}.{kind.__name__}": kind for kind in below(KVPolicyError)}
    assert kinds.keys() >= modules.keys()
    for name in modules:
        kind = kinds[name]
        assert ("__init__" in vars(kind)) == (name in ARGUMENTS), name
        error = kind(*ARGUMENTS.get(name, ("x is 3, should be 4",)))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error), name


def test_errors_stay_what_callers_caught_before() -> None:
    assert issubclass(KVPolicyError, ValueError)
    assert issubclass(EngineFailed, RuntimeError) and issubclass(EngineFailed, KVPolicyError)


def failing(monkeypatch: pytest.MonkeyPatch, command: str, error: Exception) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(kvpolicy, command.replace("-", "_"), broken, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("error", [InputError("the\nflag"), OSError("the\nflag")])
def test_a_wrong_value_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, error: Exception
) -> None:
    failing(monkeypatch, command, error)
    with pytest.raises(SystemExit) as ended:
        main([command, *COMMANDS[command]])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("kvpolicy: error: the flag\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", [ValueError, RuntimeError, KeyError, TypeError])
def test_a_fault_of_the_package_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, command: str, fault: type[Exception]
) -> None:
    failing(monkeypatch, command, fault("zip() argument 2 is shorter"))
    with pytest.raises(fault, match="argument 2 is shorter"):
        main([command, *COMMANDS[command]])


def test_a_fault_of_the_package_ends_in_a_traceback_that_names_it() -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'integrations')]!r}\n"
        "import kvpolicy\nfrom kvpolicy.cli import main\n"
        "def train(**_): return list(zip([1], [], strict=True))\n"
        "kvpolicy.train = train\nmain(['train', 't', '--out', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "ValueError: zip() argument 2 is shorter" in done.stderr
    assert "in train" in done.stderr


def test_a_fault_in_one_cell_of_a_grid_is_seen_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def work(task: Task) -> Any:
        if task.cell.kv_blocks == 400:
            raise ValueError("made to fail")
        return real(task)

    real = grid.work
    monkeypatch.setattr(grid, "work", work)
    flags = ["--kv-blocks", "500", "--cache", str(tmp_path), "--workload", "azure-conversation-2023?n=5&rate=2"]
    with pytest.raises(SystemExit) as ended:
        main(simulated(*flags))
    output = capsys.readouterr()
    assert ended.value.code != 0
    assert "Traceback" in output.err and "in work" in output.err
    assert "ValueError: made to fail" in output.out
    assert len(list(tmp_path.glob("*"))) == 1


def simulated(*changed: str) -> list[str]:
    return ["simulate", "--policy", "always-swap", "--kv-blocks", "400", "--hardware", MODEL, "--jobs", "0", *changed]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "{bytes}", "--out", "{out}"], "bytes"),
        (["train", "{damaged}", "--out", "{out}"], "header.json"),
        (["train", str(TRACE), "--out", "{out}", "--family", "forest"], "family is 'forest'"),
        (["calibrate", "--cost-model", MODEL, "--trace", str(TRACE), "--out", "{out}", "--states", "0"], "states is 0"),
        (["evaluate", "--trace", str(TRACE), "--policy", "threshold:x"], "whole number of tokens"),
        (["evaluate", "--trace", str(TRACE), "--policy", "cheapest:{damaged}"], "damaged"),
        (["evaluate", "--trace", str(TRACE), "--policy", "cheapest:analytic:H200@pcie9:{config}"], "no link 'pcie9'"),
        (["evaluate", "--trace", str(TRACE), "--policy", "always-swap", "--json", "{out}/no/x"], "No such file"),
        (["explain", "--cost-model", MODEL, "--tokens", "9" * 400], "--tokens is 999"),
        (["explain", "--cost-model", MODEL, "--tokens", "500", "--queued-save", "9" * 400], "--queued-save is 999"),
        (["explain", "--cost-model", MODEL, "--tokens", "500", "--batch-tokens", "-1"], "--batch-tokens is -1"),
        (["config", "--policy", "always-swap", "--host-gib", "-1"], "--host-gib is -1"),
        (["config", "--policy", "always-swap", "--link", "1e9,nan"], "link '1e9,nan'"),
        (["serve", "m", "--policy", "always-swap", "--dry-run", "--config", "{bytes}"], "--config"),
        (["serve", "m", "--policy", "always-swap", "--dry-run", "--scheduler-cls", "x"], "--scheduler-cls"),
        (["import-profile", "{bytes}", "--out", "{out}", "--geometry", "{config}"], "config.json"),
        (simulated("--workload", "{bytes}"), "bytes"),
        (simulated("--workload", "azure-conversation-2023?n=5&rate=-1"), "rate_per_s is -1"),
        (simulated("--workload", "azure-conversation-2023?n=5", "--host-gib", "1e300"), "--host-gib is 1e+300"),
        (simulated("--workload", "azure-conversation-2023?n=5", "--hardware", "{hardware}"), "hardware.json"),
        (["recommend", "--kv-blocks", "9", "--hardware", MODEL, "--workload", "nowhere"], "nowhere"),
        (["report", "{damaged}", "--out", "{out}.html"], "header.json"),
        (["report", str(TRACE), "--out", "{out}.html", "--seed", "-1"], "seed is -1"),
        (["profile", "--out", "{out}", "--seed", "-1"], "seed is -1"),
        (["demo", "--out", "{out}", "--seed", "-1"], "seed is -1"),
        (["characterize", "--out", "{out}", "--figure", "none"], "--figure is none"),
    ],
)
def test_bad_inputs_of_every_command_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    places = {name: tmp_path / name for name in ("bytes", "damaged", "hardware", "config", "out")}
    places["bytes"].write_bytes(bytes(range(256)))
    for folder in ("damaged/core", "hardware", "config"):
        (tmp_path / folder).mkdir(parents=True)
    (places["damaged"] / "core" / "header.json").write_bytes(b"\xff")
    card = '{"kind": "kvpolicy hardware model", "schema_version": 1, "mixed": null, "device": "d", "geometry": "g"}'
    (places["hardware"] / "hardware.json").write_text(card)
    (places["config"] / "config.json").write_text('{"hidden_size": "wide"}')
    with pytest.raises(SystemExit) as ended:
        main([argument.format(**places) for argument in arguments])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("kvpolicy: error: ") and err.count("\n") == 1
    assert said in err
