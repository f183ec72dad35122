"""What takes room in a tier of files, and which blocks make room for others."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpolicy.caching import KINDS, Lru
from kvpolicy.request_marks import HintLimits
from kvpolicy.tiers import Finished, block_files, digest_of_key
from kvpolicy.tiers.block_format import NO_PARENT, BlockName, aligned_memory
from kvpolicy.tiers.idle_folders import IdleFolder, IdleFolders
from kvpolicy.tiers.occupancy import EVICTS_AGAIN_S, Occupancy
from tests.tiers.blocks import BLOCK_BYTES, FILE_BYTES, bytes_of, content, ended, files_of, load, opened, store
from tests.tiers.test_file_tier import Clock, Gate

OLD, NEW = [b"a", b"b", b"c", b"d"], [b"e", b"f", b"g", b"h"]
HEEDING = pytest.mark.parametrize("hints", [None, HintLimits()], ids=["plain", "heeding hints"])


def there(tier: Any, keys: list[bytes]) -> int:
    return sum(tier.lookup([key]) for key in keys)


@HEEDING
@pytest.mark.parametrize("policy", sorted(KINDS))
def test_a_disk_that_turns_read_only_loses_no_block_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, hints: HintLimits | None
) -> None:
    """And is tried again now and then: in a hundred seconds twice."""
    clock = Clock()
    tier = opened(tmp_path, blocks=4, policy=policy, clock=clock, hints=hints)
    store(tier, OLD)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "unlink", refuse)
        for number in range(100):
            clock.now_s += 1.0
            key = b"new %d" % number
            tier.asked([key])
            tier.store(number, [key], {0: [content(key)]})
            ended(tier)
            assert there(tier, OLD) == 4 and tier.lookup([key]) == 0
    counts = tier.usage().counts
    assert counts["evicted"] == counts["failed_not_removed"] == 2 and counts["refused_no_room"] == 98
    assert tier.take_gone() == [] and load(tier, OLD) == {}
    assert tier.usage().used_bytes == bytes_of(tmp_path) == 4 * FILE_BYTES
    clock.now_s += EVICTS_AGAIN_S
    assert store(tier, [b"e"], 100) == {} and there(tier, OLD) == 3
    assert len(tier.take_gone()) == 1 and bytes_of(tmp_path) == 4 * FILE_BYTES
    tier.close()


def test_after_a_failed_write_no_block_is_given_up_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that takes no more: one by one all that it has would be lost."""
    clock = Clock()
    tier = opened(tmp_path, blocks=4, clock=clock)
    store(tier, OLD)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "writev", fail)
        for number, key in enumerate(NEW):
            tier.store(number, [key], {0: [content(key)]})
            ended(tier)
    assert there(tier, OLD) == 3 and there(tier, NEW) == 0
    assert store(tier, [b"new"], 7) == {} and there(tier, OLD) == 3, "there is room for one"
    assert tier.store(8, [b"other"], {0: [content(b"other")]}) == []
    clock.now_s = EVICTS_AGAIN_S
    assert store(tier, [b"other"], 9) == {} and there(tier, OLD) == 2
    tier.close()


def test_a_block_that_is_given_up_can_be_loaded_until_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, blocks=1)
    store(tier, [b"a"])
    gate, into = Gate(monkeypatch, "unlink"), aligned_memory(BLOCK_BYTES)
    assert tier.store(2, [b"b"], {0: [content(b"b")]}) == [0]
    gate.began.wait()
    assert tier.lookup([b"a"]) == 0 and tier.take_gone() == []
    assert tier.store(3, [b"a"], {0: [content(b"a")]}) == [], "its file is about to be removed"
    tier.load(4, [(b"a", [into])])
    finished: list[Finished[int]] = []
    while not finished:
        finished = tier.finished()
    assert finished[0].done == (b"a",) and np.array_equal(into, content(b"a")) and tier.take_gone() == []
    gate.open()
    assert [one.done for one in ended(tier)] == [(b"b",)]
    assert tier.take_gone() == [digest_of_key(b"a")] and load(tier, [b"a"]) == {b"a": "missing"}
    tier.close()


def test_a_block_that_is_dropped_while_it_is_given_up_is_not_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, blocks=1)
    store(tier, [b"a"])
    gate = Gate(monkeypatch, "unlink")
    tier.store(2, [b"b"], {0: [content(b"b")]})
    gate.began.wait()
    tier.drop([b"a"])
    assert tier.take_gone() == [digest_of_key(b"a")] and load_fails(tier, b"a")
    gate.open()
    ended(tier)
    assert tier.take_gone() == []
    tier.close()
    name, policy = BlockName(digest_of_key(b"a"), NO_PARENT), Lru(2)
    occupancy = Occupancy(policy, IdleFolders((), 0.0, list), FILE_BYTES, lambda: 0.0)
    policy.stored([name.key], [0])
    assert occupancy.evict(2, ()) == [name.key]
    occupancy.leave([name], evicted=True)
    assert occupancy.drop(name.key) and not occupancy.left(name, gone=False)
    assert name.key not in policy and occupancy.other_files == 1 and occupancy.room == 1


@pytest.mark.parametrize(("processes", "free"), [(1, -2), (2, 1), (4, 2)])
def test_ranks_that_share_a_bound_count_the_bytes_of_idle_folders_once(processes: int, free: int) -> None:
    idle = IdleFolders((IdleFolder(Path("other"), 6 * FILE_BYTES, 0.0),), 0.0, list)
    assert Occupancy(Lru(4), idle, FILE_BYTES, lambda: 0.0, processes).free == free


def load_fails(tier: Any, key: bytes) -> bool:
    """Whether a block is missing, while others are being written."""
    tier.load(99, [(key, [aligned_memory(BLOCK_BYTES)])])
    finished: list[Finished[int]] = []
    while not finished:
        finished = tier.finished()
    return dict(finished[0].failed) == {key: "missing"}


@HEEDING
def test_what_was_there_at_a_reset_goes_before_what_came_since(tmp_path: Path, hints: HintLimits | None) -> None:
    """However often it was used; and so does what was being written then."""
    tier = opened(tmp_path, blocks=4, policy="lfu", hints=hints)
    store(tier, OLD[:3])
    tier.store(2, OLD[3:], {0: [content(OLD[3])]})
    tier.forget_hints()
    ended(tier)
    for _ in range(2):
        tier.asked(OLD)
    for number, key in enumerate(NEW, 3):
        tier.asked([key])
        assert store(tier, [key], number) == {}
        assert there(tier, NEW) == number - 2 and there(tier, OLD) == 6 - number
    store(tier, [b"later"], 9)
    assert there(tier, NEW) == 3 and len(files_of(tmp_path)) == 4, "and then those of the policy"
    tier.close()


def test_what_is_being_loaded_at_a_reset_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, blocks=2)
    store(tier, [b"a", b"b"])
    gate = Gate(monkeypatch, "readv")
    tier.load(2, [(b"a", [aligned_memory(BLOCK_BYTES)])])
    gate.began.wait()
    tier.forget_hints()
    tier.store(3, [b"c"], {0: [content(b"c")]})
    assert tier.lookup([b"a"]) == 1 and tier.lookup([b"b"]) == 0
    gate.open()
    ended(tier)
    tier.asked([b"a"])
    assert store(tier, [b"d"], 4) == {} and [tier.lookup([key]) for key in (b"a", b"c", b"d")] == [0, 1, 1]
    tier.close()
