"""A rank's files, from and to the slots of a real copier."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from kvpolicy.caching import ByCost
from kvpolicy.cost.block_price import sampled
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.request_marks import ANYBODY, Client, HintLimits, Hints
from kvpolicy.tiers import FileTier, LastingTier, Tier, Took, digest_of_key
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.staging import StagedCopier
from kvpolicy_vllm.plugin.messages import FileEvent, FileJob, FileReport, Job, StepJobs
from kvpolicy_vllm.plugin.rank_files import FOUND_AT_ONCE, RankFiles, host_rows
from tests.snippets import shown
from tests.tiers.blocks import await_closing
from tests.tiers.test_file_tier import Gate

SEGMENTS, BLOCKS, ELEMENTS = 3, 6, 512
BLOCK_BYTES = SEGMENTS * ELEMENTS * 2
PATIENCE_S = 600.0


def copier(kind: type = IndexingCopier) -> IndexingCopier:
    """Device blocks that hold other numbers each, of two bytes, and eight host slots."""
    made = kind([torch.zeros((BLOCKS, ELEMENTS), dtype=torch.bfloat16) for _ in range(SEGMENTS)], 8, False, None)
    for number, segment in enumerate(made.device_segments):
        for block in range(BLOCKS):
            segment[block] = 10 * block + number + 1
    return made


def opened(folder: Path) -> FileTier:
    return FileTier.open(folder, {"model": "a"}, BLOCK_BYTES, 1 << 20)


@pytest.fixture(params=[IndexingCopier, StagedCopier])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RankFiles, IndexingCopier]]:
    device = copier(request.param)
    device.save(Job(1, "r", (0, 1, 2), (0, 1, 2)))
    files = RankFiles(opened(tmp_path), device)
    assert files.reports() == [FileReport(ready=True)]
    yield files, device
    files.close()


def reports(files: RankFiles) -> list[FileReport]:
    """Without how long loads took."""
    files._tier.wait_idle()
    return [replace(report, took=None) for report in files.reports()]


def test_blocks_go_to_files_and_come_back_to_other_slots(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, device = rank
    store = FileJob(1, (b"b", b"c"), (1, 2), (b"a", b"b", b"c"))
    files.begin(StepJobs(1, file_stores=(store,), file_events=(FileEvent((b"a", b"b", b"c")),)))
    assert reports(files) == [FileReport(1, moved=2)]
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"c", b"b"), (5, 6)),)))
    assert reports(files) == [FileReport(2, moved=2)]
    device.load(Job(2, "r", (4, 5), (5, 6)))
    assert [load.ok for load in device.poll()] == [True]
    for number, segment in enumerate(device.device_segments):
        assert (segment[4] == 21 + number).all() and (segment[5] == 11 + number).all()


def test_a_rank_says_how_long_it_took_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not how long it was before it was asked."""
    now_s = [0.0]
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 1 << 20, clock=lambda: now_s[0])
    device = copier()
    device.save(Job(1, "r", (0,), (0,)))
    files = RankFiles(tier, device)
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    tier.wait_idle()
    assert [report.took for report in files.reports()] == [None, None]
    gate = Gate(monkeypatch, "readv")
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"a",), (5,)),)))
    gate.began.wait()
    now_s[0] = 2.0
    gate.open()
    tier.wait_idle()
    now_s[0] = 9.0
    assert files.reports() == [FileReport(2, moved=1, took=Took(2.0, 2.0))]
    files.close()


