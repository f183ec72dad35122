"""Files of blocks: whole or not there, direct or buffered, in whatever memory the block lies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpolicy.tiers import block_files
from kvpolicy.tiers.block_files import BlockFiles, Scratch
from kvpolicy.tiers.block_format import NO_PARENT, PAGE, BlockLayout, BlockName, Damaged, aligned_memory, digest_of_key
from kvpolicy.tiers.owned_folder import OwnedFolder
from tests.mappings import refuse_dumped
from tests.tiers.blocks import NAMESPACE, content

NAME = BlockName(digest_of_key(b"a"), NO_PARENT)
SIZES = (2 * PAGE, 2 * PAGE + 100, 7)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(block_files.os, "O_DIRECT", 0)
    return bool(request.param)


class Place:
    """Files of blocks of one size in a directory."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self.folder = OwnedFolder.claim(directory, NAMESPACE, block_bytes)
        self.layout = BlockLayout(bytes(20), block_bytes)
        self.files, self.scratch = BlockFiles(self.folder, self.layout), Scratch(self.layout)
        self.files.probe()
        self.path = self.folder.path / NAME.folder / NAME.file

    def write(self) -> None:
        self.files.write(NAME, [content(b"a", self.layout.block_bytes)], self.scratch)

    def read(self) -> np.ndarray:
        memory = aligned_memory(self.layout.block_bytes)
        self.files.read(NAME, [memory], self.scratch)
        return memory


@pytest.fixture
def place(tmp_path: Path, direct: bool) -> Iterator[Place]:
    made = Place(tmp_path / "kv", SIZES[0])
    yield made
    assert not list((made.folder.path / "writing").iterdir())
    made.folder.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_read_as_it_was_written(tmp_path: Path, direct: bool, size: int) -> None:
    place = Place(tmp_path, size)
    block = content(b"a", size)
    cuts = [0, size // 3, size // 3, size // 2, size]
    split = [block[begin:end] for begin, end in pairwise(cuts)]
    for pieces in (
        [block],
        split,
        [np.array(piece) for piece in split],
        [block[n : n + 1] for n in range(min(size, 1500))],
    ):
        if sum(piece.nbytes for piece in pieces) != size:
            continue
        place.files.write(NAME, pieces, place.scratch)
        assert place.path.stat().st_size == place.layout.file_bytes and place.path.stat().st_mode & 0o777 == 0o600
        for into in ([aligned_memory(size)], [np.zeros(piece.nbytes, np.uint8) for piece in pieces]):
            place.files.read(NAME, into, place.scratch)
            assert np.array_equal(np.concatenate(into), block)
    assert [name for name, _ in place.files.blocks()] == [NAME]
    place.folder.close()


def test_direct_where_the_file_system_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "this file system has no direct input and output")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(block_files.os, "open", refuse)
    place = Place(tmp_path, SIZES[0])
    assert place.files.direct == 0
    place.write()
    assert np.array_equal(place.read(), content(b"a", SIZES[0]))
    place.folder.close()


@pytest.mark.parametrize("failing", ["open", "writev", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_nothing_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: str, number: int
) -> None:
    def fail(*arguments: Any, **options: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, failing, fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            place.write()
    assert not place.path.exists()
    place.write()
    assert np.array_equal(place.read(), content(b"a", SIZES[0]))


def test_a_disk_that_gets_full_in_the_middle_of_a_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "writev", lambda opened, parts: real(opened, parts[:1]))
        with pytest.raises(OSError, match=f"{PAGE} of {place.layout.file_bytes} bytes"):
            place.write()
    assert not place.path.exists()


def test_a_write_replaces_what_is_there_at_once(place: Place) -> None:
    place.path.write_bytes(b"something else")
    place.write()
    assert np.array_equal(place.read(), content(b"a", SIZES[0]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("empty", "truncated"), ("half", "truncated"), ("byte less", "truncated"), ("longer", "foreign"),
        ("header", "corrupt"), ("block", "corrupt"), ("link", "foreign"), ("pipe", "foreign"), ("folder", "foreign"),
        ("other block", "foreign"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_hold_the_block(
    place: Place, direct: bool, damage: str, reason: str, tmp_path: Path
) -> None:
    place.write()
    whole = place.path.read_bytes()
    changed = bytearray(whole)
    changed[{"header": 30, "block": PAGE + 5}.get(damage, 0)] ^= 4
    place.path.unlink()
    if damage == "link":
        (tmp_path / "target").write_bytes(whole)
        place.path.symlink_to(tmp_path / "target")
    elif damage == "pipe":
        os.mkfifo(place.path)
    elif damage == "folder":
        place.path.mkdir()
    elif damage == "other block":
        other = BlockName(digest_of_key(b"other"), NO_PARENT)
        place.files.write(other, [content(b"a", SIZES[0])], place.scratch)
        (place.folder.path / other.folder / other.file).rename(place.path)
    else:
        contents = {"empty": b"", "half": whole[: PAGE + 99], "byte less": whole[:-1], "longer": whole + bytes(1)}
        place.path.write_bytes(contents.get(damage, bytes(changed)))
    with pytest.raises((Damaged, OSError)) as raised:
        place.read()
    if isinstance(raised.value, Damaged):
        assert raised.value.reason == reason
    else:
        assert damage in ("link", "pipe", "folder"), raised.value


def test_a_block_that_is_not_there(place: Place) -> None:
    with pytest.raises(FileNotFoundError):
        place.read()
    place.files.remove(NAME)


def test_a_use_is_noted(place: Place) -> None:
    place.write()
    os.utime(place.path, (1, 1))
    place.files.mark_used(NAME)
    assert place.path.stat().st_mtime > 1
    with pytest.raises(FileNotFoundError):
        place.files.mark_used(BlockName(digest_of_key(b"b"), NO_PARENT))


def test_what_passes_through_for_unaligned_memory_is_in_no_core_dump(place: Place) -> None:
    """A whole block of KV goes through this memory for as long as the server runs."""
    parts = content(b"a", SIZES[0] + 1)[1:], np.zeros(SIZES[0], np.uint8)
    place.files.write(NAME, [parts[0]], place.scratch)
    place.files.read(NAME, [parts[1]], place.scratch)
    assert np.array_equal(*parts)
    for memory in (place.scratch.block, place.scratch.header):
        refuse_dumped(memory.ctypes.data)
