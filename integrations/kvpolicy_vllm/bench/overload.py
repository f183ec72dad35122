"""The same workload through several arms, their engines alive side by side, only one of them at work at a time.

Importing this loads no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpolicy.events import KINDS
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.workload import Workload
from kvpolicy_vllm.bench.engine_process import EngineProcess, device_arguments, plugin_arguments
from kvpolicy_vllm.bench.ratios import Ratio, mean_and_percentiles, paired_ratio
from kvpolicy_vllm.plugin.settings import Settings as PluginSettings

SERVING = "kvpolicy_vllm.bench.serve_engine"
STOCK = "vllm"
"""The arm without the plugin."""

Told = Callable[[str, int, int], None]
"""What is being served, tokens so far, tokens in all; 0 in all while engines start."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    policy: str | None
    """None: vLLM without the plugin, or with the plugin taken out where other arms of the engine have one."""
    link: SimulatedLink | None = None
    host_gib: float = 1.0
    seed: int = 0
    device_blocks: int | None = None
    """Instead of what the settings say."""

    @property
    def engine(self) -> Arm:
        """What arms of one engine have in common: all but name and policy."""
        return replace(self, name="", policy="")

    def arguments(self) -> dict[str, Any]:
        memory = {} if self.device_blocks is None else {"num_gpu_blocks_override": self.device_blocks}
        if self.policy is None:
            return memory
        told = PluginSettings(policy=self.policy, link=self.link, host_gib=self.host_gib, seed=self.seed)
        return memory | plugin_arguments(told)


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine all arms share."""

    model: str
    on_cpu: bool
    device_blocks: int
    """KV blocks; vLLM keeps one for itself."""
    block_size: int = 32
    context_tokens: int = 4096
    running_requests: int = 128
    """At most, as far as memory goes."""
    step_tokens: int = 2048

    def arguments(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.device_blocks,
            "max_model_len": self.context_tokens,
            "max_num_seqs": self.running_requests,
            "max_num_batched_tokens": self.step_tokens,
        } | device_arguments(self.on_cpu)


@dataclass(frozen=True, slots=True)
class Run:
    """A workload served to its end by one arm."""

    arm: str
    block: int
    makespan_s: float
    """From the workload's start to the last token."""
    ttft_s: tuple[float, ...]
    """By request, from its arrival to its first token."""
    itl_s: tuple[tuple[float, ...], ...]
    """By request, between its tokens."""
    tokens: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    """By request and token, best log-probability less second best; empty where not asked for."""
    preemptions: Mapping[str, int]
    """By what was executed."""
    recomputed_tokens: int
    moved_bytes: int

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def throughput_tok_s(self) -> float:
        """Output tokens over makespan."""
        return self.output_tokens / self.makespan_s

    def goodput(self, targets: Targets) -> float:
        """Requests per second that met both targets."""
        pairs = zip(self.ttft_s, self.itl_s, strict=True)
        return sum(targets.met_by(ttft_s, itl_s) for ttft_s, itl_s in pairs) / self.makespan_s

    @classmethod
    def of(cls, arm: str, block: int, result: Mapping[str, Any]) -> Run:
        """Out of what :mod:`kvpolicy_vllm.bench.serve_engine` answers."""
        stats = result["stats"]
        executed: dict[str, int] = {kind: _total(stats, "preemptions", f"executed={kind}") for kind in KINDS}
        if not stats:  # stock vLLM, which recomputes whatever it preempts
            executed = {"recompute": result["preemptions"], "swap": 0}
        times = zip(result["arrival_s"], result["times_s"], strict=True)
        return cls(
            arm=arm,
            block=block,
            makespan_s=result["makespan_s"],
            ttft_s=tuple(at[0] - arrival_s for arrival_s, at in times),
            itl_s=tuple(tuple(later - earlier for earlier, later in pairwise(at)) for at in result["times_s"]),
            tokens=tuple(map(tuple, result["tokens"])),
            gaps=tuple(map(tuple, result["gaps"])),
            preemptions=executed,
            recomputed_tokens=result["recomputed_tokens"],
            moved_bytes=_total(stats, "copy_bytes") + result.get("offloaded_bytes", 0),
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request has to meet to count as served well."""

    ttft_s: float
    itl_s: float
    """Of the request's mean time between tokens."""

    def met_by(self, ttft_s: float, itl_s: Sequence[float]) -> bool:
        return ttft_s <= self.ttft_s and (not itl_s or sum(itl_s) / len(itl_s) <= self.itl_s)


def _total(stats: Mapping[str, float], name: str, label: str = "") -> int:
    keys = [key for key in stats if key.split("|")[0] == name and (not label or label in key.split("|"))]
    return round(sum(stats[key] for key in keys))


class Arms:
    """Engines side by side. A context manager; an arm's engine starts when the arm is added.

    Arms that differ only in policy share one engine, which changes policy between workloads, or has the plugin taken
    out (:mod:`kvpolicy_vllm.bench.plugin_switch`): two processes of one and the same program can differ by several
    percent in speed for as long as they live, and that must not pass for a difference between policies.
    """

    def __init__(self, settings: Settings, logs: Path | None = None) -> None:
        self.settings = settings
        self._logs = logs
        self._stack = ExitStack()
        self._arms: dict[str, Arm] = {}
        self._engines: dict[Arm, EngineProcess] = {}
        self._started = 0

    def start(self, *arms: Arm) -> None:
        """Start these arms' engines. Their processes load side by side, the engines start one after the other."""
        new: dict[Arm, Arm] = {}
        for arm in arms:
            if arm.name in self._arms:
                raise ValueError(f"arm {arm.name} is there already")
            self._arms[arm.name] = arm
            if arm.engine in new and arm.policy is not None:
                new[arm.engine] = arm
            if arm.engine not in self._engines:
                log = None if self._logs is None else self._logs / f"{self._started}-{_file_name(arm.name)}.log"
                self._started += 1
                self._engines[arm.engine] = self._stack.enter_context(EngineProcess(SERVING, log))
                new[arm.engine] = arm
        for engine, arm in new.items():
            self._engines[engine].ask({"do": "start", "engine": self.settings.arguments() | arm.arguments()})

    def stop(self, *names: str) -> None:
        """Take arms out, and end the engines that no other arm needs."""
        left = {self._arms.pop(name).engine for name in names if name in self._arms}
        for engine in left - {arm.engine for arm in self._arms.values()}:
            self._engines.pop(engine).close()

    def pid(self, name: str) -> int:
        """Of an arm's engine process."""
        return self._engines[self._arms[name].engine].pid

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arms)

    def serve(
        self,
        name: str,
        workload: Workload,
        block: int,
        gaps: bool = False,
        told: Told | None = None,
        device_blocks: int | None = None,
    ) -> Run:
        """Serve a workload; its prompts are drawn from its seed, so every arm gets the same. ``device_blocks``: so many
        of the engine's, None all."""
        arm = self._arms[name]
        job = {
            "do": "serve",
            "requests": [[one.arrival_s, one.prompt_tokens, one.output_tokens] for one in workload.requests],
            "seed": workload.seed,
            "gaps": gaps,
            "policy": arm.policy,
            "device_blocks": device_blocks,
        }

        def news(values: dict[str, Any]) -> None:
            if told is not None:
                told(name, values["tokens"], workload.output_tokens)

        return Run.of(name, block, self._engines[arm.engine].ask(job, news))

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


