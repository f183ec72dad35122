"""Commands call functions of the same name, and every refusal is one line on stderr with exit status 2.

Flags are made by ``kvpolicy.cli.flags``, commands stand in ``kvpolicy.cli.measure`` and ``kvpolicy.cli.study``.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import catalog, main, measure
from kvpolicy.cost import ModelWarning
from kvpolicy.errors import EngineFailed
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import Measurement

ROOT = Path(__file__).resolve().parent.parent
TRACES = sorted(path.parent.parent for path in ROOT.glob("traces/*/*/header.json"))


class Report:
    def text(self) -> str:
        return "a table"

    def to_dict(self) -> dict[str, Any]:
        return {"regret": 0.5}


class Called:
    """Stands for a step of the loop and notes what it was called with."""

    def __init__(self, command: str) -> None:
        self.signature = inspect.signature(getattr(kvpolicy, command))
        self.arguments: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **more: Any) -> Report:
        self.arguments = self.signature.bind(*arguments, **more).arguments
        return Report()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("kvpolicy: error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("command", "arguments", "wanted"),
    [
        (
            "profile",
            ["--out", "t", "--llm", "m", "--quick", "--link", "1e9"],
            {"out": Path("t"), "how": Measurement(Path("m"), True, SimulatedLink(1e9))},
        ),
        ("profile", ["--out", "t"], {"out": Path("t"), "how": Measurement()}),
        (
            "profile",
            [
                "--out",
                "t",
                "--llm",
                "org/name",
                "--minutes",
                "5",
                "--",
                "-tp",
                "2",
                "--seed",
                "3",
                "--config",
                "a.yaml",
            ],
            {
                "out": Path("t"),
                "how": Measurement(
                    Path("org/name"),
                    vllm_flags=("-tp", "2", "--seed", "3", "--config", "a.yaml"),
                    minutes=5.0,
                ),
            },
        ),
        (
            "characterize",
            ["--out", "t", "--figure", "memory", "--seed", "4", "--", "--seed", "3", "--dtype", "bfloat16"],
            {
                "out": Path("t"),
                "figures": ["memory"],
                "how": Measurement(seed=4, vllm_flags=("--seed", "3", "--dtype", "bfloat16")),
            },
        ),
        (
            "train",
            ["a", "b", "--out", "m", "--family", "linear", "--force", "--seed", "3"],
            {
                "traces": [Path("a"), Path("b")],
                "out": Path("m"),
                "family": "linear",
                "force": True,
                "seed": 3,
                "mixed_hardware": False,
                "pageable": False,
            },
        ),
        (
            "calibrate",
            ["a", "--cost-model", "m", "--trace", "b", "--states", "4", "--out", "n", "--force"],
            {
                "cost_model": "m",
                "traces": [Path("a"), Path("b")],
                "out": Path("n"),
                "states": 4,
                "seed": 0,
                "force": True,
            },
        ),
        (
            "evaluate",
            ["a", "b", "--policy", "p", "--policy", "q", "--objective", "victim"],
            {
                "traces": [Path("a"), Path("b")],
                "policies": ["p", "q"],
                "seed": 0,
                "objective": "victim",
                "how": Estimation(),
                "between": None,
            },
        ),
        (
            "evaluate",
            ["--trace", "a", "--policy", "p", "--estimator", "dr", "--interval", "bernstein", "--limit-s", "2"],
            {
                "traces": [Path("a")],
                "policies": ["p"],
                "seed": 0,
                "objective": "engine",
                "how": Estimation(("dr",), "bernstein", limit_s=2.0),
                "between": None,
            },
        ),
        (
            "demo",
            ["--out", "d", "--quick", "--seed", "5", "--order", "mlfq:base=64"],
            {"out": Path("d"), "quick": True, "seed": 5, "order": "mlfq:base=64"},
        ),
    ],
)
def test_a_command_is_its_function(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    wanted: dict[str, Any],
) -> None:
    called = Called(command)
    monkeypatch.setattr(kvpolicy, command, called, raising=False)
    assert run(command, *arguments) == 0
    assert called.arguments == wanted
    assert capsys.readouterr().out == "a table\n"


def test_a_trace_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("evaluate", "--policy", "always-swap"), ("calibrate", "--cost-model", "m", "--out", "n")):
        assert "no trace: give TRACE" in refusal(capsys, *command)


def test_evaluate_writes_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvpolicy, "evaluate", Called("evaluate"), raising=False)
    assert run("evaluate", "--trace", "a", "--policy", "p", "--json", str(tmp_path / "report.json")) == 0
    assert json.loads((tmp_path / "report.json").read_text()) == {"regret": 0.5}


def test_a_trace_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path / "no") in refusal(capsys, "train", str(tmp_path / "no"), "--out", str(tmp_path / "m"))
    assert str(tmp_path) in refusal(capsys, "evaluate", "--trace", str(tmp_path), "--policy", "always-swap")


def test_an_engine_that_ends_badly_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile(*_: Any) -> None:
        raise EngineFailed("the engine ended with status 1:\nits last words")

    monkeypatch.setattr(kvpolicy, "profile", profile, raising=False)
    assert run("profile", "--out", "t") == 2
    assert capsys.readouterr().err == "kvpolicy: error: the engine ended with status 1:\nits last words\n"


def test_no_option_left_out_goes_unnoticed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("profile", "train", "evaluate", "serve", "config"):
        assert run(command) == 2
        assert "Missing" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(flag) == 0
    assert capsys.readouterr().out == f"kvpolicy {kvpolicy.__version__}\n"


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_what_is_listed_are_names_with_what_they_are(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", kind) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(catalog.KINDS[kind]())
    assert all(re.match(r"  \S+  +\S", line) for line in lines)


def test_everything_is_listed_under_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == list(catalog.KINDS)
    assert any(line.split()[:1] == ["H100-SXM"] for line in lines)


def test_a_list_of_nothing_known_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are models, traces" in refusal(capsys, "list", "modls")


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What typer says, without the frame around it."""
    assert run(*arguments) == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_what_is_no_number_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--cost-model", "cpu-llama-native")
    said = usage_error(capsys, "explain", *named, "--tokens", "many")
    assert "'--tokens'" in said and "Input" not in said
    assert "should be a whole number" in said or "is not a valid integer" in said  # the latter by an older typer
    said = usage_error(capsys, "explain", *named, "--tokens", "3", "--hit", "few")
    assert "'--hit'" in said and ("should be a number" in said or "is not a valid float" in said)


