"""Prompts in files by vLLM's own scheduler and hashes, without an engine: which are stored, and who finds them."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvpolicy.request_marks import Client, Hints
from kvpolicy.settings import GIB
from kvpolicy.tiers import Took, digest_of_key
from kvpolicy_vllm.plugin.messages import FileEvent, FileReport, StepJobs, Transfers
from tests.priced import Priced
from tests.vllm import alone, harness
from tests.vllm.test_prompt_cache import PROMPT, Served, one_step

pytestmark = [pytest.mark.scheduler, pytest.mark.feature("prompts in files, beyond restarts")]
BLOCK_BYTES = alone.BLOCK * 4096
"""Of these tests' model a token takes 4 KiB."""


class Rank(alone.Worker):
    """Its files take every block, and loads of them ``load_s`` seconds of the clock of the scheduler, of which steps
    take ``step_s`` besides."""

    def __init__(self, load_s: float) -> None:
        super().__init__(late=0)
        self.load_s, self.step_s, self.now_s = load_s, 0.0, 0.0
        self.reports = [FileReport(ready=True)]
        self.hints: list[FileEvent] = []
        self.resets = 0

    def _copies(self, jobs: Any) -> KVConnectorOutput | None:
        output = super()._copies(jobs) or KVConnectorOutput()
        if jobs is not None:
            self.resets += jobs.forget_hints
            self.hints += [event for event in jobs.file_events if event.hints is not None]
            self.now_s += self.step_s + self.load_s * len(jobs.file_loads)
            self.reports += [FileReport(job.number, moved=len(job.keys)) for job in jobs.file_stores]
            took = Took(self.load_s, self.load_s)
            self.reports += [FileReport(job.number, moved=len(job.keys), took=took) for job in jobs.file_loads]
        copies = output.kv_connector_worker_meta or Transfers()
        output.kv_connector_worker_meta, self.reports = Transfers(copies.done, self.reports), []
        return output


class WithFiles(Served):
    def __init__(self, model: str, load_s: float = 0.001, **cached: Any) -> None:
        super().__init__(model, **cached)
        self.worker: Rank = Rank(load_s)
        self.controller.clock = lambda: self.worker.now_s
        self.controller.decider.adopt(Priced())
        self.controller.prompts.keep_files(ranks=1)

    def in_files(self, request: Any) -> int:
        prompts = self.controller.prompts
        return int(prompts.files.lookup(map(prompts._key_of, request.block_hashes)))

    def counts_keys(self) -> Counter[bytes]:
        """How often a key has been made of each of the requests' hashes since."""
        prompts, made = self.controller.prompts, Counter[bytes]()
        key_of = prompts._key_of

        def counted(block_hash: bytes) -> bytes:
            made[block_hash] += 1
            return bytes(key_of(block_hash))

        prompts._key_of = counted
        return made

    def push_out_of_host_memory(self) -> None:
        pool = self.controller.copies.pool
        for key in pool.cache.evict(pool.cached, ()):
            pool._evicted(pool._by_key[key])


def test_a_salt_finds_its_own_blocks_only(model: str) -> None:
    served = WithFiles(model)
    plain = [*range(300, 400)]
    served.serve(
        served.request(PROMPT, cache_salt="one"), served.request([*PROMPT[:50], *plain], cache_salt="two"),
        served.request(plain),
    )  # fmt: skip
    served.push_out()
    served.push_out_of_host_memory()
    assert served.in_files(served.request(PROMPT, cache_salt="one")) == 6
    assert served.in_files(served.request(PROMPT, cache_salt="two")) == 3, "those that it has stored itself"
    assert served.in_files(served.request(PROMPT)) == 0
    assert served.in_files(served.request(plain)) == 6
    assert served.in_files(served.request(plain, cache_salt="one")) == 0
    served.serve(served.request(PROMPT), served.request(plain, cache_salt="one"))
    assert harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded") == 0
    served.serve(served.request(PROMPT, cache_salt="one"))
    stats = served.controller.stats()
    assert harness.total(stats, "cache_blocks", tier="files", event="loaded") == 6
    stored = harness.total(stats, "cache_blocks", tier="files", event="stored")
    moved = [harness.total(stats, "cache_file_bytes", direction=way) for way in ("read", "write")]
    assert moved == [6 * BLOCK_BYTES, stored * BLOCK_BYTES] and stored >= 15