def test_a_block_that_does_not_come_cannot_be_loaded(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, device = rank
    files.begin(StepJobs(1, file_loads=(FileJob(1, (b"a",), (5,)),)))
    assert reports(files) == [FileReport(1, failed=(digest_of_key(b"a"),))]
    device.load(Job(2, "r", (4,), (5,)))
    assert [load.ok for load in device.poll()] == [False]


def test_what_requests_say_of_their_windows_holds_their_files(tmp_path: Path) -> None:
    """Files for four blocks. A window that is kept stays when others come, until its session has ended."""
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 4 * (2 * 4096), hints=HintLimits(), block_tokens=16)
    assert tier.capacity_blocks == 4
    device = copier()
    device.save(Job(1, "r", (0, 1, 2), (0, 1, 2)))
    files, window = RankFiles(tier, device), (b"a", b"b")
    number = 0

    def store(chain: tuple[bytes, ...], *hints: FileEvent) -> None:
        nonlocal number
        number += 1
        job = FileJob(number, chain, tuple(range(len(chain))), chain)
        files.begin(StepJobs(number, file_events=(FileEvent(chain), *hints), file_stores=(job,)))
        reports(files)

    store(window, FileEvent(window, Hints(60.0, session="s"), ANYBODY, over=True))
    for other in (b"x", b"y", b"z", b"w"):
        store((other, other + b"2"))
    assert tier.lookup(window) == 1, "hints of a class hold a quarter at most"
    store((b"v",), FileEvent((), Hints(session="s", ended=True), ANYBODY))
    assert tier.lookup(window) == 0
    files.close()


def test_rank_0_says_what_became_of_hints(tmp_path: Path) -> None:
    """Files for four blocks, of which hints of a class hold one."""
    for number, counts_hints in enumerate((True, False)):
        tier = FileTier.open(tmp_path, {"rank": number}, BLOCK_BYTES, 4 * (2 * 4096), hints=HintLimits())
        files, window = RankFiles(tier, copier(), counts_hints=counts_hints), (b"a", b"b")
        assert files.reports() == [FileReport(ready=True)]
        came = FileEvent(window, Hints(60.0, session="s"), ANYBODY, over=True)
        over = FileEvent((), Hints(session="s", ended=True), ANYBODY, over=True)
        said = []
        for step, event in enumerate((FileEvent(window, came.hints), came, FileEvent(window), over)):
            files.begin(StepJobs(step, file_events=(event,)))
            said.append(files.reports())
        one, two = FileReport(hinted=(1, 1, 0, 0)), FileReport(hinted=(0, 0, 0, 2))
        assert said == ([[], [one], [], [two]] if counts_hints else [[]] * 4), "what comes has no files yet"
        files.close()


def test_a_session_holds_its_files_when_a_client_of_another_salt_ends_one_of_its_name(tmp_path: Path) -> None:
    tier = FileTier.open(
        tmp_path, {"model": "a"}, BLOCK_BYTES, 4 * (2 * 4096), hints=HintLimits(class_share=0.5), block_tokens=16
    )
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    files, window = RankFiles(tier, device), (b"a", b"b")
    anne, ben = Client(salt=b"anne"), Client(salt=b"ben")
    kept, ended = Hints(60.0, session="s"), Hints(session="s", ended=True)
    found, number = [], 0
    for event in (FileEvent(window, kept, anne), FileEvent((), ended, ben), FileEvent((), ended, anne)):
        for chain in (window, (b"c", b"d")) if event.keys else ((b"e", b"f"), (b"g", b"h")):
            number += 1
            job = FileJob(number, chain, (0, 1), chain)
            files.begin(StepJobs(number, file_events=(FileEvent(chain), event), file_stores=(job,)))
            reports(files)
        found.append(tier.lookup(window))
    assert found == [2, 2, 0]
    files.close()


def test_after_a_reset_earlier_hints_hold_nothing_and_take_no_share(tmp_path: Path) -> None:
    """Files for eight blocks, of which hints of a class hold two."""
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 8 * (2 * 4096), hints=HintLimits(), block_tokens=16)
    assert tier.capacity_blocks == 8
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    files = RankFiles(tier, device)

    def store(number: int, chain: tuple[bytes, ...], keep_s: float | None = None, reset: bool = False) -> None:
        events = [FileEvent(chain)] + [FileEvent(chain, Hints(keep_s), ANYBODY)] * (keep_s is not None)
        job = FileJob(number, chain, tuple(range(len(chain))), chain)
        files.begin(StepJobs(number, forget_hints=reset, file_events=tuple(events), file_stores=(job,)))
        reports(files)

    store(1, (b"a", b"b"), keep_s=600.0)
    store(2, (b"A", b"B"), keep_s=60.0, reset=True)
    for number in range(3, 9):
        store(number, (b"x%d" % number,))
    assert tier.lookup((b"a",)) == 0, "given up by use, as others are"
    assert tier.lookup((b"A", b"B")) == 2
    files.close()


