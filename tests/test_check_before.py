"""What is refused before an engine starts: by the check before a server, and of flags of an engine that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import integrations
from kvpolicy.errors import EngineFailed, InputError
from kvpolicy.fields import WrongValue
from kvpolicy.settings import Measurement, ServerSettings
from kvpolicy_vllm import launch
from tests.test_launch import dry_run, run


@dataclass
class Found:
    """What a check says."""

    served: bool | None = True
    words: str = "some/llm: served"
    untested: str = ""

    def text(self) -> str:
        return self.words


class Look:
    """In the check's place: it says ``found``, or fails with it."""

    def __init__(self) -> None:
        self.found: Found | Exception = Found()
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Found:
        self.asked.append(arguments)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture(autouse=True)
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Nothing looks at a model, and no vLLM is needed."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    monkeypatch.setattr(launch, "_distribution", lambda name: False)
    look = Look()
    monkeypatch.setattr(integrations, "check", look)
    return look


class TestTheCheckBefore:
    """What the plugin would refuse after the weights are loaded is refused before the server is started."""

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        commands: list[list[str]] = []
        monkeypatch.setattr("os.execvpe", lambda file, command, environment: commands.append(command))
        monkeypatch.setattr(integrations.subprocess, "Popen", lambda command, env: commands.append(command))
        return commands

    SERVE = ("serve", "some/llm", "--policy", "always-swap", "--port", "8001")
    REFUSED = Found(False, "some/llm: not served\n  no\n  it would be served with --order fcfs")

    def test_what_is_refused_is_not_started(
        self, started: list[list[str]], look: Look, capsys: pytest.CaptureFixture[str]
    ) -> None:
        look.found = self.REFUSED
        assert run(*self.SERVE) == 2
        said = capsys.readouterr().err
        lines = said.splitlines()
        assert lines[:2] == ["kvpolicy: error: some/llm: not served", "  no"], (
            "in lines of their own, as `check` has it"
        )
        assert lines[2] == "  it would be served with --order fcfs" and lines[3].startswith("  --no-check")
        with pytest.raises(integrations.NotServed, match="check=False"):
            kvpolicy.serve("some/llm", "always-swap")
        assert not started
        assert look.asked == [
            ("some/llm", ServerSettings("always-swap"), ["--port", "8001"]), ("some/llm", "always-swap", ())
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "found", [Found(None, "not known: it needs weights"), EngineFailed("the process ended:\nit needs weights")]
    )
    def test_what_is_not_known_is_started_with_a_warning(
        self, started: list[list[str]], look: Look, capsys: pytest.CaptureFixture[str], found: Found | Exception
    ) -> None:
        look.found = found
        assert run(*self.SERVE) == 0
        said = capsys.readouterr().err
        assert said.startswith("kvpolicy: warning: ") and said.endswith("it needs weights\n") and said.count("\n") == 1
        with pytest.warns(UserWarning, match="it needs weights"):
            kvpolicy.serve("some/llm", "always-swap")
        assert len(started) == 2

    def test_what_was_never_tested_is_started_with_a_warning(
        self, started: list[list[str]], look: Look, capsys: pytest.CaptureFixture[str]
    ) -> None:
        look.found = Found(untested="MyConnector was not tested beside it")
        assert run(*self.SERVE) == 0
        assert capsys.readouterr().err == "kvpolicy: warning: MyConnector was not tested beside it\n"
        with pytest.warns(UserWarning, match="MyConnector was not tested"):
            kvpolicy.serve("some/llm", "always-swap")
        assert len(started) == 2

    def test_it_can_be_left_out(self, started: list[list[str]], look: Look) -> None:
        look.found = self.REFUSED
        assert run(*self.SERVE, "--no-check") == 0
        kvpolicy.serve("some/llm", "always-swap", check=False)
        assert len(started) == 2 and not look.asked
        assert "--no-check" not in started[0]

    def test_a_command_that_is_only_shown_is_checked_as_well(
        self, started: list[list[str]], look: Look, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert dry_run(capsys, *self.SERVE[1:])[-2:] == ["--port", "8001"]
        look.found = self.REFUSED
        assert run(*self.SERVE, "--dry-run") == 2
        printed = capsys.readouterr()
        assert not printed.out and "it would be served with --order fcfs" in printed.err
        dry_run(capsys, *self.SERVE[1:], "--no-check")
        assert len(look.asked) == 2 and not started


class TestAnEngineThatIsMeasured:
    """Flags of `kvpolicy profile` and `characterize` after ``--``."""

    @pytest.mark.parametrize(
        ("flag", "reason"),
        [
            ("--scheduler-cls", "kvpolicy sets it itself"),
            ("--kv-transfer-config={}", "kvpolicy sets it itself"),
            ("--num_gpu_blocks_override", "as many blocks as the measured states need"),
            ("--num-gpu-blocks", "as many blocks as the measured states need"),
        ],
    )
    @pytest.mark.parametrize("has_model", [False, True])
    def test_what_kvpolicy_sets_itself_is_refused(self, flag: str, reason: str, has_model: bool) -> None:
        with pytest.raises(InputError, match=f"^{flag.partition('=')[0]} cannot be given of an engine.*{reason}"):
            launch.refuse_measured(["--dtype", "float32", flag, "9"], has_model)

    def test_in_a_config_file_too(self, tmp_path: Path) -> None:
        file = tmp_path / "server.yaml"
        file.write_text("model: some/llm\nport: 8001\nnum-gpu-blocks-override: 9\n")
        with pytest.raises(InputError, match=f"--num-gpu-blocks-override in {file}"):
            launch.refuse_measured(["--config", str(file)], True)

    def test_a_file_names_no_other_model(self, tmp_path: Path) -> None:
        """Beside --llm vLLM ignores it; without, a small model would be measured in its place."""
        file = tmp_path / "server.yaml"
        file.write_text("model: some/llm\nport: 8001\n")
        launch.refuse_measured(["--config", str(file)], True)
        with pytest.raises(InputError, match=r"--model in .*: the model to measure is given by --llm"):
            launch.refuse_measured(["--config", str(file)], False)

    def test_a_study_refuses_more(self) -> None:
        with pytest.raises(InputError, match=r"--block-size cannot be given .*: its own"):
            launch.refuse_measured(["--block-size", "16"], True, {"--block-size": "its own"})
        launch.refuse_measured(["--block-size", "16", "-tp", "2", "--max-num-seqs=8", "--max-num-batched"], True)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [("--dtype float32", "vllm_flags is '--dtype float32', should be a list"), (["-tp", 2], "vllm_flags[1] is 2")],
    )
    def test_flags_are_a_list_of_texts(self, flags: Any, message: str) -> None:
        with pytest.raises(WrongValue) as error:
            Measurement(vllm_flags=flags)
        assert str(error.value).startswith(message)
        assert Measurement(vllm_flags=["-tp", "2"]).vllm_flags == ("-tp", "2")

    def test_minutes_are_above_zero(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert run("profile", "--out", str(tmp_path), "--minutes", "0") == 2
        assert "--minutes is 0.0, should be a number above 0" in capsys.readouterr().err
