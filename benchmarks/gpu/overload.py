"""gpu-overload: the same overload through vLLM, its own offloading and the plugin's policies, at several memory limits.

Lengths are drawn from a published workload's quantiles. The arms' engines live side by side; a piece is one block of
requests at one limit through all arms, in an order that is drawn; the blocks that a limit takes away are held out of
play, so no engine is started anew. Ratios are paired by block, with 95% bootstrap intervals.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.geometries import EIGHT_B, TINY, Geometry, write_model
from benchmarks.gpu.overload_summary import SIMPLE, TARGETS, kept, show, summarised
from benchmarks.gpu.pieces import Done, Piece, read_part, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy.cost.dataset import measured
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once, scale_to
from kvpolicy_vllm.bench.engine import EngineFailed
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Run, Settings
from kvpolicy_vllm.bench.ratios import mean_and_percentiles
from kvpolicy_vllm.plugin.settings import GIB

NATIVE = "vllm-offloading"
SWAP, THRESHOLD, LEARNED = "always-swap", "threshold", "learned"
CONNECTORS = {NATIVE: "OffloadingConnector", SIMPLE: "SimpleCPUOffloadConnector"}
SHARES = (0.4, 0.25, 0.6)
"""Memory, as a share of what all requests of a block take at their longest."""
ITL_FACTOR = 1.25
STARTS_S = 400.0
"""What the start of all engines may take at most."""


@dataclass(frozen=True, slots=True)
class ConnectorArm(Arm):
    """vLLM with a connector of its own."""

    connector: str = ""

    def arguments(self) -> dict[str, Any]:
        return {
            "num_gpu_blocks_override": self.device_blocks,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "kv_transfer_config": {
                "kv_connector": self.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": int(self.host_gib * GIB)},
            },
        }


class Deployment(Settings):
    """Dummy weights, and room on the device for the other engines."""

    def arguments(self) -> dict[str, Any]:
        device = {} if self.on_cpu else {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
        return Settings.arguments(self) | device | {"load_format": "dummy", "seed": 0, "enable_prefix_caching": True}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is served."""

    geometry: Geometry
    requests: int
    context_tokens: int
    block_size: int
    blocks: int
    running: int
    step_tokens: int
    serve_s: float
    """What one arm's pass is thought to take."""
    lengths: float | None = None
    """What the trace's lengths are multiplied by; None: so that nearly all fit the context."""


def scale_of(place: Place) -> Scale:
    if place.on_cpu or place.tiny:
        return Scale(TINY, 16, 384, 32, 2, 16, 2048, 4.0, 0.12)
    roomy = place.memory_bytes is not None and place.memory_bytes > 100e9
    return Scale(EIGHT_B, 128 if roomy else 72, 8192, 16, 6, 128, 8192, 12.0)


