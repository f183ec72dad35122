"""Disks that are full, read-only, failing or lose files, and processes that are killed: the real thing where a test can
bring it about."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.tiers import block_files, digest_of_key, owned_folder
from kvpolicy.tiers.idle_folders import CLAIMED_S
from kvpolicy.tiers.owned_folder import OwnedFolder
from tests.tiers.blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    await_closing,
    bytes_of,
    content,
    descriptors,
    ended,
    files_of,
    load,
    opened,
    store,
)
from tests.tiers.test_file_tier import Clock, Gate

CHAIN = [b"%d" % number for number in range(6)]
PATIENCE_S = 600.0

WRITER = """
import sys
from pathlib import Path
from tests.tiers.blocks import content, opened, store

directory, first = Path(sys.argv[1]), int(sys.argv[2])
tier = opened(directory, blocks=40)
print(tier.directory, flush=True)
for number in range(first, first + 100_000):
    chain = [b"%d" % number, b"%d after" % number]
    tier.store(number, chain, {index: [content(key)] for index, key in enumerate(chain)})
    tier.wait_idle()
    tier.finished()
"""


def writer(directory: Path, first: int) -> tuple[subprocess.Popen[str], Path]:
    """A process that stores blocks without end; its folder."""
    arguments = [sys.executable, "-c", WRITER, str(directory), str(first)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def wait_for_blocks(folder: Path, at_least: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(files_of(folder)) < at_least:
        assert time.monotonic() < deadline, "the writer writes nothing"
        time.sleep(0.01)


@pytest.mark.parametrize("blocks", [20, 27, 38])
def test_after_a_kill_every_block_that_is_there_is_right(tmp_path: Path, blocks: int) -> None:
    """While it writes; near its bound of 40 it may be giving blocks up, too."""
    process, folder = writer(tmp_path, 0)
    wait_for_blocks(folder, blocks)
    kill(process)
    assert bytes_of(tmp_path) <= 40 * FILE_BYTES
    tier = opened(tmp_path, blocks=40)
    assert tier.directory == folder and not list(folder.glob("writing/*"))
    found = tier.usage().blocks
    assert found >= 20 and bytes_of(tmp_path) == found * FILE_BYTES
    there = [key for number in range(100_000) for key in (b"%d" % number, b"%d after" % number) if tier.lookup([key])]
    assert len(there) == found and load(tier, there) == {}
    tier.close()


def test_two_processes_on_one_directory_write_beside_each_other(tmp_path: Path) -> None:
    (one, first), (two, second) = writer(tmp_path, 0), writer(tmp_path, 0)
    assert first != second
    for folder in (first, second):
        wait_for_blocks(folder, 45 - 5)
    kill(one)
    third = opened(tmp_path, blocks=40)
    assert third.directory == first and third.usage().blocks > 30
    kill(two)
    assert len(files_of(second)) > 30 and bytes_of(second) <= 40 * FILE_BYTES
    there = [key for key in (b"%d" % number for number in range(100_000)) if third.lookup([key])]
    assert there and load(third, there) == {}
    third.close()


FULL = """
import resource, sys
from pathlib import Path
from tests.tiers.blocks import FILE_BYTES, opened, store, load, bytes_of
tier = opened(Path(sys.argv[1]))
assert store(tier, [b"before"]) == {}
resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES // 2, FILE_BYTES))
assert store(tier, [b"a", b"b"]) == {b"a": "io_error", b"b": "io_error"}, tier.usage()
assert load(tier, [b"before"]) == {} and tier.lookup([b"a"]) == 0
assert bytes_of(Path(sys.argv[1])) == FILE_BYTES == tier.usage().used_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
assert store(tier, [b"a", b"b"]) == {} and load(tier, [b"a", b"b"]) == {}
tier.close()
"""


def test_a_file_system_that_takes_no_more(tmp_path: Path) -> None:
    """A limit of the kernel ends writes in the middle of a file, as a full disk does."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a block was not stored") == 2


def no_room(call: str, number: int) -> Callable[..., int]:
    """A function of the system on a disk that is full: files can be read and removed, and none can be written."""
    real = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> int:
        if call == "open" and not arguments[1] & os.O_EXCL:
            return int(real(*arguments, **options))
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["writev", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_start_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    """What is there is loaded. Folders that nobody uses make room once others had their five minutes."""
    clock, first, gone = Clock(), opened(tmp_path), opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    store(first, CHAIN)
    store(gone, CHAIN)
    first.close()
    gone.close()
    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, call, no_room(call, number))
        tier = opened(tmp_path, blocks=100, clock=clock)
        assert tier.directory == first.directory and tier.direct == first.direct and "no room" in caplog.text
        assert tier.lookup(CHAIN) == 6 and load(tier, CHAIN) == {}
        assert store(tier, [b"new"]) == {b"new": "io_error"}
        assert len(files_of(gone.directory)) == 6, "somebody may be about to claim it"
        clock.now_s = CLAIMED_S
        ended(tier)
        assert files_of(gone.directory) == [] and tier.lookup(CHAIN) == 6
    assert store(tier, [b"new"], 2) == {} and load(tier, [b"new"]) == {}
    tier.close()


