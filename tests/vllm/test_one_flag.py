"""`KVPOLICY=...` alone makes the engine configuration that the flags make, and says what is wrong where it is made."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("vllm")

from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

import kvpolicy_vllm.plugin
from kvpolicy import policy as policies
from kvpolicy.errors import InputError
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin import one_flag
from kvpolicy_vllm.plugin.one_flag import own_refusal
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config
from tests.vllm import harness

pytestmark = pytest.mark.scheduler

SHIPPED = Path(__file__).parents[2] / "models" / "cpu-llama-native"


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was started with the variable; vLLM's own method is back afterwards."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setattr(EngineArgs, "from_cli_args", EngineArgs.__dict__["from_cli_args"])
    monkeypatch.setattr(one_flag.PROGRAM, "parsed_flags", False)
    monkeypatch.setenv("KVPOLICY", "always-swap")
    kvpolicy_vllm.plugin.register()
    kvpolicy_vllm.plugin.register()


def arguments(model: str, kind: Any = AsyncEngineArgs, **more: Any) -> Any:
    return kind(model=model, dtype="float32", skip_tokenizer_init=True, **more)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_it_is_what_the_flags_are(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    folder = tmp_path / "trace"
    monkeypatch.setenv("KVPOLICY", f"always-swap,order=urgent,host_gib=0.25,trace={folder}")
    made = arguments(model, kind)
    config = made.create_engine_config()
    extra = launch.options(ServerSettings("always-swap", host_gib=0.25, trace=folder, order="urgent"))
    wanted = transfer_config(extra)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert {name: getattr(config.kv_transfer_config, name) for name in wanted} == wanted
    assert config.shutdown_timeout == launch.SHUTDOWN_S, "time to write the trace"
    assert made.scheduler_cls is None and made.kv_transfer_config is None, "the arguments are as they were"
    again = made.create_engine_config()
    assert again.kv_transfer_config.kv_connector_extra_config == extra, "API processes make it again"


@pytest.mark.parametrize("value", ["", " ", "off"])
def test_without_it_nothing_is_changed(model: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVPOLICY", value)
    config = arguments(model).create_engine_config()
    assert config.kv_transfer_config is None and config.scheduler_config.scheduler_cls is None


WRONG = [
    ("always-swop", "KVPOLICY: policy 'always-swop' is no policy (did you mean always-swap?)"),
    (
        "cheapest:no/such/model",
        "KVPOLICY: policy is 'cheapest:no/such/model', which cannot be loaded: no/such/model: no such folder",
    ),
    ("always-swap,order=fastest", "KVPOLICY: order 'fastest' is no order"),
    ("always-swap,host_gib=much", "KVPOLICY: host_gib is 'much', should be a number"),
    ("always-swap,cache=sometimes", "KVPOLICY: cache "),
    ("cheapest:analytic,online=on", "KVPOLICY: policy 'cheapest:analytic,online=on' learns by step times"),
    ("order=urgent", "KVPOLICY: key 'policy' is missing"),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_a_bad_value_ends_the_start(model: str, monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("KVPOLICY", value)
    with pytest.raises(InputError, match=f"^{re.escape(words)}"):
        arguments(model).create_engine_config()


def from_command_line(*flags: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--dtype", "float32", "--skip-tokenizer-init", *flags]))


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_on_a_command_line_it_ends_as_a_wrong_flag_does(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, words: str
) -> None:
    """Where the flags are parsed: in one line, before anything of the engine starts."""
    monkeypatch.setenv("KVPOLICY", value)
    with pytest.raises(SystemExit) as ended:
        from_command_line("--model", model)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"kvpolicy: error: {words}")


EXCLUDED = [
    ("always-swap,order=urgent", "order urgent: ranks requests itself, --scheduling-policy priority does too: leave"),
    (
        "always-swap,classes=chat:priority=-1",
        "classes is 'chat:priority=-1', which bounds priorities, and --scheduling",
    ),
]


@pytest.mark.parametrize(("value", "words"), EXCLUDED)
def test_what_vllms_own_ranking_excludes_is_refused_where_flags_are_parsed(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, words: str
) -> None:
    """And as early, by the same words, where the plugin is given by flags, as `kvpolicy serve` gives it."""
    monkeypatch.setenv("KVPOLICY", value)
    with pytest.raises(SystemExit) as ended:
        from_command_line("--model", model, "--scheduling-policy", "priority")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and said.startswith(f"kvpolicy: error: {words}")
    with pytest.raises(InputError, match=f"^{re.escape(words)}"):
        arguments(model, scheduling_policy="priority").create_engine_config()
    monkeypatch.setenv("KVPOLICY", "off")
    _, _, setting = value.partition(",")
    key, _, text = setting.partition("=")
    given = harness.plugin("always-swap", **{key: text})
    with pytest.raises(ValidationError) as refused:
        arguments(model, scheduling_policy="priority", **given).create_engine_config()
    assert str(own_refusal(refused.value)).startswith(words)


def test_a_cost_model_of_another_model_is_refused_while_the_configuration_is_made(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line on a command line, before any process of the engine starts; in the words of ``check_fit``."""
    monkeypatch.setenv("KVPOLICY", f"cheapest:{SHIPPED}")
    with pytest.raises(ValidationError) as refused:
        arguments(model).create_engine_config()
    (words, *_) = str(own_refusal(refused.value)).splitlines()
    assert words.startswith("cost model ") and ": geometry." in words
    parsed = from_command_line("--model", model)
    with pytest.raises(SystemExit) as ended:
        parsed.create_engine_config()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said == f"kvpolicy: error: {words}\n"