class Overload:
    """What the pieces share; engines start with the first piece that needs them."""

    def __init__(
        self, out: Path, place: Place, seed: int, policies: dict[str, str], names: Sequence[str], arms: Arms
    ) -> None:
        self.out, self.place, self.seed, self.policies, self.names = out, place, seed, policies, names
        self.scale = scale_of(place)
        self.refused: dict[str, str] = {}
        self._arms = arms
        self._started = self._hangs = False

    def workload(self, block: int, share: float = 1.0) -> Workload:
        """The same lengths at every limit, but not the same prompts: an offloading engine would still know them."""
        scale = self.scale
        made = all_at_once(DEEPSEEK_R1, scale.requests, self.seed + block, scale.context_tokens, scale.lengths)
        return replace(made, seed=1000 * (made.seed + 1) + round(100 * share))

    def device_blocks(self, share: float) -> int:
        """Of the largest block of requests; never less than the longest request needs."""
        size = self.scale.block_size
        most = max(
            sum(math.ceil(one.total_tokens / size) for one in self.workload(block).requests)
            for block in range(self.scale.blocks)
        )
        return max(math.ceil(self.scale.context_tokens / size) + 1, round(share * most)) + 1

    @property
    def enough_blocks(self) -> int:
        return self.device_blocks(1.0) + self.scale.requests

    def pieces(self) -> list[Piece]:
        found = [Piece(TARGETS, 30 + 2 * self.scale.serve_s, lambda left_s: self.targets(), STARTS_S)]
        seconds = len(self.names) * self.scale.serve_s
        for block in range(self.scale.blocks):
            found += [
                Piece(f"limit{round(100 * share)}-block{block}", seconds, self.cell(share, block), STARTS_S)
                for share in SHARES
            ]
        return found

    def targets(self) -> dict[str, Any]:
        """What counts as served well: how stock vLLM serves the first block with memory for all."""
        self.start()
        run = self._serve(STOCK, 0, self.enough_blocks)
        ttft_s = mean_and_percentiles(run.ttft_s)
        itl_s = mean_and_percentiles([gap for request in run.itl_s for gap in request])
        return {
            "ttft_s": ttft_s["p99"],
            "itl_s": ITL_FACTOR * itl_s["mean"],
            "preemptions": sum(run.preemptions.values()),
            "enough_blocks": self.enough_blocks,
            "workload": self.told(),
            "from": "the first block with memory for all: 99th percentile of times to first token, "
            f"{ITL_FACTOR:g} times the mean time between tokens",
        }

    def told(self) -> dict[str, Any]:
        """What is served."""
        requests = [one for block in range(self.scale.blocks) for one in self.workload(block).requests]
        return {
            "source": DEEPSEEK_R1.source,
            "scale": self.scale.lengths or scale_to(DEEPSEEK_R1, self.scale.context_tokens),
            "requests": self.scale.requests,
            "blocks": self.scale.blocks,
            "arrivals": "all at once",
            "mean_prompt_tokens": sum(one.prompt_tokens for one in requests) / len(requests),
            "mean_output_tokens": sum(one.output_tokens for one in requests) / len(requests),
            "context_tokens": self.scale.context_tokens,
        }

    def cell(self, share: float, block: int) -> Callable[[float], dict[str, Any]]:
        def do(left_s: float) -> dict[str, Any]:
            self.start()
            present = [name for name in self.names if name in self._arms.names]
            order = random.Random(f"{self.seed}/{share}/{block}").sample(present, len(present))
            blocks = self.device_blocks(share)
            runs = []
            for name in order:
                try:
                    runs.append(self._serve(name, block, blocks, share))
                except EngineFailed as error:
                    if name not in CONNECTORS:
                        raise
                    self._leave_out(name, error)
            return {
                "share": share,
                "block": block,
                "device_blocks": blocks,
                "order": order,
                "refused": self.refused,
                "policies": self.policies,
                "arms": {run.arm: kept(run) for run in runs},
            }

        return do

    def start(self) -> None:
        """The plugin's engine, with which stock vLLM shares a process, and one for each of vLLM's own connectors."""
        if self._hangs:
            raise RuntimeError("an engine of this call hangs, or did not start; what is left is for the next call")
        if self._started:
            return
        self._started = True
        try:
            self._start()
        except (TimeoutError, EngineFailed):
            self._hangs = True
            raise

    def _start(self) -> None:
        host_gib = min(0.5 if self.place.tiny else 24.0, 0.3 * available_memory_bytes() / GIB)
        ours = [Arm(STOCK, None, host_gib=host_gib)]
        ours += [Arm(name, spec, host_gib=host_gib) for name, spec in self.policies.items() if name in self.names]
        self._arms.start(*ours)
        for name, connector in CONNECTORS.items():
            if name not in self.names:
                continue
            most = self.device_blocks(max(SHARES))
            try:
                self._arms.start(ConnectorArm(name, None, None, host_gib, 0, most, connector))
            except EngineFailed as error:
                self._leave_out(name, error)
        for name in self._arms.names:  # whatever an engine does only once; not counted
            self._serve(name, -1, self.device_blocks(max(SHARES)))

    def _leave_out(self, name: str, error: EngineFailed) -> None:
        """An engine of vLLM's own that fails: the others go on without it."""
        self.refused[name] = reason(str(error))
        self._arms.stop(name)
        print(f"    {name} is left out: {self.refused[name]}", flush=True)

    def _serve(self, name: str, block: int, device_blocks: int, share: float = 1.0) -> Run:
        """An engine that was left in the middle of a workload would answer the next question with the last one's."""
        try:
            return self._arms.serve(name, self.workload(block, share), block, device_blocks=device_blocks)
        except TimeoutError:
            self._hangs = True
            raise


