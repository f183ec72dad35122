"""vLLM's own argument parser takes what `kvpolicy config` and `kvpolicy serve` write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin.settings import CONNECTOR, CONNECTOR_MODULE, SCHEDULER

PARSE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
transfer = arguments.kv_transfer_config
print(json.dumps({
    "model": arguments.model,
    "seed": arguments.seed,
    "scheduler": arguments.scheduler_cls,
    "connector": transfer.kv_connector,
    "module": transfer.kv_connector_module_path,
    "role": transfer.kv_role,
    "failures": transfer.kv_load_failure_policy,
    "extra": transfer.kv_connector_extra_config,
}))
"""


def parsed(*flags: str) -> dict[str, Any]:
    """What vLLM understands, in a process of its own: whatever imports vLLM inherits its settings."""
    done = subprocess.run([sys.executable, "-c", PARSE, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_vllm_understands_the_flags_and_the_yaml(tmp_path: Path) -> None:
    settings = ServerSettings("random:0.5", True, 0.5, trace=tmp_path / "trace", seed=7, link=SimulatedLink(2e9))
    extra = launch.options(settings)
    command = launch.serve_command("some/llm", extra, ["--seed", "3"])
    by_flags = parsed(*command[command.index("--model") :])
    file = tmp_path / "kvpolicy.yaml"
    file.write_text(launch.config_yaml(extra))
    by_file = parsed("--model", "some/llm", "--seed", "3", "--config", str(file))
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
