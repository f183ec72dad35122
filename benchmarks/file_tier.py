"""How fast the tier of files loads: the share of one large read's bandwidth that it reaches.

    python benchmarks/file_tier.py --directory DIR [--block-kib N] [--mib N] [--pairs N] [--threads N] [--json FILE]

In DIR, on the medium to be measured: blocks in a tier, and as many bytes in one large file. Pairs of loads, one after
the other, in random order within each pair: all blocks by the tier, in one call, verified; the large file by one call
of the system into memory that is aligned. Both direct (O_DIRECT), so that nothing comes from the page cache; where the
file system has no such reads, nothing is measured. Ratios are of times, paired; 1 is as fast as the large read. Every
block is compared with what was stored, outside the times. DIR is left as it was. With ``--json`` a row is added to
those that FILE has.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from row_file import RowFile

from kvpolicy.tiers import FileTier
from kvpolicy.tiers.block_format import aligned_memory

MIB = 1 << 20
BAR = 0.8
"""Share of the large read's bandwidth that the tier is to reach."""
POLL_S = 0.0002


def measure(
    directory: Path, block_bytes: int, blocks: int, pairs: int, threads: int, seed: int, say: Any = print
) -> dict[str, Any]:
    """Seconds of both, by pair, with what was measured."""
    rng, bytes_rng = random.Random(seed), np.random.default_rng(seed)
    content = aligned_memory(blocks * block_bytes)
    content[:] = np.frombuffer(bytes_rng.bytes(content.nbytes), np.uint8)
    memory = aligned_memory(content.nbytes)
    large = directory / "large"
    _write(large, content)
    tier = FileTier.open(
        directory / "tier", {"benchmark": "file_tier"}, block_bytes, 2 * content.nbytes + MIB, queue_blocks=blocks,
        threads=threads,
    )  # fmt: skip
    if not tier.direct:
        tier.close()
        raise SystemExit(f"{directory}: its file system has no direct reads (O_DIRECT); give a folder on another one")
    keys = [b"%d" % number for number in range(blocks)]
    rows = content.reshape(blocks, block_bytes)
    taken = tier.store(0, keys, {number: [rows[number]] for number in range(blocks)})
    assert len(taken) == blocks
    tier.wait_idle()
    assert not tier.finished()[0].failed
    seconds: list[dict[str, float]] = []
    into = memory.reshape(blocks, block_bytes)
    for number in range(pairs + 1):  # the first one touches everything once, and does not count
        pair = {}
        for way in rng.sample(["tier", "large"], 2):
            memory[:] = 0
            begin = time.perf_counter()
            if way == "large":
                _read(large, memory)
            else:
                _load(tier, number + 1, keys, into)
            pair[way] = time.perf_counter() - begin
            assert np.array_equal(memory, content), f"{way}: wrong bytes"
        if number:
            seconds.append(pair)
            say(f"pair {number}: tier {pair['tier']:.3f} s, large read {pair['large']:.3f} s")
    tier.close()
    return {"block_bytes": block_bytes, "blocks": blocks, "threads": threads, "seconds": seconds}


def _load(tier: FileTier, number: int, keys: list[bytes], into: np.ndarray) -> None:
    tier.load(number, [(key, [row]) for key, row in zip(keys, into, strict=True)])
    while not (finished := tier.finished()):
        time.sleep(POLL_S)
    assert not finished[0].failed, finished[0].failed


def _write(path: Path, content: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def _read(path: Path, memory: np.ndarray) -> None:
    """One call of the system, repeated only where it returns less."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        at = 0
        while at < memory.nbytes:
            at += os.readv(opened, [memory[at:]])
    finally:
        os.close(opened)


def summary(result: dict[str, Any]) -> str:
    """The median ratio and both bandwidths, in words."""
    seconds = result["seconds"]
    total = result["block_bytes"] * result["blocks"]
    ratios = sorted(pair["large"] / pair["tier"] for pair in seconds)
    tier, large = (statistics.median(total / pair[way] / 1e9 for pair in seconds) for way in ("tier", "large"))
    ratio = statistics.median(ratios)
    return (
        f"{result['blocks']} blocks of {result['block_bytes'] // 1024} KiB, {total / MIB:,.0f} MiB, "
        f"{result['threads']} threads, {len(seconds)} pairs\n"
        f"tier {tier:.2f} GB/s, one large read {large:.2f} GB/s (medians)\n"
        f"median ratio {ratio:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; bar {BAR}: "
        f"{'reached' if ratio >= BAR else 'missed'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="on the medium to be measured")
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of all blocks")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    blocks = options.mib * 1024 // options.block_kib
    if blocks < 1:
        parser.error(f"--mib {options.mib} holds no block of {options.block_kib} KiB")
    try:
        file = RowFile.read(options.json, {"bar": BAR})
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        result = measure(Path(folder), options.block_kib * 1024, blocks, options.pairs, options.threads, options.seed)
    print(summary(result))
    file.add(result)


if __name__ == "__main__":
    main()
