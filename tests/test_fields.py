"""Configuration by fields: one line declares a flag, and no function hands on more than a person can hold in mind."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.errors import InputError
from kvpolicy.fields import COUNT, WrongValue, changed_values, option, read, refuse_single, validate
from kvpolicy.hardware.link import SimulatedLink

ROOT = Path(__file__).resolve().parent.parent
MAX_PARAMETERS = 8
LONGER = {
    "kvpolicy/cost/kernel.py pair": "compiled: it takes numbers, not records",
    "kvpolicy/cost/compile.py pair": "compiled: it takes numbers, not records",
    "kvpolicy/features.py swap_row": "compiled: it takes numbers, not records",
    "kvpolicy/regression/estimator.py __init__": "scikit-learn's contract: a constructor has the hyperparameters",
    "kvpolicy/simulator/hardware/interpolation.py hyperplane": "compiled: it takes numbers, not records",
    "kvpolicy/tiers/file_tier.py open": "what files are opened with; nothing hands it on",
    "kvpolicy/trace/rows.py window_row": "a row: one argument is one column",
    "kvpolicy/trace/rows.py decision_row": "a row: one argument is one column",
    "kvpolicy/trace/rows.py request_row": "a row: one argument is one column",
    "kvpolicy/workload/sharegpt.py __init__": "a source's own options; nothing hands them on",
    "integrations/kvpolicy_vllm/bench/models.py make_llama": "a model's shape; nothing hands it on",
}


def parameters() -> dict[str, int]:
    """How many each function takes, by file and name; the largest first."""
    values: dict[str, int] = {}
    for package in ("kvpolicy", "integrations/kvpolicy_vllm"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    value = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                    count = len([one for one in value if one.arg not in ("self", "cls")])
                    name = f"{path.relative_to(ROOT)} {node.name}"
                    values[name] = max(count, values.get(name, 0))
    return dict(sorted(values.items(), key=lambda one: -one[1]))


def test_no_function_hands_on_more_than_eight() -> None:
    counts = parameters()
    print("longest parameter lists:", *list(counts.items())[:12], sep="\n  ")
    assert {name for name, count in counts.items() if count > MAX_PARAMETERS} == set(LONGER)


@dataclass(frozen=True, slots=True)
class Plan:
    name: str = option("What it is called.")
    repeats: int = option("How often.", 1, COUNT)
    out: Path | None = option("Where to.", None)
    link: SimulatedLink | None = option("Over what.", None)
    kinds: tuple[str, ...] = option("Of what.", ())

    def __post_init__(self) -> None:
        validate(self)


def test_what_is_written_reads_as_it_was(tmp_path: Path) -> None:
    plan = Plan("a", 2, tmp_path, "2e9,0.001", ["x", "y"])  # type: ignore[arg-type]
    assert plan.link == SimulatedLink(2e9, 0.001) and plan.kinds == ("x", "y")
    assert changed_values(plan) == {
        "name": "a", "repeats": 2, "out": str(tmp_path), "link": "2e9,0.001", "kinds": ("x", "y"),
    }  # fmt: skip
    assert read(Plan, changed_values(plan), "plan.json") == plan
    assert changed_values(Plan("a")) == {"name": "a"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"name": "a", "repeats": 0}, "plan.json: repeats is 0, should be 1 or more"),
        ({"name": "a", "repeats": True}, "plan.json: repeats is True, should be a whole number"),
        ({"name": "a", "repeats": 1.5}, "plan.json: repeats is 1.5, should be a whole number"),
        ({"name": ""}, "plan.json: name is '', should be a text"),
        ({"name": "a", "link": "fast"}, "plan.json: link 'fast': should be BYTES_PER_S[,LATENCY_S]"),
        ({"name": "a", "repeat": 1}, "plan.json: unknown key 'repeat'; the keys are kinds, link, name, out, repeats"),
        ({}, "plan.json: key 'name' is missing; the keys are kinds, link, name, out, repeats"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(values: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as error:
        read(Plan, values, "plan.json")
    assert str(error.value).startswith(told)


def test_a_wrong_value_in_python_is_refused_by_field() -> None:
    with pytest.raises(WrongValue, match=r"^repeats is -1, should be 1 or more$"):
        Plan("a", -1)


@pytest.mark.parametrize("single", ["abc", Path("abc"), 40])
def test_a_single_value_is_no_list_of_them(single: object) -> None:
    with pytest.raises(WrongValue, match=r"^names is .*, should be a list, as "):
        refuse_single(others=["a"], names=single)


def test_verbs_refuse_a_single_value() -> None:
    for call in (
        lambda: kvpolicy.train("traces/mine"),
        lambda: kvpolicy.evaluate("traces/mine", ["always-swap"]),
        lambda: kvpolicy.evaluate(["traces/mine"], "always-swap"),
        lambda: kvpolicy.simulate("azure-conversation-2023", ["always-swap"], [40], "h"),
        lambda: kvpolicy.simulate(["azure-conversation-2023"], ["always-swap"], 40, "h"),  # type: ignore[arg-type]
    ):
        with pytest.raises(WrongValue, match="should be a list"):
            call()
    with pytest.raises(WrongValue, match="kv_blocks are none"):
        kvpolicy.simulate(["azure-conversation-2023"], ["always-swap"], [], "h")


LINE = '    patience_s: float = option("Seconds of patience.", 1.0, POSITIVE)\n'
REACHES = """
from kvpolicy_vllm.plugin.settings import Settings
import sys, io, contextlib, yaml
from kvpolicy.cli import main
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    main(["config", "--policy", "always-swap", "--patience-s", "2.5"])
extra = yaml.safe_load(said.getvalue())["kv-transfer-config"]["kv_connector_extra_config"]
assert extra == {"policy": "always-swap", "patience_s": 2.5}, extra
assert Settings.read(extra).patience_s == 2.5
try:
    Settings.read(extra | {"patience_s": -1})
except ValueError as error:
    print(error)
main(["serve", "--help"])
"""


def test_a_new_server_flag_is_one_line(tmp_path: Path) -> None:
    """One line in a copy of the sources, and it is in the help, in the YAML, checked, and there for the plugin."""
    for package in ("kvpolicy", "integrations/kvpolicy_vllm"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "kvpolicy" / "settings.py"
    before = "    allow_untested_version: bool"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, LINE + before))
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "integrations"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", REACHES], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kv_connector_extra_config: patience_s is -1.0, should be a number above 0" in done.stdout
    assert "--patience-s" in done.stdout and "Seconds of patience." in done.stdout
