"""What victims find on the device when they come back, and what a recompute of the rest costs, by a model's layers.

    python benchmarks/family_survival.py [--requests N] [--outputs TOKENS ...] [--share S] [--models MODEL ...]
        [--json FILE]

vLLM's own scheduler serves requests that are all there from the start, under always-recompute, with too little memory:
for a share S of what as many average requests as may run take at their end. The KV cache groups are made by vLLM's own
code from the shapes of published models, with vLLM's defaults, with windows and states cached at the end of every block
(--prefix-cache-retention-interval None), and with --disable-hybrid-kv-cache-manager in the same bytes of memory.

Survival: tokens found on the device at resume over tokens computed at the preemption, of all victims; and of those that
had generated more than the longest window or chunk, or more than a block where there are states. Tax: tokens computed
again over tokens of all requests. The schedule does not depend on how long steps take, as nobody arrives later: the
figures are the same in every run on the same version of vLLM.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy import policy as policies
from kvpolicy.simulator import MemorySink, Server
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.study.report import aligned
from kvpolicy.trace import Trace
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.simulator.deployment import block_bytes_of, scheduler_for
from kvpolicy_vllm.simulator.engine import VllmScheduler
from kvpolicy_vllm.simulator.model_layers import MODELS, ModelLayers

RUNNING = 24
PROMPT_TOKENS = 1000
PROMPT_SPREAD, OUTPUT_SPREAD = 0.3, 0.5
CONTEXT = 16384
BUDGET = 2048
OUTPUTS = (300, 1000)
SHOWN = (
    "llama-3.1-8b", "mistral-7b-v0.1", "gpt-oss-20b", "gemma-3-12b", "gemma-4-31b", "llama-4-scout",
    "granite-4-h-small", "nemotron-h-8b", "qwen3-next-80b-a3b", "deepseek-v3",
)  # fmt: skip
DEFAULT, DENSE, WHOLE = "default", "retention None", "hybrid manager off"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one model with one setting, for one length of outputs."""

    model: str
    setting: str
    output_tokens: int
    device_blocks: int
    block_size: int
    preemptions: int
    survival: float | None
    """None without preemptions."""
    with_hits: int
    """Victims that found anything."""
    far: int
    """Victims that had generated more than a window or a block."""
    far_survival: float | None
    far_with_hits: int
    tax: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--outputs", type=int, nargs="+", default=OUTPUTS, metavar="TOKENS", help="on average")
    parser.add_argument("--share", type=float, default=0.6, help="of the memory for all that may run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=SHOWN, metavar="MODEL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="replaces the same rows in it")
    options = parser.parse_args(arguments)
    found = []
    for name in options.models:
        for setting, layers in settings_of(MODELS[name]):
            for tokens in options.outputs:
                found.append(measured(MODELS[name], setting, layers, drawn(options.requests, tokens), options.share))
    print("\n".join(aligned([HEAD, *map(row, found)])))
    if options.json:
        merge_into(options.json, [asdict(one) for one in found])
    return 0


