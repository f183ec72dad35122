"""What the scheduler knows of files: contents that all ranks have are there, and slots are kept until all report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from kvpolicy.caching import KINDS, CachingPolicy, Hinted, Lru
from kvpolicy.host_store import HostBlock, HostCopy, HostStore
from kvpolicy.host_store.copy_queues import RECENT_COPIES
from kvpolicy.request_marks import ANYBODY, Client, HintLimits, Hints
from kvpolicy.tiers import MAX_QUEUED_BLOCKS, Took, digest_of_key
from kvpolicy_vllm.plugin.file_index import SHARE, STEPS_TO_REPORT, FileIndex
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S, RENEWED_S
from kvpolicy_vllm.plugin.host_copies import MAX_FAILURES_IN_A_ROW
from kvpolicy_vllm.plugin.messages import FileEvent, FileJob, FileReport

SLOTS = 16
CHAIN = [b"a", b"b", b"c"]
CHAT = Client("chat", b"salt")


class Core:
    """Host memory with a cache, an index of files, and a clock."""

    def __init__(self, ranks: int = 2, cache: CachingPolicy | None = None, slots: int = SLOTS) -> None:
        self.pool = HostStore(slots, Lru(slots) if cache is None else cache)
        self.now, self.counts = 0.0, Counter[str]()
        self.index = FileIndex(self.pool, ranks, 100, lambda: self.now, self._count)
        self.ranks = ranks
        self._places = 0

    def _count(self, event: str, blocks: int) -> None:
        self.counts[event] += blocks

    def save(self, chain: Sequence[bytes]) -> list[HostBlock]:
        """The device loses the contents of a chain, its last one first as vLLM frees it, and they are in host memory
        then."""
        places = range(self._places, self._places + len(chain))
        self._places += len(chain)
        self.pool.watch(chain, dict(enumerate(places)))
        blocks = self.pool.lost(reversed(places))
        self.index.saved(blocks)
        return blocks

    def jobs(self) -> tuple[list[FileJob], list[FileJob]]:
        _, _, stores, loads = self.index.take_jobs()
        return [*stores], [*loads]

    def report(
        self, job: FileJob, failed: Sequence[bytes] = (), ranks: int | None = None, took: Sequence[Took | None] = ()
    ) -> None:
        """``took``: of each rank; none says it where it is empty."""
        for rank in range(self.ranks if ranks is None else ranks):
            digests = tuple(map(digest_of_key, failed)) if rank == 0 else ()
            said = took[rank] if took else None
            self.index.acknowledge([FileReport(job.number, failed=digests, took=said)])

    def steps(self) -> None:
        """As many as workers may need to report what has ended."""
        for _ in range(STEPS_TO_REPORT):
            self.index.note_late()

    def stored(self, chain: Sequence[bytes] = CHAIN) -> None:
        self.save(chain)
        for job in self.jobs()[0]:
            self.report(job)

    def drop_from_host(self) -> None:
        for key in self.pool.cache.evict(SLOTS, ()) if self.pool.cache else ():
            self.pool._evicted(self.pool._by_key[key])


def test_what_comes_to_host_memory_is_stored_and_there_once_all_ranks_say_so() -> None:
    core = Core()
    blocks = core.save(CHAIN)
    ((job,), loads) = core.jobs()
    assert job.keys == job.chain == tuple(CHAIN) and not loads
    assert job.slots == tuple(block.slot for block in reversed(blocks))
    assert core.pool.used == 3 and core.index.under_way, "their slots are kept"
    core.report(job, ranks=1)
    assert core.index.lookup(CHAIN) == 0 and core.pool.used == 3
    core.report(job, ranks=1)
    assert core.index.lookup(CHAIN) == core.index.lookup([*CHAIN, b"d"]) == 3
    assert core.pool.used == 0 and core.pool.cached == 3 and core.counts["stored"] == 3
    core.index.saved(blocks)
    assert core.jobs() == ([], [])


def test_a_block_follows_the_one_before_it() -> None:
    core = Core()
    core.stored(CHAIN[:2])
    core.save([*CHAIN, b"d"])
    ((job,), _) = core.jobs()
    assert job.keys == (b"c", b"d") and job.chain == (b"b", b"c", b"d") and job.first == 1


def test_blocks_of_several_prompts_are_several_jobs() -> None:
    core = Core()
    core.pool.watch([b"a"], {0: 0})
    core.pool.watch([b"x"], {0: 1})
    core.index.saved(core.pool.lost([0, 1]))
    assert sorted(job.keys for job in core.jobs()[0]) == [(b"a",), (b"x",)]


def test_blocks_of_prompts_that_come_mixed_are_stored_in_the_order_of_their_prompts() -> None:
    """Two prompts that share a beginning, and a third one, of which files have the second block."""
    core = Core(slots=100)
    core.stored([b"x", b"y"])
    core.index.acknowledge([FileReport(gone=(digest_of_key(b"x"),))])
    core.drop_from_host()
    place_of = {key: 50 + number for number, key in enumerate([b"a", b"b", b"c", b"d", b"e", b"x", b"y", b"z"])}
    for prompt in ([b"a", b"b", b"c"], [b"a", b"b", b"d", b"e"], [b"x", b"y", b"z"]):
        core.pool.watch(prompt, {index: place_of[key] for index, key in enumerate(prompt)})
    mixed = [b"z", b"e", b"c", b"x", b"b", b"y", b"d", b"a"]
    core.index.saved(core.pool.lost(place_of[key] for key in mixed))
    chains = [b"".join(job.chain) for job in core.jobs()[0]]
    assert chains == [b"bde", b"yz", b"abc", b"x"], "nothing comes after what continues it"


def test_what_one_rank_could_not_store_is_not_there() -> None:
    core = Core()
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    core.report(job, failed=[b"b"])
    assert core.index.lookup(CHAIN) == 1 and core.index.lookup([b"c"]) == 1
    assert core.counts["store_failed"] == 1 and core.pool.used == 0


def test_what_is_not_worth_a_load_is_not_stored() -> None:
    core = Core()
    core.pool.watch(CHAIN, {0: 0, 1: 1, 2: 2})
    blocks = core.pool.lost(range(3))
    core.index.worth_storing = lambda blocks: False
    core.index.saved(blocks)
    assert core.jobs() == ([], [])


def test_workers_hear_what_requests_say_of_their_windows() -> None:
    core = Core()
    said = Hints(60.0, session="s")
    core.index.hinted(CHAIN, said, CHAT)
    core.index.hinted([], Hints(session="s", ended=True), CHAT)
    core.index.hinted([], Hints(once=True), CHAT)
    _, events, _, _ = core.index.take_jobs()
    assert events == (
        FileEvent(tuple(CHAIN), said, CHAT),
        FileEvent((), Hints(session="s", ended=True), CHAT),
    )
    core.index.hinted(CHAIN, said, CHAT)
    core.index.forget()
    assert core.index.take_jobs() == (True, (), (), ()), "what was said is of other contents: it is to be forgotten"
    assert core.index.take_jobs() == (False, (), (), ())


def test_a_block_that_a_rank_gives_up_while_others_of_its_store_are_written_is_not_there() -> None:
    core = Core()
    blocks = core.save(CHAIN)
    ((job,), _) = core.jobs()
    core.index.acknowledge([FileReport(gone=(digest_of_key(b"b"),))])
    core.report(job)
    assert core.index.lookup(CHAIN) == core.index.lookup([b"c"]) == 1 and core.index.lookup([b"b"]) == 0
    assert core.counts["stored"] == 3 and core.counts["refused"] == core.counts["store_failed"] == 0
    core.index.saved(blocks)
    ((job,), _) = core.jobs()
    assert job.keys == (b"b",), "it can be stored again"
    core.report(job)
    assert core.index.lookup(CHAIN) == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_one_rank_gives_up_before_the_other_one_has_stored_it_is_not_there(late: bool) -> None:
    core = Core()
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    core.now = MAX_WAIT_S * late
    core.steps()
    core.index.acknowledge([FileReport(job.number), FileReport(gone=(digest_of_key(b"a"),))])
    core.index.acknowledge([FileReport(job.number)])
    assert core.index.lookup(CHAIN) == 0 and core.index.lookup(CHAIN[1:]) == 2
    assert core.pool.used == 0 and not core.index._of_digest


def test_a_block_that_is_given_up_while_others_of_its_load_are_read_is_in_host_memory_alone() -> None:
    core = Core()
    core.stored()
    core.drop_from_host()
    core.index.fetch(CHAIN, 0, 3)
    (_, (job,)) = core.jobs()
    core.index.acknowledge([FileReport(gone=(digest_of_key(b"a"),))])
    core.report(job)
    assert core.pool.lookup(CHAIN) == 3 and core.counts["loaded"] == 3
    assert core.index.lookup(CHAIN) == 0 and core.index.lookup(CHAIN[1:]) == 2


def test_what_ranks_have_moved_is_told_by_direction() -> None:
    """Of a block that one rank has already the other one writes its part alone."""
    core, moved = Core(), list[tuple[str, int]]()
    core.index.moved = lambda direction, blocks: moved.append((direction, blocks))
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    core.index.acknowledge([FileReport(job.number, moved=3), FileReport(job.number, moved=1)])
    core.drop_from_host()
    core.index.fetch(CHAIN, 0, 2)
    (_, (job,)) = core.jobs()
    core.index.acknowledge([FileReport(job.number, moved=2), FileReport(job.number, moved=2), FileReport(ready=True)])
    assert moved == [("write", 3), ("write", 1), ("read", 2), ("read", 2)]


def test_after_a_store_that_failed_none_is_tried_for_a_while() -> None:
    """As on a disk that has turned read-only, or on that of one rank: others would give up blocks in vain."""
    core = Core()
    core.save([b"a"])
    ((job,), _) = core.jobs()
    core.report(job, failed=[b"a"])
    core.save([b"b"])
    assert core.jobs() == ([], []) and core.counts == {"store_failed": 1, "refused": 1, "stored": 0}
    core.now += RENEWED_S
    core.stored([b"c"])
    assert core.index.lookup([b"c"]) == 1


def test_files_hold_at_most_a_share_of_the_slots() -> None:
    core = Core()
    chain = [b"%d" % number for number in range(SLOTS)]
    core.save(chain)
    stores, _ = core.jobs()
    assert [job.keys for job in stores] == [tuple(chain[: SLOTS // SHARE])], "a prompt's beginning is of use alone"
    assert core.pool.used == SLOTS // SHARE
    assert core.counts["refused"] == SLOTS - SLOTS // SHARE
    core.save([b"later", b"still"])
    assert core.counts["refused"] == SLOTS - SLOTS // SHARE + 2
    assert not core.index.fetch([b"other"], 0, 1)


def test_what_one_step_saves_for_files_is_no_more_than_they_take() -> None:
    """As each evicts something from host memory."""
    core = Core()
    core.index.acknowledge([FileReport(ready=True)] * core.ranks)
    asked = [core.index.takes(b"%d" % number, 9) for number in range(SLOTS)]
    assert asked == [True] * (SLOTS // SHARE) + [False] * (SLOTS - SLOTS // SHARE)
    core.index.note_late()
    assert core.index.takes(b"x", 9)


def test_no_more_is_given_to_workers_than_their_queues_hold() -> None:
    """What would be refused there is known here: nothing is evicted from host memory for it, and it is counted apart
    from what fails."""
    blocks = MAX_QUEUED_BLOCKS + 100
    core = Core(slots=SHARE * 2 * blocks)
    core.index.acknowledge([FileReport(ready=True)] * core.ranks)
    core.save([b"%d" % number for number in range(blocks)])
    ((job,), _) = core.jobs()
    assert len(job.keys) == MAX_QUEUED_BLOCKS and core.counts == {"found": 0, "refused": 100}
    assert core.index._room() > 0 and not core.index.takes(b"x", 3)
    core.report(job)
    assert core.index.takes(b"x", 3) and core.counts["stored"] == MAX_QUEUED_BLOCKS


def test_what_a_rank_has_no_room_for_is_refused_and_has_not_failed() -> None:
    core = Core()
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    _, b, c = map(digest_of_key, CHAIN)
    core.index.acknowledge([FileReport(job.number, refused=(b, c)), FileReport(job.number, failed=(c,))])
    assert core.index.lookup(CHAIN) == 1 and core.index.lookup([b"b"]) == core.index.lookup([b"c"]) == 0
    assert core.counts == {"stored": 1, "refused": 1, "store_failed": 1}


def test_refused_stores_and_those_of_before_a_reset_do_not_end_saving_for_files() -> None:
    """As where folders of others are being cleared, or the queue of one rank is full."""
    core = Core()
    core.index.acknowledge([FileReport(ready=True)] * core.ranks)
    core.save(CHAIN)
    ((job,), _) = core.jobs()
    digests = tuple(map(digest_of_key, CHAIN))
    core.index.acknowledge([FileReport(job.number, refused=digests), FileReport(job.number)])
    assert core.counts["refused"] == 3 and not core.counts["store_failed"] and core.index.takes(b"x", 3)
    core.save([b"d"])
    ((job,), _) = core.jobs()
    core.index.forget()
    core.report(job)
    assert core.counts["store_failed"] == 1 and core.index.takes(b"x", 3)
    core.save([b"e"])
    ((job,), _) = core.jobs()
    core.report(job, failed=[core.index._salt + b"e"])
    assert not core.index.takes(b"x", 3), "as on a full disk"


def test_blocks_come_back_to_host_memory() -> None:
    core = Core()
    core.stored()
    core.drop_from_host()
    assert core.pool.lookup(CHAIN) == 0 and core.index.lookup(CHAIN) == 3
    assert core.index.fetch(CHAIN, 1, 2)
    (_, (job,)) = core.jobs()
    assert job.keys == (b"b", b"c") and core.pool.used == 2
    assert core.index.load_of(b"b") and not core.index.load_of(b"a") and core.pool.lookup(CHAIN[1:]) == 0
    core.now = 0.5
    core.report(job)
    assert core.pool.lookup(CHAIN[1:]) == 2 and not core.index.load_of(b"b") and core.pool.used == 0
    assert core.counts["loaded"] == 2 and core.index.read_s(4) == pytest.approx(1.0)
    core.now += RENEWED_S
    assert core.index.read_s(4) == 0.0, "a disk may be faster by now"
    core.drop_from_host()
    core.index.fetch(CHAIN, 0, 3)
    (_, (job,)) = core.jobs()
    core.now += 3.0
    core.report(job)
    assert core.index.read_s(2) == pytest.approx(2.0), "by what was loaded since"


LONGER = [*CHAIN, b"d", b"e", b"f"]


def with_others(core: Core, host_blocks: int) -> list[list[bytes]]:
    """Files have all of LONGER. Host memory has its leading blocks, so many, and is full of other prompts."""
    for blocks in range(1, len(LONGER) + 1):
        core.stored(LONGER[:blocks])
    core.drop_from_host()
    core.stored(LONGER[:host_blocks])
    others = [[b"other %d" % number] for number in range(SLOTS - host_blocks)]
    for other in others:
        core.pool.asked(other)
        core.stored(other)
    assert core.pool.cached == SLOTS and core.pool.lookup(LONGER) == host_blocks
    return others


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_from_files_does_not_push_out_what_it_continues(kind: str) -> None:
    """Though everything else in host memory is asked for more often."""
    core = Core(cache=KINDS[kind](SLOTS))
    for other in with_others(core, 3) * 4:
        core.pool.asked(other)
    core.pool.asked(LONGER)
    assert core.index.fetch(LONGER, 3, 3)
    (_, (job,)) = core.jobs()
    core.report(job)
    assert core.pool.lookup(LONGER) == len(LONGER) and core.pool.cached == SLOTS


def test_what_hints_hold_back_does_not_leave_host_memory_for_what_comes_from_files() -> None:
    """Three quarters of the slots are held, and copies of preempted requests have the others, but for one or none."""
    core = Core(cache=Hinted(Lru(SLOTS), lambda: core.now, 1, HintLimits(600.0, 0.75, 0.75)))
    held = [*with_others(core, 0)[:12]]
    for other in held:
        core.pool.hinted(other, Hints(600.0), ANYBODY)
    copy, last = HostCopy(40), HostCopy(20)
    assert len(core.pool.add(copy, [(None, 1000 + number) for number in range(3)])) == 3
    assert core.index.fetch(LONGER, 0, 3)
    (_, (job,)) = core.jobs()
    assert job.keys == (b"a",), "there is room for one"
    core.report(job)
    assert core.pool.lookup(LONGER) == 1 and all(core.pool.lookup(other) == 1 for other in held)
    assert len(core.pool.add(last, [(None, 2000)])) == 1
    used = core.pool.used
    assert not core.index.fetch(LONGER, 0, 3) and core.jobs() == ([], [])
    assert core.pool.used == used and all(core.pool.lookup(other) == 1 for other in held)


def test_a_disk_that_becomes_slow_is_noticed_however_long_it_was_fast() -> None:
    core = Core()
    core.stored()

    def load(seconds: float) -> None:
        core.drop_from_host()
        core.index.fetch(CHAIN, 0, 3)
        (_, (job,)) = core.jobs()
        core.now += seconds
        core.report(job)

    for _ in range(24 * 6):  # a day, always one load before the earlier ones stop counting
        for _ in range(20):
            load(0.01)
        core.now += RENEWED_S - 10.0
    assert core.index.read_s(3) == pytest.approx(0.01)
    for _ in range(40):
        load(1.0)
    assert 0.4 < core.index.read_s(3) < 1.0


def test_how_fast_files_are_is_known_by_the_slowest_rank_and_not_by_the_steps_of_the_engine() -> None:
    """Two blocks are read in 4 ms, and the scheduler hears of it after two steps of 25 ms."""
    core = Core()
    core.stored(CHAIN[:2])

    def load(*took: Took | None) -> float:
        core.drop_from_host()
        assert core.index.fetch(CHAIN, 0, 2)
        (_, (job,)) = core.jobs()
        core.now += 0.05
        core.report(job, took=took)
        return core.index.read_s(1)

    assert load(Took(0.003, 0.002), Took(0.009, 0.004)) == pytest.approx(0.002)
    core.now += RENEWED_S
    assert load(Took(0.003, 0.002), None) == pytest.approx(0.025), "one rank does not say it"


def test_what_a_rank_has_read_in_time_is_not_late_however_long_steps_take() -> None:
    """With asynchronous scheduling: two steps, of six seconds each, before the scheduler reads that it has come."""
    core = Core()
    core.stored([b"a"])
    core.drop_from_host()
    job = begun(core, b"a")
    assert job is not None
    for _ in range(STEPS_TO_REPORT - 1):
        core.now += 6.0
        core.index.note_late()
    assert core.now > MAX_WAIT_S and core.index.load_of(b"a") and core.index.under_way and not core.counts["late"]
    core.report(job, took=[Took(0.002, 0.002)] * core.ranks)
    assert core.pool.lookup([b"a"]) == 1 and not core.index.suspended and core.index.read_s(1) == pytest.approx(0.002)


def test_a_load_that_counted_as_late_and_was_read_in_time_ends_the_suspension() -> None:
    """As where a save of a long step was in the way of its slots."""
    core = Core()
    core.stored([b"a"])
    core.stored([b"b"])
    core.drop_from_host()
    job = begun(core, b"a")
    core.now += 2 * MAX_WAIT_S
    core.steps()
    assert job is not None and core.index.suspended
    core.report(job, took=[Took(1.0, 1.0), Took(MAX_WAIT_S, 0.0)])
    assert core.index.suspended, "one rank has waited for so long"
    trial = begun(core, b"b")
    core.now += 2 * MAX_WAIT_S
    core.steps()
    assert trial is not None
    core.report(trial, took=[Took(1.0, 1.0)] * core.ranks)
    assert not core.index.suspended and core.counts["late"] == 2


def test_what_is_on_its_way_is_read_before_what_is_asked_for_now() -> None:
    """And of two loads at once the time of the second one counts from the end of the first."""
    core = Core()
    core.stored()

    def load(first: int, count: int) -> FileJob:
        assert core.index.fetch(CHAIN, first, count)
        return core.jobs()[1][0]

    core.drop_from_host()
    job = load(0, 1)
    assert core.index.backlog_s() == 0.0, "nothing is known of these files"
    core.now += 0.5
    core.report(job)
    core.drop_from_host()
    assert core.index.backlog_s() == 0.0 and core.index.read_s(1) == pytest.approx(0.5)
    one, two = load(0, 1), load(1, 2)
    assert core.index.backlog_s() == core.index.backlog_s(two.number) == pytest.approx(1.5)
    assert core.index.backlog_s(one.number) == pytest.approx(0.5)
    core.now += 0.2
    assert core.index.backlog_s() == pytest.approx(1.3)
    core.now += 0.8
    assert core.index.backlog_s() == pytest.approx(1.5), "the first one takes longer than expected, and may go on so"
    core.report(one)
    core.now += 2.0
    core.report(two)
    weight = 1 - 1 / RECENT_COPIES
    seconds, blocks = weight * (weight * 0.5 + 1.0) + 2.0, weight * (weight + 1) + 2
    assert core.index.read_s(1) == pytest.approx(seconds / blocks)
    core.drop_from_host()
    load(0, 1)
    core.now += MAX_WAIT_S
    core.steps()
    assert core.index.backlog_s() == 0.0


def test_who_waits_for_a_load_hears_of_what_it_brings_and_of_what_files_have_behind_that() -> None:
    core = Core()
    core.stored([*CHAIN, b"d"])
    core.stored([b"x"])
    core.drop_from_host()
    core.index.fetch([b"x"], 0, 1)
    (_, (job,)) = core.jobs()
    core.now += 0.5
    core.report(job)
    core.drop_from_host()
    assert core.index.fetch(CHAIN, 0, 2) and core.index.fetch([b"x"], 0, 1)
    (_, (job, other)) = core.jobs()
    assert core.index.load_of(b"a") == core.index.load_of(b"b") == job.number != core.index.load_of(b"x")
    assert core.index.ahead([b"a", b"other"], job.number) == (1, pytest.approx(1.0))
    assert core.index.ahead([b"x"], other.number) == (1, pytest.approx(1.5))
    assert core.index.ahead([*CHAIN, b"d", b"e"], job.number) == (4, pytest.approx(1.5 + 1.0))


def test_what_many_wait_for_is_looked_up_once_for_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that go on alike: of each, what is not on its way and no other one has asked for."""
    core, hashed = Core(slots=100), list[bytes]()
    core.stored([*LONGER, b"g"])
    core.drop_from_host()
    assert core.index.fetch(LONGER, 0, 3)

    def counted(key: bytes) -> bytes:
        hashed.append(key)
        return digest_of_key(key)

    monkeypatch.setattr("kvpolicy_vllm.plugin.file_index.digest_of_key", counted)
    number = core.index.load_of(b"a")
    found = [core.index.ahead([*LONGER, *tail], number)[0] for tail in ((), (b"g",), (b"x",), (b"y",))]
    assert found == [6, 7, 6, 6] and hashed == [b"d", b"e", b"f", b"g", b"x", b"y"]
    assert core.index.ahead([b"b", b"x"], number)[0] == 1 and hashed[6:] == [b"x"]


