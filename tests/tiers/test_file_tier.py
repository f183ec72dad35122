"""The tier of files: what is stored is loaded or missed, never anything else; bounded, private, found again."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpolicy.caching import Hinted
from kvpolicy.errors import InputError
from kvpolicy.request_marks import ANYBODY, HintLimits, Hints
from kvpolicy.tiers import MAX_QUEUED_BLOCKS, FileTier, block_files, digest_of_key, idle_folders
from kvpolicy.tiers.block_format import PAGE, aligned_memory
from kvpolicy.tiers.idle_folders import ASK_AGAIN_S, CLAIMED_S, LOOK_AGAIN_S
from tests.tiers.blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    NAMESPACE,
    await_aside,
    bytes_of,
    content,
    descriptors,
    ended,
    files_of,
    load,
    no_thread_starts,
    opened,
    store,
    when_closing,
)

CHAIN = [b"a", b"b", b"c"]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = opened(tmp_path / "kv")
    yield made
    made.close()
    assert bytes_of(tmp_path / "kv") <= 8 * FILE_BYTES and not list(made.directory.glob("writing/*"))


class Gate:
    """Holds calls of one function of the system until it is opened, as a slow disk would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.began, self._open, real = threading.Event(), threading.Event(), getattr(os, name)

        def held(*arguments: Any, **options: Any) -> Any:
            self.began.set()
            self._open.wait()
            return real(*arguments, **options)

        monkeypatch.setattr(block_files.os, name, held)
        self.open = self._open.set


def test_blocks_are_loaded_as_they_were_stored(tier: FileTier) -> None:
    assert tier.lookup(CHAIN) == 0
    assert store(tier, CHAIN) == {}
    assert tier.lookup(CHAIN) == tier.lookup([*CHAIN, b"d"]) == 3
    assert load(tier, CHAIN) == {}
    usage = tier.usage()
    assert (usage.blocks, usage.used_bytes, usage.queued_blocks) == (3, 3 * FILE_BYTES, 0)
    assert usage.capacity_bytes == 8 * FILE_BYTES
    assert usage.counts["stored"] == usage.counts["loaded"] == 3
    assert {path.stat().st_mode & 0o777 for path in files_of(tier.directory)} == {0o600}


def test_a_lookup_counts_leading_blocks_alone(tier: FileTier) -> None:
    store(tier, CHAIN)
    tier.drop([b"b"])
    assert tier.lookup(CHAIN) == 1 and tier.lookup([b"b"]) == 0 and tier.lookup([b"c"]) == 1


def test_what_is_there_is_not_stored_again(tier: FileTier) -> None:
    store(tier, CHAIN)
    assert tier.store(3, [*CHAIN, b"d"], {index: [content(b"d")] for index in range(4)}) == [3]
    assert [one.done for one in ended(tier)] == [(b"d",)]
    assert tier.store(4, CHAIN, {0: [content(b"a")]}) == [] and ended(tier) == []


def test_the_load_of_nothing_ends(tier: FileTier) -> None:
    tier.load(7, [])
    assert [one.job for one in tier.finished()] == [7]