def test_a_start_on_a_full_disk_without_direct_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path).close()
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(block_files.os, "writev", no_room("writev", errno.ENOSPC))
    monkeypatch.setattr(block_files.os, "open", refuse)
    tier = opened(tmp_path)
    assert not tier.direct
    tier.close()


def test_a_full_disk_has_no_room_for_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(owned_folder.os, "mkdir", no_room("mkdir", errno.ENOSPC))
        message = f"No space left on device: no folder for blocks of this model can be made .*{tmp_path}"
        with pytest.raises(OSError, match=message):
            opened(tmp_path)
    assert descriptors() == before
    tier = opened(tmp_path)
    assert tier.number == 0
    tier.close()


def test_a_probe_that_is_written_in_part_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(block_files.os, "writev", lambda opened, parts: real(opened, [parts[0][:512]]))
    tier = opened(tmp_path)
    assert tier._faults.disk_is_full
    tier.close()


@pytest.mark.parametrize(("size", "files"), [(0, 1), (FILE_BYTES - 1, 1), (FILE_BYTES + 1, 2)])
def test_what_is_no_whole_file_and_cannot_be_removed_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, files: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A server starts all the same, and finds the others."""
    first = opened(tmp_path)
    store(first, CHAIN)
    first.close()
    victim = next(path for path in files_of(tmp_path) if path.name.startswith(digest_of_key(CHAIN[3]).hex()))
    os.truncate(victim, size)
    real = os.unlink

    def refuse(file: str, **where: int) -> None:
        if file == victim.name:
            raise PermissionError(1, "immutable")
        real(file, **where)

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "unlink", refuse)
        tier = opened(tmp_path)
        assert tier.lookup(CHAIN) == 3 and load(tier, [*CHAIN[:3], *CHAIN[4:]]) == {}
        usage = tier.usage()
        assert usage.counts["found"] == 5 and usage.counts["found_damaged"] == 1
        assert usage.used_bytes == (5 + files) * FILE_BYTES and "a file was not removed" in caplog.text
        room = 8 - 5 - files
        new = [b"new %d" % place for place in range(3)]
        taken = tier.store(3, new, {place: [content(key)] for place, key in enumerate(new)})
        assert len(taken) == 3 and len(ended(tier)) == 1 and tier.usage().counts["evicted"] == 3 - room
    tier.close()


@pytest.mark.parametrize("call", ["writev", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_stores_that_fail_and_a_disk_that_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(tmp_path)
    store(tier, CHAIN[:2])

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, call, fail)
        for trial in range(3):
            assert store(tier, CHAIN, trial) == dict.fromkeys(CHAIN[2:], "io_error")
        assert load(tier, CHAIN[:2]) == {} and tier.lookup(CHAIN) == 2
    assert tier.usage().counts["failed_io_error"] == 12 and bytes_of(tmp_path) == 2 * FILE_BYTES
    assert caplog.text.count("a block was not stored") == 5 and "only counted" in caplog.text
    assert store(tier, CHAIN) == {} and load(tier, CHAIN) == {}
    tier.close()


def test_reads_that_fail_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    store(tier, CHAIN)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "readv", fail)
        assert load(tier, CHAIN[:2]) == dict.fromkeys(CHAIN[:2], "io_error")
    assert tier.lookup(CHAIN) == 0 and load(tier, CHAIN[2:]) == {}
    tier.close()


def test_a_read_that_ends_early_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    store(tier, CHAIN)
    real = os.readv
    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "readv", lambda opened, parts: real(opened, parts[:1]))
        assert load(tier, CHAIN[:1]) == {CHAIN[0]: "truncated"}
    tier.close()


def test_all_files_are_lost_while_it_serves(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, CHAIN)
    for path in files_of(tmp_path):
        path.unlink()
    assert load(tier, CHAIN) == dict.fromkeys(CHAIN, "missing")
    assert tier.usage().used_bytes == 0 and store(tier, CHAIN) == {} and load(tier, CHAIN) == {}
    tier.close()


def test_folders_that_are_removed_while_it_serves(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, CHAIN)
    subprocess.run(["rm", "-r", str(tier.directory)], check=True)
    assert load(tier, CHAIN) == dict.fromkeys(CHAIN, "missing")
    assert set(store(tier, CHAIN).values()) == {"io_error"} and tier.lookup(CHAIN) == 0
    tier.close()


def test_the_end_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder is nobody else's as long as something may be written to it, and is left as ever when the disk goes
    on."""
    tier = opened(tmp_path, threads=2)
    gate = Gate(monkeypatch, "writev")
    tier.store(1, [b"a", b"b"], {0: [content(b"a")], 1: [content(b"b")]})
    gate.began.wait()
    closing = threading.Thread(target=tier.close, args=(0.01,), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and "the disk hangs" in caplog.text
    tier.close(0.01)
    assert [thread.name for thread in threading.enumerate()].count("kvpolicy-files-close") == 1, "it ends once"
    beside = OwnedFolder.claim(tmp_path, NAMESPACE, BLOCK_BYTES)
    assert beside.path.name == "1" and tier.directory.name == "0"
    beside.close()
    gate.open()
    await_closing()
    again = opened(tmp_path)
    assert again.directory == tier.directory and not list(again.directory.glob("writing/*"))
    assert again.lookup([b"a", b"b"]) == 1 and load(again, [b"a"]) == {}
    again.close()
