"""gpu-overload: the same overload through vLLM, its own offloading and the plugin's policies, at several memory limits.

Lengths are drawn from a published workload's quantiles. The arms' engines live side by side; a piece is one block of
requests at one limit through all arms, in an order that is drawn; the blocks that a limit takes away are held out of
play, so no engine is started anew. Ratios are paired by block, with 95% bootstrap intervals.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.geometries import EIGHT_B, TINY, Geometry, write_model
from benchmarks.gpu.pieces import Done, Piece, read_part, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy.cost.dataset import measured
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once
from kvpolicy_vllm.bench.engine import EngineFailed
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Run, Settings
from kvpolicy_vllm.bench.ratios import FEWEST_BLOCKS, mean_and_percentiles, paired_ratio
from kvpolicy_vllm.plugin.settings import GIB

NATIVE, SIMPLE = "vllm-offloading", "vllm-simple-offload"
SWAP, THRESHOLD, LEARNED = "always-swap", "threshold", "learned"
CONNECTORS = {NATIVE: "OffloadingConnector", SIMPLE: "SimpleCPUOffloadConnector"}
UNCOUNTED = (SIMPLE,)
"""Arms whose moved bytes nobody counts."""
SHARES = (0.4, 0.25, 0.6)
"""Memory, as a share of what all requests of a block take at their longest."""
ITL_FACTOR = 1.25
TARGETS = "targets"
ROUNDED_S = 1e-4


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


def scale_of(place: Place) -> Scale:
    if place.on_cpu or place.tiny:
        return Scale(TINY, 16, 384, 32, 2, 16, 2048, 4.0)
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

    def workload(self, block: int) -> Workload:
        scale = self.scale
        return all_at_once(DEEPSEEK_R1, scale.requests, self.seed + block, scale.context_tokens)

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
        found = [Piece(TARGETS, 30 + 2 * self.scale.serve_s, lambda left_s: self.targets())]
        seconds = len(self.names) * self.scale.serve_s
        for block in range(self.scale.blocks):
            found += [
                Piece(f"limit{round(100 * share)}-block{block}", seconds, self.cell(share, block)) for share in SHARES
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
            "from": "the first block with memory for all: 99th percentile of times to first token, "
            f"{ITL_FACTOR:g} times the mean time between tokens",
        }

    def cell(self, share: float, block: int) -> Callable[[float], dict[str, Any]]:
        def do(left_s: float) -> dict[str, Any]:
            self.start()
            present = [name for name in self.names if name in self._arms.names]
            order = random.Random(f"{self.seed}/{share}/{block}").sample(present, len(present))
            blocks = self.device_blocks(share)
            runs = [self._serve(name, block, blocks) for name in order]
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
            raise RuntimeError("an engine of this call hangs; what is left is for the next call")
        if self._started:
            return
        self._started = True
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
                self.refused[name] = reason(str(error))
                self._arms.stop(name)
                print(f"    {name} does not start here: {self.refused[name]}", flush=True)
        for name in self._arms.names:  # whatever an engine does only once; not counted
            self._serve(name, -1, self.device_blocks(max(SHARES)))

    def _serve(self, name: str, block: int, device_blocks: int) -> Run:
        """An engine that was left in the middle of a workload would answer the next question with the last one's."""
        try:
            return self._arms.serve(name, self.workload(block), block, device_blocks=device_blocks)
        except TimeoutError:
            self._hangs = True
            raise


def reason(said: str) -> str:
    """The last line of an engine's end that names an error."""
    lines = [line.strip() for line in said.splitlines() if "Error" in line]
    return lines[-1] if lines else said.splitlines()[-1]


def kept(run: Run) -> dict[str, Any]:
    """A run without its tokens. Times between tokens are counted by tenths of a millisecond: there are very many."""
    gaps = [gap for request in run.itl_s for gap in request]
    return {
        "makespan_s": run.makespan_s,
        "output_tokens": run.output_tokens,
        "ttft_s": [round(one, 6) for one in run.ttft_s],
        "mean_itl_s": [round(sum(request) / len(request), 6) if request else 0.0 for request in run.itl_s],
        "itl_counts": dict(sorted(Counter(round(gap / ROUNDED_S) for gap in gaps).items())),
        "itl_p99_s": mean_and_percentiles(gaps)["p99"],
        "preemptions": dict(run.preemptions),
        "recomputed_tokens": run.recomputed_tokens,
        "moved_bytes": None if run.arm in UNCOUNTED else run.moved_bytes,
    }