def test_a_load_says_how_long_it_took_whenever_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads of blocks that are read at once, in two seconds, and one of a block that is not there."""
    clock = Clock()
    tier = opened(tmp_path, clock=clock)
    store(tier, CHAIN)
    gate = Gate(monkeypatch, "readv")
    for job, key in ((5, b"a"), (6, b"b")):
        tier.load(job, [(key, [aligned_memory(BLOCK_BYTES)])])
    gate.began.wait()
    clock.now_s = 2.0
    gate.open()
    tier.wait_idle()
    clock.now_s = 9.0
    tier.load(7, [(b"x", [aligned_memory(BLOCK_BYTES)])])
    tier.store(8, [b"d"], {0: [content(b"d")]})
    took = {one.job: one.took for one in ended(tier)}
    assert sorted([took[5], took[6]], key=str) == [(2.0, 0.0), (2.0, 2.0)] and took[7] == (0.0, 0.0)
    assert took[8] is None
    tier.close()


def test_another_folder_than_the_first_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    assert first.number == 0 and not caplog.records
    second = opened(tmp_path)
    assert second.number == 1 and "folder number 1" in caplog.text
    for tier in (first, second):
        tier.close()


def test_a_restart_finds_the_blocks(tmp_path: Path) -> None:
    first = opened(tmp_path)
    store(first, CHAIN)
    first.close()
    second = opened(tmp_path)
    assert second.lookup(CHAIN) == 3 and load(second, CHAIN) == {}
    assert {*second.digests()} == {digest_of_key(key) for key in CHAIN} and second.usage().counts["found"] == 3
    second.close()


@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "s3fifo", "cost"])
def test_the_bound_holds_whatever_is_given_up(tmp_path: Path, policy: str) -> None:
    tier = opened(tmp_path, blocks=6, policy=policy)
    for number in range(30):
        chain = [b"system", b"%d" % (number % 7), b"%d turn %d" % (number % 7, number)]
        tier.asked(chain)
        store(tier, chain, number)
        assert bytes_of(tmp_path) == tier.usage().used_bytes <= 6 * FILE_BYTES
        assert len(files_of(tmp_path)) == tier.usage().blocks == len(tier.digests())
        assert tier.lookup(chain) == 3
    assert tier.usage().counts["evicted"] > 20
    tier.close()
    smaller = opened(tmp_path, blocks=2, policy=policy)
    assert bytes_of(tmp_path) <= 2 * FILE_BYTES and smaller.usage().blocks == 2
    smaller.close()


def test_a_restart_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    first = opened(tmp_path, blocks=4)
    store(first, [b"a", b"b"], 1)
    store(first, [b"c"], 2)
    store(first, [b"d"], 3)
    first.close()
    for path in files_of(tmp_path):
        os.utime(path, (100, 100))
    again = opened(tmp_path, blocks=4)
    load(again, [b"a", b"b"])
    again.close()
    last = opened(tmp_path, blocks=4)
    store(last, [b"e", b"f"], 4)
    assert last.lookup([b"a", b"b"]) == 2 and last.lookup([b"c"]) == last.lookup([b"d"]) == 0
    assert {*last.take_gone()} == {digest_of_key(b"c"), digest_of_key(b"d")} and last.take_gone() == []
    last.close()


def test_blocks_of_a_prompt_do_not_give_up_one_another(tmp_path: Path) -> None:
    tier = opened(tmp_path, blocks=2)
    chain = [b"%d" % number for number in range(5)]
    assert tier.store(1, chain, {index: [content(key)] for index, key in enumerate(chain)}) == [0, 1]
    ended(tier)
    assert tier.lookup(chain) == 2 and tier.usage().counts["refused_no_room"] == 3
    tier.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "b"}, {"dtype": "bfloat16"}, {"block_size": 32}, {"layout": "HND"}, {"ranks": [2, 1]},
        {"adapter": "one"}, {"hash_seed": "1"},
    ],
)  # fmt: skip
def test_nothing_is_shared_between_namespaces(tmp_path: Path, other: dict[str, Any]) -> None:
    one, two = opened(tmp_path), opened(tmp_path, namespace={**NAMESPACE, **other})
    store(one, CHAIN)
    assert two.lookup(CHAIN) == 0 and load(two, CHAIN) == dict.fromkeys(CHAIN, "missing")
    name = files_of(one.directory)[0]
    planted = two.directory / name.relative_to(one.directory)
    planted.write_bytes(name.read_bytes())
    one.close()
    two.close()
    again = opened(tmp_path, namespace={**NAMESPACE, **other})
    assert sorted(load(again, CHAIN).values()) == ["foreign", "missing", "missing"] and not planted.exists()
    again.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE + 17] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (flip, "corrupt"),
    "cut": (lambda path: os.truncate(path, PAGE), "truncated"),
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "zeros": (lambda path: path.write_bytes(bytes(FILE_BYTES)), "corrupt"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "foreign"),
    "lost": (lambda path: path.unlink(), "missing"),
    "link": (link, "foreign"),
    "foreign": (lambda path: path.write_bytes(b"GIF89a"), "truncated"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path: Path, damage: str, restart: bool) -> None:
    apply, reason = DAMAGES[damage]
    tier = opened(tmp_path)
    store(tier, CHAIN)
    victim = next(path for path in files_of(tmp_path) if path.name.startswith(digest_of_key(b"b").hex()))
    if restart:
        tier.close()
    apply(victim)
    if restart:
        tier = opened(tmp_path)
        assert tier.lookup(CHAIN) in (1, 3)
    if tier.lookup(CHAIN) == 3:
        assert load(tier, CHAIN) == {b"b": reason}
        assert tier.usage().counts[f"missed_{reason}"] == 1
        assert tier.take_gone() == [digest_of_key(b"b")]
    assert tier.lookup(CHAIN) == 1
    tier.wait_idle()
    assert not os.path.lexists(victim)
    assert store(tier, CHAIN) == {} and load(tier, CHAIN) == {}
    tier.close()


def test_a_full_queue_refuses_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, queue_blocks=2)
    gate = Gate(monkeypatch, "rename")
    chain = [*CHAIN, b"d"]
    assert tier.store(1, chain, {index: [content(key)] for index, key in enumerate(chain)}) == [0, 1]
    assert tier.store(2, [b"e"], {0: [content(b"e")]}) == []
    usage = tier.usage()
    assert usage.counts["refused_queue_full"] == 3 and usage.queued_blocks == 2 and usage.blocks == 0
    assert tier.lookup(chain) == 0, "what is being written cannot be loaded"
    gate.open()
    assert [{*one.done} for one in ended(tier)] == [{b"a", b"b"}]
    assert tier.lookup(chain) == 2 and tier.store(3, [b"e"], {0: [content(b"e")]}) == [0]
    ended(tier)
    tier.close()


def test_what_a_full_queue_refuses_is_held_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the room of what is there, for as long as a client asked."""
    tier = opened(tmp_path, queue_blocks=2, hints=HintLimits(class_share=0.5))
    gate = Gate(monkeypatch, "rename")
    chain = [*CHAIN, b"d"]
    tier.hinted(chain, Hints(keep_s=60.0), ANYBODY, over=True)
    policy = tier._policy
    assert isinstance(policy, Hinted) and policy.held_blocks == 4
    assert tier.store(1, chain, {index: [content(key)] for index, key in enumerate(chain)}) == [0, 1]
    assert policy.held(map(digest_of_key, chain)) == {digest_of_key(key) for key in chain[:2]}
    gate.open()
    ended(tier)
    tier.close()


