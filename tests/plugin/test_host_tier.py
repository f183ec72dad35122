"""Host memory and files behind one protocol: the same cases, with the bytes of a real copier and of real files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from kvpolicy.caching import Hinted, Lru
from kvpolicy.request_marks import ANYBODY, HintLimits, Hints
from kvpolicy.tiers import FileTier, Finished, Tier, file_bytes_of
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.host_tier import HostTier

CAPACITY, BLOCKS, ELEMENTS = 4, 12, 512
BLOCK_BYTES = 2 * ELEMENTS * 2
CHAIN = (b"a", b"b", b"c")
LIMITS = HintLimits(class_share=0.5)


class Host:
    """Host memory under a device of blocks that hold other numbers each."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.device = IndexingCopier(
            [torch.zeros((BLOCKS, ELEMENTS), dtype=torch.bfloat16) for _ in range(2)], capacity, False, None
        )
        self.copies = CopyBook(capacity, 1, BLOCK_BYTES, Hinted(Lru(capacity), lambda: 0.0, 1, LIMITS))
        self.made = HostTier(self.copies, lambda: 1)
        self.tier: Tier[Any, Any] = self.made

    def fill(self, block: int, number: int) -> None:
        for segment in self.device.device_segments:
            segment[block] = number

    def number(self, block: int) -> int:
        (number,) = {int(one) for segment in self.device.device_segments for one in segment[block].unique()}
        return number

    def memory(self, block: int) -> int:
        return block

    def lose(self, blocks: Sequence[int]) -> None:
        """The tier above gives its blocks to other tokens, the last one first, as vLLM does."""
        self.copies.lost(reversed(blocks))
        self.run()
        for block in blocks:
            self.fill(block, 0)

    def run(self) -> None:
        jobs = self.copies.take_jobs(1, False, lambda ids: frozenset())
        for save in jobs.saves:
            self.device.save(save)
        for load in jobs.loads:
            self.device.load(load)
        self.device.poll()
        done, self.device.transfers = self.device.transfers, []
        for settled in self.copies.acknowledge(done):
            self.made.settled(settled)

    def loads(self) -> list[Finished[Any]]:
        self.run()
        return self.tier.finished()


class Files:
    """Files under blocks of host memory that hold other numbers each."""

    def __init__(self, folder: Path, capacity: int = CAPACITY) -> None:
        self.above = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.opened = FileTier.open(
            folder, {"model": "a"}, BLOCK_BYTES, capacity * file_bytes_of(BLOCK_BYTES), hints=LIMITS, block_tokens=1
        )
        self.tier: Tier[Any, Any] = self.opened
        self.ended: list[Finished[Any]] = []

    def fill(self, block: int, number: int) -> None:
        self.above[block] = number

    def number(self, block: int) -> int:
        (number,) = {int(one) for one in np.unique(self.above[block])}
        return number

    def memory(self, block: int) -> Any:
        return [self.above[block]]

    def lose(self, blocks: Sequence[int]) -> None:
        """Not before what is being stored of them has ended."""
        self.opened.wait_idle()
        self.ended += self.tier.finished()
        for block in blocks:
            self.fill(block, 0)

    def loads(self) -> list[Finished[Any]]:
        self.opened.wait_idle()
        ended, self.ended = self.ended + self.tier.finished(), []
        return [finished for finished in ended if finished.kind == "load"]


