"""A preemption from state to state, over a scheduler that is made up; what vLLM's own does is tests/vllm's affair."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.events import Cause, Cost, Decision, Option, Outcome
from kvpolicy.policy import Decider, load
from kvpolicy.request_marks import KEY, Classes
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.cost_meter import CostMeter
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.messages import Direction, Transfer
from kvpolicy_vllm.plugin.observers import Observer, Pending

SIZE, BLOCKS = 16, 3
COMPUTED = 40
"""Tokens of the one request: two full blocks and a part of a third."""


class Request(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(
            request_id="r", num_computed_tokens=COMPUTED, num_prompt_tokens=30, num_output_tokens=11, num_tokens=41,
            num_output_placeholders=0, num_preemptions=0, priority=0, skip_reading_prefix_cache=False,
        )  # fmt: skip


class Pool(SimpleNamespace):
    num_gpu_blocks = 100

    def get_num_free_blocks(self) -> int:
        return 0


class Scheduler:
    """One request, which the test takes out and brings back by itself."""

    block_size, max_num_scheduled_tokens = SIZE, 512
    paused = needs_kv_cache_zeroing = False

    def __init__(self, request: Request) -> None:
        self.requests: dict[str, Any] = {"r": request}
        self.running: list[Any] = []
        self.blocks = [SimpleNamespace(ref_cnt=int(at == 8), block_hash=None, block_id=at) for at in range(20)]
        self.blocks_of: dict[str, list[int]] = {"r": [7, 8, 9]}
        self.kv_cache_manager = SimpleNamespace(block_pool=Pool(blocks=self.blocks), get_blocks=self._get_blocks)
        self.loaded_requests = SimpleNamespace(load_begins=lambda request: None)

    def _get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=[[self.blocks[block_id] for block_id in self.blocks_of[request_id]]])

    def hash_block(self, block_id: int, value: str | None) -> None:
        self.blocks[block_id].block_hash = value

    def get_num_unfinished_requests(self) -> int:
        return 0 if self.paused else len(self.requests)


class Rows:
    """What is recorded, by table."""

    dropped = 0
    size = None

    def __init__(self) -> None:
        self.closed = self.flushed = 0
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def add(self, table: str, row: dict[str, Any]) -> None:
        self.rows.setdefault(table, []).append(row)

    def flush_soon(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


class Events(Observer):
    """In the order they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def decided(self, pending: Pending) -> None:
        self.told.append(("decided", str(pending.decision.executed)))

    def undecided(self, cause: Cause) -> None:
        self.told.append(("undecided", cause))

    def executed(self, pending: Pending) -> None:
        self.told.append(("executed", str(pending.decision.executed)))

    def loaded(self, request_id: str, tokens: int) -> None:
        self.told.append(("loaded", str(tokens)))

    def fell_back(self, reason: str) -> None:
        self.told.append(("fell_back", reason))

    def idle(self) -> None:
        self.told.append(("idle", ""))

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        self.told.append((outcome.ended, opened.executed))


