"""What a tier takes up of an earlier process; more of it in test_file_tier.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpolicy.caching import KINDS, CachingPolicy, Lru, Part
from kvpolicy.caching.base import Chain
from kvpolicy.tiers import digest_of_key
from kvpolicy.tiers.block_files import OUTDATED_NS, BlockFiles
from kvpolicy.tiers.block_format import NO_PARENT, BlockLayout, BlockName
from kvpolicy.tiers.faults import Faults
from kvpolicy.tiers.found_blocks import REPLAYED, SAME_USE_NS, FoundBlocks
from kvpolicy.tiers.owned_folder import OwnedFolder
from tests.tiers.blocks import files_of, load, opened, store

MS, MINUTE = 1_000_000, 60_000_000_000
BEGIN_NS = 1_700_000_000 * 1000 * MS
KEPT, SALTED = [b"a", b"b"], [b"salted c", b"salted d"]


@pytest.mark.parametrize("policy", sorted(KINDS))
def test_what_only_the_process_that_stored_it_could_ask_for_goes_first_after_a_restart(
    tmp_path: Path, policy: str
) -> None:
    """However often and how lately it was used."""
    first = opened(tmp_path, blocks=4)
    store(first, KEPT)
    first.forget_hints()
    store(first, SALTED, 2)
    assert load(first, SALTED) == {}
    first.close()
    second = opened(tmp_path, blocks=4, policy=policy)
    for _ in range(2):
        second.asked(SALTED)
    assert second.lookup(KEPT) == second.lookup(SALTED) == 2
    for number, key in enumerate([b"e", b"f"], 3):
        assert store(second, [key], number) == {}
    assert second.lookup(KEPT) == 2 and not any(second.lookup([key]) for key in SALTED)
    second.close()


def test_it_is_not_found_where_there_is_less_room(tmp_path: Path) -> None:
    first = opened(tmp_path, blocks=4)
    store(first, KEPT)
    first.forget_hints()
    store(first, SALTED, 2)
    first.close()
    second = opened(tmp_path, blocks=2)
    assert second.lookup(KEPT) == 2 and len(files_of(tmp_path)) == 2
    second.close()


@pytest.mark.parametrize("used_ns", [OUTDATED_NS, SAME_USE_NS // 2, SAME_USE_NS])
def test_the_policy_knows_all_that_is_there_whatever_its_time(tmp_path: Path, used_ns: int) -> None:
    first = opened(tmp_path)
    store(first, KEPT)
    first.close()
    for path in files_of(tmp_path):
        os.utime(path, ns=(used_ns, used_ns))
    second = opened(tmp_path, blocks=2)
    assert second.lookup(KEPT) == 2 and store(second, [b"e", b"f"]) == {} and second.lookup(KEPT[:1]) == 0
    second.close()


class Told(Lru):
    """Keeps what it is told of."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.prompts: list[list[str]] = []
        self.stores: list[tuple[int, str]] = []
        """Blocks, each with its place in the prompt."""

    def asked(self, chain: Chain, hits: int) -> None:
        self.prompts.append([*map(str, chain)])
        super().asked(chain, hits)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        first = chain.first if isinstance(chain, Part) else 0
        self.stores += [(first + place, str(chain[place])) for place in missing]
        super().stored(chain, missing)


class Left:
    """A folder that a process left."""

    def __init__(self, directory: Path, block_bytes: int = 10) -> None:
        self.layout = BlockLayout(bytes(20), block_bytes)
        self.folder = OwnedFolder.claim(directory, {}, block_bytes)
        self._name_of: dict[bytes, str] = {}

    def put(self, prompt: str, used_ns: Sequence[int], first: int = 0) -> None:
        """Blocks of a prompt from its block ``first`` on, with the times of their last uses. A block is named by its
        prompt up to there, as "ab"."""
        for number, time_ns in enumerate(used_ns, first + 1):
            parent = self._digest(prompt[: number - 1]) if number > 1 else NO_PARENT
            self.put_block(BlockName(self._digest(prompt[:number]), parent), time_ns)

    def put_block(self, name: BlockName, used_ns: int) -> None:
        path = self.folder.path / name.folder / name.file
        path.touch()
        os.truncate(path, self.layout.file_bytes)
        os.utime(path, ns=(used_ns, used_ns))

    def _digest(self, prompt: str) -> bytes:
        digest = digest_of_key(prompt.encode())
        self._name_of[digest] = prompt
        return digest

    def take_up(self, policy: CachingPolicy) -> FoundBlocks:
        files = BlockFiles(self.folder, self.layout)
        found = FoundBlocks(files, self.layout.file_bytes, Counter(), Faults(self.folder.path))
        found.take_up(policy)
        self.folder.close()
        return found

    def name(self, digests: Sequence[str]) -> list[str]:
        names = {str(digest): name for digest, name in self._name_of.items()}
        return [names[digest] for digest in digests]


