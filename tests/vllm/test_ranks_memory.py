"""The ranks of an engine judge its host pool by one number, whatever the others have taken by then, and refuse together
to be on several machines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.vllm import harness

pytestmark = pytest.mark.scheduler

RANK = """
import json, sys, time
from types import SimpleNamespace
from unittest import mock
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from kvpolicy_vllm.plugin import connector
from kvpolicy_vllm.plugin.settings import Settings

rank, address, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
init_distributed_environment(2, rank, address, rank, backend="gloo")
with set_current_vllm_config(VllmConfig()):
    initialize_model_parallel(2)
for available_gib in cases:
    if rank == 0:
        time.sleep(1.0)  # the other one would be done long before, if it did not wait
    with mock.patch.object(connector, "available_memory_bytes", lambda: int(available_gib[rank] * 2**30)):
        found = connector.available_to_all_ranks()
    try:
        Settings(policy="always-swap", host_gib=8.0).refuse_too_much_memory(found)
        print("told: accepted")
    except ValueError as error:
        print("told:", error)
for machines in json.loads(sys.argv[4]):
    with mock.patch.object(connector, "boot_id", lambda: machines[rank]):
        try:
            connector.refuse_several_machines(SimpleNamespace(model_config=None))
            print("told: accepted")
        except ValueError as error:
            print("told:", error)
"""


def refusals_of(
    folder: Path, memory: Sequence[tuple[float, float]], machines: Sequence[tuple[str, str]]
) -> list[tuple[str, ...]]:
    """What two ranks that find so much memory available, GiB, say to a pool of 8 GiB; then what they say to being on
    these machines."""
    address = (folder / "ranks").as_uri()  # a port that is free now may be taken by then
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), address, json.dumps(memory), json.dumps(machines)],
            env=harness.environment(2) | {"GLOO_SOCKET_IFNAME": "lo"},
            cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    results = [process.communicate(timeout=900) for process in started]
    assert not any(process.returncode for process in started), results
    lines = [[line for line in out.splitlines() if line.startswith("told: ")] for out, _ in results]
    return list(zip(*lines, strict=True))


def test_what_an_earlier_rank_has_taken_is_not_held_against_a_later_one(tmp_path: Path) -> None:
    """And both ranks refuse to be on two machines."""
    later_finds_less, too_little, on_one, on_two = refusals_of(
        tmp_path, [(16.0, 12.0), (12.0, 64.0)], [("one", "one"), ("one", "other")]
    )
    assert later_finds_less == on_one == ("told: accepted", "told: accepted")
    assert too_little[0] == too_little[1] and "more than half of the 12.0 GiB" in too_little[0]
    assert on_two[0] == on_two[1] and "does not serve an engine over several nodes" in on_two[0]
