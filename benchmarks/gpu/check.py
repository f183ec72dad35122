"""gpu-check: requests produce the same text whatever was done with their memory, blocks come back bit for bit.

Nothing may leak. Each case is an engine of its own with the plugin and too little memory, both actions in turn,
compared with stock vLLM with memory for all. Ends with status 1 where a case fails, 3 where time
ran out for some.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import pagelock
from benchmarks.gpu.alternating import ALTERNATING
from benchmarks.gpu.pieces import Piece, exit_status_of, read_part, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy_vllm.bench.engine_process import EngineProcess, plugin_arguments
from kvpolicy_vllm.bench.exactness import TIE_GAP, TOKENS_PER_TIE, compare
from kvpolicy_vllm.bench.models import make_llama
from kvpolicy_vllm.plugin.settings import Settings

REFERENCE, CONTROL = "reference", "control"
WIDEST_TIE = 1e-2
"""However far rounding goes on a device, a text that leaves the reference at a clearer token than that is wrong."""
FEWEST = 2
"""Preemptions of each kind without which a case has shown nothing."""
COPIERS = "benchmarks.gpu.copiers"
# Triton's own default multiplies float32 in 19 bits on newer devices.
EXACT = {"TRITON_F32_DEFAULT": "ieee"}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine, one pass through the workload."""

    name: str
    policy: str | None = ALTERNATING
    copier: str | None = "digesting"
    """Of `benchmarks.gpu.copiers`; None: the plugin's own, judged by texts alone. A digest is work of the device's that
    may hide a wait which the plugin forgot."""
    dtype: str = "float32"
    prefix_caching: bool = False
    runner: str | None = None
    """``v1`` or ``v2``; None: what the version takes."""
    asynchronous: bool = True
    graphs: bool = True
    pin_memory: bool = True
    force_every: int = 0
    memory_enough: bool = False

    @property
    def judged_by_tokens(self) -> bool:
        """In 16 bits texts differ by rounding alone; there only the digests are compared."""
        return self.dtype == "float32"