@pytest.fixture(params=["host memory", "files"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host | Files]:
    made = Host() if request.param == "host memory" else Files(tmp_path)
    yield made
    if isinstance(made, Files):
        made.opened.close()


def store(rig: Host | Files, chain: Sequence[bytes], job: int, numbers: Mapping[int, int] | None = None) -> list[int]:
    """A request with this prompt comes, has its blocks above, by index with these numbers in them, and loses them."""
    rig.tier.asked(chain)
    numbers = {index: key[-1] for index, key in enumerate(chain)} if numbers is None else numbers
    for index, number in numbers.items():
        rig.fill(index, number)
    taken = rig.tier.store(job, chain, {index: rig.memory(index) for index in numbers})
    rig.lose([*numbers])
    return taken


def load(rig: Host | Files, keys: Sequence[bytes], job: int) -> tuple[list[int], Finished[Any]]:
    """The numbers in the blocks that keys were loaded to, and what is said of the load."""
    into = [BLOCKS - 1 - place for place in range(len(keys))]
    rig.tier.load(job, [(key, rig.memory(block)) for key, block in zip(keys, into, strict=True)])
    (finished,) = rig.loads()
    assert rig.tier.finished() == [], "each once"
    return [rig.number(block) for block in into], finished


def test_blocks_come_back_to_other_places_as_they_were(rig: Host | Files) -> None:
    assert rig.tier.lookup(CHAIN) == 0
    assert store(rig, CHAIN, 1) == [0, 1, 2] and rig.tier.lookup(CHAIN) == 3
    numbers, finished = load(rig, (b"c", b"b"), 2)
    assert numbers == [ord("c"), ord("b")] and (finished.job, finished.kind) == (2, "load")
    assert {*finished.done} == {b"c", b"b"} and not finished.failed
    assert rig.tier.lookup(CHAIN) == 3, "a load takes nothing away"


def test_a_lookup_counts_leading_blocks_alone(rig: Host | Files) -> None:
    assert store(rig, CHAIN, 1, {1: 7, 2: 8}) == [1, 2]
    assert rig.tier.lookup(CHAIN) == 0 and rig.tier.lookup(CHAIN[1:]) == 2
    assert load(rig, CHAIN[1:], 2)[0] == [7, 8]


def test_what_is_there_is_not_stored_again(rig: Host | Files) -> None:
    store(rig, CHAIN, 1)
    assert store(rig, (*CHAIN, b"d"), 2) == [3] and store(rig, CHAIN, 3) == []
    assert load(rig, (b"d",), 4)[0] == [ord("d")] and rig.tier.usage().blocks == 4


def test_what_is_not_there_is_not_loaded_and_said_to_be_so(rig: Host | Files) -> None:
    store(rig, CHAIN, 1)
    rig.fill(BLOCKS - 1, 99)
    _, finished = load(rig, (b"z",), 2)
    assert (finished.job, finished.kind, finished.done, [*finished.failed]) == (2, "load", (), [b"z"])
    assert rig.tier.lookup(CHAIN) == 3 and rig.tier.lookup((b"z",)) == 0


def test_the_load_of_nothing_ends(rig: Host | Files) -> None:
    assert load(rig, (), 1) == ([], Finished(1, "load", (), {}))


def test_what_is_dropped_is_not_found(rig: Host | Files) -> None:
    store(rig, CHAIN, 1)
    rig.tier.drop([b"b", b"unknown"])
    assert rig.tier.lookup(CHAIN) == 1 and rig.tier.lookup((b"c",)) == 1 and rig.tier.usage().blocks == 2
    assert not load(rig, (b"b",), 2)[1].done
    assert store(rig, CHAIN, 3) == [1] and load(rig, (b"b",), 4)[0] == [ord("b")], "and can be stored again"


def test_no_more_is_used_than_there_is_room_for(rig: Host | Files) -> None:
    for job, key in enumerate([b"a", b"b", b"c", b"d", b"e", b"f"], 1):
        store(rig, (key,), job)
        usage = rig.tier.usage()
        assert usage.blocks == min(job, CAPACITY) and usage.used_bytes <= usage.capacity_bytes
    assert usage.used_bytes == usage.capacity_bytes and usage.queued_blocks == 0
    assert (usage.counts["stored"], usage.counts["evicted"]) == (6, 2)


def test_what_was_asked_for_longest_ago_goes_first(rig: Host | Files) -> None:
    for job, key in enumerate([b"a", b"b", b"c", b"d"], 1):
        store(rig, (key,), job)
    rig.tier.asked((b"a",))
    store(rig, (b"e",), 5)
    assert [rig.tier.lookup((key,)) for key in (b"a", b"b", b"c")] == [1, 0, 1]


def test_what_a_hint_pins_stays(rig: Host | Files) -> None:
    rig.tier.hinted((b"p",), Hints(pin_tokens=1), ANYBODY, "r", over=True)
    store(rig, (b"p",), 1)
    for job, key in enumerate([b"a", b"b", b"c", b"d", b"e"], 2):
        store(rig, (key,), job)
    assert rig.tier.lookup((b"p",)) == 1 and load(rig, (b"p",), 9)[0] == [ord("p")]


# ---- of host memory alone ----


def test_what_the_device_keeps_is_not_saved() -> None:
    host = Host()
    host.fill(0, 1)
    assert host.tier.store("r", CHAIN[:1], {0: 0}) == [0] and host.tier.store("s", CHAIN[:1], {0: 0}) == []
    host.run()
    assert host.tier.lookup(CHAIN) == 0 and host.copies.pool.counts.stored == 0 and host.tier.finished() == []


def test_a_load_whose_request_is_gone_is_not_reported() -> None:
    host = Host()
    store(host, CHAIN, 1)
    host.tier.load("r", [(b"a", 5)])
    host.copies.forget("r")
    host.run()
    assert host.tier.finished() == [] and host.made._loads == {} and host.copies.loading == 0
    assert host.tier.lookup(CHAIN) == 3


def test_a_load_that_fails_is_said_to_have_failed_whole() -> None:
    """Whoever finds these blocks would fail again."""
    host = Host()
    store(host, CHAIN, 1)
    host.tier.load("r", [(b"a", 5), (b"b", BLOCKS + 7)])  # no such block
    (finished,) = host.loads()
    assert (finished.job, finished.done, finished.failed.keys()) == ("r", (), {b"a", b"b"})
    assert host.tier.lookup(CHAIN) == 0 and host.tier.lookup((b"c",)) == 1 and host.copies.pool.counts.spoiled == 2


@pytest.mark.parametrize("first", ["drop", "lose"])
def test_what_a_preempted_request_needs_stays_its_own_when_it_is_dropped(first: str) -> None:
    """Whether host memory has it, or the device alone."""
    host = Host()
    host.fill(0, 3)
    host.copies.keep("r", "p", 1, [(b"a", 0)])
    if first == "drop":
        host.tier.drop([b"a"])
    host.lose([0])
    host.tier.drop([b"a"])
    assert host.tier.lookup((b"a",)) == 0 and host.copies.loadable_tokens("r", 1, 0) == 1
    host.copies.begin_load("r", [0], (9,), 1)
    host.run()
    assert host.number(9) == 3
