"""gpu-overload: the same overload through vLLM, its own offloading and the plugin's policies, at several memory limits.

Lengths are drawn from a published workload's quantiles. The arms' engines live side by side; a piece is one block of
requests at one limit through all arms, in an order that is drawn; the blocks that a limit takes away are held out of
play, so no engine is restarted. Ratios are paired by block, with 95% bootstrap intervals.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import leftovers
from benchmarks.gpu.geometries import EIGHT_B, TINY, Geometry, write_model
from benchmarks.gpu.overload_summary import SIMPLE, TARGETS, run_figures, show, summary_of
from benchmarks.gpu.pieces import Done, Piece, exit_status_of, read_part, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy.datasets.profiles import read_dataset
from kvpolicy.datasets.threshold import best_threshold
from kvpolicy.errors import EngineFailed
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.hardware.sheets import SheetError, device_sheet
from kvpolicy.settings import GIB
from kvpolicy.stats import mean_and_percentiles
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once, scale_to
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Run, Settings

NATIVE = "vllm-offloading"
SWAP, THRESHOLD, LEARNED = "always-swap", "threshold", "learned"
CONNECTORS = {NATIVE: "OffloadingConnector", SIMPLE: "SimpleCPUOffloadConnector"}
SHARES = (0.25, 0.15, 0.33)
"""Memory, as a share of what all requests of a block take at their longest. The last is the control: hardly anybody
is preempted there, as only so many run at once."""
ITL_FACTOR = 1.25
MAX_HOST_GIB = 8.0
SLOWER = 1.5
"""A pass at a limit is thought to take so many times what stock vLLM takes with memory for all."""
STARTS_S = 400.0
"""What the start of all engines may take at most."""


@dataclass(frozen=True, slots=True)
class ConnectorArm(Arm):
    """vLLM with a connector of its own."""

    connector: str = ""

    def more(self) -> dict[str, Any]:
        """By default 0.24's OffloadingConnector keeps prompts only, and what was decoded is recomputed: here nearly
        all that is lost was decoded, so that it would be left without what it is measured for."""
        return {"offload_prompt_only": False} if self.connector == CONNECTORS[NATIVE] else {}

    def arguments(self) -> dict[str, Any]:
        return {
            "num_gpu_blocks_override": self.device_blocks,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "kv_transfer_config": {
                "kv_connector": self.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": int(self.host_gib * GIB)} | self.more(),
            },
        }


class Deployment(Settings):
    """Dummy weights, and memory on the device for the other engines."""

    def arguments(self) -> dict[str, Any]:
        device = {} if self.on_cpu else {"dtype": "bfloat16", "gpu_memory_utilization": 0.25}
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
    """Estimate of what one arm's pass takes, until the targets' piece has measured it."""
    lengths: float | None = None
    """What the trace's lengths are multiplied by; None: so that nearly all fit the context."""


def scale_of(place: Place) -> Scale:
    if place.on_cpu or place.tiny:
        return Scale(TINY, 16, 384, 32, 2, 16, 2048, 4.0, 0.12)
    return ON_DEVICE


ON_DEVICE = Scale(EIGHT_B, 256, 2048, 16, 6, 128, 8192, 15.0)
"""Three engines of 15 GiB of weights, one of them with 8 GiB of KV cache for all requests, the others with 3, fit an
80 GB device."""


def identity_of(scale: Scale, policies: dict[str, str], names: Sequence[str]) -> dict[str, Any]:
    """What must be the same for two runs to be put into one ratio: what is served, and what each arm's name means. A
    model counts by its contents: a folder's name stays when the model in it is trained again."""
    meant = {name: spec for name, spec in policies.items() if name in names}
    for name, spec in meant.items():
        kind, _, where = spec.partition(":")
        if where and Path(where).is_dir():
            meant[name] = f"{kind}:{digest_of(Path(where))}"
    return {"scale": asdict(scale), "policies": meant, "connectors": CONNECTORS}


def digest_of(folder: Path) -> str:
    """SHA-256 over names and contents of the files of a folder."""
    sha256 = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