class World:
    """A controller and its one request; steps are done as soon as they are scheduled."""

    def __init__(self, policy: str = "always-swap", complain: Callable[[str], None] = pytest.fail) -> None:
        self.now, self.events, self.rows = 0.0, Events(), Rows()
        self.request = Request()
        self.scheduler = Scheduler(self.request)
        self.controller = Controller(
            "core",
            Decider(load(policy, allow_python=True), random.Random(0)),
            CopyBook(8, 1, 100),
            100,
            self._clock,
            complain,
            load,
        )
        self.controller.record_into(self.rows, lambda request_id: f"anonymous {request_id}")
        self.controller.observers.add(self.events)
        self.jobs = deque[Any]()

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def preempt(self, cause: Cause = "memory") -> None:
        """In a step of its own."""
        self.controller.step_begins(self.scheduler)
        self.controller.preempting(self.request, cause)
        self.request.num_computed_tokens = 0
        self.request.num_preemptions += 1
        self.rest_of_step({})

    def step(self, tokens: int = 0, taken: Sequence[int] = (), kept: Sequence[int] = ()) -> None:
        """``taken``: blocks that a new request gets, of which ``kept`` keep their content."""
        self.controller.step_begins(self.scheduler)
        for block_id in taken:
            if block_id not in kept:
                self.scheduler.hash_block(block_id, None)
        self.rest_of_step({"r": tokens} if tokens else {}, taken)

    def rest_of_step(self, scheduled: dict[str, int], taken: Sequence[int] = ()) -> None:
        begin = self.request.num_computed_tokens
        self.request.num_computed_tokens += sum(scheduled.values())
        cached = SimpleNamespace(
            req_ids=list(scheduled), num_computed_tokens=[begin] * len(scheduled), new_block_ids=[None, (list(taken),)]
        )
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=[], scheduled_cached_reqs=cached,
        )  # fmt: skip
        self.jobs.append(self.controller.take_jobs(output))
        self.controller.step_scheduled(output)
        self.controller.step_done(output)

    def finish_copies(self, direction: Direction, ok: bool = True) -> None:
        jobs = [job for step in self.jobs for job in (step.saves if direction == "save" else step.loads)]
        now = self.now
        done = [Transfer(job.copy_id, direction, ok, 300, 3, 100, False, 0, now, now, now) for job in jobs]
        self.controller.transferred(done)

    def come_back(self) -> None:
        """By a load, as far as there is one, and the tokens that are left."""
        load = self.controller.loadable_tokens(self.request, 0)
        self.controller.admitted(self.request, [[1, 2, 3]], load)
        if load:
            self.step()
            self.finish_copies("load")
            self.request.num_computed_tokens = load
            self.controller.admitted(self.request, [[1, 2, 3]], 0)
        self.step(self.request.num_tokens - self.request.num_computed_tokens)

    def stats(self, name: str) -> dict[str, float]:
        return {key: value for key, value in self.controller.stats().items() if key.split("|")[0] == name}


@pytest.fixture
def world() -> World:
    return World()


def test_a_swap_from_the_decision_to_its_end(world: World) -> None:
    world.preempt()
    assert world.events.told == [("decided", "swap")] and "decisions" not in world.rows.rows
    world.finish_copies("save")
    world.come_back()
    events = [("decided", "swap"), ("executed", "swap"), ("loaded", "40"), ("resumed", "swap")]
    assert world.events.told == events
    (decision,), (outcome,) = world.rows.rows["decisions"], world.rows.rows["outcomes"]
    assert (decision["preemption_id"], decision["request"], decision["executed"]) == ("core-1", "anonymous r", "swap")
    assert (decision["computed_tokens"], decision["held_blocks"], decision["step"]) == (COMPUTED, BLOCKS, 0)
    assert (outcome["loaded_tokens"], outcome["recomputed_tokens"]) == (COMPUTED, 0)
    assert world.stats("preemptions") == {"preemptions|intended=swap|executed=swap|cause=memory": 1}
    assert world.controller.stats()["host_slots_used"] == 0 and not world.controller.copies.loading


def test_observers_are_told_when_no_work_is_left(world: World) -> None:
    """In a pause vLLM says that nothing is unfinished, although requests stay in the batch."""
    world.scheduler.running = [world.request]
    world.step(1)
    assert ("idle", "") not in world.events.told and not world.rows.flushed
    world.scheduler.paused = True
    world.step(1)
    assert world.events.told[-1] == ("idle", "") and world.rows.flushed == 1


def test_a_recompute_is_executed_at_once() -> None:
    world = World("always-recompute")
    world.preempt()
    assert world.events.told == [("executed", "recompute"), ("decided", "recompute")]
    world.come_back()
    assert world.events.told[-1] == ("resumed", "recompute")
    assert world.stats("recomputed_tokens") == {"recomputed_tokens": COMPUTED}


def test_a_save_that_fails_makes_a_recompute_of_it(world: World) -> None:
    world.preempt()
    world.finish_copies("save", ok=False)
    world.come_back()
    assert world.events.told == [("decided", "swap"), ("executed", "recompute"), ("resumed", "recompute")]
    assert world.rows.rows["decisions"][0]["reason"] == "save_failed"


def test_a_load_that_fails_makes_a_recompute_of_it(world: World) -> None:
    world.preempt()
    world.finish_copies("save")
    world.controller.admitted(world.request, [[1, 2, 3]], world.controller.loadable_tokens(world.request, 0))
    world.step()
    world.finish_copies("load", ok=False)
    world.come_back()
    assert world.events.told[2:] == [("fell_back", "load_failed"), ("resumed", "recompute")]