def prompts(left: Left, blocks: int = 1000) -> list[str]:
    """What the policy is told was asked for, each prompt by its last block; all of them whole."""
    told = Told(blocks)
    left.take_up(told)
    named = [left.name(prompt) for prompt in told.prompts]
    assert all(prompt == [prompt[-1][: place + 1] for place in range(len(prompt))] for prompt in named)
    return [prompt[-1] for prompt in named]


def rising(count: int, begin_ns: int = BEGIN_NS, step_ns: int = MS) -> list[int]:
    return [begin_ns + number * step_ns for number in range(count)]


@pytest.mark.parametrize("step_ns", [0, MS, -MS, SAME_USE_NS - 1], ids=str)
def test_a_prompt_whose_blocks_were_written_one_after_the_other_was_asked_for_once(
    tmp_path: Path, step_ns: int
) -> None:
    left = Left(tmp_path)
    left.put("a" * 300, rising(300, step_ns=step_ns))
    assert prompts(left) == ["a" * 300]


def test_prompts_that_go_on_later_and_those_that_come_again_count_each_time(tmp_path: Path) -> None:
    """Two turns of a conversation, a second conversation after the same beginning, and the beginning alone."""
    left = Left(tmp_path)
    left.put("sysab", rising(4), 0)
    left.put("sysab", rising(1, BEGIN_NS + MINUTE), 4)
    left.put("sysxy", rising(2, BEGIN_NS + 2 * MINUTE), 3)
    left.put("sys", rising(3, BEGIN_NS + 3 * MINUTE))
    assert prompts(left) == ["sysa", "sysab", "sysxy", "sys"]


def test_what_is_left_of_a_prompt_without_its_beginning_is_known_as_well(tmp_path: Path) -> None:
    left, told = Left(tmp_path), Told(10)
    left.put("abcd", rising(2), 2)
    assert {*left.take_up(told).there} == {digest_of_key(b"abc"), digest_of_key(b"abcd")}
    assert len(told) == 2 and [left.name(prompt) for prompt in told.prompts] == [["abc", "abcd"]]


def test_what_is_told_grows_with_the_number_of_blocks_alone(tmp_path: Path) -> None:
    """However many prompts share however much. What they end with is given up in the order of its use."""
    left, blocks, ends = Left(tmp_path), 200 + 2 * 100, [chr(1000 + number) + "." for number in range(100)]
    left.put("s" * 200, rising(200))
    for number in range(100):
        left.put("s" * 200 + ends[number], rising(2, BEGIN_NS + number * MINUTE), 200)
    told = Told(blocks)
    found = left.take_up(told)
    assert len(told) == len(found.there) == blocks
    assert sum(map(len, told.prompts)) <= REPLAYED * blocks and len(told.prompts) == 100
    assert sorted(place for place, _ in told.stores) == [*range(200), *[200] * 100, *[201] * 100]
    assert [place + 1 for place, _ in told.stores] == [len(name) for name in left.name([key for _, key in told.stores])]
    order = left.name([*map(str, told.evict(200, ()))])
    assert [name[200:] for name in order] == [end[:cut] for end in ends for cut in (2, 1)]


def test_where_there_is_less_room_beginnings_stay(tmp_path: Path) -> None:
    """Of the prompt that was used last as of others; its beginning was written before its end."""
    left = Left(tmp_path)
    left.put("abcd", rising(4, BEGIN_NS + MINUTE))
    left.put("xyz", rising(3))
    found = left.take_up(Lru(6))
    assert {*found.there} == {digest_of_key(key) for key in (b"a", b"ab", b"abc", b"abcd", b"x", b"xy")}
    left = Left(tmp_path)
    assert {*left.take_up(Lru(2)).there} == {digest_of_key(key) for key in (b"a", b"ab")}


def test_blocks_that_name_one_another_as_the_one_before_are_taken_up_all_the_same(tmp_path: Path) -> None:
    left, told = Left(tmp_path), Told(10)
    ring = [digest_of_key(b"%d" % number) for number in range(3)]
    for number, key in enumerate(ring):
        left.put_block(BlockName(key, ring[number - 1]), BEGIN_NS)
    left.put_block(BlockName(digest_of_key(b"after"), ring[0]), BEGIN_NS + MINUTE)
    left.put_block(BlockName(digest_of_key(b"own"), digest_of_key(b"own")), BEGIN_NS)
    assert len(left.take_up(told).there) == len(told) == 5