def cases_of(on_cpu: bool) -> tuple[Case, ...]:
    """On a CPU there is one runner, no asynchronous scheduling and no graph; the rest is the same."""
    first = (Case(REFERENCE, None, memory_enough=True), Case(CONTROL, None))
    if on_cpu:
        return (
            *first,
            Case("plain", copier=None),
            Case("prefix", prefix_caching=True),
            Case("slow", copier="slow"),
            Case("staged", copier="staged_digesting", prefix_caching=True),
            Case("bf16", "always-swap", dtype="bfloat16"),
            Case("forced", force_every=3),
        )
    both = [
        Case(f"{runner}-{name}", runner=runner, **values)
        for runner in ("v2", "v1")
        for name, values in (
            ("plain", {"copier": None}),
            ("prefix", {"prefix_caching": True}),
            ("slow", {"copier": "slow"}),
            ("bf16", {"policy": "always-swap", "dtype": "bfloat16", "prefix_caching": True}),
            ("staged", {"copier": "staged_slow", "prefix_caching": True}),
            ("forced", {"force_every": 3}),
        )
    ]
    return (
        *first,
        *both,
        Case("sync-plain", asynchronous=False),
        Case("pageable", copier="staged_digesting", pin_memory=False),
        Case("bf16-staged", "always-swap", "staged_digesting", "bfloat16"),
        Case("eager-slow", copier="slow", graphs=False),
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and memory."""

    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    context_tokens: int
    block_size: int
    scarce_blocks: int
    enough_blocks: int

    def drawn(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[0, rng.randint(*self.prompt_tokens), rng.randint(*self.output_tokens)] for _ in range(self.requests)]


ON_CPU = Load(16, (40, 200), (50, 90), 512, 32, 26, 200)
ON_DEVICE = Load(64, (60, 600), (80, 200), 1024, 16, 500, 4000)


class Checks:
    """What the cases share."""

    def __init__(self, out: Path, place: Place, seed: int, attention: str | None = None) -> None:
        self.out, self.place, self.seed, self.attention = out, place, seed, attention
        self.load = ON_CPU if place.on_cpu else ON_DEVICE

    def piece(self, case: Case) -> Piece:
        return Piece(case.name, 40 if self.place.on_cpu else 45, lambda left_s: self.run(case))

    def model(self) -> str:
        """Made once, from the seed."""
        folder = self.out / "llm"
        # Weights are not packed between calls; a configuration without them is none.
        if not any(folder.glob("*.safetensors")):
            make_llama(folder, self.seed)
        return str(folder)

    def run(self, case: Case) -> dict[str, Any]:
        """Serve the workload and judge it; raises RuntimeError saying everything that is wrong."""
        with EngineProcess("benchmarks.gpu.check_engine", self.out / "logs" / f"{case.name}.log") as engine:
            started = engine.ask({"do": "start", "engine": self.engine(case), "environment": environment_of(case)})
            job = {
                "do": "serve",
                "requests": self.load.drawn(self.seed),
                "seed": self.seed,
                "gaps": case.name == REFERENCE,
                "policy": case.policy,
                "force_every": case.force_every,
            }
            served = engine.ask(job)
        keep = {name: served[name] for name in served if name not in ("times_s", "tokens", "gaps", "arrival_s")}
        result = {"engine": started, "served": keep}
        if case.name == REFERENCE:
            if served["preemptions"]:
                raise RuntimeError(f"{served['preemptions']} preemptions with memory for all: that is no reference")
            return result | {"tokens": served["tokens"], "gaps": served["gaps"]}
        result |= self.compared(case, served)
        wrong = faults(case, result, served) + self.not_as_asked(case, started)
        if wrong:
            write_json(self.out / "wrong" / f"{case.name}.json", result)
            raise RuntimeError("; ".join(wrong))
        return result

    def not_as_asked(self, case: Case, started: dict[str, Any]) -> list[str]:
        """Where the engine is another one than the case is about."""
        if self.place.on_cpu:
            return []
        settings = {"async_scheduling": case.asynchronous, "prefix_caching": case.prefix_caching}
        settings |= {} if case.runner is None else {"runner": case.runner}
        facts = started | {"runner": runner_of(started)}
        other = [name for name, value in settings.items() if facts[name] != value]
        wrong = [f"{name} is {facts[name]}, should be {settings[name]}" for name in other]
        if case.graphs == started["graphs"].endswith("NONE"):
            wrong.append(f"CUDA graphs: {started['graphs']}, should be {'some' if case.graphs else 'none'}")
        return wrong

    def engine(self, case: Case) -> dict[str, Any]:
        load = self.load
        values: dict[str, Any] = {
            "model": self.model(),
            "dtype": case.dtype,
            "skip_tokenizer_init": True,
            "seed": 0,
            "block_size": load.block_size,
            "num_gpu_blocks_override": load.enough_blocks if case.memory_enough else load.scarce_blocks,
            "max_model_len": load.context_tokens,
            "max_num_seqs": load.requests,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": case.prefix_caching,
            "enforce_eager": self.place.on_cpu or not case.graphs,
        }
        if not self.place.on_cpu:
            values |= {"gpu_memory_utilization": 0.3, "async_scheduling": case.asynchronous}
        if self.attention is not None and case.judged_by_tokens:
            values["attention_backend"] = self.attention
        if case.policy is None:
            return values
        settings = Settings(policy=case.policy, host_gib=0.25, pin_memory=case.pin_memory, allow_python_policies=True)
        if case.copier is not None:
            settings = replace(settings, copier=f"{COPIERS}.{case.copier}")
        return values | plugin_arguments(settings)

    def compared(self, case: Case, served: dict[str, Any]) -> dict[str, Any]:
        """Against the reference, as far as rounding lets one; what the control did is how far that is."""
        reference = read_part(self.out, REFERENCE)
        if not case.judged_by_tokens:
            return {}
        if reference is None:
            return {"wrong": ["there is no reference to compare with: it failed"]}
        control = read_part(self.out, CONTROL) or {}
        gap = max(TIE_GAP, min(WIDEST_TIE, 2 * control.get("widest_gap", 0.0)))
        gap = WIDEST_TIE if case.name == CONTROL else gap
        compared = compare(reference["tokens"], reference["gaps"], served["tokens"], case.name, gap)
        ties = max(1, compared.tokens // TOKENS_PER_TIE, 2 * control.get("ties", 0))
        return {
            "tokens": compared.tokens,
            "ties": compared.ties,
            "ties_allowed": None if case.name == CONTROL else ties,
            "tie_gap": gap,
            "wrong": list(compared.wrong[:5]),
            "widest_gap": widest_gap(reference, served["tokens"]),
        }


def runner_of(engine: dict[str, Any]) -> str:
    """vLLM's second model runner lives in a package, the first in a module."""
    return "v2" if ".gpu.model_runner" in engine["runner"] else "v1"


def environment_of(case: Case) -> dict[str, str]:
    runner = {} if case.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(int(case.runner == "v2"))}
    return EXACT | runner