@pytest.mark.parametrize("command", ["explain --tokens 300", "calibrate traces/x --out x"])
def test_where_a_cost_model_is_missing_those_that_ship_are_named(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    said = usage_error(capsys, *command.split())
    assert "Missing option '--cost-model'. Models that ship:" in said and "cpu-llama-native" in said


def test_a_shell_can_be_given_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert run("--show-completion", "bash") == 0
    assert "complete" in (shown := capsys.readouterr().out) and "kvpolicy" in shown


def without_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter where vllm, and torch and blake3, which come with it, cannot be imported."""
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'integrations')]!r}\n"
        "sys.modules['vllm'] = sys.modules['blake3'] = None\n"
        # Not None for torch: SciPy looks for its classes in what sys.modules holds.
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        f"from kvpolicy.cli import catalog, main\nmain({list(arguments)!r})"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_demo_without_an_engine_needs_no_vllm_and_writes_its_page(tmp_path: Path) -> None:
    done = without_vllm("demo", "--offline", "--quick", "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert "headline, fixed beforehand:" in done.stdout
    found = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert found["kind"] == "offline" and len(found["headline"]) == 2
    pytest.importorskip("matplotlib")
    page = (tmp_path / "demo" / "demo.html").read_text()
    assert "Where it pays" in page and "simulated: x 0." in page and "How it was simulated" in page
    assert "measured: x" not in page and "How it was measured" not in page


def test_a_page_that_cannot_be_drawn_is_told_and_an_earlier_one_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "demo.html").write_text("of an earlier demo")
    (tmp_path / "demo.json").write_text("{}")
    monkeypatch.setattr(kvpolicy, "offline_demo", Called("offline_demo"), raising=False)
    monkeypatch.setattr(measure, "find_spec", lambda _: None)
    assert run("demo", "--offline", "--out", str(tmp_path)) == 0
    assert "demo.html is not written, which takes: pip install 'kvpolicy[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "demo.html").exists()


@pytest.mark.parametrize("command", ["check m", "profile --out x", "demo --out x", "serve m --policy always-swap"])
def test_without_vllm_what_needs_an_engine_says_what_to_install(command: str) -> None:
    done = without_vllm(*command.split())
    assert done.returncode == 2
    assert "vllm is not installed in this environment: `pip install 'kvpolicy[vllm]'" in done.stderr
    assert "without an engine: demo --offline (offline_demo in Python), explain, evaluate and sim" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_vllm_flags_are_written() -> None:
    done = without_vllm("config", "--policy", "always-swap")
    assert done.returncode == 0 and "policy: always-swap" in done.stdout, done.stderr


@pytest.mark.skipif(not TRACES, reason="no trace ships yet")
def test_without_vllm_train_and_evaluate_work(tmp_path: Path) -> None:
    trained = without_vllm("train", str(TRACES[0]), "--out", str(tmp_path / "m"), "--family", "linear", "--force")
    assert trained.returncode == 0, trained.stderr
    priced = without_vllm("evaluate", "--trace", str(TRACES[0]), "--policy", f"cheapest:{tmp_path / 'm'}")
    # The model has seen this trace; where too few states are left, that is what is said.
    assert priced.returncode in (0, 2), priced.stderr
    assert "Traceback" not in priced.stderr


def test_a_models_warning_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_: Any) -> Report:
        warnings.warn("cost model m was measured elsewhere", ModelWarning, stacklevel=2)
        return Report()

    monkeypatch.setattr(kvpolicy, "evaluate", evaluate, raising=False)
    assert run("evaluate", "--trace", "a", "--policy", "p") == 0
    assert capsys.readouterr().err == "kvpolicy: warning: cost model m was measured elsewhere\n"


def test_other_warnings_are_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(*_: Any) -> Report:
        warnings.warn("something else", UserWarning, stacklevel=2)
        return Report()

    monkeypatch.setattr(kvpolicy, "evaluate", evaluate, raising=False)
    with pytest.raises(UserWarning, match="something else"):
        main(["evaluate", "--trace", "a", "--policy", "p"])


def test_a_negative_seed_is_a_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = refusal(capsys, "evaluate", "--trace", "a", "--policy", "always-swap", "--seed", "-1")
    assert result == "kvpolicy: error: --seed is -1, should be 0 or above\n"
