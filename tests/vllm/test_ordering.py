"""The order of service in vLLM's scheduler: who is displaced comes for somebody who comes in; errors stop nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.request import RequestStatus, StreamingUpdate

from kvpolicy import trace as traces
from kvpolicy.order import Priority, Progress, Rank, View, load, room
from kvpolicy.tiers import digest_of_key
from kvpolicy_vllm.bench.plugin_switch import PluginSwitch
from kvpolicy_vllm.plugin import observers
from kvpolicy_vllm.plugin.messages import FileReport
from kvpolicy_vllm.plugin.ordering import Ordering
from kvpolicy_vllm.plugin.trace_writer import TraceRecorder
from kvpolicy_vllm.plugin.versions import UnsupportedEngine
from tests.vllm import alone, fuzz, harness
from tests.vllm.models import write_llama
from tests.vllm.places import Places
from tests.vllm.setups import HOLDING, UNRULY, Setup
from tests.vllm.test_same_schedule import BASE
from tests.vllm.test_soak import PRESSED

pytestmark = pytest.mark.scheduler

ORDERED = PRESSED | {
    "order": "mlfq:base=4", "prefix_caching": True, "max_running": 16, "token_budget": 128, "pictures": 0,
    "cache": "off",  # what is found in host memory may be gone when its request is admitted
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def schedule(model: Path, seed: int = 1, **fixed: Any) -> fuzz.Schedule:
    return fuzz.Schedule(Setup.draw(seed, **ORDERED | fixed), model)


def served(made: fuzz.Schedule) -> fuzz.Outcome:
    made.run()
    return made.outcome()


def test_a_server_records_whom_it_displaces_and_in_which_order(model: Path, tmp_path: Path) -> None:
    """By names that are not the clients'; a policy without predictions has no prices."""
    order = "mlfq:base=4,explore=.5"
    plugin = harness.plugin("always-recompute", order=order, trace=str(tmp_path))
    job = BASE | {"model": str(model), "plugin": plugin, "blocks": 200, "requests": 60}
    scheduler, worker = alone.scheduler_for(job), alone.Worker(late=0)
    for _ in alone.drive(scheduler, deque(alone.made_requests(job)), worker.execute, False):
        pass
    scheduler.kvpolicy.close()
    trace = traces.read(tmp_path)
    (header,) = trace.headers.values()
    assert (header.order, header.order_digest) == (order, load(order).digest)
    rows = trace.rows("displacements")
    taken = {(row["step"], one["request"]) for row in rows for one in row["candidates"][: row["taken"]]}
    decided = {(row["step"], row["request"]) for row in trace.rows("decisions") if row["cause"] == "displaced"}
    assert taken == decided and len(taken) == harness.total(scheduler.connector.stats(), "displaced") > 10
    named = {row["request"] for row in trace.rows("requests")}
    assert {name for _, name in taken} | {row["request"] for row in rows} <= named and "r0" not in named
    assert {one["price_s"] for row in rows for one in row["candidates"]} == {None}
    assert {row["order"] for row in rows} == {order} and any(row["probability"] < 1.0 for row in rows)


