"""How fast the plugin's copiers move blocks: the share of one large copy's bandwidth that they reach, by block size.

    python benchmarks/swap_bandwidth.py [--tokens N] [--block-size N] [--turns N] [--seed N] [--json FILE]

On a CUDA device where torch sees one (``make gpu-swap`` measures there in resumable pieces, page-locked and pageable),
else on the CPU. Memory has the shape of an 8B model's KV cache: 32 layers, 8 KV heads, blocks outermost, keys and
values of a block together. The large copy has as many bytes and runs in the same process, in turn with the copiers, in
random order within each turn. Ratios are of times, paired by turn, with 95% intervals; 1 is as fast as the large copy.
Times are the caller's, from the call until the device is done. Every block is compared after its way there and back.

``coalesced``: blocks follow each other on the device and on the host. ``scattered``: both at random, as in an old pool.
``as they lie`` is the plugin's copier, ``staged`` the one that gathers blocks in a buffer first. ``two passes`` is an
assignment by index, which gathers into a temporary tensor; the plugin copied so on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu.geometries import EIGHT_B, Geometry
from benchmarks.gpu.intervals import interval_text, ratio_of
from kvpolicy.study.report import aligned
from kvpolicy_vllm.plugin.copiers.base import Copier, unique_segments
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.staging import StagedCopier
from kvpolicy_vllm.plugin.messages import Job

BLOCK_SIZES = (16, 32, 64, 128, 256)
DIRECTIONS = ("save", "load")
ORDERS = ("coalesced", "scattered")
LARGE, DIRECT, STAGED, TWICE = "large", "as they lie", "staged", "two passes"
WARM_TURNS = 2
"""For what happens only once, such as the first touch of memory."""

Seconds = dict[str, dict[str, list[tuple[float, float]]]]
"""By way and direction, of each turn: until it was done, and until the call returned."""


class TwicePassing(IndexingCopier):
    """Copies by index assignments."""

    def copy_out(self, job: Job, urgent: int) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            host[slots] = device[blocks]

    def copy_in(self, job: Job) -> None:
        blocks, slots = torch.tensor(job.block_ids), torch.tensor(job.slots)
        for device, host in zip(self.device_segments, self.host_segments, strict=True):
            device[blocks] = host[slots]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is copied, and to what memory."""

    block_size: int
    pinned: bool
    tokens: int
    """Copied at once: a victim's length."""
    order: str = "scattered"

    @property
    def name(self) -> str:
        return f"b{self.block_size}-{self.tokens}-{'pinned' if self.pinned else 'pageable'}-{self.order}"


def ways_of(device: torch.device, pinned: bool) -> Mapping[str, type[Copier]]:
    """The plugin never moves pieces between a device and pageable memory as they lie."""
    if device.type == "cpu":
        return {DIRECT: IndexingCopier, STAGED: StagedCopier, TWICE: TwicePassing}
    from kvpolicy_vllm.plugin.copiers.cuda import CudaCopier, StagedCudaCopier

    return {DIRECT: CudaCopier, STAGED: StagedCudaCopier} if pinned else {STAGED: StagedCudaCopier}


