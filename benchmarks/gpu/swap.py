"""gpu-swap: how fast the plugin's copiers move blocks, by block size and direction, against one large page-locked copy.

The large copy has as many bytes and runs in the same process, in turn with the copiers; ratios are of times, paired by
turn, with 95% bootstrap intervals. 1 is as fast as the link goes. Times are the caller's, from the call until the
device is done; how long the call itself took, which the engine waits for, is reported too. The measurement itself is
that of ``benchmarks/swap_bandwidth.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.geometries import EIGHT_B, TINY
from benchmarks.gpu.intervals import interval_text
from benchmarks.gpu.pieces import Done, Piece, exit_status_of, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from benchmarks.swap_bandwidth import Setting, measure

AIM = 0.95


def settings_of(place: Place) -> tuple[Setting, ...]:
    """Most telling first. On a CPU nothing is page-locked."""
    if place.on_cpu:
        kinds = [(False, 256 if place.tiny else 2048)]
    else:
        kinds = [(True, 256)] if place.tiny else [(True, 4096), (False, 4096), (True, 512)]
    return tuple(Setting(size, pinned, n) for pinned, n in kinds for size in (16, 64, 32, 128, 256))


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
            geometry, device = TINY if place.tiny else EIGHT_B, torch.device("cpu" if place.on_cpu else "cuda")
            return measure(setting, geometry, options.seed, options.turns, device, min(60.0, left_s))

        return Piece(setting.name, 2 if place.tiny else 15, do)

    pieces = chosen([piece(setting) for setting in settings_of(place)], options)
    done = run_pieces(options.out, place.to_dict(), pieces, options.minutes, say)
    show(Console(width=160), place, done)
    summary = {"place": place.to_dict(), "pieces": done.results, "failed": done.failed, "left": list(done.left)}
    write_json(options.out / "swap.json", summary)
    return 1 if done.failed else 3 if done.left else 0


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
