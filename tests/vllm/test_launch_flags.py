"""vLLM's own argument parser takes what `kvpolicy config` and `kvpolicy serve` write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.given_transfer import put_first
from kvpolicy_vllm.plugin.settings import CONNECTOR, CONNECTOR_MODULE, SCHEDULER
from tests.test_documents import OURS, not_ours

pytestmark = pytest.mark.scheduler

PARSE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
found = []
for flags in json.loads(sys.argv[1]):
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    transfer = arguments.kv_transfer_config
    found.append({
        "model": arguments.model,
        "seed": arguments.seed,
        "scheduler": arguments.scheduler_cls,
        "connector": transfer.kv_connector,
        "module": transfer.kv_connector_module_path,
        "role": transfer.kv_role,
        "failures": transfer.kv_load_failure_policy,
        "extra": transfer.kv_connector_extra_config,
    })
print(json.dumps(found))
"""

FLAGS = """
import json
from vllm import __version_tuple__
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
flags = ["--config", *(flag for action in parser._actions for flag in action.option_strings)]
print(json.dumps([__version_tuple__[:2], flags]))
"""

READ_LIST = """
import json, sys
from types import SimpleNamespace
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**json.loads(sys.argv[1])))
found = [given.kv_transfer_config for _, given in MultiConnector._get_connector_classes_and_configs(config)]
print(json.dumps([[one.kv_connector, one.engine_id] for one in found]))
"""


def parsed(*each: list[str]) -> list[dict[str, Any]]:
    """What vLLM understands, in a process of its own: whatever imports vLLM inherits its settings."""
    values: list[dict[str, Any]] = printed(PARSE, each)
    return values


def printed(code: str, argument: Any = None) -> Any:
    done = subprocess.run([sys.executable, "-c", code, json.dumps(argument)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def flags_of(command: list[str]) -> list[str]:
    """What follows the program; `vllm serve` takes the model without a flag."""
    if "serve" in command:
        return ["--model", *command[command.index("serve") + 1 :]]
    return command[command.index("--model") :]


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_vllms_own_commands_start(command: str) -> None:
    """They ask for a distribution named vllm, which the CPU build alone is not."""
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", command, "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"vllm {command}" in done.stdout


def test_vllm_understands_the_flags_and_the_yaml(tmp_path: Path) -> None:
    settings = ServerSettings("random:0.5", True, 0.5, trace=tmp_path / "trace", seed=7, link=SimulatedLink(2e9))
    extra = launch.options(settings)
    command = launch.serve_command("some/llm", extra, ["--seed", "3"])
    file = tmp_path / "kvpolicy.yaml"
    file.write_text(launch.config_yaml(extra))
    by_flags, by_file = parsed(flags_of(command), ["--model", "some/llm", "--seed", "3", "--config", str(file)])
    assert by_flags == by_file
    assert by_flags == {
        "model": "some/llm",
        "seed": 3,
        "scheduler": SCHEDULER,
        "connector": CONNECTOR,
        "module": CONNECTOR_MODULE,
        "role": "kv_producer",
        "failures": "recompute",
        "extra": extra,
    }


@pytest.mark.parametrize("engine_id", [{}, {"engine_id": "one"}], ids=["no-id", "id"])
def test_vllm_reads_the_list_with_a_connector_that_is_given(engine_id: dict[str, str]) -> None:
    """Each with the engine id that was given for the single one."""
    given = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", **engine_id}
    names, ids = zip(*printed(READ_LIST, put_first({"policy": "always-swap"}, given)), strict=True)
    assert names == (CONNECTOR, "DecodeBenchConnector")
    assert len(set(ids)) == 1 and ids[0] == engine_id.get("engine_id", ids[0])


def test_the_flags_that_documents_show_beside_ours_are_vllms() -> None:
    version, theirs = printed(FLAGS)
    if tuple(version) < (0, 32):
        pytest.skip("documents show flags of vLLM 0.32")
    others = [(page, " ".join(one.words), not_ours(one) - set(theirs)) for page, one in OURS]
    assert len(theirs) > 100 and [one for one in others if one[2]] == []