def test_the_queue_takes_what_two_steps_give_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,192 tokens each, in blocks of 16: what is refused leaves a hole in a prompt, at which a hit ends."""
    tier = opened(tmp_path, blocks=1100, threads=2)
    gate, blocks = Gate(monkeypatch, "writev"), {place: [content(b"a")] for place in range(1100)}
    chain = [b"%d" % place for place in blocks]
    assert MAX_QUEUED_BLOCKS >= 2 * 8192 // 16
    assert tier.store(1, chain, blocks) == [*range(MAX_QUEUED_BLOCKS)]
    assert tier.usage().counts["refused_queue_full"] == 1100 - MAX_QUEUED_BLOCKS
    opening = when_closing(tier._threads, gate.open)
    tier.close()
    opening.join()


def test_a_load_does_not_wait_for_slow_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, threads=2)
    store(tier, CHAIN)
    gate = Gate(monkeypatch, "writev")
    tier.store(8, [b"d", b"e"], {0: [content(b"d")], 1: [content(b"e")]})
    gate.began.wait()
    into = aligned_memory(BLOCK_BYTES)
    tier.load(9, [(b"a", [into])])
    finished: list[int] = []
    while not finished:
        finished = [one.job for one in tier.finished()]
    assert finished == [9] and np.array_equal(into, content(b"a"))
    gate.open()
    tier.close()


def test_a_block_that_is_dropped_while_it_is_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    gate = Gate(monkeypatch, "writev")
    tier.store(1, CHAIN, {0: [content(b"a")]})
    gate.began.wait()
    tier.drop(CHAIN)
    gate.open()
    assert [one.done for one in ended(tier)] == [(b"a",)]
    tier.wait_idle()
    assert tier.lookup(CHAIN) == 0 and tier.usage().used_bytes == 0 and not files_of(tmp_path)
    tier.close()


def test_a_block_that_is_given_up_while_it_is_loaded_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, blocks=1)
    store(tier, [b"a"])
    gate = Gate(monkeypatch, "readv")
    into = aligned_memory(BLOCK_BYTES)
    tier.load(5, [(b"a", [into])])
    gate.began.wait()
    assert tier.store(6, [b"b"], {0: [content(b"b")]}) == [], "what is being loaded is not given up"
    gate.open()
    assert [one.done for one in ended(tier)] == [(b"a",)] and np.array_equal(into, content(b"a"))
    tier.close()


def test_several_stores_give_up_no_more_than_they_bring_however_long_removing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the stores of one step, of several prompts: what the first one gives up is not gone when the next one asks."""
    tier = opened(tmp_path, blocks=20)
    store(tier, [b"%d" % number for number in range(20)])
    gate = Gate(monkeypatch, "unlink")
    for number in range(5):
        key = b"new %d" % number
        assert tier.store(number, [key], {0: [content(key)]}) == [0]
    usage = tier.usage()
    assert usage.counts["evicted"] == 5 and usage.used_bytes == 20 * FILE_BYTES
    gate.open()
    assert all(not one.failed for one in ended(tier))
    assert tier.usage().blocks == 20 and bytes_of(tmp_path) == 20 * FILE_BYTES
    tier.close()