def test_a_block_that_fails_to_come_is_not_there_any_more() -> None:
    core = Core()
    core.stored()
    core.drop_from_host()
    core.index.fetch(CHAIN, 0, 3)
    (_, (job,)) = core.jobs()
    core.report(job, failed=[b"b"])
    assert core.pool.lookup(CHAIN) == 1 and core.index.lookup(CHAIN) == 1
    assert core.pool.free == SLOTS and core.pool.cached == 2 and core.counts["load_failed"] == 1


def test_what_came_to_the_device_meanwhile_gets_the_slot() -> None:
    core = Core()
    core.stored([b"a"])
    core.drop_from_host()
    core.index.fetch([b"a"], 0, 1)
    (_, (job,)) = core.jobs()
    core.pool.watch([b"a"], {0: 77})
    core.report(job)
    assert core.pool.lookup([b"a"]) == 1 and core.pool.cached == 1 and core.pool.free == SLOTS
    assert core.pool.lost([77]) == [], "it is in host memory already"


def test_nobody_waits_for_ever_and_a_slot_that_may_be_written_to_is_not_used_again() -> None:
    core = Core()
    core.index.acknowledge([FileReport(ready=True)] * core.ranks)
    core.stored([b"a"])
    core.drop_from_host()
    core.index.fetch([b"a"], 0, 1)
    (_, (job,)) = core.jobs()
    core.now = MAX_WAIT_S - 0.1
    core.steps()
    assert core.index.load_of(b"a") and core.index.under_way and not core.counts["late"]
    core.now = MAX_WAIT_S
    for _ in range(2):
        core.index.note_late()
        assert not core.index.load_of(b"a") and core.index.lookup([b"a"]) == 0
        assert core.counts["late"] == 1 and core.pool.used == 1 and not core.index.under_way
    core.report(job, ranks=1)
    assert core.pool.used == 1, "the other rank may still be writing to its slot"
    core.report(job, ranks=1)
    assert core.pool.used == 0 and core.pool.lookup([b"a"]) == core.index.lookup([b"a"]) == 1