def test_a_prompt_that_comes_again_as_its_session_ends_goes_first_no_longer(tmp_path: Path) -> None:
    """Both in one step, in this order."""
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 2 * (2 * 4096), hints=HintLimits(), block_tokens=16)
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    files = RankFiles(tier, device)
    again = FileEvent((b"a",), Hints(session="s", ended=True), ANYBODY), FileEvent((b"a",))
    for number, (key, events) in enumerate([(b"a", ()), (b"b", ()), (b"c", again)], 1):
        job = FileJob(number, (key,), (0,), (key,))
        files.begin(StepJobs(number, file_events=(*events, FileEvent((key,))), file_stores=(job,)))
        reports(files)
    assert tier.lookup((b"a",)) == 1 and not tier.lookup((b"b",)), "by use it is not the next"
    files.close()


def test_what_is_there_already_counts_as_stored_and_not_as_written(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, _ = rank
    chain, found = (b"a", b"b"), []
    for number, blocks in enumerate((1, 2, 2), 1):
        job = FileJob(number, chain[:blocks], tuple(range(blocks)), chain[:blocks])
        files.begin(StepJobs(number, file_stores=(job,)))
        found += reports(files)
    assert found == [FileReport(1, moved=1), FileReport(2, moved=1), FileReport(3)]


def test_a_slot_that_holds_no_whole_block_is_not_stored(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, _ = rank
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b"), (0, 7), (b"a", b"b")),)))
    assert reports(files) == [FileReport(1, refused=(digest_of_key(b"b"),), moved=1)], "no disk has failed"


def test_what_there_is_no_room_for_is_refused_and_has_not_failed(tmp_path: Path) -> None:
    """Files for one block, of two that are stored at once. A third one is not whole."""
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 2 * 4096)
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    files = RankFiles(tier, device)
    assert files.reports() == [FileReport(ready=True)]
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b", b"c"), (0, 1, 7), (b"a", b"b", b"c")),)))
    assert reports(files) == [FileReport(1, refused=(digest_of_key(b"b"), digest_of_key(b"c")), moved=1)]
    files.close()


def test_jobs_that_are_given_twice_are_done_once(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, _ = rank
    jobs = StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),))
    files.begin(jobs)
    files.begin(jobs)
    assert reports(files) == [FileReport(1, moved=1)]


def test_loads_into_memory_that_was_replaced_have_failed(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, _ = rank
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    reports(files)
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"a",), (5,)),), file_stores=(FileJob(3, (b"b",), (1,), (b"b",)),)))
    other = copier()
    files.let_go()
    files.copy_with(other)
    found = {report.number: report.failed for report in files.reports()}
    assert found == {2: (digest_of_key(b"a"),), 3: ()} and not other.holds(5)
    files.begin(StepJobs(4, file_stores=(FileJob(4, (b"c",), (2,), (b"c",)),)))
    assert reports(files) == [FileReport(4, refused=(digest_of_key(b"c"),))], "the new slots hold nothing"


def test_memory_that_is_let_go_of_can_be_freed_before_there_is_other(rank: tuple[RankFiles, IndexingCopier]) -> None:
    files, _ = rank
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b"), (0, 1), (b"a", b"b")),)))
    reports(files)
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"b", b"a"), (5, 6)),)))
    memory = [weakref.ref(rows) for rows in files._memory]
    files.let_go()
    gc.collect()
    assert [rows() for rows in memory] == [None] * len(memory)
    files.copy_with(copier())


