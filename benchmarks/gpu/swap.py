"""gpu-swap: how fast the plugin's copiers move blocks, by block size and direction, against one large page-locked copy.

The large copy has as many bytes and runs in the same process, in turn with the copiers; ratios are of times, paired by
turn, with 95% bootstrap intervals. 1 is as fast as the link goes. Times are the caller's, from the call until the
device is done; how long the call itself took, which the engine waits for, is reported too.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import copiers
from benchmarks.gpu.geometries import EIGHT_B, TINY, Geometry
from benchmarks.gpu.intervals import interval_text, ratio_of
from benchmarks.gpu.pieces import Done, Piece, exit_status_of, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy_vllm.plugin.copiers.base import Copier, unique_segments
from kvpolicy_vllm.plugin.messages import Job

WAYS: dict[str, Callable[..., Copier]] = {"as they lie": copiers.plain, "staged": copiers.staged}
"""The plugin's two: pieces copied where they lie, and gathered on the device first."""
AIM = 0.95


@dataclass(frozen=True, slots=True)
class Setting:
    """What one piece measures."""

    block_size: int
    pinned: bool
    tokens: int
    """Copied at once: a victim's length."""

    @property
    def name(self) -> str:
        return f"b{self.block_size}-{self.tokens}-{'pinned' if self.pinned else 'pageable'}"


def settings_of(place: Place) -> tuple[Setting, ...]:
    """Most telling first. On a CPU nothing is page-locked."""
    if place.on_cpu:
        kinds = [(False, 256 if place.tiny else 2048)]
    else:
        kinds = [(True, 256)] if place.tiny else [(True, 4096), (False, 4096), (True, 512)]
    return tuple(Setting(size, pinned, n) for pinned, n in kinds for size in (16, 64, 32, 128, 256))


class Bench:
    """Memory on the device and on the host, and everything that is timed."""

    def __init__(self, place: Place, setting: Setting, geometry: Geometry, seed: int) -> None:
        self._device = torch.device("cpu" if place.on_cpu else "cuda")
        self._setting = setting
        self._rng = random.Random(f"{seed}/{setting.name}")
        self.blocks = setting.tokens // setting.block_size
        kept_blocks = 2 * self.blocks + 1
        # As the engine lays it out: blocks outermost, keys and values of a block together, a tensor a layer.
        shape = (kept_blocks, 2, setting.block_size, geometry.kv_heads, geometry.head_dim)
        caches = {
            f"layer.{i}": torch.randint(-99, 99, shape, dtype=torch.int16, device=self._device)
            for i in range(geometry.layers)
        }
        self.segments = unique_segments(caches, kept_blocks)
        # The plugin never moves pieces between a device and pageable memory as they lie.
        ways = WAYS if setting.pinned or place.on_cpu else {"staged": WAYS["staged"]}
        self.copiers = {name: make(self.segments, kept_blocks, setting.pinned, None) for name, make in ways.items()}
        size = self.blocks * geometry.kv_token_bytes * setting.block_size
        self.bytes = size
        self._large = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._large_host = torch.zeros(size, dtype=torch.uint8, pin_memory=not place.on_cpu)
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
        """Out and back again, through blocks and slots as scattered as an old pool's. Raises RuntimeError where what
        came back is not what went out."""
        copier = self.copiers[name]
        self._copies += 1
        blocks = self._rng.sample(range(1, 2 * self.blocks + 1), self.blocks)
        first = self._rng.randrange(self.blocks)
        job = Job(self._copies, "bench", tuple(blocks), tuple(range(first, first + self.blocks)))
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


def measure(place: Place, setting: Setting, seed: int, turns: int, max_s: float) -> dict[str, Any]:
    geometry = TINY if place.tiny else EIGHT_B
    bench = Bench(place, setting, geometry, seed)
    rng = random.Random(f"{seed}/order")
    times_by_way: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {"save": [], "load": []} for name in ("large", *bench.copiers)
    }
    end_s = time.monotonic() + max_s
    for turn in range(-2, turns):  # two for what happens only once
        for name in rng.sample(list(times_by_way), len(times_by_way)):
            turn_times = bench.turn(name) if name != "large" else {way: bench.large(way) for way in ("save", "load")}
            for way, times in turn_times.items():
                if turn >= 0:
                    times_by_way[name][way].append(times)
        if turn >= 2 and time.monotonic() > end_s:
            break
    rows = [row(bench.bytes, name, way, times_by_way, rng) for name in times_by_way for way in ("save", "load")]
    result = {
        "geometry": geometry.name,
        "block_size": setting.block_size,
        "tokens": setting.tokens,
        "pinned": setting.pinned,
        "bytes": bench.bytes,
        "pieces": bench.blocks * len(bench.segments),
        "piece_bytes": bench.segments[0].shape[1] * bench.segments[0].element_size(),
        "turns": len(times_by_way["large"]["save"]),
        "rows": rows,
    }
    del bench
    gc.collect()
    return result


def row(
    size: int, name: str, way: str, times_by_way: dict[str, dict[str, list[tuple[float, float]]]], rng: random.Random
) -> dict[str, Any]:
    seconds = [done for done, _ in times_by_way[name][way]]
    values: dict[str, Any] = {
        "way": name,
        "direction": way,
        "gb_per_s": size / statistics.median(seconds) / 1e9,
        "call_ms": 1e3 * statistics.median(called for _, called in times_by_way[name][way]),
        "seconds": seconds,
    }
    if name != "large":
        values["of_large"] = ratio_of([done for done, _ in times_by_way["large"][way]], seconds, rng)
    return values


def show(console: Console, place: Place, done: Done) -> None:
    table = Table(title=f"gpu-swap on {place.text()}")
    for name in ("piece", "pieces", "bytes each", "way", "direction", "GB/s", "call ms", "of one large copy", "95%"):
        table.add_column(name)
    for name, result in done.results.items():
        for way_row in result["rows"]:
            ratio = way_row.get("of_large")
            table.add_row(
                name, str(result["pieces"]), str(result["piece_bytes"]), way_row["way"], way_row["direction"],
                f"{way_row['gb_per_s']:.1f}", f"{way_row['call_ms']:.2f}",
                "" if ratio is None else f"{ratio['value']:.3f}{'' if ratio['value'] >= AIM else ' (below the aim)'}",
                "" if ratio is None else interval_text(ratio),
            )  # fmt: skip
    console.print(table)


def main(say: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    parser = arguments("swap", __doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = find_place(options.scale)
    say(place.text())

    def piece(setting: Setting) -> Piece:
        def do(left_s: float) -> dict[str, Any]:
            return measure(place, setting, options.seed, options.turns, min(60.0, left_s))

        return Piece(setting.name, 2 if place.tiny else 15, do)

    pieces = chosen([piece(setting) for setting in settings_of(place)], options)
    done = run_pieces(options.out, place.to_dict(), pieces, options.minutes, say)
    show(Console(width=160), place, done)
    summary = {"place": place.to_dict(), "pieces": done.results, "failed": done.failed, "left": list(done.left)}
    write_json(options.out / "swap.json", summary)
    return 1 if done.failed else 3 if done.left else 0


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
