"""Blocks, tiers and faults of media for the tests of files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpolicy.tiers import FileTier, Finished
from kvpolicy.tiers.block_format import PAGE, aligned_memory
from kvpolicy.tiers.io_threads import IoThreads

BLOCK_BYTES = 3 * PAGE
FILE_BYTES = BLOCK_BYTES + PAGE
NAMESPACE = {"model": "a", "dtype": "float16", "block_size": 16}


def content(key: bytes, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """The bytes that the block of this key has in these tests, on pages of their own."""
    memory = aligned_memory(block_bytes)
    memory[:] = np.frombuffer(np.random.default_rng([*key]).bytes(block_bytes), np.uint8)
    return memory


def opened(directory: Path, blocks: int = 8, namespace: Mapping[str, Any] = NAMESPACE, **options: Any) -> FileTier:
    """A tier for so many blocks."""
    block_bytes = options.pop("block_bytes", BLOCK_BYTES)
    return FileTier.open(directory, namespace, block_bytes, blocks * FILE_BYTES, **options)


def ended(tier: FileTier) -> list[Finished[int]]:
    """Everything that was begun, after its end, and after that of what is done with folders that no process uses."""
    tier.wait_idle()
    finished, idle = tier.finished(), tier._occupancy.idle
    while idle._busy or idle._looking:
        await_aside(tier)
        finished += tier.finished()
    return finished


def await_aside(tier: FileTier) -> None:
    """Until what is done with such folders has ended."""
    threads = tier._threads
    with threads._changed:
        threads._changed.wait_for(lambda: not (threads._aside or threads._running[True]))


def store(tier: FileTier, chain: Sequence[bytes], number: int = 1) -> Mapping[bytes, str]:
    """Store all blocks of a chain; return those that failed, with the reasons."""
    taken = tier.store(number, chain, {index: [content(key)] for index, key in enumerate(chain)})
    finished = ended(tier)
    assert [one.job for one in finished] == [number] * bool(taken)
    assert not finished or {*finished[0].done, *finished[0].failed} == {chain[index] for index in taken}
    return finished[0].failed if finished else {}


def load(tier: FileTier, keys: Sequence[bytes], number: int = 2) -> Mapping[bytes, str]:
    """Load blocks and check their bytes; return those that failed, with the reasons."""
    into = [aligned_memory(BLOCK_BYTES) for _ in keys]
    tier.load(number, [(key, [memory]) for key, memory in zip(keys, into, strict=True)])
    (finished,) = ended(tier)
    assert finished.job == number and finished.kind == "load"
    for key, memory in zip(keys, into, strict=True):
        assert (key in finished.done) != (key in finished.failed)
        assert key in finished.failed or np.array_equal(memory, content(key)), "a wrong content was taken for right"
    tier.wait_idle()  # what has failed is removed
    return finished.failed


def when_closing(threads: IoThreads[Any], action: Callable[[], object]) -> threading.Thread:
    """A thread that does it once these threads are told to end, and wait for what they run."""

    def await_end() -> None:
        with threads._changed:
            threads._changed.wait_for(lambda: not threads._open)
        action()

    waiting = threading.Thread(target=await_end)
    waiting.start()
    return waiting


def no_thread_starts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No thread of this name, as where the system has too many."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def await_closing() -> None:
    """Until tiers that were closed on a disk that hung have ended."""
    for thread in threading.enumerate():
        if thread.name == "kvpolicy-files-close":
            thread.join()


def files_of(directory: Path) -> list[Path]:
    """All block files below a directory."""
    return sorted(path for path in directory.rglob("*-*") if len(path.name) == 81)


def bytes_of(directory: Path) -> int:
    """Of block files, written whole or not."""
    return sum(path.lstat().st_size for path in (*files_of(directory), *directory.rglob("writing/*")))


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])
