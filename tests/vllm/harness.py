"""Starting engines for tests, each in its own process, and comparing what they say."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.alternating import ALTERNATING
from tests.vllm.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800.0
WARM: dict[tuple[str, str | None], Warm] = {}
"""By module and the vLLM it imports, in the order of their last use."""
MAX_WARM = 2
"""Each takes some 600 MB."""
TIE_GAP = 1e-4
"""A first difference where the reference's two best log-probabilities are closer than this is a tie."""
TIES_PER_TOKEN = 1 / 50_000
HOST_GIB = 0.25
TORCHVISION = "KVPOLICY_TORCHVISION"
"""Names a folder that torchvision was installed to without its dependencies."""
BESIDE = ROOT / "tests" / "vllm" / "torchvision_beside"


def environment(workers: int = 1, multiprocess: bool = False) -> dict[str, str]:
    """What an engine needs on a machine without an accelerator: bound cores, no network, plugins on."""
    paths = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    cores = [min(os.sched_getaffinity(0))] if workers == 1 else range(workers)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        # Where the engine is in the process itself vLLM 0.32 does not read its own binding.
        "OMP_NUM_THREADS": "1",
        # No set of names is in another order at the next run.
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class EngineFailed(AssertionError):
    """The engine's process ended badly; carries the end of what it printed."""


def run(
    job: dict[str, Any], folder: Path, *, workers: int = 1, multiprocess: bool = False, torchvision: bool = False
) -> dict[str, Any]:
    """Run one job in a new process and return its result; ``torchvision``: which can import it. Raises
    :class:`EngineFailed` with the child's last lines."""
    variables = environment(workers, multiprocess)
    if torchvision:
        variables["PYTHONPATH"] = os.pathsep.join([str(BESIDE), os.environ[TORCHVISION], variables["PYTHONPATH"]])
    # Engines of several processes start them themselves, and choose how.
    alone = workers == 1 and not multiprocess and not torchvision
    return run_module("tests.vllm.engine_process", job, folder, variables, warm=alone)


def run_module(
    module: str, job: dict[str, Any], folder: Path, environment: dict[str, str], *, warm: bool = True
) -> dict[str, Any]:
    """What ``python -m MODULE JOB RESULT`` comes to; ``warm``: in a process that has its imports behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("job-*.json")))
    job_path, result_path, output = (folder / f"{name}-{number}.json" for name in ("job", "result", "output"))
    job_path.write_text(json.dumps(job))
    arguments = [str(job_path), str(result_path)]
    if warm:
        status = _warm(module, environment).run(arguments, environment, output, TIMEOUT_S)
    else:
        with output.open("w") as sink:
            status = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                env=environment, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
            ).returncode  # fmt: skip
    printed = output.read_text()
    if status or not result_path.exists():
        raise EngineFailed(f"{module} ended with {status}:\n{printed[-6000:]}")
    return json.loads(result_path.read_text()) | {"output": printed}


def _warm(module: str, environment: dict[str, str]) -> Warm:
    """The one that has this module and vLLM imported; the one that was used longest ago ends for a new one."""
    key = module, environment.get("KVPOLICY_VLLM_SOURCE")
    found = WARM.pop(key, None) or Warm(module)
    if len(WARM) == MAX_WARM:
        WARM.pop(next(iter(WARM))).end()
    WARM[key] = found
    return found


def plugin(policy: str, **extra: Any) -> dict[str, Any]:
    """The plugin's engine arguments."""
    if "copier" in extra:
        extra = {"allow_python_policies": True} | extra
    return {
        "scheduler_cls": "kvpolicy_vllm.AdaptiveScheduler",
        "kv_transfer_config": {
            "kv_connector": "KVPolicyConnector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "kvpolicy_vllm.connector",
            "kv_connector_extra_config": {"policy": policy, "host_gib": HOST_GIB, **extra},
        },
    }


def alternating(**extra: Any) -> dict[str, Any]:
    """As :func:`plugin`, with the policy that takes both options in turn."""
    return plugin(ALTERNATING, allow_python_policies=True, **extra)


def prompts(
    count: int, tokens: tuple[int, int], outputs: tuple[int, int], seed: int, shared: int = 0, vocabulary: int = 2000
) -> list[dict[str, Any]]:
    """Random requests; the first ``shared`` tokens are the same in all of them."""
    rng = random.Random(seed)
    head = [rng.randrange(10, vocabulary) for _ in range(shared)]
    return [
        {
            "prompt": head + [rng.randrange(10, vocabulary) for _ in range(rng.randint(*tokens))],
            "max_tokens": rng.randint(*outputs),
        }
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two runs of the same requests differ."""

    tokens: int
    ties: int
    wrong: tuple[str, ...]


def compare(reference: dict[str, Any], other: dict[str, Any], leave_out: Sequence[str] = ()) -> Comparison:
    """Greedy tokens of two runs. After a tie the two texts differ rightly, so only the first difference counts."""
    ties, wrong, tokens = 0, [], 0
    for request, expected in reference["tokens"].items():
        if request in leave_out:
            continue
        got = other["tokens"].get(request)
        tokens += len(expected)
        if got == expected:
            continue
        if got is None or len(got) != len(expected):
            wrong.append(f"{request}: {len(expected)} tokens expected, {len(got or [])} came")
            continue
        at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        gap = reference["gaps"][request][at]
        if gap < TIE_GAP:
            ties += 1
        else:
            wrong.append(
                f"{request}: token {at} is {got[at]}, should be {expected[at]} (log-probability gap {gap:.2g})"
            )
    return Comparison(tokens, ties, tuple(wrong))


def assert_exact(reference: dict[str, Any], other: dict[str, Any], leave_out: Sequence[str] = ()) -> None:
    found = compare(reference, other, leave_out)
    assert not found.wrong, "\n".join(found.wrong[:10])
    assert found.ties <= max(1, found.tokens * TIES_PER_TOKEN), f"{found.ties} ties in {found.tokens} tokens"


def assert_nothing_left(result: dict[str, Any]) -> None:
    """No host slot in use, the block pool full again, nobody open."""
    assert result["free_blocks"] == result["device_blocks"] - 1, "device blocks leaked"  # one is vLLM's null block
    stats = result["stats"]
    assert stats["host_slots_used"] == 0, f"{stats['host_slots_used']} host slots leaked"
    assert stats["open_preemptions"] == 0


def total(stats: dict[str, float], name: str, **labels: str) -> float:
    """Sum of a counter over the labels not given."""
    wanted = {f"{key}={value}" for key, value in labels.items()}
    return sum(value for key, value in stats.items() if key.split("|")[0] == name and wanted <= set(key.split("|")[1:]))