@pytest.mark.parametrize("records", [True, False])
def test_candidates_are_priced_only_while_somebody_records_them(
    records: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody does once the trace's recorder has failed too often: here that is once."""
    plugin = harness.plugin("always-recompute", order="mlfq:base=4", trace=str(tmp_path))
    job = BASE | {"model": str(model), "plugin": plugin, "blocks": 200, "requests": 20}
    if not records:
        monkeypatch.setattr(observers, "MAX_FAILURES", 1)
        monkeypatch.setattr(TraceRecorder, "arrived", lambda self, request, now: 1 / 0)
    scheduler, worker = alone.scheduler_for(job), alone.Worker(late=0)
    chosen: list[Any] = []
    choice_of = room.choice_of
    monkeypatch.setattr(room, "choice_of", lambda *known: (chosen.append(known), choice_of(*known))[1])
    for _ in alone.drive(scheduler, deque(alone.made_requests(job)), worker.execute, False):
        pass
    scheduler.kvpolicy.close()
    assert harness.total(scheduler.connector.stats(), "displaced") > 0 and bool(chosen) == records


def test_the_header_names_vllms_own_priority_scheduling(model: Path, tmp_path: Path) -> None:
    plugin = harness.plugin("always-recompute", trace=str(tmp_path))
    job = BASE | {"model": str(model), "plugin": plugin, "blocks": 200, "scheduling": "priority"}
    controller = alone.scheduler_for(job).kvpolicy
    assert controller.recorder._header.order == "priority"
    controller.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_others_are_displaced_for_comes_in(seed: int, asynchronous: bool, model: Path) -> None:
    """So what it needs is what vLLM asks for, with loads under way and blocks shared."""
    made = schedule(model, seed, asynchronous=asynchronous)
    outcome = served(made)
    assert outcome.problems == () and outcome.displaced > 30
    assert harness.total(made.scheduler.connector.stats(), "displaced") == outcome.displaced
    assert outcome.missed == 0


def test_few_are_displaced_in_vain_for_requests_with_pictures(model: Path) -> None:
    """Of several that want the encoder in one step, and of running ones, who gets it is vLLM's to say."""
    outcome = served(schedule(model, 0, pictures=24, encoder_room=1.0))
    assert outcome.problems == () and outcome.displaced > 30 and outcome.let_in_with_pictures > 10
    assert outcome.missed <= 0.1 * outcome.let_in_with_pictures


def test_where_nobody_comes_in_victims_grow_rare(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever vLLM's reason: here it asks for more blocks than expected."""
    right = Ordering.need_blocks
    monkeypatch.setattr(Ordering, "need_blocks", lambda self, waiting: max(1, right(self, waiting) - 5))
    rests: list[int] = []
    missed = room.BackOff.missed
    monkeypatch.setattr(
        room.BackOff, "missed", lambda self, step: (missed(self, step), rests.append(self.next_step - step))[0]
    )
    made = schedule(model)
    outcome = served(made)
    assert outcome.problems == () and outcome.missed > 5
    assert max(rests) >= 4


def test_nobody_is_displaced_for_a_prompt_that_is_on_its_way_from_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    plugin = harness.plugin("always-swap", order="urgent", cache="lru", cache_files=str(tmp_path))
    scheduler = alone.scheduler_for(
        BASE | {"model": str(model), "plugin": plugin, "blocks": 41, "prefix_caching": True}
    )
    worker, files, prompts = alone.Worker(late=0), scheduler.kvpolicy.prompts.files, scheduler.kvpolicy.prompts
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    running = alone.made_request(0, [*range(500)], long.clone(), priority=5)
    urgent = alone.made_request(1, [*range(600, 800)], long.clone(), priority=-5)

    def step() -> int:
        output = scheduler.schedule()
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        scheduler.update_from_output(output, worker.execute(output, sampled))
        return int(harness.total(scheduler.connector.stats(), "displaced"))

    scheduler.add_request(running)
    for _ in range(8):
        step()
    prompts.step_begins(scheduler, 0, lambda: 0.0)
    digests = tuple(map(digest_of_key, prompts._keys(urgent, 0, 12)))
    files.acknowledge([FileReport(found=digests, ready=True)])
    scheduler.add_request(urgent)
    assert [step() for _ in range(5)] == [0] * 5 and running.status == RequestStatus.RUNNING
    assert [*files._under] == [1], "it waits for its prompt"
    files.acknowledge([FileReport(1)])
    assert [step() for _ in range(3)][-1] == 1 and urgent in scheduler.running


@pytest.mark.parametrize(("order", "method"), [("mlfq:base=4", "make_room"), ("reserve:.2", "admits")])
def test_what_fails_is_counted_and_displaces_nobody(
    order: str, method: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise AttributeError("not in this vLLM")

    monkeypatch.setattr(Ordering, "need_blocks", fail)
    made = schedule(model, order=order)
    made.run()
    stats = made.scheduler.connector.stats()
    assert harness.total(stats, "order_failed", method=method) > 5
    assert harness.total(stats, "preemptions", cause="displaced") == 0
    assert all(request.is_finished() for request in made.requests)


def test_the_running_list_is_by_rank_again_where_a_step_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many chunks stands behind those that decode only while vLLM schedules."""
    plugin = harness.plugin("always-recompute", order="urgent")
    job = BASE | {"model": str(model), "plugin": plugin, "budget": 32, "sequences": 16}
    scheduler, worker = alone.scheduler_for(job), alone.Worker(late=0)
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    decoding = alone.made_request(0, [*range(8)], long.clone())
    prompt = alone.made_request(1, [*range(200)], long.clone(), priority=-1)

    def step() -> Any:
        output = scheduler.schedule()
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        scheduler.update_from_output(output, worker.execute(output, sampled))
        return output

    for request in (decoding, prompt):
        scheduler.add_request(request)
        step()
    assert [*step().num_scheduled_tokens.items()] == [("r0", 1), ("r1", 31)] and scheduler.running == [prompt, decoding]
    seen: list[list[Any]] = []

    def failing(*arguments: Any, **more: Any) -> None:
        seen.append([*scheduler.running])
        raise RuntimeError("no blocks")

    with monkeypatch.context() as broken:
        broken.setattr(scheduler.kv_cache_manager, "allocate_slots", failing)
        with pytest.raises(RuntimeError, match="no blocks"):
            scheduler.schedule()
    assert seen == [[decoding, prompt]] and scheduler.running == [prompt, decoding]
    assert step().num_scheduled_tokens == {"r0": 1, "r1": 31}


@pytest.mark.parametrize("order", UNRULY)
def test_an_order_whose_code_fails_is_counted(order: str, model: Path) -> None:
    made = schedule(model, order=order)
    assert served(made).problems == ()
    assert harness.total(made.scheduler.connector.stats(), "order_failed", method="rank") > 5


@pytest.mark.parametrize("order", ["urgent/mlfq:base=4", "mlfq:base=4,victims=least-computed", "reserve:.2"])
def test_what_a_newcomer_would_leave_free_is_looked_up_only_where_an_order_may_refuse_it(
    order: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    need = Ordering.need_blocks

    def noting(self: Ordering, waiting: Progress) -> int:
        looked.append(self._scheduling)
        return need(self, waiting)

    monkeypatch.setattr(Ordering, "need_blocks", noting)
    made = schedule(model, order=order)
    assert served(made).problems == () and looked
    assert any(looked) == (order == "reserve:.2")


class Derived(Priority):
    """vLLM's priority, whose code fails for every third request."""

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((1 // (request.number % 3),))


def test_an_order_derived_from_vllms_is_guarded_too(model: Path) -> None:
    made = schedule(model, order="fcfs")
    made.scheduler.kvpolicy.serve_by(Derived("derived"))
    made.scheduler.serve_by(made.scheduler.kvpolicy.order)
    made.run()
    assert harness.total(made.scheduler.connector.stats(), "order_failed", method="rank") > 5
    assert all(request.is_finished() for request in made.requests)


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
def test_whoever_does_not_come_in_is_counted_in_whichever_queue(status: RequestStatus, model: Path) -> None:
    """Up to vLLM 0.30 who was passed over waits among those that hold blocks; so does one that was loaded."""
    made = schedule(model)
    waiting = made.requests[0]
    made.scheduler.add_request(waiting)
    served_by = made.scheduler.ordering
    served_by.queues.waiting.remove(waiting)
    served_by.queues.holding.append(waiting)
    waiting.status = status
    served_by._let_in = [waiting]
    served_by._count_missed()
    assert harness.total(made.scheduler.connector.stats(), "displaced_in_vain") == 1
    assert served_by.lookout.after_miss.next_step > 0


@pytest.mark.parametrize(("stale", "dropped", "admitted"), [(0, False, True), (1, False, False), (1, True, True)])
def test_nobody_is_displaced_for_a_request_with_stale_outputs(
    stale: int, dropped: bool, admitted: bool, model: Path
) -> None:
    """vLLM passes it over until the outputs are back that were under way when it was reset, unless it drops them."""
    made = schedule(model)
    waiting = made.requests[0]
    made.scheduler.add_request(waiting)
    if not hasattr(waiting, "num_stale_output_tokens"):  # vLLM of before stale outputs
        stale = 0
    else:
        waiting.num_stale_output_tokens, waiting.drop_stale_output = stale, dropped
    assert made.scheduler.ordering._is_ready_itself(waiting) == (admitted or not stale)
    assert bool(made.scheduler.schedule().num_scheduled_tokens) == (admitted or not stale)


def test_an_answer_that_changes_at_once_leaves_the_queues_one_to_offer(model: Path) -> None:
    """vLLM up to 0.30 asks whether a queue has somebody, then which one: it must not be told none the second time."""
    made = schedule(model, order="reserve:.2")
    made.scheduler.add_request(made.requests[0])
    queues = made.scheduler.ordering.queues
    answers = iter([True])
    made.scheduler.waiting._admits = lambda request: next(answers, False)
    assert made.scheduler.waiting
    assert queues.first_queue(made.scheduler.waiting) is made.scheduler.waiting


def test_a_session_that_waits_for_its_next_turn_is_promoted(model: Path) -> None:
    """Streaming input: the request ran, and is queued again without having been preempted."""
    made = schedule(model, order="mlfq:base=4,promote=2")
    session = made.requests[0]
    made.scheduler.add_request(session)
    ranks = made.scheduler.ordering.ranks
    ranks.admitted(session, 1, made.scheduler.ordering.view())
    assert ranks.next_s == inf
    update = StreamingUpdate(
        mm_features=[], prompt_token_ids=[1, 2], max_tokens=8, arrival_time=0.0, sampling_params=session.sampling_params
    )
    made.scheduler._update_request_as_session(session, update)
    assert ranks.next_s == made.scheduler.kvpolicy.clock() + 2


def test_the_next_turn_of_a_session_has_its_whole_deadline(model: Path) -> None:
    made = schedule(model, order="deadline:ttft=2,tpot=.1")
    session, ordering = made.requests[0], made.scheduler.ordering
    made.scheduler.add_request(session)
    ordering.ranks.admitted(session, 1, ordering.view())
    began_s = ordering.ranks.key(session)[1]
    made.steps += 50
    ordering.ranks.preempted(session, 2, ordering.view())
    update = StreamingUpdate(
        mm_features=[], prompt_token_ids=[1, 2], max_tokens=8, arrival_time=0.0, sampling_params=session.sampling_params
    )
    made.scheduler._update_request_as_session(session, update)
    rank, arrival_s, _ = ordering.ranks.key(session)
    assert (rank, arrival_s) == ((2,), began_s + 50 * fuzz.STEP_S)


def test_whoever_vllm_passed_over_is_admitted_by_the_order_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to vLLM 0.30 they wait in the queue of those that hold blocks."""
    passed_over, newcomer = schedule(model).requests[:2]
    passed_over.priority = newcomer.priority = 1
    pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 100)
    ready: list[Any] = [None]
    config = SimpleNamespace(enable_chunked_prefill=True, long_prefill_token_threshold=0)
    vllm_30 = SimpleNamespace(
        block_size=16, running=["somebody"], kv_cache_manager=SimpleNamespace(block_pool=pool), waiting=None,
        skipped_waiting=None, loaded_requests=SimpleNamespace(in_front=lambda queue: ready[0]),
        scheduler_config=config, scheduler_reserve_full_isl=True,
    )  # fmt: skip
    ordered = Ordering(load("reserve:.2"), vllm_30, lambda: 0.0, lambda request: None, pytest.fail)
    needs = {0: 90, 1: 10}
    monkeypatch.setattr(Ordering, "need_blocks", lambda self, waiting: needs[waiting.number])
    vllm_30.skipped_waiting.add_request(passed_over)
    vllm_30.waiting.add_request(newcomer)
    assert vllm_30.skipped_waiting and vllm_30.waiting, "outside of scheduling nobody is hidden"
    ordered.scheduling(True)
    assert not vllm_30.skipped_waiting
    assert not vllm_30.waiting, "who comes later does not overtake it"
    ready[0] = "one that was loaded"
    assert vllm_30.skipped_waiting
    ready[0], needs[0] = None, 10
    assert vllm_30.skipped_waiting and vllm_30.waiting


def test_whoever_holds_an_adapter_sits_no_step_out(model: Path) -> None:
    """vLLM counts the adapters of those that it schedules: it would give the slot away, and end with an assertion."""
    made = schedule(model, order=HOLDING, adapters=2, resets="none")
    ordering = made.scheduler.ordering
    hold, counted = ordering.hold, ordering._holding_back
    wrong: list[Any] = []

    def noting() -> list[Any]:
        found: list[Any] = hold()
        numbers = {ordering._number_of[request] for request in found}
        if counted._steps.keys() != numbers or any(request.lora_request for request in found):
            wrong.append((counted._steps, found))
        return found

    ordering.hold = noting
    outcome = served(made)
    assert outcome.problems == () and outcome.displaced > 0
    assert not wrong, "only those that sat it out are counted as held"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_whoever_sits_a_step_out_goes_on_where_it_was(asynchronous: bool, model: Path) -> None:
    made = schedule(model, order=HOLDING, asynchronous=asynchronous)
    held: list[int] = []
    hold = made.scheduler.ordering.hold
    made.scheduler.ordering.hold = lambda: (found := hold(), held.append(len(found)))[0]
    outcome = served(made)
    assert outcome.problems == () and sum(held) > 50


def test_a_hold_that_fails_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = schedule(model, order=HOLDING)
    monkeypatch.setattr(made.scheduler.ordering._holding_back, "held", lambda running, view: {}["nobody"])
    made.run()
    assert harness.total(made.scheduler.connector.stats(), "order_failed", method="hold") > 5
    assert all(request.is_finished() for request in made.requests)


@pytest.mark.parametrize(
    "setting", [{"sessions": True}, {"reserves_whole": False}, {"long_prefill": 40}, {"throttled": True}], ids=str
)
def test_what_admission_goes_by_besides(setting: dict[str, Any], model: Path) -> None:
    """Whoever others are displaced for comes in."""
    drawn = {
        "asynchronous": False,
        "sessions": False,
        "reserves_whole": True,
        "long_prefill": 0,
        "throttled": False,
        "token_budget": 64,
    }
    made = schedule(model, 3, **drawn | setting)
    outcome = served(made)
    assert outcome.problems == () and outcome.displaced > 20 and (outcome.turns > 0) == ("sessions" in setting)
    assert outcome.missed == 0


def test_a_request_that_ended_is_forgotten_though_another_has_its_id(model: Path) -> None:
    """As a client's that gives up and asks again at once, under an id of its own."""
    made = schedule(model)
    gone, other = made.requests[:2]
    other.request_id = gone.request_id
    made.scheduler.add_request(gone)
    made.scheduler.finish_requests(gone.request_id, RequestStatus.FINISHED_ABORTED)
    made.scheduler.add_request(other)
    made.scheduler.ordering.step_begins()
    assert len(made.scheduler.ordering.ranks) == 1
    assert made.scheduler.ordering.ranks.progress(other).number == 1
    made.scheduler.finish_requests(gone.request_id, RequestStatus.FINISHED_ABORTED)
    made.scheduler.ordering.step_begins()
    assert len(made.scheduler.ordering.ranks) == 0


def test_what_is_kept_of_who_has_ended_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ordering, "forget_ended", lambda self, step=(): None)
    assert any("the order of service keeps" in problem for problem in served(schedule(model)).problems)


def test_running_requests_in_another_order_are_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ordering, "_sort_running", lambda self, changed: None)
    assert any("in another order" in problem for problem in served(schedule(model)).problems)


def test_where_vllm_ranks_requests_itself_an_order_is_refused(model: Path) -> None:
    made = schedule(model, scheduling="priority")
    assert made.scheduler.ordering is None
    made.scheduler.serve_by(load("priority"))
    assert made.scheduler.ordering is None, "the same by another name"
    with pytest.raises(UnsupportedEngine, match=r"order urgent.*leave the flag out"):
        made.scheduler.serve_by(load("urgent"))


def switching(made: fuzz.Schedule, orders: Sequence[str], every: int) -> Callable[[], int]:
    """Have the schedule's orders of service switched in every so many steps; returns how often that came about while
    requests ran and waited."""
    scheduler, schedule, steps, under_load = made.scheduler, made.scheduler.schedule, count(1), []

    def switched(*args: Any, **kwargs: Any) -> Any:
        number = next(steps)
        if number % every == 0:
            under_load.append(bool(scheduler.running and (scheduler.waiting or len(scheduler.waiting))))
            scheduler.kvpolicy.serve_by(load(orders[number // every % len(orders)]))
            scheduler.serve_by(scheduler.kvpolicy.order)
            made.places = Places(scheduler)  # an account that begins anew, as the numbers of those who run do
            made.places.before_step()
            assert not [one for one in scheduler.running if one.request_id not in scheduler.requests]
        return schedule(*args, **kwargs)

    scheduler.schedule = switched
    return lambda: sum(under_load)


@pytest.mark.parametrize("seed", range(1, 7))
def test_orders_are_switched_while_requests_run_and_wait(model: Path, seed: int) -> None:
    """Nobody is lost, stalls or gets wrong tokens, whichever way the order changes."""
    made = schedule(model, seed, order="urgent")
    often = switching(made, ("fcfs", "las", "urgent", "fcfs", "mlfq:base=4", "urgent"), 7)
    made.run()
    made.scheduler.serve_by(load("urgent"))
    assert often() > 3 and made.outcome().problems == ()
    assert all(request.is_finished() for request in made.requests)


def test_an_order_that_is_refused_leaves_the_one_before(model: Path) -> None:
    made = schedule(model, order="fcfs", scheduling="priority")
    made.scheduler.add_request(made.requests[0])
    with pytest.raises(UnsupportedEngine, match="leave the flag out"):
        made.scheduler.serve_by(load("urgent"))
    assert made.scheduler.ordering is None and len(made.scheduler.waiting) == 1


def test_an_idle_engine_goes_back_to_vllms_own_order(model: Path) -> None:
    made = schedule(model, order="mlfq:base=4")
    made.scheduler.serve_by(load("fcfs"))
    assert made.scheduler.ordering is None
    assert type(made.scheduler.waiting).__module__.startswith("vllm.")
    made.run()
    assert all(request.is_finished() for request in made.requests)
    assert harness.total(made.scheduler.connector.stats(), "displaced") == 0


def test_the_plugin_of_an_engine_with_an_order_of_its_own_is_not_switched_off(model: Path) -> None:
    """What would serve then is neither vLLM's order nor the plugin's."""
    made = schedule(model, order="mlfq:base=4")
    runner = SimpleNamespace(kv_connector=SimpleNamespace(set_disabled=lambda disabled: None))
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    switch = PluginSwitch(
        SimpleNamespace(scheduler=made.scheduler, model_executor=SimpleNamespace(driver_worker=worker))
    )
    switch.set(True)
    with pytest.raises(ValueError, match="mlfq:base=4 has queues of its own"):
        switch.set(False)
    made.scheduler.serve_by(load("fcfs"))
    switch.set(False)
    assert not hasattr(made.scheduler, "serve_by")