def merge_into(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a row a line; those that the file has of the same model, setting and outputs are replaced."""

    def named(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("model", "setting", "output_tokens"))

    known = json.loads(file.read_text()) if file.exists() else []
    merged = [*({named(row): row for row in known} | {named(row): row for row in rows}).values()]
    merged.sort(key=lambda row: (row["output_tokens"], list(MODELS).index(row["model"])))
    file.write_text("[\n" + ",\n".join(map(json.dumps, merged)) + "\n]\n")


def settings_of(layers: ModelLayers) -> Iterator[tuple[str, ModelLayers]]:
    """The layers with vLLM's defaults, and with the flags that may let more survive."""
    yield DEFAULT, layers
    limited = any(attention.reach for attention in layers.attention)
    if limited or layers.states is not None:
        yield DENSE, replace(layers, retention=None)
    # vLLM leaves windows alone where there is nothing else; a group of layers of several sizes is not served.
    alike = len({attention.token_bytes for attention in layers.attention}) == 1
    if limited and alike and len(layers.attention) > 1:
        yield WHOLE, replace(layers, hybrid_manager=False)


def drawn(count: int, output_tokens: int) -> Workload:
    rng = random.Random(f"lengths {output_tokens}")

    def length(mean: int, spread: float) -> int:
        return round(mean * rng.uniform(1 - spread, 1 + spread))

    requests = tuple(
        Request(0.0, length(PROMPT_TOKENS, PROMPT_SPREAD), length(output_tokens, OUTPUT_SPREAD)) for _ in range(count)
    )
    return Workload(f"{PROMPT_TOKENS}+{output_tokens}", requests, 0)


def server_of(layers: ModelLayers, device_bytes: int | None, tokens: int, share: float) -> tuple[Server, int]:
    """The server, and its bytes of KV memory: given, or for a share of as many requests of so many tokens as run."""
    block_bytes = block_bytes_of(layers)
    server = Server(
        layers.block_size, block_bytes, 10_000, 0, token_budget=BUDGET, max_running=RUNNING, max_model_len=CONTEXT
    )
    managers = scheduler_for(server, layers).kv_cache_manager.coordinator.single_type_managers
    if device_bytes is None:
        device_bytes = round(share * RUNNING * sum(held(manager, tokens) for manager in managers)) * block_bytes
    return replace(server, device_blocks=device_bytes // block_bytes), device_bytes


def held(manager: Any, tokens: int) -> int:
    """Blocks that a group needs of a request with so many computed tokens."""
    return int(-(-tokens // manager.block_size) - max(0, manager.get_num_skipped_tokens(tokens)) // manager.block_size)


def measured(model: ModelLayers, setting: str, layers: ModelLayers, work: Workload, share: float) -> Figures:
    tokens = sum(request.total_tokens for request in work.requests)
    mean_tokens = tokens // len(work.requests)
    _, device_bytes = server_of(model, None, mean_tokens, share)
    server, _ = server_of(layers, device_bytes, mean_tokens, share)
    simulator = VllmScheduler(layers=layers)
    server = replace(server, rules=simulator.rules)
    run = simulator.run(work, policies.load("always-recompute"), server, ConstantTimes(), 0, MemorySink())
    assert run.trace is not None
    victims = list(victims_of(run.trace))
    far = [victim for victim in victims if victim.generated_tokens > reach_of(model)]
    return Figures(
        model.name, setting, output_mean(work), server.device_blocks, server.block_size, len(victims),
        survival(victims), sum(victim.found_tokens > 0 for victim in victims), len(far), survival(far),
        sum(victim.found_tokens > 0 for victim in far), run.summary.recomputed_tokens / tokens,
    )  # fmt: skip


def output_mean(work: Workload) -> int:
    return int(work.name.split("+")[1])


@dataclass(frozen=True, slots=True)
class Victim:
    computed_tokens: int
    generated_tokens: int
    found_tokens: int


def victims_of(trace: Trace) -> Iterator[Victim]:
    decided = {row["preemption_id"]: row for row in trace.rows("decisions")}
    for outcome in trace.rows("outcomes"):
        decision = decided[outcome["preemption_id"]]
        yield Victim(decision["computed_tokens"], decision["output_tokens"], outcome["local_hit_tokens"])


def reach_of(layers: ModelLayers) -> int:
    """Tokens after which a victim's windows and chunks have left its prompt, or a state stands in another block; 0
    where there are none."""
    reaches = [attention.reach or 0 for attention in layers.attention]
    return max(*reaches, 0, 0 if layers.states is None else layers.block_size)


def survival(victims: Sequence[Victim]) -> float | None:
    computed = sum(victim.computed_tokens for victim in victims)
    return sum(victim.found_tokens for victim in victims) / computed if computed else None


HEAD = [
    "model", "setting", "output", "blocks", "of tokens", "preemptions", "survival", "hits", "went far", "survival",
    "hits", "tax",
]  # fmt: skip


def row(one: Figures) -> list[str]:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f}%"

    cells: list[Any] = [
        one.model, one.setting, one.output_tokens, one.device_blocks, one.block_size, one.preemptions,
        percent(one.survival), one.with_hits, one.far, percent(one.far_survival), one.far_with_hits, f"{one.tax:.2f}",
    ]  # fmt: skip
    return [str(cell) for cell in cells]


if __name__ == "__main__":
    raise SystemExit(main())
