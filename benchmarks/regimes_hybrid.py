"""The hybrid regimes of the matrix: gpt-oss-20b, half of whose layers keep a window of 128 tokens.

The built-in simulator has one block table, so vLLM's own scheduler runs here, on a virtual clock, with the KV cache
groups that vLLM makes of such a model. Times are by data sheet and shape, the weights taken as 16-bit; a window counts
as a full one in every chunk. Beside the arms of the other regimes there are vLLM's two flags by which more of a victim
survives: windows stored whole (``--disable-hybrid-kv-cache-manager``, in as many bytes of memory) and
``--prefix-cache-retention-interval None``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from matrix_places import HOST_GIB
from order_places import HOW, Arm
from regimes import Regime

from kvpolicy.cost.analytic import untrained
from kvpolicy.hardware import EngineSpec
from kvpolicy.hardware.sheets import device_sheet
from kvpolicy.order.spec import load as load_order
from kvpolicy.policy import Policy, load_policy
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.settings import GIB
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.hardware.law_times import law_times
from kvpolicy.study.cache import Result, ResultCache, program_digest
from kvpolicy.study.run_cell import numbers
from kvpolicy.study.workers import in_processes
from kvpolicy.workload import Workload

MODEL = "gpt-oss-20b"
GPT_OSS_20B: Mapping[str, Any] = {
    "_name_or_path": MODEL, "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
WHOLE, DENSE = "recompute, windows stored whole", "recompute, retention None"


def installed() -> bool:
    """Whether there is a vLLM whose scheduler can run."""
    return find_spec("vllm") is not None


def arms(regime: Regime) -> list[Arm]:
    """Fewer than elsewhere: a run of vLLM's own scheduler takes longer."""
    stock, order = regime.stock, regime.order
    marked = [replace(stock, watermark=0.05)]
    hows = (WHOLE, DENSE, "threshold:2048", "swap", "learned")
    return [stock, *marked, *(replace(stock, how=how) for how in hows), Arm(order, "learned")]


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    regime: Regime
    arm: Arm
    workload: Workload

    def digest(self) -> str:
        inputs = {"regime": asdict(self.regime), "arm": asdict(self.arm), "workload": self.workload.digest}
        contents = {"program": program_digest("vllm"), "script": Path(__file__).read_text(encoding="utf-8")}
        return hashlib.sha256(json.dumps([inputs, contents], sort_keys=True).encode()).hexdigest()


def run(task: Task) -> Result:
    """Imports vLLM, so that nothing else here needs it."""
    from kvpolicy_vllm.simulator.deployment import block_bytes_of
    from kvpolicy_vllm.simulator.engine import VllmScheduler
    from kvpolicy_vllm.simulator.model_layers import MODELS

    regime, arm = task.regime, task.arm
    hybrid = MODELS[MODEL]
    layers = hybrid
    if arm.how == WHOLE:
        layers = replace(hybrid, hybrid_manager=False)
    elif arm.how == DENSE:
        layers = replace(hybrid, retention=None)
    block_bytes, simulator = block_bytes_of(layers), VllmScheduler(layers=layers)
    blocks = regime.kv_blocks * block_bytes_of(hybrid) // block_bytes
    limits = regime.serving(Arm()).limits(regime.machine)
    spec = EngineSpec(layers.block_size, limits.token_budget, block_bytes=block_bytes)
    model = untrained(ModelShape.from_config(GPT_OSS_20B), device_sheet(regime.machine), engine=spec)
    fixed = "always-recompute" if arm.how in (WHOLE, DENSE) else HOW.get(arm.how, arm.how)
    policy: Policy = Cheapest("learned", model) if arm.how == "learned" else load_policy(fixed)
    server = Server(
        layers.block_size, block_bytes, blocks, int(HOST_GIB * GIB // block_bytes), limits.token_budget,
        limits.max_num_seqs, prefix_caching=regime.caching, asynchronous=limits.asynchronous,
        watermark=arm.watermark, order=load_order(arm.order), rules=simulator.rules,
    )  # fmt: skip
    return numbers(simulator.run(task.workload, policy, server, law_times(model), task.workload.seed).summary)


def run_all(tasks: Sequence[Task], jobs: int | None, cache: Path, fresh: bool = False) -> list[Result]:
    """Finished ones are taken from the cache. Raises SystemExit where one fails."""
    kept = ResultCache(cache)
    digests = [task.digest() for task in tasks]
    found = {} if fresh else {key: one for key in digests if (one := kept.find(key)) is not None}
    pending = [number for number, key in enumerate(digests) if key not in found]
    for number, outcome in in_processes(run, [tasks[number] for number in pending], 1 if jobs is None else jobs):
        task, key = tasks[pending[number]], digests[pending[number]]
        if isinstance(outcome, BaseException):
            raise SystemExit(f"failed: {task.regime.text()}: {task.arm.text()}: {outcome}") from outcome
        found[key] = {"digest": key, **outcome}
        kept.store(key, found[key])
    return [found[key] for key in digests]
