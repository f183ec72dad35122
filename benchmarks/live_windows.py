"""What swaps gain over recomputes on a model with windows, on vLLM's CPU engine short of memory, in alternating runs.

    python benchmarks/live_windows.py --out DIR [--minutes M] [--requests N] [--memory-share S] [--policy SPEC]
        [--workloads N] [--seed N]

The model has the layers of gpt-oss, made from a seed: one with a window, one that attends to everything, four experts
of which a token uses two. It is wide and flat, as that of ``live_pairs.py``, whose lengths and engine settings these
are. Most requests write more than a window.

Arms: unmodified vLLM with its defaults, with ``--prefix-cache-retention-interval None``, and with
``--disable-hybrid-kv-cache-manager`` in as many bytes of memory, each in an engine of its own that is started as
anybody would start it; always-recompute and always-swap in one engine, and ``--policy`` where it is given. Every start
of the engines serves the same ``--workloads`` by all arms, in random order. Starts are made as long as another one fits
into ``--minutes``, two at least; intervals are over starts.

Printed are p / d at the batch that ran (``kvpolicy/headroom.py``), from a recorded run under always-recompute, which
should be at least 0.2, and ratios over unmodified vLLM and of always-swap over each arm. Tokens have to be the same,
but for ties. Writes ``live_windows.json`` into DIR: settings, figures of every run, and ratios. With ``python
tools/family_tables.py --live DIR/live_windows.json`` it becomes that of docs/model-families.md. Exits 1 where tokens
differ, p / d is below 0.2, or always-swap preempted nobody or loaded nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from live_pairs import MIN_PRICE_RATIO, RECOMPUTE, SWAP, WARM_UP_REQUESTS, CachingArm
from measured_on import head_of, load_average

from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.json_values import rounded
from kvpolicy.stats import Ratio, geometric_means, student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.trace import read
from kvpolicy.workload import Request, Workload
from kvpolicy.workload.near_capacity import CONTEXT_TOKENS, at_once
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.live_scenarios import BLOCK_SIZE, HOST_GIB, compared, e2e_s
from kvpolicy_vllm.bench.overload import STOCK, Arms, Run, Settings

WINDOW_TOKENS = 64
LAYER_TYPES = ("sliding_attention", "full_attention")
DENSE, WHOLE, GIVEN = "retention None", "hybrid manager off", "policy"
MIN_STARTS = 2
ASKED = ("minutes", "requests", "workloads", "memory_share", "policy", "seed")


@dataclass(frozen=True, slots=True)
class FlagArm(CachingArm):
    """An arm whose engine has further arguments."""

    flags: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        return CachingArm.arguments(self) | dict(self.flags)


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write a model with the layers of gpt-oss, 28 million parameters in float32; return the folder."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GptOssConfig

    if folder.exists():
        return folder
    config = GptOssConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=1280, num_hidden_layers=len(LAYER_TYPES),
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS, layer_types=[*LAYER_TYPES], max_position_embeddings=4096, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    return folder


def blocks_of(request: Request) -> int:
    """Of one layer each, that a request takes at its end."""
    blocks = -(-request.total_tokens // BLOCK_SIZE)
    return blocks + min(blocks, WINDOW_TOKENS // BLOCK_SIZE + 1)


FIGURES: Mapping[str, Callable[[Run], float]] = {
    "tok/s": lambda run: run.throughput_tok_s,
    "CPU time": lambda run: run.cpu_s,
    "e2e": lambda run: fmean(e2e_s(run, number) for number in range(len(run.tokens))),
    "TTFT": lambda run: fmean(run.ttft_s),
}


@dataclass(slots=True)
class Found:
    """What ran."""

    price_ratio: float | None
    sentence: str
    blocks: int
    runs: list[tuple[int, Run]] = field(default_factory=list)
    """Each with the number of its start."""
    comparison: Comparison = field(default_factory=Comparison)
    loads: list[float] = field(default_factory=list)
    """The machine's load average over a minute, before the first engine and after every start."""
    seconds: float = 0.0
    """That all of it took."""

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(sorted((run.arm for _, run in self.runs), key=ORDER.index)))

    def of(self, arm: str) -> list[Run]:
        return [run for _, run in self.runs if run.arm == arm]

    def ratio(self, figure: str, arm: str, over: str) -> Ratio:
        def means(name: str) -> list[float]:
            some = [(start, FIGURES[figure](run)) for start, run in self.runs if run.arm == name]
            return geometric_means([value for _, value in some], [start for start, _ in some])

        return student_ratio(means(arm), means(over))

    def ratios(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By arm and figure, over unmodified vLLM and, by the other arm, of always-swap."""
        arms = [arm for arm in self.arms if arm != STOCK]
        pairs = {f"{arm} over {STOCK}": (arm, STOCK) for arm in arms}
        pairs |= {f"{SWAP} over {arm}": (SWAP, arm) for arm in arms if arm != SWAP}
        return {
            name: {figure: self.ratio(figure, *arms).to_dict() for figure in FIGURES} for name, arms in pairs.items()
        }

    def to_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "price_ratio": self.price_ratio, "blocks": self.blocks, "seconds": self.seconds, "loads": self.loads,
            "tokens": comparison.tokens, "ties": comparison.ties, "wrong": len(comparison.wrong),
            "runs": [{"start": start} | row_of(run) for start, run in self.runs], "ratios": self.ratios(),
        }  # fmt: skip

    def missed(self) -> list[str]:
        """What is not as it should be, in words."""
        missed = [] if self.comparison.exact else list(self.comparison.wrong[:3]) or ["too many ties"]
        if self.price_ratio is None or self.price_ratio < MIN_PRICE_RATIO:
            missed.append(f"p / d is {self.price_ratio}, should be at least {MIN_PRICE_RATIO}")
        swapped = self.of(SWAP)
        if not sum(run.preemptions["swap"] for run in swapped) or not sum(run.moved_bytes for run in swapped):
            missed.append(f"{SWAP} swapped nothing: lower --memory-share or raise --requests")
        return missed


ORDER = (STOCK, DENSE, WHOLE, RECOMPUTE, SWAP, GIVEN)


def row_of(run: Run) -> dict[str, Any]:
    """The figures of a run, without its tokens."""
    return {
        "arm": run.arm, **{figure: take(run) for figure, take in FIGURES.items()}, "preemptions": dict(run.preemptions),
        "recomputed_tokens": run.recomputed_tokens, "moved_bytes": run.moved_bytes,
    }  # fmt: skip


class Bench:
    """One folder and model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        llm = make_model(self._out / "llm")
        needed = sum(map(blocks_of, self._workload(0).requests))
        self._blocks = max(2 * CONTEXT_TOKENS // BLOCK_SIZE + 1, round(options.memory_share * needed)) + 1
        self._settings = Settings(str(llm), True, self._blocks, BLOCK_SIZE, CONTEXT_TOKENS)

    def _workload(self, number: int, requests: int | None = None) -> Workload:
        seed = 1000 * self._options.seed + number
        return at_once(requests or self._options.requests, seed)

    def _arms(self) -> list[FlagArm]:
        halved = len(LAYER_TYPES)  # a block of both layers has the bytes of two
        given = [FlagArm(GIVEN, self._options.policy, host_gib=HOST_GIB)] if self._options.policy else []
        return [
            FlagArm(STOCK, None, own_engine=True),
            FlagArm(DENSE, None, own_engine=True, flags=(("prefix_cache_retention_interval", None),)),
            FlagArm(
                WHOLE, None, own_engine=True, device_blocks=(self._blocks - 1) // halved + 1,
                flags=(("disable_hybrid_kv_cache_manager", True),),
            ),
            FlagArm(RECOMPUTE, RECOMPUTE, host_gib=HOST_GIB),
            FlagArm(SWAP, SWAP, host_gib=HOST_GIB),
            *given,
        ]  # fmt: skip

    def measured(self) -> Found:
        began_s, load = time.monotonic(), load_average()
        found = self._recorded()
        found.loads.append(load)
        print(f"{self._blocks} blocks, p / d {found.price_ratio}; {found.sentence}", flush=True)
        start, longest_s = 0, 0.0
        while start < MIN_STARTS or time.monotonic() - began_s + longest_s < 60 * self._options.minutes:
            start_s = time.monotonic()
            self._start(start, found)
            longest_s = max(longest_s, time.monotonic() - start_s)
            found.loads.append(load_average())
            found.seconds = time.monotonic() - began_s
            start += 1
            print(f"start {start} in {time.monotonic() - start_s:.0f} s", *table(found), sep="\n", flush=True)
        return found

    def _recorded(self) -> Found:
        """p / d, from other requests than those that are compared."""
        trace = self._out / f"trace-{int(time.time())}"
        with Arms(self._settings, self._out / "logs") as arms:
            arms.start(FlagArm(RECOMPUTE, RECOMPUTE, host_gib=HOST_GIB, trace=str(trace)))
            arms.serve(RECOMPUTE, self._workload(900), -1)
        won = log_headroom([read(trace)])
        return Found(won.price_ratio, won.sentence(), self._blocks)

    def _start(self, start: int, found: Found) -> None:
        rng = random.Random(f"{self._options.seed} {start}")
        with Arms(self._settings, self._out / "logs") as arms:
            arms.start(*self._arms())
            for name in arms.names:
                arms.serve(name, self._workload(901, WARM_UP_REQUESTS), -1)
            for number in range(self._options.workloads):
                work = self._workload(number)
                runs = {name: arms.serve(name, work, start) for name in rng.sample(arms.names, len(arms.names))}
                found.runs += [(start, run) for run in runs.values()]
                for run in runs.values():
                    if run.arm != STOCK:
                        found.comparison += compared(arms, work, runs[STOCK], run)


def table(found: Found) -> list[str]:
    cells = [["over unmodified vLLM", *FIGURES, "preempted", "swapped", "tokens recomputed", "moved MB"]]
    for name in found.arms:
        runs = found.of(name)
        cells.append(
            [
                "unmodified vLLM, means" if name == STOCK else name,
                *(
                    f"{fmean(map(take, runs)):.3g}" if name == STOCK else found.ratio(figure, name, STOCK).text()
                    for figure, take in FIGURES.items()
                ),
                f"{fmean(sum(run.preemptions.values()) for run in runs):.0f}",
                f"{fmean(run.preemptions['swap'] for run in runs):.0f}",
                f"{fmean(run.recomputed_tokens for run in runs):.0f}",
                f"{fmean(run.moved_bytes for run in runs) / 1e6:.0f}",
            ]
        )
    over = [["always-swap over", *FIGURES]]
    over += [
        [name, *(found.ratio(figure, SWAP, name).text() for figure in FIGURES)] for name in found.arms if name != SWAP
    ]
    comparison = found.comparison
    return [
        *aligned(cells),
        *aligned(over),
        f"{len(found.of(STOCK))} runs of each arm; {comparison.tokens} tokens, {len(comparison.wrong)} differ, "
        f"{comparison.ties} ties; intervals: 95% over starts",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found = Bench(options).measured()
    written = head_of(options, ASKED) | found.to_dict()
    (options.out / "live_windows.json").write_text(json.dumps(rounded(written), indent=1) + "\n")
    missed = found.missed()
    print("\n".join(missed))
    return 1 if missed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", help="a further arm, such as cheapest:FOLDER")
    parser.add_argument("--minutes", type=float, default=9.5, help="within which starts are made")
    parser.add_argument("--requests", type=int, default=64, help="of each workload")
    parser.add_argument("--workloads", type=int, default=1, help="of every start")
    parser.add_argument("--memory-share", type=float, default=0.33, help="of what the requests would take in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("requests", "workloads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: should be 1 or more")
    if not 0 < options.memory_share <= 1:
        parser.error(f"--memory-share is {options.memory_share}: should be above 0, up to 1")
    if not 0 <= options.minutes < float("inf"):
        parser.error(f"--minutes is {options.minutes}: should be 0 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