def begun(core: Core, key: bytes) -> FileJob | None:
    """The load of a content that has begun; None where none has."""
    waits = core.index.fetch([key], 0, 1)
    loads = core.jobs()[1]
    assert not waits or loads
    return loads[0] if loads else None


def test_a_late_load_suspends_reads_until_one_comes_in_time() -> None:
    """As on a disk that hangs: the next prompts do not wait for it, too."""
    core = Core()
    for key in (b"a", b"b", b"c", b"d"):
        core.stored([key])
    core.drop_from_host()
    first = begun(core, b"a")
    core.now = 5.0
    second = begun(core, b"b")
    assert core.index.load_of(b"b")
    core.now = MAX_WAIT_S
    core.steps()
    assert not core.index.load_of(b"b"), "nor does anybody wait any longer who waits already"
    assert begun(core, b"c") is None and core.counts["suspended"] == 1
    assert first is not None and second is not None
    core.now = 2 * MAX_WAIT_S
    core.steps()
    core.report(second)
    assert begun(core, b"c") is None, "the other one may hang still"
    core.report(first)
    assert not core.index.fetch([b"c"], 0, 1), "the disk goes on, but nobody waits before it is seen to be fast"
    (_, (trial,)) = core.jobs()
    assert not core.index.fetch([b"d"], 0, 1) and core.jobs()[1] == [], "one is tried at a time"
    core.report(trial)
    assert core.pool.lookup([b"c"]) == 1 and core.index.fetch([b"d"], 0, 1) and core.index.load_of(b"d")