def test_what_is_dropped_and_cannot_be_removed_takes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, blocks=2)
    store(tier, [b"a"], 1)
    store(tier, [b"b"], 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("immutable")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "unlink", refuse)
        tier.drop([b"a"])
        tier.wait_idle()
    assert tier.usage().used_bytes == bytes_of(tmp_path) == 2 * FILE_BYTES
    assert tier.lookup([b"a"]) == 0 and tier.lookup([b"b"]) == 1 and tier.take_gone() == [digest_of_key(b"a")]
    assert store(tier, [b"d"], 4) == {}
    assert bytes_of(tmp_path) == 2 * FILE_BYTES and tier.lookup([b"d"]) == 1 and tier.lookup([b"b"]) == 0
    tier.close()


def test_two_servers_on_one_directory_both_stay_right(tmp_path: Path) -> None:
    one, two = opened(tmp_path, blocks=3), opened(tmp_path, blocks=3)
    store(one, CHAIN)
    assert two.lookup(CHAIN) == 0 and store(two, [b"d", b"e"]) == {}
    for tier in (one, two):
        store(tier, [b"f", b"g"], 9)
        assert load(tier, [b"f", b"g"]) == {} and tier.usage().used_bytes == bytes_of(tier.directory)
    assert bytes_of(tmp_path) <= 6 * FILE_BYTES
    one.close()
    two.close()


