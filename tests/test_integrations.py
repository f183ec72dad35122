"""Engines found by entry point: what is registered is used, what is not is a clear error."""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from kvpolicy import integrations
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.integrations import EngineMissing, Integration, Launcher
from kvpolicy.settings import Measurement, ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.integration import VllmIntegration
from tests.snippets import ROOT, shown

ENGINE = """
class Silent:
    launcher = None

    def profile(self, out, how):
        return (out, how)

    def simulator(self):
        return "simulated"
"""


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that registers an integration for an engine of the same name."""
    (tmp_path / "silent_engine.py").write_text(ENGINE)
    folder = tmp_path / "silent_engine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: silent-engine\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{integrations.GROUP}]\nsilent_engine = silent_engine:Silent\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "silent_engine"


def test_a_registered_engine_is_found(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert integrations.simulator(silent) == "simulated"
    assert integrations.launcher(silent) is None
    monkeypatch.setattr(integrations, "engine", lambda: integrations.integration(silent))
    assert integrations.profile("out", Measurement(link="2e9")) == (Path("out"), Measurement(link=SimulatedLink(2e9)))


def test_what_nobody_registered_is_named_with_what_is(silent: str) -> None:
    with pytest.raises(integrations.EngineMissing, match=r"'nothing' \(registered: .*silent_engine"):
        integrations.engine("nothing")


def test_an_engine_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "find_spec", lambda name: None)
    with pytest.raises(integrations.EngineMissing, match=r"vllm is not installed .* without an engine: demo --offline"):
        integrations.demo("out")
    with pytest.raises(integrations.EngineMissing, match=r"vllm is not installed .*: `pip install 'kvpolicy\[vllm\]'"):
        integrations.engine()


def test_flags_are_written_where_the_engine_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "find_spec", lambda name: None)
    assert integrations.launcher().options(ServerSettings("always-swap")) == {"policy": "always-swap"}


INTEGRATIONS: tuple[type[Integration], ...] = (VllmIntegration, shown("MyEngine"))
"""Each is held to the protocol; add one's own."""
SETTINGS = ServerSettings(
    "random:0.25", shadow=True, host_gib=0.5, trace=Path("/a/trace"), seed=7, link=SimulatedLink(2e9, 0.001)
)
WRITTEN = ("random:0.25", "shadow", "0.5", "/a/trace", "7", "2e9,0.001")
"""What of these settings has to reach the server."""


def methods(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_") and callable(getattr(protocol, name))]


@pytest.fixture(params=INTEGRATIONS, ids=lambda one: str(one.__name__))
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Integration:
    """An integration as it is made when it is found, on a machine that has its engine."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    integration: Integration = request.param()
    return integration


def takes_the_same(protocol: type, instance: object, name: str) -> None:
    wanted, given = getattr(protocol, name), getattr(instance, name)
    parameters = [parameter for parameter in inspect.signature(wanted).parameters if parameter != "self"]
    signature = inspect.signature(given)
    signature.bind(*parameters)
    signature.bind(**dict.fromkeys(parameters))


class TestEveryIntegration:
    """What kvpolicy relies on in an engine's integration before an engine runs."""

    @pytest.mark.parametrize("name", methods(Integration))
    def test_its_methods_take_what_the_protocol_says(self, made: Integration, name: str) -> None:
        takes_the_same(Integration, made, name)

    @pytest.mark.parametrize("name", methods(Launcher))
    def test_those_of_its_launcher_do(self, made: Integration, name: str) -> None:
        takes_the_same(Launcher, made.launcher, name)

    def test_every_setting_reaches_the_command_and_the_yaml(self, made: Integration) -> None:
        launcher = made.launcher
        extra = launcher.options(SETTINGS)
        assert json.loads(json.dumps(extra)) == extra, "options are plain values"
        flags = ["--port", "8001", "--seed=3"]
        command = launcher.serve_command("some/llm", extra, flags)
        assert "some/llm" in command and command[-len(flags) :] == flags
        config = launcher.config_yaml(extra)
        assert isinstance(yaml.safe_load(config), dict)
        for value in WRITTEN:
            assert value in " ".join(command) and value in config

    def test_defaults_are_left_to_the_engine(self, made: Integration) -> None:
        assert made.launcher.options(ServerSettings("always-swap")) == {"policy": "always-swap"}

    def test_a_shell_reads_the_line_as_the_command(self, made: Integration) -> None:
        command = ["server", "a b", "it's", '{"a": 1}', "$HOME"]
        assert shlex.split(made.launcher.shell_line(command)) == command


def test_what_the_shown_one_cannot_do_it_says(tmp_path: Path) -> None:
    """The calls that vLLM's integration answers are those of tests/vllm."""
    made = shown("MyEngine")()
    for call in (made.simulator, lambda: made.profile(tmp_path, Measurement()), lambda: made.demo(tmp_path, True, 0)):
        with pytest.raises(EngineMissing, match=r"my_engine .* yet"):
            call()


@pytest.mark.parametrize("name", methods(Integration))
def test_an_integration_with_other_arguments_is_found_out(name: str) -> None:
    class Other:
        def simulator(self, clock: str) -> None: ...
        def check(self, llm: str) -> None: ...
        def profile(self, out: Path) -> None: ...
        def demo(self, out: Path, quickly: bool, seed: int) -> None: ...
        def characterize(self, figures: Sequence[str], out: Path, how: Measurement, more: int) -> None: ...
        def bench(self, out: Path, load: str) -> None: ...

    with pytest.raises(TypeError):
        takes_the_same(Integration, Other(), name)


def test_writing_flags_imports_no_engine() -> None:
    code = (
        "import sys; from kvpolicy import ServerSettings; from kvpolicy.integrations import serve_command\n"
        "serve_command('some/llm', ServerSettings('always-swap')); print(*({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""