def test_a_disk_that_is_always_late_is_tried_and_never_waited_for() -> None:
    core = Core()
    for key in (b"a", b"b", b"c"):
        core.stored([key])
    core.drop_from_host()
    for key in (b"a", b"b"):
        job = begun(core, key)
        core.now += MAX_WAIT_S + 1.0
        core.steps()
        assert job is not None
        core.report(job)
    assert core.counts["late"] == 2 and not core.index.fetch([b"c"], 0, 1)


def test_a_report_that_never_comes_does_not_suspend_reads_for_ever() -> None:
    core = Core()
    core.stored([b"a"])
    core.stored([b"b"])
    core.drop_from_host()
    begun(core, b"a")
    core.now = MAX_WAIT_S
    core.steps()
    assert begun(core, b"b") is None
    core.now = RENEWED_S
    trial = begun(core, b"b")
    assert trial is not None
    core.report(trial)
    core.drop_from_host()
    assert core.index.fetch([b"b"], 0, 1)


def test_loads_that_bring_nothing_move_no_bytes_and_suspend_reads_when_there_are_several_in_a_row() -> None:
    """As where files are gone: that is known at once, and says nothing of how fast they are."""
    core = Core()

    def load(key: bytes, failed: Sequence[bytes], seconds: float) -> None:
        core.stored([key])
        core.drop_from_host()
        assert core.index.fetch([key], 0, 1)
        (_, (job,)) = core.jobs()
        core.now += seconds
        core.report(job, failed)

    load(b"a", (), 0.5)
    for number in range(MAX_FAILURES_IN_A_ROW - 1):
        load(b"%d" % number, [b"%d" % number], 0.0)
    assert core.index.read_s(1) == pytest.approx(0.5)
    load(b"a", (), 0.5)
    for number in range(MAX_FAILURES_IN_A_ROW):
        load(b"%d" % number, [b"%d" % number], 0.0)
    core.stored([b"b"])
    core.drop_from_host()
    assert core.index.read_s(1) == pytest.approx(0.5) and not core.index.fetch([b"b"], 0, 1)
    assert core.counts["suspended"] == 1