def test_a_request_that_leaves_before_its_save_is_confirmed_leaves_nothing(world: World) -> None:
    world.preempt()
    world.controller.finished(world.request)
    assert world.events.told[1:] == [("executed", "swap"), ("aborted", "swap")]
    world.finish_copies("save")
    assert len(world.events.told) == 3 and world.controller.stats()["host_slots_used"] == 0


def test_a_policy_that_is_certain_at_resume_has_the_rest_computed() -> None:
    """Nothing of it is on the device, so the hit has an even number of blocks; then one, which is odd."""
    world = World("python:tests.fickle:Fickle")
    world.preempt()
    world.finish_copies("save")
    assert [world.controller.loadable_tokens(world.request, hit) for hit in (0, 16, 0)] == [40, 0, 40]
    assert world.controller.loadable_tokens(world.request, 16) == 0
    world.controller.admitted(world.request, [[1, 2, 3]], 0)
    world.request.num_computed_tokens = 16
    world.step(world.request.num_tokens - 16)
    assert world.events.told[-2:] == [("fell_back", "cheaper_at_resume"), ("resumed", "recompute")]
    assert world.controller.stats()["host_slots_used"] == 0
    assert world.rows.rows["decisions"][0]["executed"] == "swap"


def test_what_is_all_on_the_device_after_all_is_no_recompute_by_choice() -> None:
    """Asked with one block there, the policy would not load; when the request is admitted, all are."""
    world = World("python:tests.fickle:Fickle")
    world.preempt()
    world.finish_copies("save")
    assert [world.controller.loadable_tokens(world.request, hit) for hit in (16, COMPUTED)] == [0, 0]
    world.controller.admitted(world.request, [[1, 2, 3]], 0)
    world.request.num_computed_tokens = COMPUTED
    world.step(1)
    assert world.events.told[-1] == ("resumed", "swap") and not world.stats("fallbacks")


def test_a_policy_that_fails_at_resume_has_the_copy_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    world = World(complain=complaints.append)
    world.preempt()
    monkeypatch.setattr(world.controller.decider, "loads", lambda situation: 1 / 0)
    assert [world.controller.loadable_tokens(world.request, 0) for _ in range(3)] == [40, 40, 40]
    assert len(complaints) == 1, "not in every step"
    assert world.stats("resume_undecided") == {"resume_undecided": 1}


