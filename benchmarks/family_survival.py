"""What victims find on the device when they come back, and what a recompute of the rest costs, by a model's layers.

    python benchmarks/family_survival.py [--seeds N] [--first-seed SEED] [--requests N] [--outputs TOKENS ...]
        [--share S] [--models MODEL ...] [--json FILE]

vLLM's own scheduler serves requests that are all there from the start, under always-recompute, with too little memory:
for a share S of what as many average requests as may run take at their end. The KV cache groups are made by vLLM's own
code from the shapes of published models, with vLLM's defaults, with windows and states cached at the end of every block
(--prefix-cache-retention-interval None), and with --disable-hybrid-kv-cache-manager in the same bytes of memory.

Survival: tokens found on the device at resume over tokens computed at the preemption, of all victims; and of those that
had generated more than the longest window or chunk, or more than a block where there are states. Tax: tokens computed
again over tokens of all requests. The schedule does not depend on how long steps take, as nobody arrives later: the
figures are the same in every run on the same version of vLLM.

Each seed draws a load, which every model serves with every setting. Shares are of the victims of all N loads together,
from SEED on. In round brackets stand 95% intervals over loads; in square ones, where fewer than five loads have victims
that found something or fewer than five have some that lost something, Clopper and Pearson's of so many victims, taken
as independent.

FILE has a row of every load. A run that it has is not made again, and it is written after every run, so that a run of
this script that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import vllm
from survival_cells import DEFAULT, DENSE, WHOLE, Key, Row, far_survival, read, survival, tax, write

from kvpolicy import policy as policies
from kvpolicy.errors import InputError
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
SETTINGS = (DEFAULT, DENSE, WHOLE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="loads that are drawn")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--requests", type=int, default=48, help="in each load")
    parser.add_argument("--outputs", type=int, nargs="+", default=OUTPUTS, metavar="TOKENS", help="on average")
    parser.add_argument("--share", type=float, default=0.6, help="of the memory for all that may run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=SHOWN, metavar="MODEL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what it has is not run again")
    options = parser.parse_args(arguments)
    for name in ("seeds", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: should be 1 or more")
    if options.first_seed < 0:
        parser.error(f"--first-seed is {options.first_seed}: should be 0 or more")
    made = {"requests": options.requests, "share": options.share, "vllm": vllm.__version__.partition("+")[0]}
    try:
        rows = {row.key: row for row in (read(options.json, made) if options.json else [])}
    except InputError as error:
        parser.error(str(error))
    keys = list(wanted(options))
    for number, key in enumerate(keys, 1):
        if key in rows:
            continue
        rows[key] = timed(key, options, f"{number} of {len(keys)}")
        if options.json:
            write(options.json, made, sorted(rows.values(), key=place_of))
    print("\n".join(aligned([HEAD, *cells([rows[key] for key in keys])])))
    return 0


def wanted(options: argparse.Namespace) -> Iterator[Key]:
    """Seed by seed, so that what was interrupted has whole loads."""
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.models:
            for setting, _ in settings_of(MODELS[name]):
                for tokens in options.outputs:
                    yield name, setting, tokens, seed


def timed(key: Key, options: argparse.Namespace, place: str) -> Row:
    name, setting, tokens, seed = key
    start_s = time.perf_counter()
    layers = dict(settings_of(MODELS[name]))[setting]
    row = measured(MODELS[name], setting, layers, drawn(options.requests, tokens, seed), options.share)
    took_s = time.perf_counter() - start_s
    print(f"{place}: {name}, {setting}, outputs of {tokens}, seed {seed}: {took_s:.1f} s", file=sys.stderr, flush=True)
    return row


def place_of(row: Row) -> tuple[int, ...]:
    """In the order of the file."""
    return row.output_tokens, [*MODELS].index(row.model), SETTINGS.index(row.setting), row.seed


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


def drawn(count: int, output_tokens: int, seed: int) -> Workload:
    rng = random.Random(f"lengths {output_tokens}" + (f" of seed {seed}" if seed else ""))

    def length(mean: int, spread: float) -> int:
        return round(mean * rng.uniform(1 - spread, 1 + spread))

    requests = tuple(
        Request(0.0, length(PROMPT_TOKENS, PROMPT_SPREAD), length(output_tokens, OUTPUT_SPREAD)) for _ in range(count)
    )
    return Workload(f"{PROMPT_TOKENS}+{output_tokens}", requests, seed)


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


def measured(model: ModelLayers, setting: str, layers: ModelLayers, work: Workload, share: float) -> Row:
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
    return Row(
        model.name, setting, output_mean(work), work.seed, server.device_blocks, server.block_size, tokens,
        run.summary.recomputed_tokens, *counts(victims), *counts(far),
    )  # fmt: skip


def counts(victims: Sequence[Victim]) -> tuple[int, int, int, int]:
    """Victims, tokens they had computed, tokens they found, and how many found anything."""
    return (
        len(victims),
        sum(victim.computed_tokens for victim in victims),
        sum(victim.found_tokens for victim in victims),
        sum(victim.found_tokens > 0 for victim in victims),
    )


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


HEAD = [
    "model", "setting", "output", "loads", "blocks", "of tokens", "preemptions", "survival", "hits", "went far",
    "survival", "hits", "tax",
]  # fmt: skip


def cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Of every model, setting and length of outputs, all loads together."""
    for model, setting, tokens in dict.fromkeys(row.key[:3] for row in rows):
        some = [row for row in rows if row.key[:3] == (model, setting, tokens)]
        shares = [share.text() if share else "" for share in (survival(some), far_survival(some))]
        values: list[Any] = [
            model, setting, tokens, len(some), round(fmean(row.device_blocks for row in some)), some[0].block_size,
            sum(row.preemptions for row in some), shares[0], sum(row.with_hits for row in some),
            sum(row.far for row in some), shares[1], sum(row.far_with_hits for row in some), tax(some).text(".2f"),
        ]  # fmt: skip
        yield [str(value) for value in values]


if __name__ == "__main__":
    raise SystemExit(main())
