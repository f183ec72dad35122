"""The arms of a bench over HTTP: how they are named, and what starts them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.bench_settings import BenchTarget
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, read
from kvpolicy.request_marks import HintLimits
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import live_arms
from kvpolicy_vllm.bench.control_arm import Switch
from kvpolicy_vllm.bench.live_arms import arms_of, dtype_of, sharing_memory
from tests.snippets import commands


@pytest.mark.parametrize(
    ("arms", "flags", "problem"),
    [
        (("a=1",), (), "should be NAME or NAME=JSON"),
        (("a={",), (), "should be NAME or NAME=JSON"),
        (("a/b",), (), "a name of letters, digits"),
        (("a", "a"), (), "twice by the same name"),
        (('a={"hints": 1}',), (), '"hints" should be true or false'),
        (("a=[]",), (), "should be NAME or NAME=JSON"),
        (('vllm={"order": "mlfq"}',), (), "takes no settings of it"),
        (('a={"ordre": "mlfq"}',), (), "unknown key 'ordre'"),
        (('a={"plugin": false, "order": "mlfq"}',), (), "a is vLLM without the plugin, and takes no settings"),
        (('a={"plugin": "no"}',), (), '"plugin" should be true or false'),
        (('vllm={"plugin": true}',), (), '"plugin" should be true or false, and false for vllm or'),
        (('orca-max={"plugin": true}',), (), '"plugin" should be true or false'),
        (('a={"vllm_flags": "--seed 3"}',), (), '"vllm_flags" should be a list of texts'),
        (('a={"vllm_flags": ["--seed", 3]}',), (), '"vllm_flags" should be a list of texts'),
        (('a={"vllm_flags": ["seed", "3"]}',), (), '"vllm_flags" should begin with a flag'),
        (('a={"vllm_flags": ["--port", "1"]}',), (), "--port cannot be given"),
        (('a={"vllm_flags": ["--dtype=half"]}',), (), "--dtype should be that of all arms"),
        (('a={"vllm_flags": ["--seed", "3", "--max_model_len", "99"]}',), (), "--max-model-len should be that of all"),
        (('a={"vllm_flags": ["--kv-transfer-config", "{}"]}',), (), "kv-transfer-config"),
        (('a={"vllm_flags": ["--seed", "3", "-q", "fp8"]}',), (), "--quantization should be that of all"),
        (('a={"vllm_flags": ["--revision=new"]}',), (), "--revision should be that of all arms"),
        (('a={"vllm_flags": ["--hf-overrides={}"]}',), (), "--hf-overrides should be that of all arms"),
        (('a={"vllm_flags": ["--tokenizer", "b"]}',), (), "--tokenizer should be that of all arms"),
        ((), ("--port", "1"), "--port cannot be given"),
    ],
)
def test_an_arm_that_cannot_be_read_is_named(
    arms: tuple[str, ...], flags: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    with pytest.raises(InputError, match=problem):
        arms_of(BenchTarget("some/llm", arms, vllm_flags=flags))


def test_arms_of_a_model_are_commands_and_of_a_url_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    settings = ServerSettings("always-swap", host_gib=2.0, order="mlfq", cache="lru")
    arms = arms_of(BenchTarget("llm", ("vllm", "kvpolicy", 'las={"order": "las"}', "hints"), settings, ("--seed", "3")))
    stock, plugin, las, hints = arms
    assert "--kv-transfer-config" not in stock.command and stock.command[-2:] == ("--seed", "3")
    assert '"order": "mlfq"' in plugin.command[-3] and '"host_gib": 2.0' in plugin.command[-3]
    assert '"order": "las"' in las.command[-3] and '"host_gib": 2.0' in las.command[-3]
    assert hints.command == plugin.command and hints.hints and not plugin.hints
    assert [arm.name for arm in arms_of(BenchTarget("llm"))] == ["vllm", "kvpolicy"]
    (alone,) = arms_of(BenchTarget("http://there:8000"))
    assert alone.url == "http://there:8000" and not alone.command
    with pytest.raises(WrongValue, match='"hints", "reserve", and "control" with "policy" or "order" alone'):
        arms_of(BenchTarget("http://there:8000", ('a={"order": "mlfq"}',)))
    with pytest.raises(WrongValue, match='"url" should begin with http:// or https://'):
        arms_of(BenchTarget("http://there:8000", ('a={"url": "there:8001"}',)))
    with pytest.raises(InputError, match="runs already"):
        arms_of(BenchTarget("http://there:8000", vllm_flags=("--seed", "3")))
    for own in ({"cache": "cost"}, {"policy": "never-swap"}, {"hints": HintLimits.parse("none")}, {"host_gib": 2.0}):
        (name,) = own
        settings = ServerSettings(**{"policy": "always-swap"} | own)
        with pytest.raises(WrongValue, match=f"{name} is of servers to be started; http://there:8000 runs already"):
            arms_of(BenchTarget("http://there:8000", settings=settings))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (("--dtype", "float32"), "float32"),
        (("--dtype=half", "--seed", "3"), "float16"),
        (("--dtype", "float", "--dt", "bfloat16"), "bfloat16"),
        (("--config", "FILE"), "float16"),
        ((), ""),
        (("--dtype", "auto"), ""),
        (("--data-parallel-size", "2"), ""),
    ],
)
def test_what_servers_compute_in_is_that_of_their_flags(flags: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dtype: float16\n")
    given = tuple(str(tmp_path / "config.yaml") if flag == "FILE" else flag for flag in flags)
    assert dtype_of(BenchTarget("org/llm", vllm_flags=given)) == dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"text_config": None}, ""),
        ([], ""),
    ],
)
def test_or_that_of_the_model_as_vllm_takes_it(config: Any, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert dtype_of(BenchTarget(str(tmp_path))) == dtype
    assert dtype_of(BenchTarget(str(tmp_path), vllm_flags=("--dtype", "float32"))) == "float32"
    assert dtype_of(BenchTarget("http://there:8000")) == ""


def test_an_arm_has_vllm_flags_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After those of all arms, so that vLLM takes them where both are there; and not of a server that runs."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    more = ["--num-gpu-blocks-override", "3278"]
    texts = ("vllm", f'wide={json.dumps({"plugin": False, "vllm_flags": more})}', 'a={"vllm_flags": ["--seed", "4"]}',
             'vllm-too={"plugin": false}')  # fmt: skip
    stock, wide, plugin, same = arms_of(BenchTarget("llm", texts, vllm_flags=("--num-gpu-blocks-override", "480")))
    assert wide.command == (*stock.command, *more)
    assert plugin.command[-4:] == ("--num-gpu-blocks-override", "480", "--seed", "4")
    assert "--kv-transfer-config" in plugin.command and same.command == stock.command
    (ranks,) = arms_of(BenchTarget("llm", ('a={"plugin": false, "vllm_flags": ["-tp", "2"]}',)))
    assert ranks.command[-2:] == ("-tp", "2")
    with pytest.raises(InputError, match="--config"):
        arms_of(BenchTarget("llm", ('a={"vllm_flags": ["--config", "some.yaml"]}',)))
    for given in ('{"vllm_flags": ["--seed", "4"]}', '{"plugin": false}'):
        with pytest.raises(WrongValue, match="of a server that runs, JSON has"):
            arms_of(BenchTarget("http://there:8000", (f"a={given}",)))


def test_an_arm_whose_server_heeds_no_hint_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be one without hints, by another name. Stock vLLM, or a server that runs, may be sent what others are
    sent."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    for silent in ("hints", 'a={"hints": true, "order": "mlfq"}'):
        with pytest.raises(WrongValue, match="sends hints, of which nothing comes without a cache: give it --cache"):
            arms_of(BenchTarget("llm", (silent,)))
    for heeding in ('a={"hints": true, "cache": "lru"}', 'a={"hints": true, "order": "hints/mlfq"}'):
        assert arms_of(BenchTarget("llm", (heeding, 'vllm={"hints": true}')))[0].hints
    assert arms_of(BenchTarget("http://there:8000", ("hints",)))[0].hints
    refusing = read(ServerSettings, {"policy": "always-swap", "cache": "lru", "hints": "none"}, "flags")
    with pytest.raises(WrongValue, match="asks to keep windows, which --hints none refuses"):
        arms_of(BenchTarget("llm", ("hints",), settings=refusing))


def test_several_servers_on_a_cpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody said how: neither of a single one, nor on a GPU."""
    monkeypatch.setattr(launch, "require", lambda name: None)
    monkeypatch.delenv(live_arms.SHARE_VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    build = {"vllm": "0.32.0+cpu"}
    monkeypatch.setattr(launch, "version", build.__getitem__)
    share = "--gpu-memory-utilization"
    settings = ServerSettings("always-swap", cache="lru")
    two = sharing_memory(BenchTarget("llm", ("vllm", "kvpolicy", "hints"), settings, ("--seed", "3")))
    assert two.vllm_flags == ("--seed", "3", share, "0.3"), "hints are of the same server as kvpolicy"
    assert all(arm.command[-2:] == (share, "0.3") for arm in arms_of(two))
    three = BenchTarget("llm", ("vllm", "a", 'b={"order": "las"}'))
    assert sharing_memory(three).vllm_flags == (share, "0.2")
    (tmp_path / "config.yaml").write_text("gpu_memory_utilization: 0.4\n")
    for given in (("--gpu-memory-utilization=0.4",), ("--gpu_memory_utilization", "0.4"), ("--kv-cache-memory-bytes",
                  "4G"), ("--config", str(tmp_path / "config.yaml"))):  # fmt: skip
        at = replace(three, vllm_flags=given)
        assert sharing_memory(at) is at
    larger = ("vllm", 'a={"vllm_flags": ["--kv-cache-memory-bytes", "4G"]}')
    assert len(arms_of(BenchTarget("llm", larger, vllm_flags=(share, "0.2")))) == 2
    with pytest.raises(WrongValue, match="give all arms a share of the memory, too, as --gpu-memory-util"):
        arms_of(BenchTarget("llm", larger))
    for alone in (BenchTarget("llm", ("vllm",)), BenchTarget("http://there:8000")):
        assert sharing_memory(alone) is alone
    build["vllm"] = "0.32.0"
    assert sharing_memory(three) is three
    build["vllm"] = "0.32.0+cpu"
    monkeypatch.setenv(live_arms.SHARE_VARIABLE, "4")
    assert sharing_memory(three) is three


def test_a_folder_for_files_that_others_can_change_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    def arms(folder: Path | str) -> None:
        arms_of(BenchTarget("llm", ("vllm", f'files={{"cache": "lru", "cache_files": "{folder}"}}')))

    with pytest.raises(WrongValue, match=r"cache_files cannot be used: .*mode 777\); chmod it to 700"):
        arms(tmp_path / "open")
    with pytest.raises(WrongValue, match=r"cache_files cannot be used: .*No such file.*give another folder"):
        arms("/proc/kv")
    arms(tmp_path / "a" / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["open"], "nothing is left of what had to be made"


def test_an_arm_switches_a_server_that_runs_to_a_policy_or_an_order() -> None:
    there = "http://there:8000"
    text = 'urgent={"control": "/run/control", "policy": "threshold:100", "order": "urgent"}'
    plain, urgent = arms_of(BenchTarget(there, ("plain", text)))
    assert plain.switch is None and "control" not in plain.to_dict()
    assert urgent.switch == Switch("/run/control", "threshold:100", "urgent") and urgent.url == there
    switched = {"control": "/run/control", "policy": "threshold:100", "order": "urgent"}
    assert switched.items() <= urgent.to_dict().items()
    for wrong in ('{"control": "/run/control"}', '{"control": 1, "order": "las"}', '{"control": "f", "order": ""}'):
        with pytest.raises(WrongValue, match='beside "control", a file, should be "policy" or "order", as texts'):
            arms_of(BenchTarget(there, (f"a={wrong}",)))
    with pytest.raises(InputError, match=r"(?s)arm a=.*did you mean mlfq"):
        arms_of(BenchTarget(there, ('a={"control": "f", "order": "mlqf"}',)))


def test_the_arms_that_the_page_shows_are_read() -> None:
    """Of servers that run; those of a model need the command of an engine."""
    shown = [one.words for one in commands("docs/bench.md") if one.words[1] == "bench" and "http" in one.words[3]]
    arms = [arms_of(BenchTarget(words[3], _arms_in(words))) for words in shown]
    assert {arm.switch.order for some in arms for arm in some if arm.switch} == {"urgent"}
    assert {arm.url for some in arms for arm in some} == {"http://localhost:8000", "http://localhost:8001"}


def _arms_in(words: tuple[str, ...]) -> list[str]:
    return [value for flag, value in pairwise(words) if flag == "--arm"]


def test_an_arm_that_reserves_is_served_by_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    stock, orca, own = arms_of(BenchTarget("llm", ("vllm", "orca-max", 'mine={"reserve": "pow2"}')))
    assert orca.command == own.command == stock.command, "one server for all three"
    assert [arm.reserve for arm in (stock, orca, own)] == ["", "max", "pow2"]
    assert "reserve" not in stock.to_dict() and orca.to_dict()["reserve"] == "max"
    (there,) = arms_of(BenchTarget("http://there:8000", ("orca-oracle",)))
    assert (there.url, there.reserve) == ("http://there:8000", "oracle")
    with pytest.raises(WrongValue, match='"reserve" should be one of max, pow2, oracle'):
        arms_of(BenchTarget("llm", ('a={"reserve": "all"}',)))
    with pytest.raises(WrongValue, match=r"orca-max is vLLM without the plugin, and takes no settings of it"):
        arms_of(BenchTarget("llm", ('orca-max={"order": "las"}',)))