def widest_gap(reference: dict[str, Any], tokens: list[list[int]]) -> float:
    """How clear the reference was at the clearest token where another text leaves it; 0 where none does."""
    widest = 0.0
    for expected, gaps, actual in zip(reference["tokens"], reference["gaps"], tokens, strict=True):
        for a, b, gap in zip(expected, actual, gaps, strict=False):
            if a != b:
                widest = max(widest, gap)
                break
    return widest


def faults(case: Case, result: dict[str, Any], served: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a case; empty where it passes."""
    wrong = list(result.get("wrong", ()))
    allowed = result.get("ties_allowed")
    if allowed is not None and result["ties"] > allowed:
        wrong.append(f"{result['ties']} ties in {result['tokens']} tokens, at most {allowed} are to be expected")
    if served["blocks_in_use"]:
        wrong.append(f"{served['blocks_in_use']} device blocks leaked")
    if case.policy is None:
        return wrong if served["preemptions"] else [*wrong, "nobody was preempted"]
    for name, noun in (("host_slots_used", "host slots leaked"), ("open_preemptions", "preemptions stay open")):
        if served[name]:
            wrong.append(f"{served[name]} {noun}")
    for kind in ("swap",) if case.policy == "always-swap" else ("swap", "recompute"):
        if executed(served, kind) < FEWEST:
            wrong.append(f"{executed(served, kind)} preemptions by {kind}: too few to tell")
    if served.get("different_blocks"):
        wrong.append(f"{served['different_blocks']} of {served['restored_blocks']} blocks came back different")
    if case.copier is not None and not served.get("restored_blocks"):
        wrong.append("no block came back")
    for reason, noun in (("error", "decisions"), ("load_failed", "loads")):
        failed = served["stats"].get(f"fallbacks|reason={reason}", 0)
        if failed:
            wrong.append(f"{failed:g} {noun} failed")
    return wrong


def executed(served: dict[str, Any], kind: str) -> int:
    """How many preemptions were carried out that way."""
    total = 0.0
    for key, value in served["stats"].items():
        what, *labels = key.split("|")
        if what == "preemptions" and f"executed={kind}" in labels:
            total += value
    return round(total)


def show(console: Console, place: Place, cases: list[Case], done: Any) -> None:
    table = Table(title=f"gpu-check on {place.text()}")
    for name in ("case", "runner", "async", "graphs", "swapped", "recomputed", "blocks back", "ties", "result"):
        table.add_column(name)
    for case in cases:
        result = done.results.get(case.name)
        if result is None:
            why = done.failed.get(case.name, "left for the next time")
            table.add_row(case.name, *([""] * 7), "FAIL: " + why if case.name in done.failed else why)
            continue
        served, engine = result["served"], result["engine"]
        table.add_row(
            case.name,
            runner_of(engine),
            str(engine["async_scheduling"]),
            engine["graphs"].removeprefix("CUDAGraphMode."),
            str(executed(served, "swap")),
            str(executed(served, "recompute") if case.policy else served["preemptions"]),
            str(served.get("restored_blocks", "")),
            str(result.get("ties", "")),
            "pass",
        )
    console.print(table)


def page_locking(try_pages: Callable[[], str | None], say: Callable[[str], None]) -> str | None:
    """First of all, and in words: every case but the pageable ones would fail for it, each in its own way."""
    refused = try_pages()
    if refused is None:
        say("1 MiB of host memory was page-locked, as the plugin does it")
    else:
        say(
            f"PAGE-LOCKING FAILS, for 1 MiB already: {refused}\n"
            'All cases but "pageable" will fail for it. See `ulimit -l` and the container\'s limits; '
            'the plugin runs with "pin_memory": false.'
        )
    return refused


def main(say: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    parser = arguments("check", __doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", help="vLLM's attention backend for float32, where its own choice fails")
    options = parser.parse_args()
    place = find_place(options.scale)
    say(place.text())
    checks = Checks(options.out, place, options.seed, options.attention)
    cases = list(cases_of(place.on_cpu))
    wanted_names = {piece.name for piece in chosen([checks.piece(case) for case in cases], options)} | {REFERENCE}
    if not place.on_cpu:
        wanted_names.add(CONTROL)  # it shows how far rounding goes
    cases = [case for case in cases if case.name in wanted_names]
    refused = None if place.on_cpu else page_locking(pagelock.asked, say)
    done = run_pieces(options.out, place.to_dict(), [checks.piece(case) for case in cases], options.minutes, say)
    show(Console(width=160), place, cases, done)
    summary = {"place": place.to_dict(), "passed": sorted(done.results), "failed": done.failed, "left": done.left}
    summary |= {"page_locking_refused": refused}
    write_json(options.out / "check.json", json.loads(json.dumps(summary)))
    return 1 if done.failed else 3 if done.left else 0


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