@pytest.mark.parametrize("load_s", [0.001, 1.0], ids=["fast", "slow"])
def test_only_what_is_loaded_faster_than_computed_is_stored(load_s: float, model: str) -> None:
    """Six blocks take 9.6 ms to compute. How long files take is known once something was loaded from them."""
    served = WithFiles(model, load_s)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(PROMPT))
    loaded = harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded")
    assert loaded == 6 and served.controller.prompts.files.read_s(6) == pytest.approx(load_s)
    later = [*range(300, 450)]
    served.serve(served.request(later))
    served.push_out()
    assert served.found(served.request(later)) == 144, "they are in host memory, which is as fast as ever"
    assert served.in_files(served.request(later)) == (9 if load_s < 0.01 else 0)


def test_a_small_load_between_long_steps_does_not_make_files_look_slow(model: str) -> None:
    """A step takes 25 ms; two blocks are read in 2 ms, and take 3.2 ms to compute."""
    served = WithFiles(model, load_s=0.002)
    served.worker.step_s = 0.025
    served.serve(served.request(PROMPT[:40]), served.request([*range(300, 400)]))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(PROMPT[:40]))
    assert served.controller.prompts.files.read_s(2) == pytest.approx(0.002)
    served.serve(served.request([*range(300, 400)]))
    assert harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded") == 2 + 6
    later = [*range(400, 500)]
    served.serve(served.request(later))
    served.push_out()
    assert served.in_files(served.request(later)) == 6


@pytest.mark.parametrize("is_behind", [False, True], ids=["alone", "behind a long read"])
def test_a_long_read_before_it_turns_a_load_into_a_recompute(is_behind: bool, model: str) -> None:
    """A block takes 1 ms to read and 1.6 ms to compute; another prompt has twenty blocks in files."""
    served = WithFiles(model, load_s=0.006)
    first, longer = [*range(300, 400)], [*range(400, 735)]
    served.serve(*map(served.request, (first, PROMPT, longer)))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(first))
    assert served.controller.prompts.files.read_s(1) == pytest.approx(0.001)
    asked = [served.request(longer)] * is_behind + [served.request(PROMPT)]
    served.serve(*asked)
    loaded = harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded")
    assert loaded == 6 + (20 if is_behind else 6) and all(request.num_output_tokens == 4 for request in asked)


def test_who_computes_faster_does_not_wait_for_a_load_of_another_request(model: str) -> None:
    """A block takes 1 ms to read and 1.6 ms to compute. Of twenty that one request brings, another one needs two, which
    come with the last ones."""
    served = WithFiles(model, load_s=0.006)
    first, longer = [*range(300, 400)], [*range(400, 735)]
    served.serve(*map(served.request, (first, longer)))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(first))
    prompts = served.controller.prompts
    asked = [served.request(prompt) for prompt in (longer, longer, [*longer[:40], *PROMPT])]
    assert [prompts.waits_for_files(request, 0) for request in asked] == [True, True, False]
    served.worker.now_s += 0.019
    served.controller.decider.adopt(Priced(token_s=1e-9))
    assert [prompts.waits_for_files(request, 0) for request in asked] == [True, True, False], "each is asked once"
    assert not prompts.waits_for_files(served.request(longer), 0), "by the new prices"
    asked[0].resumable = True
    assert not prompts.waits_for_files(asked[0], 0), "it would not be loaded"
    assert len(prompts) == 4
    for request in asked[1:]:
        prompts.ended(request)
    assert len(prompts) == 2


def test_who_waits_for_a_load_makes_no_keys_of_its_prompt_in_every_step(model: str) -> None:
    served = WithFiles(model)
    longer = [*range(400, 735)]
    served.serve(served.request(longer))
    served.push_out()
    served.push_out_of_host_memory()
    prompts, made = served.controller.prompts, served.counts_keys()
    asked = [served.request(longer) for _ in range(3)]
    assert all(prompts.waits_for_files(request, 0) for request in asked) and made.total() >= 3 * 20
    made.clear()
    assert all(prompts.waits_for_files(request, 0) for request in asked * 5) and not made
    assert prompts.waits_for_files(asked[0], 16) and made.total() == 19, "the device has more of it by now"
    jobs = prompts.with_files(StepJobs(1)).file_loads
    prompts.files.acknowledge([FileReport(job.number, moved=len(job.keys)) for job in jobs])
    assert not any(prompts.waits_for_files(request, 0) for request in asked), "it has come"