class TestBlocksThatSurvive:
    """The two full blocks, 7 and 8, are in the prefix cache; the third one, 9, is not."""

    @pytest.fixture
    def world(self) -> World:
        made = World()
        for block_id in (7, 8):
            made.scheduler.hash_block(block_id, f"hash {block_id}")
        return made

    def saved(self, world: World) -> list[tuple[int, ...]]:
        return [job.block_ids for step in world.jobs for job in step.saves]

    def test_they_are_saved_when_a_step_takes_them(self, world: World) -> None:
        world.preempt()
        assert self.saved(world) == [(9,)]
        world.step(taken=[5, 7, 8], kept=(7,))
        assert self.saved(world) == [(9,), (8,)], "7 is taken by a hit and keeps its content"
        world.step(taken=[8])
        assert len(self.saved(world)) == 2

    def test_a_block_that_has_its_hash_before_it_is_full_is_saved_at_once(self, world: World) -> None:
        """As where the step that would have filled it preempts the request after all."""
        world.scheduler.hash_block(9, "hash 9")
        world.preempt()
        assert self.saved(world) == [(9,)] and world.controller.copies.pool.key_at(9) is None
        world.finish_copies("save")
        assert world.rows.rows["decisions"][0]["hashed_blocks"] == 2

    def test_also_where_a_load_takes_them(self, world: World) -> None:
        world.preempt()
        other = Request()
        other.request_id = "other"
        world.scheduler.requests["other"] = other
        world.scheduler.blocks_of["other"] = [10, 11, 12]
        world.controller.step_begins(world.scheduler)
        world.controller.preempting(other, "memory")
        world.rest_of_step({})
        world.scheduler.hash_block(8, None)
        world.controller.admitted(other, [[5, 8, 6]], 40)
        world.step()
        assert self.saved(world) == [(9,), (10, 11, 12), (8,)]
        assert [job.block_ids for job in world.jobs[-1].loads] == [(5, 8, 6)]

    def test_what_a_load_needs_and_only_the_device_has_is_saved_before(self, world: World) -> None:
        world.preempt()
        world.controller.admitted(world.request, [[7, 5, 6]], 24)
        world.step()
        assert self.saved(world) == [(9,), (8,)] and [job.block_ids for job in world.jobs[-1].loads] == [(5, 6)]

    def test_also_where_a_request_that_took_them_is_preempted_in_the_same_step(self, world: World) -> None:
        world.preempt()
        world.controller.step_begins(world.scheduler)
        other = Request()
        other.request_id, other.num_computed_tokens = "other", 16
        world.scheduler.requests["other"] = other
        world.scheduler.hash_block(8, None)
        world.scheduler.blocks_of["other"] = [5, 8]
        world.controller.preempting(other, "memory")
        world.rest_of_step({})
        assert self.saved(world) == [(9,), (8,), (5,)]

    def test_where_the_engine_clears_blocks_all_are_saved_at_once(self, world: World) -> None:
        world.scheduler.needs_kv_cache_zeroing = True
        world.preempt()
        assert self.saved(world) == [(7, 8, 9)]

    def test_where_the_engine_clears_blocks_each_one_is_named_at_once_as_overwritten(self, world: World) -> None:
        """It may be cleared before the worker can order the save: also a block that nobody has taken yet."""
        for clears, named in ((False, {8}), (True, {7, 8, 9})):
            made = World()
            made.scheduler.needs_kv_cache_zeroing = clears
            made.preempt()
            assert made.jobs[-1].overwritten == named, "of these only 8 is another request's too"

    def test_where_a_tool_measures_it_evicts_blocks_and_all_are_saved_at_once(self, world: World) -> None:
        world.controller.pin("swap", {"state_id": "s1", "arm": "swap", "repeat": 0})
        world.preempt()
        assert self.saved(world) == [(7, 8, 9)]
        world.finish_copies("save")
        (row,) = world.rows.rows["decisions"]
        assert (row["hit_blocks"], row["save_blocks"]) == (row["shared_blocks"], BLOCKS)

    def test_what_a_tool_has_in_host_memory_is_not_saved_again(self, world: World) -> None:
        world.controller.pin("swap", {"state_id": "s1", "arm": "swap", "repeat": 0})
        world.controller.copies.save_for_tool([("hash 7", 7), ("hash 8", 8)])
        world.step()
        world.finish_copies("save")
        world.preempt()
        assert self.saved(world) == [(7, 8), (9,)]
        world.finish_copies("save")
        (row,) = world.rows.rows["decisions"]
        assert (row["hit_blocks"], row["save_blocks"]) == (row["shared_blocks"], BLOCKS - 2)

    def test_a_slot_with_a_content_that_the_victim_needs_makes_no_room_for_it(self, world: World) -> None:
        """Host memory is full. The only copy of a shorter request holds what is in block 7."""
        copies = world.controller.copies
        copies.keep("short", "p1", COMPUTED - 1, [("hash 7", 7)])
        copies.lost([7])
        copies.keep("long", "p2", COMPUTED + 1, [(None, at) for at in range(12, 19)])
        assert copies.pool.free == 0 and copies.pool.obtainable(COMPUTED, 1) == 1
        world.preempt()
        assert world.events.told == [("executed", "recompute"), ("decided", "recompute")]
        assert world.rows.rows["decisions"][0]["free_host_blocks"] == 0

    def test_a_swap_that_copies_nothing_is_settled_in_its_step(self, world: World) -> None:
        world.request.num_computed_tokens = 32
        world.preempt()
        assert self.saved(world) == [] and world.events.told == [("decided", "swap"), ("executed", "swap")]
        world.controller.admitted(world.request, [[7, 8, 5]], 0)
        world.request.num_computed_tokens = 32
        world.step(1)
        assert world.events.told[2:] == [("resumed", "swap")] and world.controller.stats()["host_slots_used"] == 0

    def test_a_copy_that_is_given_up_is_counted_and_recomputed(self, world: World) -> None:
        """Of eight slots it has one when a longer request takes all."""
        world.preempt()
        other = Request()
        other.request_id, other.num_computed_tokens, other.num_tokens = "other", 128, 129
        world.scheduler.requests["other"] = other
        world.scheduler.blocks_of["other"] = list(range(10, 18))
        world.controller.step_begins(world.scheduler)
        world.controller.preempting(other, "memory")
        world.rest_of_step({})
        assert ("executed", "recompute") in world.events.told
        assert world.stats("fallbacks") == {"fallbacks|reason=host_full": 1}
        assert world.rows.rows["decisions"][0]["reason"] == "host_full"
        assert world.controller.loadable_tokens(world.request, 0) == 0

    def test_also_one_that_is_given_up_in_the_step_that_made_it(self, world: World) -> None:
        other = Request()
        other.request_id, other.num_computed_tokens, other.num_tokens = "other", 128, 129
        world.scheduler.requests["other"] = other
        world.scheduler.blocks_of["other"] = list(range(10, 18))
        world.controller.step_begins(world.scheduler)
        world.controller.preempting(world.request, "memory")
        world.controller.preempting(other, "memory")
        world.rest_of_step({})
        first = world.rows.rows["decisions"][0]
        assert (first["executed"], first["reason"]) == ("recompute", "host_full") and self.saved(world)[0][0] == 10