class Bench:
    """Memory on the device and on the host, and everything that is timed."""

    def __init__(self, setting: Setting, geometry: Geometry, seed: int, device: torch.device) -> None:
        self._device = device
        self._setting = setting
        self._rng = random.Random(f"{seed}/{setting.name}")
        self.blocks = setting.tokens // setting.block_size
        kept_blocks = 2 * self.blocks + 1
        # As the engine lays it out: blocks outermost, keys and values of a block together, a tensor a layer.
        shape = (kept_blocks, 2, setting.block_size, geometry.kv_heads, geometry.head_dim)
        caches = {
            f"layer.{i}": torch.randint(-99, 99, shape, dtype=torch.int16, device=device)
            for i in range(geometry.layers)
        }
        self.segments = unique_segments(caches, kept_blocks)
        ways = ways_of(device, setting.pinned)
        self.copiers = {name: make(self.segments, kept_blocks, setting.pinned, None) for name, make in ways.items()}
        self.bytes = self.blocks * geometry.kv_token_bytes * setting.block_size
        self._large = torch.zeros(self.bytes, dtype=torch.uint8, device=device)
        self._large_host = torch.zeros(self.bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._copies = 0

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _timed(self, copy: Callable[[], Any]) -> tuple[float, float]:
        """Seconds until it was done, and until the call returned."""
        self._wait()
        start = time.perf_counter()
        copy()
        called = time.perf_counter()
        self._wait()
        return time.perf_counter() - start, called - start

    def large(self, direction: str) -> tuple[float, float]:
        pair = (self._large_host, self._large) if direction == "save" else (self._large, self._large_host)
        return self._timed(lambda: pair[0].copy_(pair[1], non_blocking=True))

    def turn(self, name: str) -> dict[str, tuple[float, float]]:
        """Out and back again. Raises RuntimeError where what came back is not what went out."""
        copier = self.copiers[name]
        self._copies += 1
        blocks, slots = self._places()
        job = Job(self._copies, "bench", tuple(blocks), tuple(slots))
        ids = torch.tensor(blocks, device=self._device)
        before = [segment[ids] for segment in self.segments]
        times = {"save": self._timed(lambda: copier.save(job))}
        for segment in self.segments:
            segment[ids] = 0
        times["load"] = self._timed(lambda: copier.load(job))
        if [done.ok for done in copier.poll()] != [True]:
            raise RuntimeError(f"{name}: the load did not end well: {copier.transfers[-1].error}")
        if not all(torch.equal(segment[ids], was) for segment, was in zip(self.segments, before, strict=True)):
            raise RuntimeError(f"{name}: blocks came back different")
        return times

    def _places(self) -> tuple[list[int], list[int]]:
        """Device blocks and host slots."""
        if self._setting.order == "coalesced":
            first, slot = 1 + self._rng.randrange(self.blocks), self._rng.randrange(self.blocks)
            return list(range(first, first + self.blocks)), list(range(slot, slot + self.blocks))
        return (
            self._rng.sample(range(1, 2 * self.blocks + 1), self.blocks),
            self._rng.sample(range(2 * self.blocks), self.blocks),
        )


def measure(
    setting: Setting, geometry: Geometry, seed: int, turns: int, device: torch.device, max_s: float = float("inf")
) -> dict[str, Any]:
    """The figures of every way in both directions, and what was copied. Ends early, after three turns or more, when
    ``max_s`` have passed."""
    bench = Bench(setting, geometry, seed, device)
    rng = random.Random(f"{seed}/order")
    times: Seconds = {name: {"save": [], "load": []} for name in (LARGE, *bench.copiers)}
    end_s = time.monotonic() + max_s
    for turn in range(-WARM_TURNS, turns):
        for name in rng.sample(list(times), len(times)):
            turn_times = bench.turn(name) if name != LARGE else {way: bench.large(way) for way in DIRECTIONS}
            for way, seconds in turn_times.items():
                if turn >= 0:
                    times[name][way].append(seconds)
        if turn >= 2 and time.monotonic() > end_s:
            break
    result = {
        "geometry": geometry.name,
        "block_size": setting.block_size,
        "tokens": setting.tokens,
        "pinned": setting.pinned,
        "order": setting.order,
        "bytes": bench.bytes,
        "pieces": bench.blocks * len(bench.segments),
        "piece_bytes": bench.segments[0].shape[1] * bench.segments[0].element_size(),
        "turns": len(times[LARGE]["save"]),
        "rows": [_row(bench.bytes, name, way, times, rng) for name in times for way in DIRECTIONS],
    }
    del bench
    gc.collect()
    return result


def _row(size: int, name: str, way: str, times: Seconds, rng: random.Random) -> dict[str, Any]:
    seconds = [done for done, _ in times[name][way]]
    values: dict[str, Any] = {
        "way": name,
        "direction": way,
        "gb_per_s": size / statistics.median(seconds) / 1e9,
        "call_ms": 1e3 * statistics.median(called for _, called in times[name][way]),
        "seconds": seconds,
    }
    if name != LARGE:
        values["of_large"] = ratio_of([done for done, _ in times[LARGE][way]], seconds, rng)
    if name == DIRECT and TWICE in times:
        values["over_two_passes"] = ratio_of(seconds, [done for done, _ in times[TWICE][way]], rng)
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="that one copy moves")
    parser.add_argument("--block-size", type=int, action="append", help="instead of the usual five")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.block_size or BLOCK_SIZES
    if min(sizes) < 1 or options.tokens < max(sizes):
        parser.error(
            f"--tokens is {options.tokens}, --block-size {', '.join(map(str, sizes))}: blocks of 1 token or more, and "
            "tokens for a block or more are needed"
        )
    if options.turns < 1:
        parser.error(f"--turns is {options.turns}: should be 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads; {EIGHT_B.name}")
    settings = [Setting(size, device.type == "cuda", options.tokens, order) for size in sizes for order in ORDERS]
    results = [measure(setting, EIGHT_B, options.seed, options.turns, device) for setting in settings]
    print("\n".join(table(results)))
    if options.json:
        options.json.write_text(json.dumps({"device": name, "settings": results}, indent=1) + "\n")
    return 0


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["block", "order", "KiB a piece", "way", "direction", "GB/s", "of one large copy, 95%", "time of two passes"]
    cells = [head]
    for result in results:
        for row in result["rows"]:
            ratios = [row.get(name) for name in ("of_large", "over_two_passes")]
            cells.append(
                [str(result["block_size"]), result["order"], f"{result['piece_bytes'] / 1024:g}", row["way"]]
                + [row["direction"], f"{row['gb_per_s']:.2f}"]
                + ["" if one is None else f"{one['value']:.3f} ({interval_text(one)})" for one in ratios]
            )
    return aligned(cells)


if __name__ == "__main__":
    sys.exit(main())