def goodput(run: dict[str, Any], targets: dict[str, Any]) -> float:
    """Requests a second that met both targets."""
    pairs = zip(run["ttft_s"], run["mean_itl_s"], strict=True)
    return sum(a <= targets["ttft_s"] and b <= targets["itl_s"] for a, b in pairs) / run["makespan_s"]


def figures(run: dict[str, Any], targets: dict[str, Any]) -> dict[str, float]:
    return {
        "throughput_tok_s": run["output_tokens"] / run["makespan_s"],
        "goodput_req_s": goodput(run, targets),
        "ttft_mean_s": sum(run["ttft_s"]) / len(run["ttft_s"]),
        "itl_p99_s": run["itl_p99_s"],
    }


def best_threshold(trace: Path) -> str:
    """The policy name of the threshold under which the states of a profile cost least together."""
    states = [(one.computed_tokens, one.mean_s["recompute"], one.mean_s["swap"]) for one in measured([trace]).states]
    edges = [0, *sorted({round(tokens) for tokens, _, _ in states}), 10**6]

    def cost_s(edge: int) -> float:
        return sum(swap if tokens >= edge else recompute for tokens, recompute, swap in states)

    return f"threshold:{min(edges, key=cost_s)}"


def summarised(results: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """By limit and arm: means over blocks, sums of what was counted, and the ratios of every arm to every other one."""
    targets = results[TARGETS]
    cells: dict[float, list[dict[str, Any]]] = {}
    for name, result in results.items():
        if name != TARGETS:
            cells.setdefault(result["share"], []).append(result)
    found: dict[str, Any] = {}
    for share, some in sorted(cells.items()):
        names = [name for name in some[0]["arms"] if all(name in one["arms"] for one in some)]
        by_arm = {name: [figures(one["arms"][name], targets) for one in some] for name in names}
        found[f"{share:g}"] = {
            "blocks": len(some),
            "device_blocks": some[0]["device_blocks"],
            "arms": {name: _arm(by_arm[name], [one["arms"][name] for one in some]) for name in names},
            "ratios": _ratios(by_arm, random.Random(f"{seed}/bootstrap/{share}")),
        }
    return found


def _arm(rows: list[dict[str, float]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    moved = [run["moved_bytes"] for run in runs]
    return means | {
        "swapped": sum(run["preemptions"]["swap"] for run in runs),
        "recomputed": sum(run["preemptions"]["recompute"] for run in runs),
        "recomputed_tokens": sum(run["recomputed_tokens"] for run in runs),
        "moved_bytes": None if None in moved else sum(moved),
    }


def _ratios(by_arm: dict[str, list[dict[str, float]]], rng: random.Random) -> dict[str, Any]:
    """Of one arm over another; only where both are above 0 in every block, and there are blocks enough."""
    found: dict[str, Any] = {}
    for above in by_arm:
        for below in by_arm:
            for key in by_arm[above][0]:
                pair = [[row[key] for row in by_arm[name]] for name in (above, below)]
                if above != below and len(pair[0]) >= FEWEST_BLOCKS and min(map(min, pair)) > 0:
                    found[f"{key} {above} / {below}"] = paired_ratio(pair[0], pair[1], rng, resamples=2000).to_dict()
    return found


def show(console: Console, place: Place, summary: dict[str, Any]) -> None:
    table = Table(title=f"gpu-overload on {place.text()}")
    for name in ("limit", "arm", "tok/s", "goodput", "ttft s", "itl p99 s", "swapped", "recomp.", "tokens again", "MB"):
        table.add_column(name)
    table.add_column("throughput over vllm")
    for share, found in summary.items():
        for name, one in found["arms"].items():
            ratio = found["ratios"].get(f"throughput_tok_s {name} / {STOCK}")
            table.add_row(
                share, name, f"{one['throughput_tok_s']:.1f}", f"{one['goodput_req_s']:.2f}",
                f"{one['ttft_mean_s']:.3f}", f"{one['itl_p99_s']:.4f}", str(one["swapped"]), str(one["recomputed"]),
                str(one["recomputed_tokens"]), "?" if one["moved_bytes"] is None else f"{one['moved_bytes'] / 1e6:.0f}",
                "" if ratio is None else f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
            )  # fmt: skip
    console.print(table)


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
