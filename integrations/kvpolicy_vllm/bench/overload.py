"""Serves the same workload through several arms, whose engines are alive together but work one at a time.

An arm is one way to serve: a policy, or vLLM without the plugin. Importing this loads no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.events import KINDS
from kvpolicy.extensions import names_module
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.latency import Slo
from kvpolicy.stats import Ratio, bootstrap_ratio, mean_and_percentiles
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.engine_process import EngineProcess, device_arguments, plugin_arguments
from kvpolicy_vllm.bench.service import service, service_by_class
from kvpolicy_vllm.plugin.settings import Settings as PluginSettings
from kvpolicy_vllm.simulator.controller import transfer_params

SERVING = "kvpolicy_vllm.bench.serve_engine"
STOCK = "vllm"
"""The arm without the plugin."""
STOCK_ORDER = "fcfs"

ProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: what is being served, tokens so far, tokens in all; 0 in all while engines start."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    policy: str | None
    """None: vLLM without the plugin, which is switched off if the engine also serves arms that have it."""
    link: SimulatedLink | None = None
    host_gib: float = 1.0
    seed: int = 0
    device_blocks: int | None = None
    """Overrides the settings' value."""
    order: str = field(default=STOCK_ORDER, kw_only=True)
    """Order of service. Without the plugin ``fcfs`` or ``priority``, which is vLLM's own priority scheduling."""
    watermark: float = field(default=0.0, kw_only=True)
    """vLLM's ``--watermark``: share of the blocks that stays free when a request is admitted while others run."""
    extra: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)
    """Further settings of the plugin, by name."""
    own_engine: bool = field(default=False, kw_only=True)
    """Whether an arm without the plugin shares no engine with others, so that it is vLLM as anybody would start it."""

    @property
    def engine(self) -> Arm:
        """Key of the engine that this arm shares with others: the arm without name and policy. The plugin is switched
        off only where vLLM's own order serves without it."""
        own = self.policy is None and self.order != STOCK_ORDER
        return replace(self, name="", policy=None if own else "")

    def arguments(self) -> dict[str, Any]:
        memory: dict[str, Any] = {} if self.device_blocks is None else {"num_gpu_blocks_override": self.device_blocks}
        memory |= {"watermark": self.watermark} if self.watermark else {}
        if self.policy is None:
            return memory | self._own_scheduling()
        settings = PluginSettings(
            policy=self.policy,
            link=self.link,
            host_gib=self.host_gib,
            seed=self.seed,
            order=self.order,
            allow_python_policies=names_module(self.order.replace("/", ":")),
            **dict(self.extra),
        )
        return memory | plugin_arguments(settings)

    def _own_scheduling(self) -> dict[str, Any]:
        if self.order not in (STOCK_ORDER, "priority"):
            raise InputError(f"arm {self.name}: order {self.order} is the plugin's: give the arm a policy")
        return {} if self.order == STOCK_ORDER else {"scheduling_policy": self.order}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the engine that all arms share."""

    model: str
    on_cpu: bool
    device_blocks: int
    """KV blocks, including the one that vLLM keeps for itself."""
    block_size: int = 32
    context_tokens: int = 4096
    running_requests: int = 128
    """Maximum number of running requests."""
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
    """Time to first token from arrival, by request."""
    itl_s: tuple[tuple[float, ...], ...]
    """Times between tokens, by request."""
    tokens: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    """Best log-probability minus second best, by request and token; empty where not requested."""
    preemptions: Mapping[str, int]
    """Counts by executed option."""
    recomputed_tokens: int
    moved_bytes: int
    cpu_s: float = 0.0
    """CPU time of the engine's process from the workload's start to the last token."""
    arrival_s: tuple[float, ...] = ()
    """Of each request, from the workload's start; empty for a run that is read from a file without it."""
    requests: tuple[Request, ...] = ()
    """What was asked for: classes and deadlines."""

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def throughput_tok_s(self) -> float:
        """Output tokens over makespan."""
        return self.output_tokens / self.makespan_s

    def goodput(self, targets: Targets) -> float:
        """Requests per second that meet both targets."""
        pairs = zip(self.ttft_s, self.itl_s, strict=True)
        return sum(targets.met_by(ttft_s, itl_s) for ttft_s, itl_s in pairs) / self.makespan_s

    @classmethod
    def of(cls, arm: str, block: int, result: Mapping[str, Any], requests: Sequence[Request] = ()) -> Run:
        """From an answer of :mod:`kvpolicy_vllm.bench.serve_engine`. ``requests``: what was asked for."""
        stats = result["stats"]
        executed: dict[str, int] = {kind: _total(stats, "preemptions", f"executed={kind}") for kind in KINDS}
        if not stats:  # stock vLLM recomputes every preempted request
            executed = {"recompute": result["preemptions"], "swap": 0}
        times = zip(result["arrival_s"], result["times_s"], strict=True)
        return cls(
            arm=arm,
            block=block,
            makespan_s=result["makespan_s"],
            ttft_s=tuple(token_times_s[0] - arrival_s for arrival_s, token_times_s in times),
            itl_s=tuple(
                tuple(later - earlier for earlier, later in pairwise(token_times_s))
                for token_times_s in result["times_s"]
            ),
            tokens=tuple(map(tuple, result["tokens"])),
            gaps=tuple(map(tuple, result["gaps"])),
            preemptions=executed,
            recomputed_tokens=result["recomputed_tokens"],
            moved_bytes=_total(stats, "copy_bytes") + result.get("offloaded_bytes", 0),
            cpu_s=result.get("cpu_s", 0.0),
            arrival_s=tuple(result["arrival_s"]),
            requests=tuple(requests),
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets that a request must meet to count towards goodput."""

    ttft_s: float
    itl_s: float
    """Target for the request's mean time between tokens."""

    def met_by(self, ttft_s: float, itl_s: Sequence[float]) -> bool:
        return ttft_s <= self.ttft_s and (not itl_s or sum(itl_s) / len(itl_s) <= self.itl_s)


def _total(stats: Mapping[str, float], name: str, label: str = "") -> int:
    keys = [key for key in stats if key.split("|")[0] == name and (not label or label in key.split("|"))]
    return round(sum(stats[key] for key in keys))


class Arms:
    """The arms and their engines. A context manager; an arm's engine starts when the arm is added.

    Arms that differ only in policy share one engine. Between workloads it changes policy, or the plugin is switched off
    (:mod:`kvpolicy_vllm.bench.plugin_switch`). Two processes of the same program can differ by several percent in speed
    for as long as they live, which must not appear as a difference between policies.
    """

    def __init__(self, settings: Settings, logs: Path | None = None) -> None:
        self.settings = settings
        self._logs = logs
        self._stack = ExitStack()
        self._arms: dict[str, Arm] = {}
        self._engines: dict[Arm, EngineProcess] = {}
        self._started = 0

    def start(self, *arms: Arm) -> None:
        """Start these arms' engines. The processes load concurrently, the engines start one after the other."""
        to_start: dict[Arm, Arm] = {}
        for arm in arms:
            if arm.name in self._arms:
                raise ValueError(f"arm {arm.name} exists already")
            self._arms[arm.name] = arm
            if arm.engine in to_start and arm.policy is not None:
                to_start[arm.engine] = arm
            if arm.engine not in self._engines:
                log = None if self._logs is None else self._logs / f"{self._started}-{_file_name(arm.name)}.log"
                self._started += 1
                self._engines[arm.engine] = self._stack.enter_context(EngineProcess(SERVING, log))
                to_start[arm.engine] = arm
        for engine, arm in to_start.items():
            self._engines[engine].ask({"do": "start", "engine": self.settings.arguments() | arm.arguments()})

    def stop(self, *names: str) -> None:
        """Remove arms, and stop the engines that no other arm uses."""
        stopped = {self._arms.pop(name).engine for name in names if name in self._arms}
        for engine in stopped - {arm.engine for arm in self._arms.values()}:
            self._engines.pop(engine).close()

    def pid(self, name: str) -> int:
        """Process id of an arm's engine."""
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
        progress: ProgressCallback | None = None,
        device_blocks: int | None = None,
    ) -> Run:
        """Serve a workload by the clock: each request arrives at its ``arrival_s``, with its priority, and, where the
        arm has the plugin, its class and deadlines. Prompts are drawn from the workload's seed, so every arm gets the
        same; they share no prefixes. Raises InputError for requests that wait for others.

        ``gaps``: whether to record log-probability gaps. ``progress``: called with the progress.
        ``device_blocks``: how many of the engine's KV blocks are used; None uses all.
        """
        arm = self._arms[name]
        _refuse_waiting(workload)
        job = {
            "do": "serve",
            "requests": [
                [request.arrival_s, request.prompt_tokens, request.output_tokens] for request in workload.requests
            ],
            "priorities": [request.priority for request in workload.requests],
            "transfer_params": [
                None if arm.policy is None else transfer_params(request) for request in workload.requests
            ],
            "seed": workload.seed,
            "gaps": gaps,
            "policy": arm.policy,
            "device_blocks": device_blocks,
        }

        def news(values: dict[str, Any]) -> None:
            if progress is not None:
                progress(name, values["tokens"], workload.output_tokens)

        return Run.of(name, block, self._engines[arm.engine].ask(job, news), workload.requests)

    def __enter__(self) -> Arms:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


