"""What a preemption costs on a node that only decodes, on vLLM's CPU engine; in virtual time: `decode_node.py`.

    python benchmarks/decode_node_engine.py [--pairs N] [--seats N] [--running N] [--prompt N] [--json FILE]

kvpolicy's connector serves beside DecodeBenchConnector, which makes up the KV of prompts, and a step has no more tokens
than requests may run (``--seats``). One request is preempted while ``--running`` others decode, by either option in
turn, the order drawn for each pair. Printed are the time and the engine's CPU time from the preemption to the victim's
next token, recompute over swap, with 95% intervals over the pairs, and the medians of each option, in seconds, ms and
steps; ``--json`` has these and every return, and above them what was asked for, the versions, the machine, and its load
average before and after. A victim's text after a recompute is another one, as it then has the real KV of its prompt:
that a swap changes no bit of it is shown in tests/vllm/test_engines_beside.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measured_on import head_of, load_average

from kvpolicy.stats import Ratio, student_ratio
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config

SWAP = "always-swap"
ASKED = ("pairs", "seats", "running", "prompt", "seed")
DECODE_BENCH = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
BLOCK_SIZE, OUTPUT, BEFORE = 32, 24, 8
"""Tokens of a block, of a victim's answer, and of those before it is preempted."""
OTHERS_PROMPT = 64


@dataclass(frozen=True, slots=True)
class Return:
    """Of one victim, from its preemption to its next token."""

    pair: int
    kind: str
    seconds: float
    cpu_s: float
    steps: int


class DecodeNode:
    """vLLM's CPU engine in this process, with other requests that decode all the time."""

    def __init__(self, folder: Path, seats: int, running: int, prompt: int) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ[name] = value
        # Here: vLLM reads its environment when it is imported.
        from vllm import LLM, SamplingParams

        from kvpolicy_vllm.bench.models import make_llama

        tokens = -(-(prompt + 4096) // BLOCK_SIZE) * BLOCK_SIZE
        self._parameters, self._running, self._prompt = SamplingParams, running, prompt
        self._llm = LLM(
            model=str(make_llama(folder / "llama", context_tokens=tokens)), dtype="float32", skip_tokenizer_init=True,
            enforce_eager=True, enable_prefix_caching=False, block_size=BLOCK_SIZE, max_model_len=tokens,
            max_num_seqs=seats, max_num_batched_tokens=seats, scheduler_cls=SCHEDULER,
            num_gpu_blocks_override=(running + 2) * tokens // BLOCK_SIZE,
            kv_transfer_config=transfer_config({"policy": SWAP, "host_gib": 1.0}, [DECODE_BENCH]),
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._added = 0

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _add(self, prefix: str, rng: random.Random, prompt: int, output: int) -> str:
        self._added += 1
        name = f"{prefix}{self._added}"
        parameters = self._parameters(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        tokens = [rng.randrange(10, 2000) for _ in range(prompt)]
        self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        return name

    def _live(self, name: str) -> Any:
        return next((one for one in self._scheduler.requests.values() if one.request_id.split("-")[0] == name), None)

    def returns(self, pair: int, kind: str, seed: int) -> Return:
        """Preempt one request and see it back. The others of a pair are the same for both options."""
        rng = random.Random(seed)
        names = [self._add("other", rng, OTHERS_PROMPT, 4000) for _ in range(self._running)]
        victim = self._add("victim", rng, self._prompt, OUTPUT)
        self._scheduler.kvpolicy.pin(kind)
        while (live := self._live(victim)) is None or live.num_output_tokens < BEFORE:
            self._engine.step()
        self._scheduler.preempt_at_next_step(live.request_id)
        before, steps = live.num_output_tokens, 0
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        while live.num_output_tokens == before:
            self._engine.step()
            steps += 1
        found = Return(pair, kind, time.perf_counter() - began_s, time.process_time() - cpu_began_s, steps)
        self._engine.abort_request([*names, victim])
        while self._engine.has_unfinished_requests() or self._scheduler.kvpolicy.unsettled:
            self._engine.engine_core.engine_core.step()
        return found


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def on_the_engine(pairs: int, seats: int, running: int, prompt: int, seed: int) -> list[Return]:
    rng, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        node = DecodeNode(Path(folder), seats, running, prompt)
        for kind in ("swap", "recompute"):  # not counted: the first of each is slower
            node.returns(-1, kind, seed)
        for pair in range(pairs):
            for kind in rng.sample(("swap", "recompute"), 2):
                found.append(node.returns(pair, kind, seed + pair))
                print(found[-1], flush=True)
    return found


def ratios(found: Sequence[Return]) -> dict[str, Ratio]:
    """Recompute over swap."""

    def values(kind: str, name: str) -> list[float]:
        return [float(getattr(one, name)) for one in sorted(found, key=lambda one: one.pair) if one.kind == kind]

    return {name: student_ratio(values("recompute", name), values("swap", name)) for name in ("seconds", "cpu_s")}


def medians(found: Sequence[Return]) -> dict[str, dict[str, float]]:
    """Of each option, from the preemption to the next token."""
    of_kind = {kind: [one for one in found if one.kind == kind] for kind in ("recompute", "swap")}
    return {
        kind: {name: float(median(getattr(one, name) for one in some)) for name in ("seconds", "cpu_s", "steps")}
        for kind, some in of_kind.items()
    }


def median_line(kind: str, of: Mapping[str, float]) -> str:
    milliseconds = f"{of['seconds']:.4f} s ({1e3 * of['seconds']:,.1f} ms)"
    return f"median of a {kind}: {milliseconds}, {1e3 * of['cpu_s']:,.1f} ms of CPU time, {of['steps']:g} steps"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=32, help="max_num_seqs and max_num_batched_tokens")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--running", type=int, default=16, help="requests that decode beside the victim")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the victim's prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not 0 < args.running < args.seats:
        parser.error(f"--running {args.running}: should leave tokens of the budget, --seats {args.seats}")
    loads = [load_average()]
    found = on_the_engine(args.pairs, args.seats, args.running, args.prompt, args.seed)
    loads.append(load_average())
    for name, ratio in ratios(found).items():
        print(f"{name}, recompute over swap: {ratio.text()}")
    middle = medians(found)
    for kind, of in middle.items():
        print(median_line(kind, of))
    if args.json:
        written = head_of(args, ASKED) | {"loads": loads, "medians": middle, "returns": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