class Clock:
    """Of a tier that was opened at its begin."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_folders_of_processes_that_are_gone_count_and_are_given_up_first(tmp_path: Path) -> None:
    clock = Clock()
    for number, model in enumerate("bc"):
        gone = opened(tmp_path, namespace={**NAMESPACE, "model": model})
        store(gone, CHAIN)
        gone.close()
        os.utime(gone.directory / "lock", (number, number))
    tier = opened(tmp_path, blocks=8, clock=clock)
    assert store(tier, [b"1", b"2"]) == {} and bytes_of(tmp_path) == 8 * FILE_BYTES
    clock.now_s = CLAIMED_S
    for number in range(3, 9):
        store(tier, [b"%d" % number], number)
        store(tier, [b"%d" % number], 10 + number)
        assert bytes_of(tmp_path) <= 8 * FILE_BYTES
    assert tier.usage().blocks == 8 and tier.usage().counts["cleared_folders"] == 2
    assert tier.usage().counts["refused_no_room"] > 0 == tier.usage().counts.get("evicted", 0)
    tier.close()


def test_no_more_folders_are_cleared_than_make_the_room_that_is_short(tmp_path: Path) -> None:
    """Those used longest ago go, and what is left within the bound stays for who starts again."""
    clock, gone = Clock(), dict[str, FileTier]()
    tier = opened(tmp_path, blocks=8, clock=clock)
    store(tier, [*CHAIN, b"d"])
    for number, model in enumerate("xyz"):
        gone[model] = opened(tmp_path, blocks=8, namespace={**NAMESPACE, "model": model})
        store(gone[model], [b"1", b"2"])
        gone[model].close()
        os.utime(gone[model].directory / "lock", (number, number))
    clock.now_s = LOOK_AGAIN_S
    assert looked(tier) == 6 * FILE_BYTES
    clock.now_s += CLAIMED_S - 1
    assert looked(tier) == 6 * FILE_BYTES
    clock.now_s += 1
    assert looked(tier) == 4 * FILE_BYTES
    ended(tier)
    assert [len(files_of(one.directory)) for one in gone.values()] == [0, 2, 2]
    assert tier.lookup(CHAIN) == 3 and not tier.usage().counts.get("evicted")
    tier.close()


def test_what_the_second_of_two_servers_left_is_cleared_first_once_one_is_alone(tmp_path: Path) -> None:
    """It has the folder of the first one, and does not find what is in the other: that makes room before its own."""
    one, two = opened(tmp_path, blocks=4), opened(tmp_path, blocks=4)
    store(one, [b"a", b"b"])
    store(two, [b"c", b"d"])
    one.close()
    two.close()
    clock = Clock()
    alone = opened(tmp_path, blocks=4, clock=clock)
    clock.now_s = CLAIMED_S
    assert alone.directory == one.directory != two.directory
    assert alone.lookup([b"a", b"b"]) == 2 and load(alone, [b"a", b"b"]) == {}
    assert alone.lookup([b"c"]) == alone.lookup([b"d"]) == 0 and load(alone, [b"c"]) == {b"c": "missing"}
    assert alone.store(3, [b"e"], {0: [content(b"e")]}) == [] and ended(alone) == [], "as long as they take room"
    assert files_of(two.directory) == [] and store(alone, [b"e", b"f"], 4) == {}
    assert alone.lookup([b"a", b"b"]) == alone.lookup([b"e", b"f"]) == 2
    counts = alone.usage().counts
    assert counts["cleared_folders"] == 1 and not counts.get("evicted") and bytes_of(tmp_path) == 4 * FILE_BYTES
    alone.close()


def test_no_folder_is_cleared_before_others_that_start_have_claimed_theirs(tmp_path: Path) -> None:
    """As of two ranks, of which one opens its files before the other one: both find what they had. The directory is
    full, and each has a half of it."""
    clock, of_rank = Clock(), [{**NAMESPACE, "rank": rank} for rank in range(2)]
    before = [opened(tmp_path, blocks=3, namespace=namespace) for namespace in of_rank]
    for tier in before:
        store(tier, CHAIN)
        tier.close()
    first = opened(tmp_path, blocks=3, namespace=of_rank[0], clock=clock)
    assert store(first, [b"d"]) == {} and first.lookup([b"d"]) == 1, "in the place of one of its own"
    assert first.usage().counts["evicted"] == 1 and bytes_of(tmp_path) == 6 * FILE_BYTES
    second = opened(tmp_path, blocks=3, namespace=of_rank[1], clock=clock)
    assert [tier.directory.name for tier in (first, second)] == ["0", "0"]
    assert second.lookup(CHAIN) == 3 and load(second, CHAIN) == {}
    assert first._occupancy.idle.any
    clock.now_s = ASK_AGAIN_S
    assert store(first, [b"e"], 2) == {}, "and it is looked who has claimed"
    clock.now_s = CLAIMED_S
    assert store(first, [b"f"], 3) == {} and first.lookup([b"f"]) == 1 and not first._occupancy.idle.any
    assert second.lookup(CHAIN) == 3 and not first.usage().counts["cleared_folders"]
    assert first.usage().blocks == 3 and bytes_of(tmp_path) == 6 * FILE_BYTES
    for tier in (first, second):
        tier.close()


def test_a_full_tier_stores_right_after_a_start_in_the_place_of_its_own_blocks(tmp_path: Path) -> None:
    """What nobody has claimed yet exceeds the bound; for that it gives up nothing of its own."""
    clock, gone = Clock(), opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    store(gone, [b"1", b"2"])
    gone.close()
    before = opened(tmp_path)
    for number, key in enumerate(CHAIN):
        store(before, [key], number)
    before.close()
    tier = opened(tmp_path, blocks=4, clock=clock)
    assert tier._occupancy.free == -1
    for number in range(1, 6):
        clock.now_s += ASK_AGAIN_S
        key = b"new %d" % number
        assert store(tier, [key], number) == {} and tier.lookup([key]) == 1
        assert tier.usage().counts["evicted"] == number and bytes_of(tmp_path) == 5 * FILE_BYTES
    clock.now_s = CLAIMED_S
    assert tier.store(8, [b"d"], {0: [content(b"d")]}) == [] and ended(tier) == [], "the folder makes room now"
    assert store(tier, [b"d"], 9) == {} and files_of(gone.directory) == []
    assert tier.usage().blocks == 4 and tier.usage().counts["evicted"] == 5
    tier.close()


def test_a_tier_that_has_nothing_to_give_up_waits_until_folders_are_cleared(tmp_path: Path) -> None:
    """As of another model in a directory that is full: it goes over no bound and clears nothing of those who start."""
    clock, gone = Clock(), opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    store(gone, CHAIN)
    gone.close()
    tier = opened(tmp_path, blocks=3, clock=clock)
    for clock.now_s in (0.0, CLAIMED_S - 1):
        assert tier.store(1, [b"d"], {0: [content(b"d")]}) == [] and ended(tier) == []
    assert len(files_of(gone.directory)) == 3 and tier.usage().counts["refused_no_room"] == 2
    clock.now_s = CLAIMED_S
    assert tier.store(2, [b"d"], {0: [content(b"d")]}) == [] and ended(tier) == []
    assert store(tier, [b"d"], 3) == {} and bytes_of(tmp_path) == FILE_BYTES
    tier.close()


def test_a_folder_that_another_server_leaves_comes_to_count_and_makes_room(tmp_path: Path) -> None:
    """As where a new server starts before the old one has ended, which nobody starts again."""
    clock, before = Clock(), opened(tmp_path, blocks=4)
    store(before, [*CHAIN, b"d"])
    tier = opened(tmp_path, blocks=4, clock=clock)
    before.close()
    assert store(tier, [b"1", b"2", b"3", b"4"]) == {} and bytes_of(tmp_path) == 8 * FILE_BYTES
    clock.now_s = LOOK_AGAIN_S
    found = looked(tier)
    assert found == 4 * FILE_BYTES
    clock.now_s += CLAIMED_S - 1
    assert store(tier, [b"5"], 2) == {} and bytes_of(tmp_path) == 8 * FILE_BYTES, "in the place of one of its own"
    clock.now_s += 1
    tier.finished()
    await_aside(tier)
    assert files_of(before.directory) == [] and bytes_of(tmp_path) == 4 * FILE_BYTES
    assert store(tier, [b"6"], 3) == {} and tier.usage().counts["cleared_folders"] == 1
    assert tier.usage().blocks == 4 and bytes_of(tmp_path) == 4 * FILE_BYTES
    tier.close()


def looked(tier: FileTier) -> int:
    """Bytes in folders that no process owns, after it was looked for them if that is due."""
    for _ in range(2):
        tier.finished()
        await_aside(tier)
    return tier._occupancy.idle.used_bytes


def test_a_full_disk_is_cleared_of_such_folders_far_below_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for them at once, and they are left alone for five minutes as ever."""
    clock, before = Clock(), opened(tmp_path)
    store(before, CHAIN)
    tier = opened(tmp_path, blocks=100, clock=clock)
    before.close()

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, "writev", fail)
        assert looked(tier) == 0
        assert store(tier, [b"d"]) == {b"d": "io_error"} and looked(tier) == 3 * FILE_BYTES
        clock.now_s = CLAIMED_S - 1
        assert looked(tier) == bytes_of(tmp_path) == 3 * FILE_BYTES
        clock.now_s = CLAIMED_S
        assert looked(tier) == bytes_of(tmp_path) == 0
    assert store(tier, [b"d"], 2) == {}
    tier.close()