def damaged(folder: Path, how: str) -> str:
    """A cost model's folder that cannot be loaded, and the file to blame."""
    shutil.copytree(SHIPPED, folder)
    if how == "cut":
        card = folder / "model.json"
        card.write_text(card.read_text()[:999])
    else:
        (folder / "model.json").unlink()
    return str(folder / "model.json" if how == "cut" else folder)


@pytest.mark.parametrize("how", ["cut", "without its card"])
def test_a_damaged_model_is_named_by_its_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    file = damaged(tmp_path / "mine", how)
    monkeypatch.setenv("KVPOLICY", f"cheapest:{tmp_path / 'mine'},order=urgent")
    with pytest.raises(SystemExit):
        from_command_line("--model", model)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and file in said
    assert said.startswith(f"kvpolicy: error: KVPOLICY: policy is 'cheapest:{tmp_path / 'mine'}', which cannot be")


def test_a_command_line_without_fault_gets_the_flags(model: str) -> None:
    made = from_command_line("--model", model)
    config = made.create_engine_config()
    assert isinstance(made, AsyncEngineArgs) and config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.kv_transfer_config.kv_connector_extra_config["policy"] == "always-swap"


@pytest.mark.parametrize("configured", [False, True])
def test_programs_that_make_arguments_of_arguments_get_the_flags(
    model: str, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    """`vllm bench throughput` and others hand all attributes of the arguments to LLM, which makes further ones."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--model", model, "--dtype", "float32", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    made = EngineArgs.from_cli_args(parser.parse_args(flags))
    if configured:
        made.create_engine_config()
    started: list[EngineArgs] = []

    def engine(cls: type, engine_args: EngineArgs, **more: Any) -> None:
        started.append(engine_args)
        raise InterruptedError

    monkeypatch.setattr(LLMEngine, "from_engine_args", classmethod(engine))
    with pytest.raises(InterruptedError):  # where the engine would have been started
        LLM.from_engine_args(made)
    config = started[0].create_engine_config()
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.kv_transfer_config.kv_connector_extra_config["policy"] == "always-swap"


def test_a_model_of_the_engine_is_loaded_by_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "load", lambda *a, **k: pytest.fail("only the engine knows its model and device"))
    monkeypatch.setenv("KVPOLICY", "cheapest:analytic")
    assert from_command_line("--model", model).create_engine_config().kv_transfer_config


def test_only_the_policys_errors_are_put_down_to_it(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the trace becomes absolute, for which the working directory must be there."""
    monkeypatch.setenv("KVPOLICY", "always-swap,trace=mine")

    def gone(self: Path) -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "absolute", gone)
    with pytest.raises(SystemExit):
        from_command_line("--model", model)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No such file" in said and "policy" not in said.replace("kvpolicy: error", "")


def test_the_same_flags_may_be_given_beside_it(model: str) -> None:
    """And configurations are made again, in which the plugin sets the host memory that the settings leave open."""
    transfer = KVTransferConfig(**transfer_config({"policy": "always-swap"}))
    both = arguments(model, scheduler_cls=SCHEDULER, kv_transfer_config=transfer)
    for _ in range(2):
        config = both.create_engine_config()
        assert config.kv_transfer_config.kv_connector_extra_config["policy"] == "always-swap"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scheduler_cls": "somebody.Elses"}, "--scheduler-cls is given as well"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size is given as well"),
        (harness.plugin("always-recompute"), "--kv-transfer-config is given as well"),
    ],
)
def test_flags_that_contradict_it_are_named(model: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        arguments(model, **given).create_engine_config()