def test_who_found_nothing_makes_no_keys_of_its_prompt_when_it_is_asked_again(model: str) -> None:
    """An order of service asks of all that wait, in every step."""
    served = WithFiles(model)
    served.serve(served.request([*range(400, 735)]))
    prompts, made, asked = served.controller.prompts, served.counts_keys(), served.request(PROMPT)
    assert not prompts.waits_for_files(asked, 0) and made.total() == 6
    assert not any(prompts.waits_for_files(asked, local_tokens) for local_tokens in (0, 16, 0)) and made.total() == 6


def test_who_waits_for_what_an_earlier_server_left_makes_no_keys_in_every_step(model: str) -> None:
    served = WithFiles(model)
    served.worker.reports = []
    served.scheduler.add_request(served.request([1, 2, 3]))
    one_step(served)
    prompts, made, asked = served.controller.prompts, served.counts_keys(), served.request(PROMPT)
    assert prompts.files.starting and not prompts.waits_for_files(served.request([1, 2, 3]), 0)
    assert prompts.waits_for_files(asked, 0) and made.total() == 6
    assert prompts.waits_for_files(asked, 0) and made.total() == 6
    prompts.files.acknowledge([FileReport(ready=True)])
    assert not prompts.waits_for_files(asked, 0) and made.total() == 12