def alternate(
    arms: Arms, names: Sequence[str], workloads: Iterable[Workload], rng: random.Random, told: Told | None = None
) -> list[Run]:
    """Each workload, a block, through all arms before the next one; the order within a block is drawn."""
    return [
        arms.serve(name, workload, block, told=told)
        for block, workload in enumerate(workloads)
        for name in rng.sample(list(names), len(names))
    ]


def summary(runs: Sequence[Run], targets: Targets) -> dict[str, Any]:
    """One arm over its blocks, as in demo.json. Latencies are pooled over all requests and tokens."""
    makespan_s = sum(run.makespan_s for run in runs)
    return {
        "throughput_tok_s": sum(run.output_tokens for run in runs) / makespan_s,
        "goodput": sum(run.goodput(targets) * run.makespan_s for run in runs) / makespan_s,
        "ttft_s": mean_and_percentiles([one for run in runs for one in run.ttft_s]),
        "itl_s": mean_and_percentiles([one for run in runs for request in run.itl_s for one in request]),
        "preemptions": {kind: sum(run.preemptions[kind] for run in runs) for kind in KINDS},
        "recomputed_tokens": sum(run.recomputed_tokens for run in runs),
        "moved_bytes": sum(run.moved_bytes for run in runs),
        "runs": len(runs),
    }


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of each arm in the order of their blocks. Raises ValueError where an arm misses a block or has it twice."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.block):
        found.setdefault(run.arm, []).append(run)
    blocks = {arm: [run.block for run in mine] for arm, mine in found.items()}
    expected = next(iter(blocks.values()), [])
    for arm, mine in blocks.items():
        if mine != expected or len(set(mine)) < len(mine):
            raise ValueError(f"arm {arm} has blocks {mine}, others have {expected}: only whole blocks can be compared")
    return found


def throughput_ratio(above: Sequence[Run], below: Sequence[Run], rng: random.Random) -> Ratio:
    """Throughput of one arm over another's, paired by block."""
    return paired_ratio([run.throughput_tok_s for run in above], [run.throughput_tok_s for run in below], rng)


def ttft_ratio(above: Sequence[Run], below: Sequence[Run], rng: random.Random) -> Ratio:
    """Mean time to first token of one arm over another's, paired by block; below 1 is faster."""
    means = [[sum(run.ttft_s) / len(run.ttft_s) for run in runs] for runs in (above, below)]
    return paired_ratio(means[0], means[1], rng)