def _refuse_waiting(workload: Workload) -> None:
    """Raise InputError for requests whose arrival depends on the end of others."""
    for number, request in enumerate(workload.requests):
        if request.think_s is not None or request.loop is not None:
            raise InputError(
                f"workload {workload.name}, request {number}: waits for others to end, in a session or a closed loop; "
                "live engines are driven by the clock: give requests their own times"
            )


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


def alternate(
    arms: Arms,
    names: Sequence[str],
    workloads: Iterable[Workload],
    rng: random.Random,
    progress: ProgressCallback | None = None,
) -> list[Run]:
    """Serve each workload, a block, by all arms before the next one, in random order within the block."""
    return [
        arms.serve(name, workload, block, progress=progress)
        for block, workload in enumerate(workloads)
        for name in rng.sample(list(names), len(names))
    ]


def summary(runs: Sequence[Run], targets: Targets) -> dict[str, Any]:
    """Summary of one arm over its blocks, as in demo.json. Latencies are pooled over all requests and tokens.

    The targets are the deadlines of requests that bring none.
    """
    makespan_s = sum(run.makespan_s for run in runs)
    slo = Slo(targets.ttft_s, targets.itl_s)
    whole = service(runs, slo).to_dict()
    return {
        "throughput_tok_s": sum(run.output_tokens for run in runs) / makespan_s,
        "goodput": sum(run.goodput(targets) * run.makespan_s for run in runs) / makespan_s,
        "ttft_s": mean_and_percentiles([ttft_s for run in runs for ttft_s in run.ttft_s]),
        "itl_s": mean_and_percentiles([itl_s for run in runs for request in run.itl_s for itl_s in request]),
        "preemptions": {kind: sum(run.preemptions[kind] for run in runs) for kind in KINDS},
        "recomputed_tokens": sum(run.recomputed_tokens for run in runs),
        "moved_bytes": sum(run.moved_bytes for run in runs),
        "runs": len(runs),
        **{name: whole[name] for name in ("e2e_s", "longest_gap_s", "e2e_per_token_s", "fairness")},
        "classes": {name: told.to_dict() for name, told in service_by_class(runs, slo).items()},
    }


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs by arm, in the order of blocks. Raises ValueError where an arm misses a block or has it twice."""
    runs_by_arm: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.block):
        runs_by_arm.setdefault(run.arm, []).append(run)
    blocks = {arm: [run.block for run in arm_runs] for arm, arm_runs in runs_by_arm.items()}
    expected = next(iter(blocks.values()), [])
    for arm, arm_runs in blocks.items():
        if arm_runs != expected or len(set(arm_runs)) < len(arm_runs):
            raise ValueError(
                f"arm {arm} has blocks {arm_runs}, others have {expected}: only whole blocks can be compared"
            )
    return runs_by_arm


def throughput_ratio(above: Sequence[Run], below: Sequence[Run], rng: random.Random) -> Ratio:
    """Throughput of one arm over another's, paired by block."""
    return bootstrap_ratio([run.throughput_tok_s for run in above], [run.throughput_tok_s for run in below], rng)


def ttft_ratio(above: Sequence[Run], below: Sequence[Run], rng: random.Random) -> Ratio:
    """Mean time to first token of one arm over another's, paired by block; below 1 is faster."""
    means = [[sum(run.ttft_s) / len(run.ttft_s) for run in runs] for runs in (above, below)]
    return bootstrap_ratio(means[0], means[1], rng)