class Overload:
    """What the pieces share; engines start with the first piece that needs them."""

    def __init__(
        self, out: Path, place: Place, seed: int, policies: dict[str, str], names: Sequence[str], arms: Arms
    ) -> None:
        self.out, self.place, self.seed, self.policies, self.names = out, place, seed, policies, names
        self.scale = scale_of(place)
        self.identity = identity_of(self.scale, policies, names)
        self.refused: dict[str, str] = {}
        self._arms = arms
        max_gib = 0.5 if place.tiny else MAX_HOST_GIB
        self.host_gib = min(max_gib, 0.3 * available_memory_bytes() / GIB)
        self._started = self._hangs = False

    def workload(self, block: int, share: float = 1.0) -> Workload:
        """The same lengths at every limit, but not the same prompts: an offloading engine would still know them."""
        scale = self.scale
        drawn_workload = all_at_once(
            DEEPSEEK_R1, scale.requests, self.seed + block, scale.context_tokens, scale.lengths
        )
        return replace(drawn_workload, seed=1000 * (drawn_workload.seed + 1) + round(100 * share))

    def device_blocks(self, share: float) -> int:
        """Of the largest block of requests; never less than the longest request needs."""
        size = self.scale.block_size
        most = max(
            sum(math.ceil(request.total_tokens / size) for request in self.workload(block).requests)
            for block in range(self.scale.blocks)
        )
        return max(math.ceil(self.scale.context_tokens / size) + 1, round(share * most)) + 1

    @property
    def enough_blocks(self) -> int:
        return self.device_blocks(1.0) + self.scale.requests

    def pieces(self) -> list[Piece]:
        """Their names carry what they are runs of: with other policies, or at another scale, they are other pieces."""
        whole = json.dumps(self.identity, sort_keys=True).encode()
        scale = json.dumps(self.identity["scale"], sort_keys=True).encode()
        self.targets_name = f"{TARGETS}-{hashlib.sha256(scale).hexdigest()[:6]}"
        planned_pieces = [
            Piece(self.targets_name, 30 + 2 * self.scale.serve_s, lambda left_s: self.targets(), STARTS_S)
        ]
        seconds = len(self.names) * self.scale.serve_s
        mark = hashlib.sha256(whole).hexdigest()[:6]
        for block in range(self.scale.blocks):
            for share in SHARES:
                name = f"limit{round(100 * share)}-block{block}-{mark}"
                planned_pieces.append(Piece(name, seconds, self.cell(share, block), STARTS_S, self.cell_s))
        return planned_pieces

    def cell_s(self) -> float | None:
        """What a pass through all arms takes, judged by the targets' own."""
        targets = read_part(self.out, self.targets_name)
        return None if targets is None else len(self.names) * SLOWER * float(targets["makespan_s"])

    def targets(self) -> dict[str, Any]:
        """What counts as served well: how stock vLLM serves the first block with memory for all."""
        self.start()
        run = self._serve(STOCK, 0, self.enough_blocks)
        ttft_s = mean_and_percentiles(run.ttft_s)
        itl_s = mean_and_percentiles([gap for request in run.itl_s for gap in request])
        return {
            "ttft_s": ttft_s["p99"],
            "itl_s": ITL_FACTOR * itl_s["mean"],
            "makespan_s": run.makespan_s,
            "preemptions": sum(run.preemptions.values()),
            "enough_blocks": self.enough_blocks,
            "workload": self.told(),
            "from": "the first block with memory for all: 99th percentile of times to first token, "
            f"{ITL_FACTOR:g} times the mean time between tokens",
        }

    def told(self) -> dict[str, Any]:
        """What is served."""
        requests = [request for block in range(self.scale.blocks) for request in self.workload(block).requests]
        return {
            "source": DEEPSEEK_R1.source,
            "scale": self.scale.lengths or scale_to(DEEPSEEK_R1, self.scale.context_tokens),
            "requests": self.scale.requests,
            "blocks": self.scale.blocks,
            "arrivals": "all at once",
            "mean_prompt_tokens": sum(request.prompt_tokens for request in requests) / len(requests),
            "mean_output_tokens": sum(request.output_tokens for request in requests) / len(requests),
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
                "policies": self.identity["policies"],
                "host_gib": self.host_gib,
                "arms": {run.arm: run_figures(run) for run in runs},
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
        host_gib = self.host_gib
        ours = [Arm(STOCK, None, host_gib=host_gib)]
        ours += [Arm(name, spec, host_gib=host_gib) for name, spec in self.policies.items() if name in self.names]
        self._arms.start(*ours)
        for name, connector in CONNECTORS.items():
            if name not in self.names:
                continue
            most = self.device_blocks(max(SHARES))
            try:
                self._arms.start(ConnectorArm(name, None, None, host_gib, 0, most, connector))
                leftovers.note(self.out, self._arms.pid(name))
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


def reason(output: str) -> str:
    """The last line of an engine's end that names an error."""
    lines = [line.strip() for line in output.splitlines() if "Error" in line]
    return lines[-1] if lines else output.splitlines()[-1]


def policies_of(place: Place, profile: Path, geometry: Geometry, say: Callable[[str], None]) -> dict[str, str]:
    """Arms of the plugin. Without a model from gpu-profile the analytic one stands in, where there is a sheet of the
    device, and there is no threshold."""
    name = f"{place.short_name}-{geometry.name}"
    trace, model = profile / "traces" / name, profile / "models" / name
    if not (model / "model.json").exists():
        try:
            device_sheet(place.device)
        except SheetError as error:  # the one engine of all our arms would not start for it
            say(f"no cost model in {model}: neither {LEARNED} nor {THRESHOLD}. {error}")
            return {SWAP: SWAP}
        say(f"no cost model in {model}: {LEARNED} is cheapest:analytic, and there is no best threshold")
        return {SWAP: SWAP, LEARNED: "cheapest:analytic"}
    threshold = best_threshold(read_dataset([trace]).states).policy
    return {SWAP: SWAP, THRESHOLD: threshold, LEARNED: f"cheapest:{model.resolve()}"}


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
        if removed := leftovers.remove(options.out):
            say(f"removed from {leftovers.SHARED}, left there by engines of an earlier call: {' '.join(removed)}")
        pieces = work.pieces()
        done = run_pieces(options.out, at, chosen(pieces, options), options.minutes, say)
    summary = report(options.out, place, done, pieces, options.seed)
    write_json(options.out / "overload.json", {"place": at, **work.identity, **summary})
    return 1 if done.failed else 3 if done.left else 0


def report(out: Path, place: Place, done: Done, pieces: list[Piece], seed: int) -> dict[str, Any]:
    parts = {piece.name: read_part(out, piece.name) for piece in pieces}
    results = {name: part for name, part in parts.items() if part is not None}
    if pieces[0].name in results:
        results = {TARGETS: results.pop(pieces[0].name), **results}
    if TARGETS not in results:
        return {"failed": done.failed, "left": list(done.left), "limits": {}}
    limits = summary_of(results, seed)
    show(Console(width=170), place, limits)
    refused = {name: why for result in results.values() for name, why in result.get("refused", {}).items()}
    for name, why in refused.items():
        print(f"{name} is missing, the engine refuses it: {why}")
    remarks = {"refused": refused, "failed": done.failed, "left": list(done.left)}
    return {"targets": results[TARGETS], "limits": limits} | remarks


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