def test_a_reset_forgets_what_was_saved_and_swaps_nobody(world: World) -> None:
    world.preempt()
    world.request.num_computed_tokens = 20
    world.controller.preempting(world.request, "reset")
    assert ("executed", "swap") in world.events.told and world.events.told[-1] == ("superseded", "swap")
    assert world.rows.rows["decisions"][-1]["reason"] == "reset"
    assert world.rows.rows["decisions"][-1]["step"] == world.controller.next_step, "between steps: the next one's"
    world.step()
    assert world.rows.rows["steps"][-1]["preemptions"] == 1


def test_a_failed_decision_becomes_a_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    world = World(complain=complaints.append)
    with monkeypatch.context() as patch:
        patch.setattr(world.controller.decider, "decide", lambda *arguments: 1 / 0)
        world.preempt()
    assert world.events.told == [("undecided", "memory")] and len(complaints) == 1
    world.come_back()
    assert world.events.told[-1] == ("resumed", "recompute")
    assert world.stats("fallbacks") == {"fallbacks|reason=error": 1}


def test_open_preemptions_are_recorded_at_shutdown(world: World) -> None:
    world.preempt()
    world.controller.close()
    world.controller.close()
    assert world.events.told[-1] == ("executed", "swap")
    assert len(world.rows.rows["decisions"]) == 1 and world.rows.closed == 1


def test_a_controller_that_nobody_closes_closes_what_it_recorded() -> None:
    world = World()
    rows = world.rows
    world.controller._keep()  # as at the interpreter's exit, or when the controller is collected
    assert rows.closed == 1
    world.controller.close()
    assert rows.closed == 1


def test_records_are_written_when_the_controller_is_collected() -> None:
    """As some versions of vLLM shut no engine down; so nothing that is recorded with may hold the controller."""
    world = World()
    rows = world.rows
    del world
    gc.collect()
    assert rows.closed == 1


def test_a_trace_records_what_is_granted_later_too() -> None:
    world = World()
    request, controller = world.request, world.controller
    request.kv_transfer_params, request.get_finished_reason = {KEY: {"class": "chat"}}, lambda: "stop"
    controller.arrived(request)
    assert controller.marks.of(request).class_name == "default", "no class may be claimed yet"
    controller.grant_marks(Classes.parse("chat:ttft=0.5").grant)
    controller.finished(request)
    (row,) = world.rows.rows["requests"]
    assert (row["class"], row["ttft_deadline_s"]) == ("chat", 0.5)


def test_a_recorder_that_fails_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    world = World(complain=complaints.append)
    monkeypatch.setattr(world.rows, "add", lambda table, row: 1 / 0)
    world.preempt()
    world.finish_copies("save")
    world.come_back()
    assert world.events.told[-1] == ("resumed", "swap")
    assert "an event could not be recorded (counted as records_dropped)" in complaints
    assert world.controller.stats()["records_dropped"] > 0