def test_an_empty_folder_that_was_left_over_changes_nothing(tmp_path: Path) -> None:
    opened(tmp_path, namespace={**NAMESPACE, "model": "b"}).close()
    clock = Clock()
    tier = opened(tmp_path, blocks=2, clock=clock)
    for clock.now_s in (0.0, 2 * CLAIMED_S):
        for number in range(4):
            key = b"%d at %d" % (number, clock.now_s)
            assert store(tier, [key], number) == {} and tier.lookup([key]) == 1
    assert not tier.usage().counts["cleared_folders"] and not tier.usage().counts["refused_no_room"]
    tier.close()


def test_what_cannot_be_cleared_goes_on_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own blocks make room then, as long as they can."""
    clock, gone = Clock(), opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    store(gone, CHAIN)
    gone.close()
    tier = opened(tmp_path, blocks=5, clock=clock)
    clock.now_s = CLAIMED_S
    store(tier, [b"1", b"2"])
    real = os.unlink

    def refuse(file: str, **where: int) -> None:
        if (gone.directory / file[0] / file).exists():
            raise PermissionError(1, "immutable")
        real(file, **where)

    with monkeypatch.context() as patch:
        patch.setattr(idle_folders.os, "unlink", refuse)
        for number in range(3, 8):
            store(tier, [b"%d" % number], number)
            assert bytes_of(tmp_path) <= 5 * FILE_BYTES
    assert tier.lookup([b"7"]) == 1 and tier.usage().counts["evicted"] > 0
    assert not tier.usage().counts["cleared_folders"] and "an unused folder was not cleared" in caplog.text
    tier.close()
    smaller = opened(tmp_path, blocks=3, clock=clock)
    clock.now_s += CLAIMED_S
    with monkeypatch.context() as patch:
        patch.setattr(idle_folders.os, "unlink", refuse)
        for number in range(2):
            assert smaller.store(number, [b"x"], {0: [content(b"x")]}) == [] and ended(smaller) == []
    assert smaller.usage().blocks == 2, "giving these up would make no room"
    smaller.close()


def test_the_end_leaves_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = descriptors(), threading.active_count()
    tier = opened(tmp_path, threads=2)
    gate = Gate(monkeypatch, "writev")
    tier.store(1, CHAIN, {index: [content(key)] for index, key in enumerate(CHAIN)})
    gate.began.wait()
    opening = when_closing(tier._threads, gate.open)
    tier.close()
    opening.join()
    assert threading.active_count() == threads and descriptors() == before
    assert len(files_of(tmp_path)) == 1 and not list(tmp_path.rglob("writing/*"))
    again = opened(tmp_path)
    assert again.lookup(CHAIN) == 1
    again.close()


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    """What has the numbers of its descriptors by then stays open."""
    before, tier = descriptors(), opened(tmp_path)
    number = descriptors() - before
    tier.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(number)]
    second = opened(tmp_path)
    tier.close()
    assert [os.fstat(other).st_ino for other in others] == [tmp_path.stat().st_ino] * number
    assert store(second, CHAIN) == {} and load(second, CHAIN) == {}
    second.close()
    for other in others:
        os.close(other)


def test_where_a_thread_cannot_be_started_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = descriptors(), threading.active_count()
    with monkeypatch.context() as patch:
        no_thread_starts(patch, "kvpolicy-files-1")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            opened(tmp_path)
    assert descriptors() == before and threading.active_count() == threads
    tier = opened(tmp_path)
    assert tier.number == 0
    tier.close()


def test_nobody_waits_until_a_folder_is_cleared_and_the_end_ends_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes minutes where it has many files."""
    clock, gone = Clock(), opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    store(gone, CHAIN)
    gone.close()
    tier = opened(tmp_path, blocks=3, clock=clock, threads=2)
    clock.now_s = CLAIMED_S
    gate = Gate(monkeypatch, "unlink")
    assert tier.store(1, [b"d"], {0: [content(b"d")]}) == []
    gate.began.wait()
    assert tier.wait_idle(30), "it was waited for"
    tier.load(2, [(b"d", [aligned_memory(BLOCK_BYTES)])])
    assert tier.wait_idle(30) and [one.failed for one in tier.finished()] == [{b"d": "missing"}]
    opening = when_closing(tier._threads, gate.open)
    tier.close()
    opening.join()
    assert len(files_of(gone.directory)) == 2, "the one that was being removed is gone"
    again = opened(tmp_path, namespace={**NAMESPACE, "model": "b"})
    assert again.directory == gone.directory and len(again.digests()) == 2
    again.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 0}, "capacity_bytes is 0, which holds no file of 16384 bytes"),
        ({"policy": "belady"}, "policy is 'belady', should be one of lru"),
        ({"queue_blocks": 0}, "queue_blocks is 0"),
        ({"threads": 1}, "threads is 1"),
        ({"block_bytes": 0}, "block_bytes is 0"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    before = descriptors()
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "kv", **options)
    assert not (tmp_path / "kv").exists() and descriptors() == before


def test_without_blake3_the_start_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(InputError, match=r"needs blake3, .*: pip install 'kvpolicy\[files\]'"):
        opened(tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_a_directory_that_cannot_be_written_is_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(block_files.os, "writev", refuse)
    with pytest.raises(OSError, match="Read-only"):
        opened(tmp_path)
    assert descriptors() == before
