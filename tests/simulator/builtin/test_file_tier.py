"""Files below host memory, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.caching import ByCost, Hinted
from kvpolicy.caching.by_use import Lru
from kvpolicy.caching.tree import Tree
from kvpolicy.prefix_hits import PrefixHits
from kvpolicy.request_marks import ANYBODY, HintLimits, Hints
from kvpolicy.simulator import LowerTiers
from kvpolicy.simulator.builtin.blocks import pool_for
from kvpolicy.simulator.builtin.file_tier import Demoting, FileTier
from kvpolicy.simulator.builtin.lower_tiers import host_pool
from kvpolicy.workload import Workload
from tests.simulator.builtin.test_lower_tiers import BYTES, SERVER, run, talks

CACHE = LowerTiers("lru", file_blocks=8, file_bytes_per_s=1e6, file_latency_s=0.001, file_queue_blocks=3)
"""A block takes 2 ms to write, and 1 ms after another one to read."""


def tier(cache: LowerTiers = CACHE) -> FileTier:
    return FileTier(cache, BYTES, Lru(cache.file_blocks))


def test_what_is_written_can_be_read_once_the_write_has_ended() -> None:
    files = tier()
    files.write("abc", 0)
    files.write("abc", 1)
    files.now_s = 0.003
    assert files.lookup("abc") == 1
    files.now_s = 0.004
    assert files.lookup("abc") == 2 and files.lookup("xbc") == 0


def test_the_queue_of_writes_is_bounded() -> None:
    files = tier()
    for position in range(5):
        files.write("abcde", position)
    assert files.left_out == 2
    files.now_s = 1.0
    files.write("abcde", 3)
    files.now_s = 2.0
    assert files.lookup("abcde") == 4 and files.left_out == 2


def test_reads_follow_each_other() -> None:
    files = tier()
    files.now_s = 5.0
    assert files.read_s(4) == pytest.approx(0.005)
    assert files.read(4) == pytest.approx(5.005) and files.read(1) == pytest.approx(5.007)


def test_the_files_hold_no_more_than_they_may_and_what_was_used_last() -> None:
    files = tier(replace(CACHE, file_blocks=2, file_queue_blocks=9))
    for number, chain in enumerate(("a", "b", "c")):
        files.now_s = float(number)
        files.asked(chain)
        files.write(chain, 0)
    files.now_s = 9.0
    assert [files.lookup(chain) for chain in "abc"] == [0, 1, 1]


def test_what_is_evicted_above_is_written_first_blocks_first() -> None:
    files = tier(replace(CACHE, file_queue_blocks=2))
    above = Demoting(Lru(3), files)
    above.asked("abc", 0)
    above.stored("abc", (0, 1, 2))
    assert len(above) == 3 and "a" in above and set(above.evict(3, ())) == set("abc")
    files.now_s = 1.0
    assert files.lookup("abc") == 2, "the last one found the queue full"
    above.asked("d", 0)
    above.stored("d", (0,))
    above.lost("d")
    assert not above.evict(1, ())


def test_a_request_waits_for_its_read_and_loads_it_then() -> None:
    """Host memory holds six blocks, less than two prompts; the first prompt is in files when it comes again."""
    cache = replace(CACHE, file_blocks=40, file_queue_blocks=40)
    server = replace(SERVER, host_blocks=6, cache=cache)
    result = run(talks(1, 2, 3, 4, 1), server)
    hits = result.summary.prefix_hits
    assert hits.file_tokens > 0 and hits.host_tokens + hits.file_tokens == 80 == hits.loaded_tokens
    assert hits == PrefixHits(5 * 96, 0, hits.host_tokens, hits.file_tokens, 80)
    assert result.trace is not None
    (last,) = [row for row in result.trace.rows("requests") if row["request"] == "4"]
    read_s = 0.001 + 1e-3 * hits.file_tokens // 16
    assert last["first_token_s"] - 4.0 > read_s + 5e-3 + 16e-4


def test_what_hints_hold_above_is_told_to_the_policy_there() -> None:
    above = Lru(4)
    policy = Demoting(above, tier())
    policy.hold_began("b")
    assert above._held == {"b"}
    policy.hold_ended("b")
    assert not above._held


def test_a_window_that_is_to_be_kept_stays_in_files() -> None:
    files = FileTier(CACHE, BYTES, Hinted(Lru(4), lambda: files.now_s, 16, HintLimits(share=0.5, class_share=0.5)))

    def write(chain: str) -> None:
        files.now_s += 1.0
        files.asked(chain)
        files.hinted(chain, Hints(keep_s=60.0) if chain == "ab" else Hints(), ANYBODY, over=True)
        for position in range(len(chain)):
            files.write(chain, position)

    for chain in ("ab", "cd", "ef", "gh"):
        write(chain)
    files.now_s += 1.0
    assert [files.lookup(chain) for chain in ("ab", "cd", "ef", "gh")] == [2, 0, 0, 2]
    files.now_s = 100.0
    write("xy")
    files.now_s += 1.0
    assert files.lookup("ab") == 0


def test_what_the_queue_refuses_is_held_no_longer() -> None:
    policy = Hinted(Lru(4), lambda: 0.0, 16, HintLimits(share=0.5, class_share=0.5))
    files = FileTier(replace(CACHE, file_queue_blocks=1), BYTES, policy)
    files.hinted("ab", Hints(keep_s=60.0), ANYBODY, over=True)
    assert policy.held("ab") == {"a", "b"}
    for position in range(2):
        files.write("ab", position)
    assert files.left_out == 1 and policy.held("ab") == {"a"}


def test_files_hear_of_hints_as_host_memory_does() -> None:
    """Host memory may hold four blocks of a window, files all of it."""
    cache = replace(CACHE, file_blocks=12, file_queue_blocks=40, hints=HintLimits(share=0.8, class_share=0.8))
    server = replace(SERVER, host_blocks=6, cache=cache)
    work = talks(1, 2, 3, 4, 5, 6, 7, 1)
    kept = replace(work.requests[0], hints=Hints(keep_s=60.0))
    plain, held = (run(one, server) for one in (work, replace(work, requests=(kept, *work.requests[1:]))))
    assert plain.summary.prefix_hits.found_tokens == 0
    assert held.summary.prefix_hits.found_tokens == 80 > held.summary.prefix_hits.host_tokens


def test_files_are_read_where_that_beats_going_on_with_host_memory() -> None:
    """A block takes 1 ms to read after the first 1.5 ms, and 1.6 ms to compute: two that follow three in host memory
    take longer to read."""
    cache = replace(CACHE, file_blocks=40, file_queue_blocks=40, file_latency_s=0.0015)
    server = replace(SERVER, host_blocks=6, cache=cache)
    hits = run(talks(1, 2, 3, 4, 2), server, spec="python:tests.priced:Priced").summary.prefix_hits
    assert (hits.host_tokens, hits.file_tokens, hits.loaded_tokens) == (48, 32, 48)


@pytest.mark.parametrize(
    ("names", "client", "found"),
    [(("chat", "chat"), None, 4), (("chat", "batch"), None, 2 * 4), (("chat", "chat"), 0.2, 2)],
    ids=["one class", "two classes", "one client"],
)
def test_a_class_holds_no_more_files_than_its_share_and_without_salts_it_is_one_client(
    names: tuple[str, str], client: float | None, found: int
) -> None:
    """Two windows are kept. Of twelve files a class holds four."""
    limits = HintLimits(share=0.8, class_share=0.4, client_share=client)
    server = replace(SERVER, host_blocks=6, cache=replace(CACHE, file_blocks=12, file_queue_blocks=40, hints=limits))
    work = talks(1, 2, 3, 4, 5, 6, 7, 1, 2)
    kept = [
        replace(request, hints=Hints(keep_s=60.0), class_name=name)
        for request, name in zip(work.requests, names, strict=False)
    ]
    result = run(replace(work, requests=(*kept, *work.requests[2:])), server)
    assert result.summary.prefix_hits.found_tokens == found * 16


@pytest.mark.parametrize("latency_s", [0.001, 30.0], ids=["fast", "slow"])
def test_only_what_is_read_faster_than_computed_is_written(latency_s: float) -> None:
    """Six blocks take 9.6 ms to compute."""
    cache = replace(CACHE, file_blocks=40, file_queue_blocks=40, file_latency_s=latency_s)
    server = replace(SERVER, host_blocks=6, cache=cache)
    priced = "python:tests.priced:Priced"
    hits = run(talks(1, 2, 3, 4, 1, gap_s=300.0), server, spec=priced).summary.prefix_hits
    assert (hits.file_tokens > 0) == (latency_s < 1.0) == (hits.loaded_tokens > hits.host_tokens)


@pytest.mark.parametrize("latency_s", [0.001, 30.0], ids=["fast", "slow"])
def test_what_host_memory_would_leave_out_is_written_where_reading_it_pays(latency_s: float) -> None:
    """The policy would keep the first prompt for good."""
    cache = LowerTiers("python:tests.caching.reluctant:Reluctant", 40, 1e7, latency_s, 40)
    server = replace(SERVER, host_blocks=6, cache=cache)
    hits = run(talks(1, 2, 3, 4, 2, gap_s=300.0), server, spec="python:tests.priced:Priced").summary.prefix_hits
    assert hits.file_tokens + hits.host_tokens == (80 if latency_s < 1.0 else 0) == hits.loaded_tokens
    assert (hits.file_tokens > 0) == (latency_s < 1.0)


def test_what_is_written_already_is_not_handed_on_again() -> None:
    files = tier()
    files.write("abc", 0)
    assert not files.takes("a", 3) and files.takes("b", 3)
    files.worth_saving = lambda blocks, read_s: blocks > 3 and read_s == pytest.approx(0.005)
    assert not files.takes("b", 3) and files.takes("b", 4)


def test_nothing_is_handed_on_while_the_queue_of_writes_is_full() -> None:
    files = tier()
    for position in range(3):
        files.write("abcde", position)
    assert not files.takes("d", 5)
    files.now_s = 0.002
    assert files.takes("d", 5)


def test_what_files_give_up_goes_by_what_a_block_saves_after_its_read() -> None:
    """A block takes 1 ms to read."""
    server = replace(SERVER, cache=replace(CACHE, policy="cost"))
    pool = pool_for(server.device_blocks, server.block_size, True)
    _, files = host_pool(server, lambda index: 0.004 * index, pool, lambda: 0.0)
    assert files is not None and isinstance(files._policy, Hinted) and isinstance(files._policy.inner, ByCost)
    assert [files._policy.inner._price(index) for index in (0, 1, 2)] == pytest.approx([0.0, 0.003, 0.007])


def test_a_block_is_judged_by_the_longest_chain_that_it_is_in() -> None:
    files, asked, tree = tier(), [], Tree()
    files.worth_writing = lambda blocks, read_s: bool(asked.append((blocks, pytest.approx(read_s))))
    first, *_ = tree.nodes("abc")
    files.write(first.chain, 0)
    assert asked == [(3, 0.004)] and not files.lookup("abc")


def test_a_read_that_takes_longer_than_computing_and_loading_is_not_begun() -> None:
    """Reading what is in files of one prompt takes less than computing it, but not behind that of another one."""
    cache = replace(CACHE, file_blocks=40, file_queue_blocks=40)
    server = replace(SERVER, host_blocks=6, cache=cache)
    priced = "python:tests.priced:Priced"
    work = talks(1, 2, 3, 4, 1, 2)
    together = replace(work, requests=(*work.requests[:5], replace(work.requests[5], arrival_s=4.0)))
    alone, behind = (run(one, server, spec=priced).summary.prefix_hits for one in (work, together))
    assert alone.loaded_tokens == alone.host_tokens + alone.file_tokens > behind.loaded_tokens > 0


def at_one_time(*ids: int) -> Workload:
    """The last two prompts of :func:`talks` come together, each of a class of its own."""
    work = talks(*ids)
    first, second = work.requests[-2:]
    together = replace(first, class_name="first"), replace(second, arrival_s=first.arrival_s, class_name="second")
    return replace(work, requests=(*work.requests[:-2], *together))


@pytest.mark.parametrize("host_blocks", [6, 9, 12])
def test_of_equal_prompts_at_one_time_none_finds_more_than_it_has(host_blocks: int) -> None:
    """Both wait for files, and the second finds on the device what the first has loaded by then."""
    server = replace(SERVER, host_blocks=host_blocks, cache=replace(CACHE, file_blocks=40, file_queue_blocks=40))
    classes = run(at_one_time(1, 2, 3, 4, 1, 1), server).summary.classes
    for name in ("first", "second"):
        hits = classes[name].prefix_hits
        assert 0 < hits.found_tokens <= 80, name


def test_what_is_read_for_one_request_is_not_read_again_for_another_one() -> None:
    """A block takes 0.1 s to read: both prompts have their first token when one read has ended, and not two."""
    cache = replace(CACHE, file_blocks=40, file_bytes_per_s=1e4, file_queue_blocks=40)
    server = replace(SERVER, device_blocks=14, host_blocks=6, cache=cache)
    alone, two = (run(work, server) for work in (talks(1, 2, 3, 4, 5, 1), at_one_time(1, 2, 3, 4, 5, 1, 1)))
    assert alone.summary.prefix_hits.file_tokens > 0
    assert alone.trace is not None and two.trace is not None
    (once,) = [row["first_token_s"] for row in alone.trace.rows("requests") if row["request"] == "5"]
    both = [row["first_token_s"] for row in two.trace.rows("requests") if row["request"] in ("5", "6")]
    assert both == pytest.approx([once, once], abs=0.02), "five blocks take half a second to read"