def test_who_is_preempted_may_bring_from_files_again_what_it_needs(model: str) -> None:
    served = WithFiles(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    prompts, asked = served.controller.prompts, served.request(PROMPT)
    served.scheduler.add_request(asked)
    for _ in range(20):
        one_step(served)
        if asked.num_output_tokens:
            break
    assert harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded") == 6
    for _ in range(2):
        one_step(served)
    served.push_out_of_host_memory()
    assert not prompts.waits_for_files(asked, 0), "it has asked"
    prompts.preempted(asked)
    assert prompts.waits_for_files(asked, 0), "where the device has lost it, too"


def test_what_has_no_room_at_first_comes_from_files_once_there_is_some(model: str) -> None:
    """Loads hold a quarter of 80 slots at most. Of two prompts of twelve blocks the second one brings eight, and the
    others when these have come."""
    served = WithFiles(model, load_s=0.0001, host_gib=80.5 * BLOCK_BYTES / GIB)
    prompts = [[*range(first, first + 200)] for first in (300, 600)]
    served.serve(*map(served.request, prompts))
    served.push_out()
    served.push_out_of_host_memory()
    assert [served.in_files(served.request(prompt)) for prompt in prompts] == [12, 12]
    asked = [*map(served.request, prompts)]
    served.serve(*asked)
    assert harness.total(served.controller.stats(), "cache_blocks", tier="files", event="loaded") == 24
    assert all(request.num_output_tokens == 4 for request in asked) and len(served.controller.prompts) == 0


def test_what_came_from_files_and_is_gone_again_is_computed(model: str) -> None:
    """Whoever waits for files gets further with each load, or waits no more."""
    served = WithFiles(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    prompts, asked = served.controller.prompts, served.request(PROMPT)
    assert prompts.waits_for_files(asked, 0)
    jobs = prompts.with_files(StepJobs(1)).file_loads
    prompts.files.acknowledge([FileReport(job.number, moved=len(job.keys)) for job in jobs])
    assert served.found(asked) == 96 and not prompts.waits_for_files(asked, 0)
    served.push_out_of_host_memory()
    assert served.in_files(asked) == 6 and not prompts.waits_for_files(asked, 0)


def test_files_are_waited_for_where_that_beats_going_on_with_host_memory(model: str) -> None:
    """A block takes 2 ms to read, 1.6 ms to compute and none to load. Of six blocks host memory has four."""
    served = WithFiles(model, load_s=0.012)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(PROMPT))
    assert served.controller.prompts.files.read_s(1) == pytest.approx(0.002)
    pool, asked = served.controller.copies.pool, served.request(PROMPT)
    keys = [*map(served.controller.prompts._key_of, asked.block_hashes)]
    for key in keys[4:]:
        pool.cache.lost(key)
        pool._evicted(pool._by_key[key])
    assert pool.lookup(keys) == 4 and served.in_files(asked) == 6
    assert not served.controller.prompts.waits_for_files(asked, 0), "4 ms of reading, 3.2 ms of computing"


def test_what_one_rank_gives_up_goes_to_all_with_the_next_step(model: str) -> None:
    served, gone = WithFiles(model), digest_of_key(b"a")
    prompts = served.controller.prompts
    prompts.keep_files(ranks=2)
    prompts.files.acknowledge([FileReport(gone=(gone,))])
    assert prompts.with_files(StepJobs(1)).file_drops == (gone,)
    jobs = StepJobs(2)
    assert prompts.with_files(jobs) is jobs


@pytest.mark.parametrize("load_s", [0.001, 1.0], ids=["fast", "slow"])
def test_what_host_memory_would_leave_out_goes_to_files_where_that_pays(load_s: float, model: str) -> None:
    """The policy would keep what came first for good: it gives up what came last for what only passes through."""
    host_gib = 80.5 * BLOCK_BYTES / GIB
    served = WithFiles(model, load_s, cache="python:tests.caching.reluctant:Reluctant", host_gib=host_gib)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    served.serve(served.request(PROMPT))  # read, so that it is known how long files take
    served.push_out()
    later = [*range(300, 400)]
    served.serve(served.request(later))
    served.push_out()
    pool = served.controller.copies.pool
    assert pool.cached == pool.total == 80 and served.in_files(served.request(later)) == (6 if load_s < 0.01 else 0)


def test_files_hear_what_a_request_says_of_its_window_when_it_comes_and_when_it_has_ended(model: str) -> None:
    served = WithFiles(model)
    said = served.request(PROMPT, cache_salt="tenant")
    said.kv_transfer_params = {"kvpolicy": {"keep_s": 60, "session": "s"}}
    served.serve(said, served.request([1, 2, 3]))
    first, last = served.worker.hints
    keys = tuple(map(served.controller.prompts._key_of, said.block_hashes))
    client = Client(salt=hashlib.blake2b(b"tenant", digest_size=16).digest())
    hints, name = Hints(60.0, session="s"), said.request_id
    assert (first, last) == (FileEvent(keys, hints, client, name), FileEvent(keys, hints, client, name, over=True))
    assert len(keys) == 6
    assert "tenant" not in repr(first), "vLLM logs what a step sent to workers when one of them fails"
    assert served.worker.resets == 0
    served.controller.forget_saved()
    served.serve(served.request([1, 2, 3]))
    assert served.worker.resets == 1


def test_files_hear_what_there_is_of_the_window_of_a_request_that_is_cancelled(model: str) -> None:
    served = WithFiles(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    served.push_out_of_host_memory()
    asked = served.request([*PROMPT, *range(300, 400)])
    asked.kv_transfer_params = {"kvpolicy": {"keep_s": 60, "session": "s"}}
    served.scheduler.add_request(asked)
    served.scheduler.finish_requests(asked.request_id, RequestStatus.FINISHED_ABORTED)
    served.serve(served.request([1, 2, 3]))
    first, last = served.worker.hints
    assert len(first.keys) == 12 and last.over and last.keys == first.keys[:6], "six blocks are in files alone"


def test_what_is_found_in_files_at_the_start_is_counted(model: str) -> None:
    served = WithFiles(model)
    served.worker.reports = [FileReport(found=(digest_of_key(b"a"), digest_of_key(b"b")), ready=True)]
    served.serve(served.request(PROMPT))
    assert harness.total(served.controller.stats(), "cache_blocks", tier="files", event="found") == 2


def test_what_became_of_hints_about_files_is_counted_by_tier(model: str) -> None:
    served = WithFiles(model)
    served.worker.reports = [FileReport(hinted=(3, 0, 0, 2)), FileReport(hinted=(1, 0, 0, 0), ready=True)]
    asked = served.request(PROMPT)
    asked.kv_transfer_params = {"kvpolicy": {"keep_s": 60}}
    served.serve(asked)
    stats = served.controller.stats()
    of_files = [harness.total(stats, "hinted_blocks", tier="files", event=event) for event in ("held", "released")]
    assert of_files == [4, 2] and harness.total(stats, "hinted_blocks", tier="host") >= 6


def test_what_costs_more_to_save_and_load_than_to_compute_is_not_stored(model: str) -> None:
    served = WithFiles(model)
    served.controller.decider.adopt(Priced(block_s=1.0))
    served.serve(served.request(PROMPT))
    served.push_out()
    assert served.found(served.request(PROMPT)) == served.in_files(served.request(PROMPT)) == 0