def test_loads_from_before_a_reset_are_no_failures() -> None:
    core = Core()
    keys = [b"%d" % number for number in range(SLOTS // SHARE)]
    for _ in range(2):
        for key in keys:
            core.stored([key])
        core.drop_from_host()
        jobs = [begun(core, key) for key in keys]
        core.pool.forget_keys()
        core.index.forget()
        for job in jobs:
            assert job is not None
            core.report(job)
    core.stored(CHAIN)
    core.drop_from_host()
    assert core.index.fetch(CHAIN, 0, 3) and core.index.read_s(1) == 0.0


def test_what_comes_late_is_of_the_weights_of_its_time() -> None:
    core = Core()
    core.stored([b"a"])
    core.drop_from_host()
    core.index.fetch([b"a"], 0, 1)
    core.save(CHAIN)
    stores, loads = core.jobs()
    core.now = MAX_WAIT_S
    core.steps()
    core.pool.forget_keys()
    core.index.forget()
    for job in (*stores, *loads):
        core.report(job)
    assert core.pool.lookup([b"a"]) == core.index.lookup(CHAIN) == core.pool.used == 0


def test_reports_that_never_come_cost_no_more_than_a_share_of_the_slots(caplog: pytest.LogCaptureFixture) -> None:
    core = Core()
    for number in range(SLOTS):
        core.save([b"%d" % number])
        core.now += MAX_WAIT_S
        core.steps()
        core.drop_from_host()
    share = SLOTS // SHARE
    assert core.counts == {"late": share, "refused": SLOTS - share} and core.pool.used == share
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "1 host slots stay in use" in warnings[0]


def test_what_an_earlier_server_left_is_there_once_all_ranks_have_said_it() -> None:
    core = Core()
    digests = tuple(map(digest_of_key, CHAIN))
    core.index.acknowledge([FileReport(found=digests[:2]), FileReport(found=digests, ready=True)])
    assert core.index.lookup(CHAIN) == 2 and not core.index.ready and core.index.under_way
    core.index.acknowledge([FileReport(found=digests[2:], ready=True)])
    assert core.index.lookup(CHAIN) == 3 and core.index.ready and not core.index.under_way
    core.index.acknowledge([FileReport(gone=digests[1:2])])
    assert core.index.lookup(CHAIN) == 1


def test_what_all_ranks_have_at_the_start_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever each of them reports at once, and without what only some have."""
    core, (a, b, c) = Core(), map(digest_of_key, CHAIN)
    caplog.set_level("INFO", logger="vllm")
    core.index.acknowledge([FileReport(found=(a,)), FileReport(found=(b, c), ready=True), FileReport(found=(b,))])
    assert not core.counts["found"] and not caplog.records
    core.index.acknowledge([FileReport(found=(a,), ready=True)])
    assert core.counts["found"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "kvpolicy: found 2 KV blocks in files, which an earlier server left there"
    ]
    core.stored(LONGER)
    core.index.acknowledge([FileReport(gone=(a,))])
    assert core.counts["found"] == 2 and len(caplog.records) == 1


def test_a_caching_policy_of_files_that_fails_is_told() -> None:
    core, failed = Core(), list[str]()
    core.index.policy_failed = failed.append
    core.index.acknowledge([FileReport(ready=True), FileReport(policy_failed="evict"), FileReport(ready=True)])
    assert failed == ["evict"] and core.index.ready


def test_a_rank_that_never_says_what_is_there_is_not_waited_for() -> None:
    core = Core()
    core.now = 100.0
    assert core.index.starting
    core.index.note_late()
    core.now += MAX_WAIT_S - 0.1
    assert core.index.starting and core.index.under_way
    core.now += 0.1
    assert not core.index.starting and not core.index.under_way


def test_after_a_reset_nothing_old_is_found_and_keys_are_others() -> None:
    core = Core()
    core.stored([b"old"])
    core.save(CHAIN)
    ((before,), _) = core.jobs()
    core.pool.forget_keys()
    core.index.forget()
    core.report(before)
    assert core.index.lookup(CHAIN) == core.index.lookup([b"old"]) == 0 and core.pool.used == 0
    core.save(CHAIN)
    ((after,), _) = core.jobs()
    assert not {*after.keys} & {*before.keys}
    core.report(after)
    assert core.index.lookup(CHAIN) == 3


def test_stores_that_no_worker_has_heard_of_are_dropped_by_a_reset() -> None:
    """Nobody can ask for these blocks any more, and files would give them places as good as others'."""
    core = Core()
    core.save(CHAIN)
    core.save([b"d"])
    core.pool.forget_keys()
    settled = core.index.settled
    core.index.forget()
    assert core.index.take_jobs() == (True, (), (), ()) and core.pool.used == core.index._held == 0
    assert core.counts["store_failed"] == 4 and core.index.settled == settled + 2, "slots are free again"
    core.stored()
    assert core.index.lookup(CHAIN) == 3


def test_a_late_store_that_no_worker_has_heard_of_is_dropped_by_a_reset() -> None:
    """As in an engine that was idle for long."""
    core = Core()
    core.save(CHAIN)
    core.now = MAX_WAIT_S
    core.steps()
    core.index.forget()
    assert core.index.take_jobs() == (True, (), (), ()) and core.pool.used == core.index._held == 0


def test_prompts_reach_the_policies_of_files_in_their_order_among_hints() -> None:
    core, ended = Core(), Hints(session="s", ended=True)
    core.index.asked(CHAIN)
    core.index.asked([])
    core.index.hinted(CHAIN, ended, CHAT)
    core.index.asked(CHAIN)
    prompt = FileEvent(tuple(CHAIN))
    assert core.index.take_jobs()[1] == (prompt, FileEvent(tuple(CHAIN), ended, CHAT), prompt)
    assert core.index.take_jobs()[1] == ()


def test_nothing_is_saved_for_files_that_are_not_there_have_no_room_or_failed() -> None:
    core = Core()
    assert not core.index.takes(b"x", 3), "no rank has said what is there"
    core.index.acknowledge([FileReport(ready=True)] * core.ranks)
    assert core.index.takes(b"x", 3)
    core.index.note_late()
    core.save(CHAIN)
    assert not core.index.takes(b"a", 3) and core.index.takes(b"x", 3)
    core.index.note_late()
    core.save([b"d"])
    assert core.index._room() == 0 and not core.index.takes(b"x", 3)
    first, second = core.jobs()[0]
    core.report(first, failed=CHAIN)
    assert not core.index.takes(b"a", 3), "as on a full disk"
    core.now += RENEWED_S
    assert core.index.takes(b"a", 3)
    core.now -= RENEWED_S
    core.report(second)
    assert core.index.takes(b"a", 3), "it is stored again"
