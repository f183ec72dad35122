"""Blocks of files are there when all ranks have their parts, and what some rank lacks the others are told to drop."""

from __future__ import annotations

import pytest

from kvpolicy.tiers import digest_of_key
from kvpolicy_vllm.plugin.file_parts import FileParts
from kvpolicy_vllm.plugin.messages import FileReport
from tests.plugin.test_file_index import CHAIN, Core


def test_a_block_is_there_while_all_ranks_have_their_parts() -> None:
    parts = FileParts(2)
    parts.found([b"a", b"b"], is_last=True)
    assert not parts.has(b"a") and not parts.ready
    parts.found([b"a"], is_last=False)
    assert parts.has(b"a") and not parts.has(b"b") and not parts.ready
    parts.found([b"b"], is_last=True)
    assert parts.has(b"b") and parts.ready
    parts.gone(b"a")
    assert not parts.has(b"a") and parts.take_drops(()) == (b"a",) and parts.take_drops(()) == ()
    parts.stored(b"a")
    assert parts.has(b"a")
    parts.forget()
    assert not parts.has(b"a") and not parts.has(b"b") and parts.ready


def test_of_what_an_earlier_server_left_whole_blocks_are_counted_that_are_still_there() -> None:
    parts = FileParts(2)
    assert parts.found([b"a", b"b", b"c"], is_last=False) is None
    assert parts.found([b"d"], is_last=True) is None
    assert parts.found([b"a", b"b", b"d"], is_last=False) is None
    parts.gone(b"b")
    parts.stored(b"new")
    assert parts.found([], is_last=True) == 2, "a and d"
    reset = FileParts(1)
    reset.forget()
    assert reset.found([b"a"], is_last=True) == 0


def test_what_is_busy_is_dropped_when_it_is_busy_no_longer_unless_all_have_it_then() -> None:
    parts = FileParts(2)
    for digest in (b"a", b"b"):
        parts.gone(digest)
    assert parts.take_drops({b"a", b"b"}) == ()
    parts.stored(b"a")
    assert parts.take_drops({b"b"}) == () and parts.take_drops(()) == (b"b",)


def test_a_part_of_a_block_that_some_rank_has_not_is_dropped() -> None:
    """Of what one rank refused or failed to write, and of what an earlier server left on one rank alone."""
    core = Core()
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    digests = [*map(digest_of_key, CHAIN)]
    core.index.acknowledge(
        [FileReport(job.number, refused=(digests[1],)), FileReport(job.number, failed=(digests[2],))]
    )
    assert set(core.index.take_drops()) == {*digests[1:]} and core.index.lookup(CHAIN) == 1
    left, lone = digest_of_key(b"left"), digest_of_key(b"lone")
    core.index.acknowledge([FileReport(found=(left, lone), ready=True)])
    assert core.index.take_drops() == (), "the other rank has yet to say what it has"
    core.index.acknowledge([FileReport(found=(left,), ready=True)])
    assert core.index.take_drops() == (lone,) and core.index.lookup([b"left"]) == 1
    for reset, found in ((True, (left,)), (False, ())):
        other = Core()
        other.index.acknowledge([FileReport(found=(left, lone), ready=True)])
        if reset:
            other.index.forget()
        other.index.acknowledge([FileReport(found=found, ready=True)])
        assert other.index.take_drops() == (), "nobody knows, or another process still has a rank's folder"
    alone = Core(ranks=1)
    alone.save(CHAIN)
    alone.report(alone.jobs()[0][0], failed=[b"c"])
    assert alone.index.take_drops() == (), "nobody else has any of it"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_rank_gives_up_the_others_are_told_to_drop(ranks: int) -> None:
    core = Core(ranks)
    core.stored()
    core.index.acknowledge([FileReport(gone=(digest_of_key(b"b"),)), FileReport(gone=(digest_of_key(b"b"),))])
    assert core.index.take_drops() == ((digest_of_key(b"b"),) if ranks > 1 else ())
    assert core.index.take_drops() == () and core.index.lookup(CHAIN) == 1


def test_what_is_stored_again_is_not_dropped_and_what_is_loaded_not_before_its_end() -> None:
    core, gone = Core(), [FileReport(gone=(digest_of_key(b"a"),))]
    core.stored()
    core.drop_from_host()
    core.index.acknowledge(gone)
    core.save([b"a"])
    assert core.index.take_drops() == ()
    for job in core.jobs()[0]:
        core.report(job)
    assert core.index.take_drops() == () and core.index.lookup(CHAIN) == 3
    core.drop_from_host()
    core.index.fetch(CHAIN, 0, 3)
    (_, (job,)) = core.jobs()
    core.index.acknowledge(gone)
    assert core.index.take_drops() == ()
    core.report(job, ranks=1)
    assert core.index.take_drops() == ()
    core.report(job, ranks=1)
    assert core.index.take_drops() == (digest_of_key(b"a"),)


def test_of_what_is_given_up_at_once_so_many_are_dropped_elsewhere_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy_vllm.plugin.file_parts.MAX_DROPS", 2)
    core = Core()
    core.index.acknowledge([FileReport(gone=tuple(map(digest_of_key, CHAIN)))])
    assert core.index.take_drops() == tuple(map(digest_of_key, CHAIN[:2]))