def test_memory_is_replaced_though_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from it later goes to the old memory, and counts as failed."""
    device, other = copier(), copier()
    device.save(Job(1, "r", (0,), (0,)))
    files = RankFiles(opened(tmp_path), device, hang_s=0.01)
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    reports(files)
    gate, new = Gate(monkeypatch, "readv"), [rows.copy() for rows in host_rows(other)]
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"a",), (5,)),)))
    gate.began.wait()

    def replace() -> None:
        files.let_go()
        files.copy_with(other)

    replacing = threading.Thread(target=replace, daemon=True)
    replacing.start()
    replacing.join(PATIENCE_S)
    assert not replacing.is_alive() and files.reports() == []
    del device
    gate.open()
    assert reports(files) == [FileReport(2, failed=(digest_of_key(b"a"),), moved=1)]
    assert not other.holds(5) and all(map(np.array_equal, host_rows(other), new))
    files.close()


def test_the_end_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = copier()
    device.save(Job(1, "r", (0,), (0,)))
    files = RankFiles(opened(tmp_path), device, hang_s=0.01)
    gate = Gate(monkeypatch, "writev")
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    gate.began.wait()
    closing = threading.Thread(target=files.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    gate.open()
    await_closing()


def test_a_load_waits_for_a_save_that_is_still_being_written_to_its_slot(tmp_path: Path) -> None:
    device, now_s = copier(), [0.0]
    device._clock, device._link = lambda: now_s[0], SimulatedLink(bytes_per_s=BLOCK_BYTES)
    files = RankFiles(opened(tmp_path), device)
    device.save(Job(1, "r", (0,), (0,)))
    now_s[0] = 1.0
    device.poll()
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    assert reports(files) == [FileReport(1, moved=1), FileReport(ready=True)]
    device.save(Job(2, "r", (1,), (5,)))  # its content leaves the slot at once, before the copy has ended
    load = StepJobs(2, file_loads=(FileJob(2, (b"a",), (5,)),))
    files.begin(load)
    assert reports(files) == [], "what is being written there would overwrite the block from the file"
    now_s[0] = 2.0
    device.poll()
    files.begin(load)
    assert reports(files) == [FileReport(2, moved=1)]
    device.load(Job(3, "r", (4,), (5,)))
    assert (device.device_segments[0][4] == 1).all(), "block 0, from the file"
    files.close()


def test_what_an_earlier_server_left_is_reported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = copier()
    device.save(Job(1, "r", (0, 1, 2), (0, 1, 2)))
    first = RankFiles(opened(tmp_path), device)
    first.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b", b"c"), (0, 1, 2), (b"a", b"b", b"c")),)))
    reports(first)
    first.close()
    assert FOUND_AT_ONCE > 2
    monkeypatch.setattr("kvpolicy_vllm.plugin.rank_files.FOUND_AT_ONCE", 2)
    digests = {digest_of_key(key): key for key in (b"a", b"b", b"c")}
    second = RankFiles(opened(tmp_path), copier())
    told = [*second.reports(), *second.reports()]
    assert [(len(report.found), report.ready) for report in told] == [(2, False), (1, True)]
    assert {*told[0].found, *told[1].found} == digests.keys()
    assert second.reports() == []
    second.close()
    third = RankFiles(opened(tmp_path), copier())
    (part,) = third.reports()
    (last,) = digests.keys() - {*part.found}
    third._tier.drop([digests[last]])
    assert third.reports() == [FileReport(ready=True), FileReport(gone=(last,))], "it has left before it was reported"
    third.close()


def test_what_another_rank_has_no_more_is_dropped_and_not_reported(rank: tuple[RankFiles, IndexingCopier]) -> None:
    """The scheduler knows, as it has said so. What leaves for another reason meanwhile is reported."""
    files, _ = rank
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b", b"c"), (0, 1, 2), (b"a", b"b", b"c")),)))
    assert reports(files) == [FileReport(1, moved=3)]
    files._tier.drop([b"c"])
    files.begin(StepJobs(2, file_drops=(digest_of_key(b"b"), digest_of_key(b"x"))))
    assert reports(files) == [FileReport(gone=(digest_of_key(b"c"),))]
    assert [files._tier.lookup([key]) for key in (b"a", b"b", b"c")] == [1, 0, 0]
    files.begin(StepJobs(3, file_stores=(FileJob(2, (b"b",), (1,), (b"a", b"b")),)))
    assert reports(files) == [FileReport(2, moved=1)]


def test_what_is_dropped_before_it_is_reported_is_not_found(tmp_path: Path) -> None:
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    first = RankFiles(opened(tmp_path), device)
    first.begin(StepJobs(1, file_stores=(FileJob(1, (b"a", b"b"), (0, 1), (b"a", b"b")),)))
    reports(first)
    first.close()
    second = RankFiles(opened(tmp_path), copier())
    second.begin(StepJobs(1, file_drops=(digest_of_key(b"b"),)))
    assert reports(second) == [FileReport(found=(digest_of_key(b"a"),), ready=True)]
    second.close()


def test_files_go_by_the_prices_of_the_step(tmp_path: Path) -> None:
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 1 << 20, "cost")
    files = RankFiles(tier, copier())
    files.begin(StepJobs(1, file_prices=sampled(lambda index: 2.0 * index)))
    files.begin(StepJobs(2))
    assert isinstance(tier._policy, ByCost) and [tier._policy._price(index) for index in (0, 5, 900)] == [0, 10, 1800]
    files.close()


def test_what_was_generated_has_its_place_in_the_prompt(tmp_path: Path) -> None:
    """Nobody has asked for the block before it."""
    tier = FileTier.open(tmp_path, {"model": "a"}, BLOCK_BYTES, 1 << 20, "cost")
    device = copier()
    device.save(Job(1, "r", (0,), (0,)))
    files = RankFiles(tier, device)
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"f",), (0,), (b"e", b"f"), first=4),)))
    assert isinstance(tier._policy, ByCost) and tier._policy._there[digest_of_key(b"f")].position == 5
    files.close()


def test_a_caching_policy_that_fails_is_reported_once(tmp_path: Path) -> None:
    """Files for one block: the second one takes the place of the first one all the same."""
    failures: list[str] = []
    raising = "python:tests.caching.raising:Raising"
    tier = FileTier.open(
        tmp_path, {"model": "a"}, BLOCK_BYTES, 2 * 4096, raising, allow_python=True, failed=failures.append
    )
    device = copier()
    device.save(Job(1, "r", (0, 1), (0, 1)))
    files = RankFiles(tier, device, failures)
    assert files.reports() == [FileReport(ready=True)]
    files.begin(StepJobs(1, file_stores=(FileJob(1, (b"a",), (0,), (b"a",)),)))
    assert reports(files) == [FileReport(1, moved=1)]
    files.begin(StepJobs(2, file_stores=(FileJob(2, (b"b",), (1,), (b"b",)),)))
    gone = FileReport(gone=(digest_of_key(b"a"),))
    assert reports(files) == [FileReport(2, moved=1), gone, FileReport(policy_failed="evict")]
    assert reports(files) == []
    files.close()


def test_the_tier_that_a_document_shows_takes_the_place_of_files() -> None:
    """It has every method of the protocol, with its parameters; its third block finds no room."""
    made = shown("Elsewhere", "docs/tiers.md")
    for name, method in {**vars(Tier), **vars(LastingTier)}.items():
        if callable(method) and not name.startswith("_"):
            assert signature(getattr(made, name)).parameters.keys() == signature(method).parameters.keys(), name
    device, tier = copier(), made(BLOCK_BYTES, 2 * BLOCK_BYTES)
    device.save(Job(1, "r", (0, 1, 2), (0, 1, 2)))
    files, chain = RankFiles(tier, device), (b"a", b"b", b"c")
    assert files.reports() == [FileReport(ready=True)]
    files.begin(StepJobs(1, file_stores=(FileJob(1, chain, (0, 1, 2), chain),), file_events=(FileEvent(chain),)))
    assert reports(files) == [FileReport(1, refused=(digest_of_key(b"c"),), moved=2)]
    files.begin(StepJobs(2, file_loads=(FileJob(2, (b"b", b"c"), (5, 6)),)))
    assert reports(files) == [FileReport(2, failed=(digest_of_key(b"c"),), moved=1)]
    device.load(Job(2, "r", (4,), (5,)))
    assert [load.ok for load in device.poll()] == [True]
    assert all((segment[4] == 11 + number).all() for number, segment in enumerate(device.device_segments))
    files.begin(StepJobs(3, file_drops=(digest_of_key(b"b"),)))
    assert reports(files) == [] and tier.usage().blocks == 1
    tier.drop([b"a"])
    assert reports(files) == [FileReport(gone=(digest_of_key(b"a"),))] and tier.usage().blocks == 0
    tier.drop_digests = None
    files.begin(StepJobs(4, file_drops=(digest_of_key(b"a"),)))  # as of a tier that was made before there were drops
    assert reports(files) == []
    files.close()
