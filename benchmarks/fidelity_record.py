"""Recording real runs for `fidelity.py --real`: vLLM's CPU engine with the plugin, short of memory, several policies.

A session is one engine process. It serves blocks: every workload under every policy, in an order that is drawn. The
first half of its blocks is for calibration, the second is held out; both are drawn from seeds of their own.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy.request_marks import Hints
from kvpolicy.workload import (
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    SHAREGPT,
    Lengths,
    Request,
    Workload,
    all_at_once,
    random_arrivals,
)
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.overload import Arm, Arms, Run, Settings
from kvpolicy_vllm.bench.progress import Bar
from kvpolicy_vllm.bench.run_characterize import SHAPE

BLOCK_SIZE, CONTEXT_TOKENS, RUNNING, STEP_TOKENS = 32, 512, 64, 2048
DEVICE_BLOCKS, HOST_GIB = 97, 0.25
POLICIES = ("always-recompute", "always-swap", "threshold:96", "threshold:192", "random:0.5")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of workload: lengths of a public trace, scaled down, and how they arrive."""

    name: str
    lengths: Lengths
    scale: float
    rate_per_s: float | None
    """None: all at once."""
    variation: float = 1.0

    def draw(self, count: int, seed: int) -> Workload:
        workload = all_at_once(self.lengths, count, seed, CONTEXT_TOKENS, self.scale, self.name)
        if self.rate_per_s is None:
            return workload
        return workload.arriving(random_arrivals(count, self.rate_per_s, random.Random(seed), self.variation))


KINDS = (
    Kind("reasoning, all at once", DEEPSEEK_R1, 0.12, None),
    Kind("reasoning, Poisson", DEEPSEEK_R1, 0.12, 25.0),
    Kind("conversation, Poisson", AZURE_CONVERSATION, 0.25, 60.0),
    Kind("chat, bursts", SHAREGPT, 0.08, 60.0, 3.0),
)


@dataclass(frozen=True, slots=True)
class RecordedArm(Arm):
    """An arm whose engine records a trace."""

    trace: str = ""

    def arguments(self) -> dict[str, Any]:
        values_by_name = Arm.arguments(self)
        values_by_name["kv_transfer_config"]["kv_connector_extra_config"]["trace"] = self.trace
        return values_by_name | {"enable_prefix_caching": True}


@dataclass(frozen=True, slots=True)
class Real:
    """One run that was really served."""

    workload: str
    policy: str
    session: int
    block: int
    kept_out: bool
    seed: int
    requests: tuple[Request, ...]
    begin_s: float
    """On the machine's monotonic clock, which the trace's times are on too."""
    end_s: float
    makespan_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[tuple[float, ...], ...]
    preemptions: dict[str, int]
    recomputed_tokens: int
    moved_bytes: int

    @property
    def work(self) -> Workload:
        return Workload(self.workload, self.requests, self.seed)

    @property
    def e2e_s(self) -> list[float]:
        return [first + sum(later) for first, later in zip(self.ttft_s, self.itl_s, strict=True)]

    @property
    def all_itl_s(self) -> list[float]:
        return [gap for later in self.itl_s for gap in later]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Real:
        lists = {
            "requests": tuple(
                Request(**request | {"hints": Hints(**request.get("hints", {}))}) for request in values["requests"]
            ),
            "ttft_s": tuple(values["ttft_s"]),
            "itl_s": tuple(tuple(gaps) for gaps in values["itl_s"]),
        }
        return cls(**values | lists)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much one session serves."""

    requests: int = 40
    blocks: int = 2
    """Even: the first half is for calibration."""
    kinds: tuple[Kind, ...] = KINDS
    policies: tuple[str, ...] = POLICIES


def record(out: Path, session: int, extent: Extent, llm: Path | None) -> None:
    """Serve one session and write ``out/session-N``. Raises ValueError for an odd number of blocks."""
    if extent.blocks % 2 or extent.blocks < 2:
        raise ValueError(f"{extent.blocks} blocks: should be an even number, half of them are kept out")
    folder = out / f"session-{session}"
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", folder / "preparing.log") as process:
        job = {"llm": llm and str(llm), "make": str(out / "llm"), "seed": 0, "shape": SHAPE}
        answer = process.ask(job)
    settings = Settings(
        answer["llm"], not answer["device"], DEVICE_BLOCKS, BLOCK_SIZE, CONTEXT_TOKENS, RUNNING, STEP_TOKENS
    )
    arms = [
        RecordedArm(policy, policy, None, HOST_GIB, session, trace=str(folder / "trace")) for policy in extent.policies
    ]
    runs = []
    with Arms(settings, folder) as engines, Bar("runs") as bar:
        engines.start(*arms)
        engines.serve(extent.policies[0], extent.kinds[0].draw(8, 0), -1)  # warm up
        jobs = list(_jobs(session, extent))
        for number, (kind, policy, block, seed) in enumerate(jobs):
            bar.tell(f"{kind.name}, {policy}", number, len(jobs))
            work = kind.draw(extent.requests, seed)
            begin_s = time.monotonic()
            run = engines.serve(policy, work, block)
            runs.append(_real(run, work, session, block >= extent.blocks // 2, begin_s, time.monotonic()))
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))


def _jobs(session: int, extent: Extent) -> Iterator[tuple[Kind, str, int, int]]:
    rng = random.Random(f"order {session}")
    for block in range(extent.blocks):
        for place, kind in enumerate(rng.sample(extent.kinds, len(extent.kinds))):
            seed = (session * 1000 + block) * 100 + place
            for policy in rng.sample(extent.policies, len(extent.policies)):
                yield kind, policy, block, seed


def _real(run: Run, work: Workload, session: int, kept_out: bool, begin_s: float, end_s: float) -> Real:
    return Real(
        work.name, run.arm, session, run.block, kept_out, work.seed, work.requests, begin_s, end_s, run.makespan_s,
        run.ttft_s, run.itl_s, dict(run.preemptions), run.recomputed_tokens, run.moved_bytes,
    )  # fmt: skip


def recorded_runs(out: Path) -> list[Real]:
    """All runs of all sessions. Raises ValueError where there is none."""
    runs: list[Real] = []
    for path in sorted(out.glob("session-*/runs.json")):
        runs += [Real.from_dict(values) for values in json.loads(path.read_text())]
    if not runs:
        raise ValueError(f"{out}: no session-*/runs.json inside; record some first")
    return runs