def reason(said: str) -> str:
    """The last line of an engine's end that names an error."""
    lines = [line.strip() for line in said.splitlines() if "Error" in line]
    return lines[-1] if lines else said.splitlines()[-1]


def best_threshold(trace: Path) -> str:
    """The policy name of the threshold under which the states of a profile cost least together."""
    states = [(one.computed_tokens, one.mean_s["recompute"], one.mean_s["swap"]) for one in measured([trace]).states]
    edges = [0, *sorted({round(tokens) for tokens, _, _ in states}), 10**6]

    def cost_s(edge: int) -> float:
        return sum(swap if tokens >= edge else recompute for tokens, recompute, swap in states)

    return f"threshold:{min(edges, key=cost_s)}"


def policies_of(place: Place, profile: Path, geometry: Geometry, say: Callable[[str], None]) -> dict[str, str]:
    """Arms of the plugin. Without a model from gpu-profile the analytic one stands in, and there is no threshold."""
    name = f"{place.short_name}-{geometry.name}"
    trace, model = profile / "traces" / name, profile / "models" / name
    if not (model / "model.json").exists():
        say(f"no cost model in {model}: {LEARNED} is cheapest:analytic, and there is no best threshold")
        return {SWAP: SWAP, LEARNED: "cheapest:analytic"}
    return {SWAP: SWAP, THRESHOLD: best_threshold(trace), LEARNED: f"cheapest:{model.resolve()}"}


def main(say: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    parser = arguments("overload", __doc__.split("\n")[0])
    parser.add_argument("--profile", type=Path, default=Path("out/gpu/profile"), help="what gpu-profile wrote")
    parser.add_argument("--arms", help=f"by commas, of {STOCK},{NATIVE},{SIMPLE},{SWAP},{THRESHOLD},{LEARNED}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = find_place(options.scale)
    say(place.text())
    scale = scale_of(place)
    policies = policies_of(place, options.profile, scale.geometry, say)
    known = [STOCK, *CONNECTORS, *policies]
    names = options.arms.split(",") if options.arms else known
    if wrong := [name for name in names if name not in known]:
        parser.error(f"--arms {wrong[0]}: there are {', '.join(known)}")
    llm = write_model(options.out / "llm", scale.geometry, "float32" if place.on_cpu else "bfloat16")
    probe = Overload(options.out, place, options.seed, policies, names, Arms(Deployment(str(llm), place.on_cpu, 2)))
    settings = Deployment(
        str(llm), place.on_cpu, probe.enough_blocks, scale.block_size, scale.context_tokens, scale.running,
        scale.step_tokens,
    )  # fmt: skip
    with Arms(settings, options.out / "logs") as arms:
        work = Overload(options.out, place, options.seed, policies, names, arms)
        at = place.to_dict() | {"arms": names}
        pieces = work.pieces()
        done = run_pieces(options.out, at, chosen(pieces, options), options.minutes, say)
    summary = report(options.out, place, done, pieces, options.seed)
    write_json(options.out / "overload.json", {"place": at, "policies": policies, **summary})
    return 1 if done.failed else 3 if done.left else 0


def report(out: Path, place: Place, done: Done, pieces: list[Piece], seed: int) -> dict[str, Any]:
    results = {piece.name: found for piece in pieces if (found := read_part(out, piece.name)) is not None}
    if TARGETS not in results:
        return {"failed": done.failed, "left": list(done.left), "limits": {}}
    limits = summarised(results, seed)
    show(Console(width=170), place, limits)
    refused = {name: why for result in results.values() for name, why in result.get("refused", {}).items()}
    for name, why in refused.items():
        print(f"{name} is missing, the engine refuses it: {why}")
    told = {"refused": refused, "failed": done.failed, "left": list(done.left)}
    return {"targets": results[TARGETS], "limits": limits} | told


if __name__ == "__main__":
    sys.exit(main())
