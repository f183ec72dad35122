"""``--enable-return-routed-experts`` beside the plugin: refused by name, or every routed expert reaches its client.

vLLM below 0.31 refuses the flag beside any KV connector. 0.31 and 0.32 end the engine where a request resumes inside a
block, and also at a block's end where the store has meanwhile dropped what was captured before; 0.33 loads up to a
block's end or not at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm import harness
from tests.vllm.setups import Setup
from tests.vllm.test_soak import PRESSED
from tests.vllm.versions import INSTALLED, source_or_skip

pytestmark = pytest.mark.scheduler

FLAG = "--enable-return-routed-experts"


POLICIES = ("always-recompute", "always-swap")
others = [pytest.param(version, marks=pytest.mark.slow) for version in ("0.31.0", "0.33.0")]
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[INSTALLED, *others])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By policy, in one process for each version."""
    source, folder = source_or_skip(request.param), tmp_path_factory.mktemp("experts")
    fixed = PRESSED | {"spare_blocks": 10, "ranks": 1, "host_gib": 0.25, "max_running": 16}
    modes = [(seed, asynchronous) for seed in (1, 2, 3) for asynchronous in (False, True)]
    setups = [
        Setup.draw(seed, **fixed | {"policy": policy, "asynchronous": asynchronous})
        for policy in POLICIES
        for seed, asynchronous in modes
    ]
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"setups": [repr(setup) for setup in setups]}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.experts", str(job), str(result)],
        env=harness.environment() | {"KVPOLICY_VLLM_SOURCE": source},
        cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    part = json.loads(result.read_text())["runs"]
    return {policy: part[i * len(modes) : (i + 1) * len(modes)] for i, policy in enumerate(POLICIES)}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_routed_expert_reaches_its_client_or_the_flag_is_refused(
    policy: str, runs: Runs, request: pytest.FixtureRequest
) -> None:
    is_refused = any(result["refused"] for result in runs[policy])
    request.applymarker(pytest.mark.feature("routed experts returned", refused=is_refused))
    for result in runs[policy]:
        if result["refused"]:
            assert FLAG in result["refused"] and "kvpolicy" in result["refused"]
            continue
        assert result["raised"] == ""
        assert (result["wrong"], result["wrong_rows"], result["unfinished"]) == ([], [], 0)
        assert harness.total(result["stats"], "preemptions") > 5


def test_what_vllm_does_not_load_is_not_recorded_as_a_swap(runs: Runs) -> None:
    for result in runs["always-swap"]:
        assert result["refused"] or not result["not_swapped"]