def test_a_pinned_option_is_recorded_with_its_labels_and_a_policy_is_adopted(world: World) -> None:
    world.controller.pin("recompute", {"state_id": "s1", "arm": "recompute", "repeat": 2})
    world.preempt()
    world.come_back()
    world.controller.pin(None)
    world.controller.adopt("threshold:1000")
    world.request.num_computed_tokens = COMPUTED
    world.preempt()
    first, second = world.rows.rows["decisions"]
    assert (first["policy"], first["arm"], first["repeat"], first["executed"]) == (
        "pinned",
        "recompute",
        2,
        "recompute",
    )
    assert (second["policy"], second["arm"], second["executed"]) == ("threshold:1000", None, "recompute")
    shown = world.stats("cost_model")
    assert shown == {"cost_model|policy=always-swap|digest=": 0, "cost_model|policy=threshold:1000|digest=": 1}


def test_a_policy_that_cannot_be_loaded_leaves_the_one_in_charge(world: World) -> None:
    with pytest.raises(ValueError, match="is no policy"):
        world.controller.adopt("nonsense")
    assert world.controller.decider.policy.name == "always-swap"
    assert world.stats("cost_model") == {"cost_model|policy=always-swap|digest=": 1}


def test_what_a_resumed_swap_cost_is_measured(world: World) -> None:
    controller = world.controller
    step_time = StepTimeModel(1e-4, (1e-6,) * 6, "nothing", 100, HeldOutError(0.0, 0.0, 0.0))
    meter = CostMeter(step_time, controller.observers.tell, controller.metrics.tally)
    controller.observers.replace(CostMeter, meter)
    world.preempt()
    world.finish_copies("save")
    world.come_back()
    for _ in range(5):
        world.step(1)
    assert world.stats("measured_preemptions") == {"measured_preemptions|executed=swap": 1} and len(meter) == 0
    assert world.stats("recomputed_tokens") == world.stats("recompute_microseconds") == {}, "nothing was recomputed"


def test_what_recomputed_tokens_take_is_counted_where_steps_recompute() -> None:
    """40 tokens and a new one, alone in a step of a millisecond: without the 40 it would have decoded one. The model
    expects 141 us, of which 40 are of the 40."""
    world = World("always-recompute")
    controller = world.controller
    step_time = StepTimeModel(1e-4, (1e-6, 0.0, 0.0, 0.0, 0.0, 0.0), "nothing", 100, HeldOutError(0.0, 0.0, 0.0))
    controller.observers.replace(CostMeter, CostMeter(step_time, controller.observers.tell, controller.metrics.tally))
    world.step(1)
    assert "recompute_microseconds" not in controller.stats()
    world.request.num_computed_tokens = COMPUTED
    world.preempt()
    world.come_back()
    stats = controller.stats()
    assert stats["recomputed_tokens"] == COMPUTED and stats["beside_recompute_tokens"] == 1
    assert stats["recompute_microseconds"] == pytest.approx(1000 * COMPUTED / 141)
    assert stats["beside_recompute_microseconds"] == pytest.approx(1000 * 101 / 141)
    for _ in range(3):
        world.step(1)
    assert controller.stats()["beside_recompute_tokens"] == 1, "steps without a recompute are not priced"


def test_what_the_other_option_would_have_saved_is_counted(world: World) -> None:
    cost, dearer = (Cost(s, 0.0, 0.0, s, 0.0, s, s) for s in (0.002, 0.005))
    options = (Option("recompute"), Option("swap"))
    situation = SimpleNamespace(cause="memory")
    for costs, executed in (((dearer, cost), "recompute"), ((cost, dearer), "recompute"), ((), "recompute")):
        decision = Decision(options, (1.0, 0.0), 0, costs, "p", "{}", executed)  # type: ignore[arg-type]
        world.controller.metrics.executed(Pending(situation, decision, SimpleNamespace(preemption_id="core-1")))  # type: ignore[arg-type]
    assert world.stats("avoidable_cost_microseconds") == {
        "avoidable_cost_microseconds|executed=recompute": pytest.approx(3000.0)
    }


def test_only_what_was_priced_counts_as_priced(world: World) -> None:
    cost, situation = Cost(0.002, 0.0, 0.0, 0.002, 0.0, 0.002, 0.002), SimpleNamespace(cause="memory")
    for costs in ((cost,), (), ()):
        decision = Decision((Option("recompute"),), (1.0,), 0, costs, "p", "{}", "recompute")
        world.controller.metrics.executed(Pending(situation, decision, SimpleNamespace(preemption_id="core-1")))  # type: ignore[arg-type]
    assert world.stats("priced_preemptions") == {"priced_preemptions|executed=recompute": 1}
