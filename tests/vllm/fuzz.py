"""Drawn schedules over vLLM's scheduler alone, each run to its end and looked at for whatever may not be.

`tests.vllm.soak` starts this in a process of its own, ``python -m tests.vllm.fuzz JOB RESULTS``, with
``KVPOLICY_VLLM_SOURCE`` naming the vLLM; see there for a command. RESULTS gets a line of JSON per schedule.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from tests import claims
from tests.vllm import alone, harness, memory  # first: it finds the vLLM that is asked for

# isort: split
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvpolicy import events
from kvpolicy.attribution.ledger import OpenPreemption
from kvpolicy.host_store import HostBlock, HostStore
from kvpolicy_vllm.plugin.learner import Learner
from kvpolicy_vllm.plugin.observers import Observer, Pending
from tests.vllm.disturbances import Disturbances, Shares, loaded_and_waiting
from tests.vllm.models import write_llama
from tests.vllm.pictures import RefusedByEncoder, drawn_features, limit_encoder
from tests.vllm.places import Places
from tests.vllm.setups import BLOCK, MAX_SESSIONS, MAX_SHARED_TOKENS, UNRULY, Setup
from tests.vllm.symbolic import Faults, SymbolicWorker

MAX_STEPS = 60_000
STEP_S = 0.05
"""What a step takes by the clock of the controller."""
MAX_IDLE_STEPS = 40
"""So long nothing may be scheduled though nothing is paused, loading or compiling."""
TURN_STEPS = 40
"""What a turn may last beyond the request's tokens: steps until room is looked for, and until a victim is saved."""
MAX_GRAMMAR_STEPS = 60
MAX_EVENTS_PER_REQUEST = 8
MAX_ACCOUNTS = 6
"""Preemptions of the last steps, whose costs no later step has closed."""
FEATURES = (
    "orders of service", "streaming sessions", "structured output", "LoRA", "multimodal", "priority scheduling",
    "prompts in host memory",
)  # fmt: skip
"""Those of the support matrix that schedules draw."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one schedule."""

    setup: str
    problems: tuple[str, ...]
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    displaced: int = 0
    waits: tuple[int, ...] = ()
    """Of every load that ended: steps that its request then held its blocks and was not scheduled."""
    turns: int = 0
    """Further inputs that came for sessions."""
    missed: int = 0
    """Requests for which others were displaced and which did not come in."""
    longest_wait: int = 0
    """Under an order that promotes: most steps in a row in which a request could have been scheduled and was not."""
    let_in_with_pictures: int = 0
    """Requests with pictures for which others were displaced."""
    featured: dict[str, int] = field(default_factory=dict)
    """Swaps of requests that have one of the :data:`FEATURES`, by its name; of sessions, which are never loaded,
    preemptions; of prompts in host memory, loads of them."""
    cache_hits: int = 0
    """Requests that began to load what others had left in host memory."""
    cache_evicted: int = 0


class Grammars:
    """Structured output without a compiler: a grammar becomes ready some steps after its request came, and accepts
    everything."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"grammars {seed}")
        self._ready_at: dict[str, int] = {}
        self._steps = 0

    def step(self, requests: dict[str, Request]) -> int:
        """Another step begins; returns how many requests still wait for their grammar."""
        self._steps += 1
        compiling = 0
        for name, request in requests.items():
            wanted = request.structured_output_request
            if wanted is None or request.is_finished() or wanted.grammar is not None:
                continue
            ready_at = self._ready_at.setdefault(name, self._steps + self._rng.randint(0, MAX_GRAMMAR_STEPS))
            if self._steps < ready_at:
                compiling += 1
            else:
                wanted.grammar = self
        return compiling

    def should_advance(self, request: Any, **kwargs: Any) -> bool:
        return False

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return True


class Schedule:
    """One drawn schedule on its way to its end."""

    def __init__(self, setup: Setup, model: Path) -> None:
        self.setup = setup
        self.grammars = Grammars(setup.seed)
        self.scheduler = alone.scheduler_for(_job(setup, model), grammars=self.grammars if setup.grammars else None)
        limit_encoder(self.scheduler, setup)
        self.steps = self.tokens = 0
        self._make_repeatable()
        controller = self.scheduler.kvpolicy
        alone.measure(controller)
        self.learner = Learner(controller.decider, None, controller.metrics.tally)
        self.swaps = UnusedSwaps()
        self.requests = drawn_requests(setup)
        self.featured = FeatureCount(setup, self.requests)
        controller.observers.add(self.learner, self.swaps, self.featured)
        faults = Faults(max_late_steps=setup.max_late_steps)
        if not setup.copies_fail:
            faults = Faults(0.0, 0.0, setup.max_late_steps)
        self.workers = [
            SymbolicWorker(self.scheduler, self.requests, BLOCK, setup.seed, rank, faults)
            for rank in range(setup.ranks)
        ]
        self._aggregator = KVOutputAggregator(setup.ranks)
        self.disturbances = Disturbances(self.scheduler, self.workers, setup.seed, _shares(setup))
        self.places = Places(self.scheduler)
        self.refused_by_encoder = RefusedByEncoder(self.scheduler)
        self.stalled = ""
        self.waits: list[int] = []
        self.most_events = 0
        self.turns = self.longest_wait = 0
        self._rng = random.Random(f"throttle {setup.seed}")
        self._throttled = False
        self._idle_steps = self._compiling = 0
        self._waiting: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        """Steps in a row that each request has been waiting."""
        self._tell_workers_of_turns()

    def _tell_workers_of_turns(self) -> None:
        update = self.scheduler._update_request_as_session

        def updated(session: Request, *arguments: Any) -> None:
            update(session, *arguments)
            self.turns += 1
            for worker in self.workers:
                worker.next_turn(session)

        self.scheduler._update_request_as_session = updated

    def _make_repeatable(self) -> None:
        """Elsewhere each start draws differently, and a suspension of swapping lasts as long as the machine is slow."""
        controller = self.scheduler.kvpolicy
        controller.decider._rng = random.Random(self.setup.seed)
        controller.clock = lambda: self.steps * STEP_S

    def run(self) -> None:
        """Step to the end, or to the first stall."""
        arriving = deque(with_further_inputs(self.requests, self.setup))
        steps = alone.drive(
            self.scheduler,
            arriving,
            self._execute,
            self.setup.asynchronous,
            self._before_step,
            self._throttles,
            self._add,
        )
        for output in steps:
            self.steps += 1
            self.tokens += output.total_num_scheduled_tokens
            self.places.after_step()
            self._watch(output)
            if self.scheduler.ordering is not None:
                self.most_events = max(self.most_events, self.scheduler.ordering.ranks.events)
            if self.stalled:
                return

    def _throttles(self) -> bool:
        self._throttled = self.setup.throttled and self._rng.random() < 0.3
        return self._throttled

    def _add(self, arrival: Request | None) -> None:
        """None is a pause between arrivals; what comes for a session that has ended is late."""
        if arrival is None:
            return
        known = any(arrival is request for request in self.requests)
        if known or arrival.request_id in self.scheduler.requests:
            self.scheduler.add_request(arrival)

    def _before_step(self) -> None:
        self._compiling = self.grammars.step(self.scheduler.requests)
        self.disturbances.before_step()
        self.places.before_step()
        if loaded_and_waiting(self.scheduler) or self.scheduler.finished_recving_kv_req_ids:
            for name, request in self.scheduler.requests.items():
                if _loaded(request, self.scheduler):
                    self._waiting.setdefault(name, 0)

    def _execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        results = [worker.execute(output, sampled) for worker in self.workers]
        return results[0] if len(results) == 1 else self._aggregator.aggregate(results, 0)

    def _watch(self, output: Any) -> None:
        if self.steps == MAX_STEPS:
            self.stalled = f"no end after {MAX_STEPS} steps"
        if self.scheduler.pause_state != PauseState.UNPAUSED:
            self._idle_steps = 0
            return
        loading = any(worker.loading for worker in self.workers)
        excused = output.total_num_scheduled_tokens or loading or self._compiling or not self.scheduler.requests
        self._idle_steps = 0 if excused else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            self.stalled = f"nothing scheduled for {MAX_IDLE_STEPS} steps: {self._situation()}"
        self._count_waits(output)
        self._count_queued(output)

    def _count_queued(self, output: Any) -> None:
        """Only of those whom nothing keeps waiting but memory, places and the order of service."""
        ordering = self.scheduler.ordering
        if ordering is None or ordering.order.promote_s == inf or self.setup.adapters:
            return
        queued = {
            name: self._queued.get(name, 0) + (not self._throttled)
            for name, request in self.scheduler.requests.items()
            if name not in output.num_scheduled_tokens
            and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        }
        self.longest_wait = max(self.longest_wait, max(queued.values(), default=0))
        self._queued = queued

    def _count_waits(self, output: Any) -> None:
        for name in list(self._waiting):
            if name in output.num_scheduled_tokens:
                self.waits.append(self._waiting.pop(name))
            elif _loaded(self.scheduler.requests.get(name), self.scheduler):
                self._waiting[name] += 1
            else:  # aborted or reset
                del self._waiting[name]

    def _situation(self) -> str:
        manager = self.scheduler.kv_cache_manager
        told = []
        for name, request in self.scheduler.requests.items():
            held = sum(map(len, manager.get_block_ids(name)))
            told.append((-held, f"{name} {request.status.name} {request.num_tokens} tokens, holds {held} blocks"))
        free = manager.block_pool.get_num_free_blocks()
        shown = ", ".join(text for _, text in sorted(told)[:6])
        return f"{free} of {self.setup.blocks - 1} blocks free, {len(told)} requests: {shown}"

    def problems(self) -> Iterator[str]:
        """Whatever may not be at the end."""
        if self.stalled:
            yield self.stalled
            return
        yield from self.places.wrong
        yield from _wrong_contents(self.workers)
        yield from _left_behind(self.scheduler, self.workers, self.learner)
        yield from memory.naming(self.scheduler, {request.request_id for request in self.requests})
        yield from _miscounted(self.scheduler, self.requests)
        yield from self._ill_ordered()
        if self.longest_wait > self._patience():
            yield f"a request waited for {self.longest_wait} steps, of {self._patience()} at most"
        # Whether Fickle loads follows from what survives, which those who are displaced change.
        if self.refused_by_encoder.found and "Fickle" not in self.setup.policy:
            names = ", ".join(self.refused_by_encoder.found[:5])
            yield f"others were displaced for requests whose pictures cannot be encoded: {names}"
        if self.swaps.found:
            yield f"recorded as swapped, but computed again: {', '.join(self.swaps.found[:5])}"
        yield from _ended_badly(self.requests, self.disturbances.aborted)

    def _patience(self) -> float:
        """Steps until somebody is promoted and everybody else has had a turn, one after the other: a prompt, a late
        load, and a quantum."""
        ordering, setup = self.scheduler.ordering, self.setup
        if ordering is None or ordering.order.promote_s == inf or setup.served in UNRULY:
            return inf
        longest = MAX_SHARED_TOKENS + setup.max_prompt_tokens + setup.max_output_tokens
        chunk = min(setup.long_prefill or setup.token_budget, setup.token_budget)
        turn = longest / chunk + setup.max_late_steps + ordering.order.quantum_tokens + TURN_STEPS
        return ordering.order.promote_s / STEP_S + setup.requests * turn

    def _ill_ordered(self) -> Iterator[str]:
        """What the order of service got wrong, or kept of requests that have ended."""
        ordering, setup = self.scheduler.ordering, self.setup
        if (ordering is None) != (setup.served == "fcfs"):
            yield f"order {setup.served}, but {'stock' if ordering is None else 'ordered'} queues"
        if ordering is None:
            return
        if self.most_events > MAX_EVENTS_PER_REQUEST * setup.requests:
            yield f"{self.most_events} events in the calendar of at most {setup.requests} requests"
        left = [len(ordering.ranks), *map(len, (ordering._number_of, ordering._by_number, ordering._arrival_of))]
        left += [len(ordering._marks_of), *map(len, ordering.queues)]
        if any(left):
            yield f"the order of service keeps {left} requests"
        failed = harness.total(self.scheduler.connector.stats(), "order_failed")
        if bool(failed) and setup.served not in UNRULY:
            yield f"counted order_failed {failed:.0f}"

    def outcome(self) -> Outcome:
        stats = self.scheduler.connector.stats()
        return Outcome(
            setup=repr(self.setup),
            problems=tuple(self.problems()),
            steps=self.steps,
            tokens=self.tokens,
            preemptions=int(harness.total(stats, "preemptions")),
            swaps=int(harness.total(stats, "preemptions", executed="swap")),
            displaced=int(harness.total(stats, "preemptions", cause="displaced")),
            waits=tuple(self.waits),
            turns=self.turns,
            cache_hits=int(harness.total(stats, "cache_hits", outcome="loaded")),
            cache_evicted=int(harness.total(stats, "cache_blocks", event="evicted")),
            missed=int(harness.total(stats, "displaced_in_vain")),
            longest_wait=self.longest_wait,
            let_in_with_pictures=self.refused_by_encoder.let_in,
            featured=dict(self.featured.counts),
        )


def _loaded(request: Request | None, scheduler: Any) -> bool:
    """Whether its load has ended and it holds its blocks, but is not in the batch."""
    if request is None:
        return False
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    waits = request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING) and not request.resumable
    return waits and request.num_computed_tokens > 0


class UnusedSwaps(Observer):
    """Preemptions that ended as swaps although nothing was loaded and more than a block was computed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def closed(self, opened: OpenPreemption, outcome: events.Outcome) -> None:
        unused = outcome.loaded_tokens == 0 and outcome.recomputed_tokens > BLOCK
        if opened.executed == "swap" and outcome.ended == "resumed" and unused:
            self.found.append(f"{opened.request}, {outcome.recomputed_tokens} tokens")


class FeatureCount(Observer):
    """Counts what shows the features of the support matrix: see :attr:`Outcome.featured`."""

    def __init__(self, setup: Setup, requests: list[Request]) -> None:
        self._ranked = setup.scheduling == "priority"
        self._sessions = {request.request_id for request in requests if request.resumable}
        self._features = {request.request_id: [*_features_of(request)] for request in requests}
        self.counts: Counter[str] = Counter()

    def executed(self, pending: Pending) -> None:
        self.counts["streaming sessions"] += pending.identity.request_id in self._sessions
        if pending.decision.executed != "swap":
            return
        self.counts.update(self._features[pending.identity.request_id])
        self.counts["priority scheduling"] += self._ranked
        self.counts["orders of service"] += pending.situation.cause == "displaced"

    def prompt_loaded(self, request_id: str, tokens: int) -> None:
        self.counts["prompts in host memory"] += 1


def _features_of(request: Request) -> Iterator[str]:
    has = {
        "structured output": request.structured_output_request is not None,
        "LoRA": request.lora_request is not None,
        "multimodal": bool(request.mm_features),
    }
    yield from (name for name, there in has.items() if there)


def _job(setup: Setup, model: Path) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "tensor_parallel_size": setup.ranks,
        "scheduler_reserve_full_isl": setup.reserves_whole,
        "long_prefill_token_threshold": setup.long_prefill,
    }
    if setup.adapters:
        engine |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": setup.adapters}
    return {
        "model": str(model),
        "sequences": setup.max_running,
        "budget": max(setup.token_budget, setup.max_running),
        "prefix_caching": setup.prefix_caching,
        "scheduling": setup.scheduling,
        "blocks": setup.blocks,
        "asynchronous": setup.asynchronous,
        "layers": setup.layers,
        "dense": setup.dense,
        "engine": engine,
        "plugin": harness.plugin(
            setup.policy,
            seed=setup.seed,
            host_gib=setup.host_gib,
            order=setup.served,
            cache=setup.caches,
            allow_python_policies=True,
            classes="batch+chat:ttft=0.5,tpot=0.05" + (",priority=-1" if setup.scheduling == "fcfs" else ""),
        ),
    }


def _shares(setup: Setup) -> Shares:
    return Shares(
        aborts=0.01 if setup.harried else 0.0,
        forced=0.05 if setup.harried else 0.0,
        resets=0.01 if setup.resets == "weights" else 0.0,
        resets_when_loaded=0.05 if setup.resets == "weights" else 0.0,
        clearings=0.01 if setup.resets == "cache" else 0.0,
        pauses=0.01 if setup.pauses else 0.0,
    )


def drawn_requests(setup: Setup) -> list[Request]:
    rng = random.Random(f"requests {setup.seed}")
    head = [rng.randrange(1, 1000) for _ in range(MAX_SHARED_TOKENS)]
    requests: list[Request] = []
    returns = random.Random(f"returns {setup.seed}")
    for number in range(setup.requests):
        requests.append(_drawn_request(number, head, rng, setup, _returning(requests, returns, setup)))
    marks = random.Random(f"marks {setup.seed}")
    for request in requests:
        request.kv_transfer_params = claims.drawn(marks)
    return requests


def with_further_inputs(requests: list[Request], setup: Setup) -> list[Request | None]:
    """Requests in the order in which they come, each session followed by further inputs and its end, with pauses."""
    rng = random.Random(f"sessions {setup.seed}")
    arrivals: list[Request | None] = [*requests]
    for session in (request for request in requests if request.resumable):
        at = arrivals.index(session)
        for left in reversed(range(rng.randint(1, 4))):
            at = rng.randint(at + 1, len(arrivals) + 60)
            arrivals += [None] * (at - len(arrivals))
            arrivals.insert(at, _further_input(session, rng, setup, ends=not left))
    return arrivals


def _further_input(session: Request, rng: random.Random, setup: Setup, ends: bool) -> Request:
    prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 20))]
    parameters = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 20), ignore_eos=True)
    number = int(session.request_id[1:])
    return alone.made_request(number, prompt, parameters, priority=session.priority, resumable=not ends)


def _returning(earlier: list[Request], rng: random.Random, setup: Setup) -> list[int]:
    """The beginning of an earlier prompt, for a request that has the same; where nothing is cached there is none."""
    if setup.caches == "off" or not earlier or rng.random() < 0.3:
        return []
    prompt = list(rng.choice(earlier[-40:]).prompt_token_ids)
    return prompt[: rng.randint(1, len(prompt))] if rng.random() < 0.3 else prompt


def _drawn_request(number: int, head: list[int], rng: random.Random, setup: Setup, returning: list[int]) -> Request:
    own = rng.randint(5, setup.max_prompt_tokens)
    prompt = head[: rng.choice([0, 32, 64, 96])] + [rng.randrange(1, 1000) for _ in range(own)]
    if returning:
        own = max(5, len(prompt) - len(returning))
        prompt = [*returning[: MAX_SHARED_TOKENS + setup.max_prompt_tokens - own], *prompt[-own:]]
    special: dict[str, Any] = {}
    if setup.stops and rng.random() < 0.5:
        special["stop_token_ids"] = [rng.randrange(1, 1000) for _ in range(10)]
    if setup.prompt_logprobs and rng.random() < 0.2:
        special["prompt_logprobs"] = 1
    if setup.grammars and rng.random() < 0.4:
        special["structured_outputs"] = StructuredOutputsParams(choice=["yes", "no"])
    outputs = rng.randint(1, setup.max_output_tokens)
    parameters = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, **special)
    adapter = rng.randint(0, setup.adapters)
    lora = LoRARequest(f"adapter-{adapter}", adapter, "/nowhere") if adapter else None
    plain = special.keys() <= {"stop_token_ids"}
    session = setup.has_sessions and plain and number % (setup.requests // MAX_SESSIONS) == 3
    more: dict[str, Any] = {"resumable": True} if session else {}
    if not session:
        more["mm_features"] = drawn_features(setup, number, len(prompt) - own, len(prompt))
    return alone.made_request(number, prompt, parameters, priority=rng.randrange(4), lora_request=lora, **more)


def _wrong_contents(workers: list[SymbolicWorker]) -> Iterator[str]:
    for rank, worker in enumerate(workers):
        found = worker.found()
        if found["wrong"]:
            yield f"rank {rank} read a wrong position: {found['wrong'][0]}"
    garbled = workers[0].found()["garbled"]
    if garbled:
        yield f"tokens lost or repeated: {', '.join(garbled[:5])}"


def _left_behind(scheduler: Any, workers: list[SymbolicWorker], learner: Learner) -> Iterator[str]:
    """Blocks, slots, copies and accounts that nobody gave back."""
    controller, pool = scheduler.kvpolicy, scheduler.kv_cache_manager.block_pool
    accounts = alone.accounts_left(scheduler)
    left = {
        "device blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's null block
        "host slots": controller.copies.pool.used,
        "slots of nothing": _slots_of_nothing(controller.copies.pool),
        "prompts": 0 if controller.prompts is None else len(controller.prompts),
        "copies": len(controller.copies._of_request) + len(controller.copies.pool._copies),
        "contents by key": sum(map(_is_needed, controller.copies.pool._by_key.values())),
        "watched blocks": sum(map(_is_needed, controller.copies.pool.watched.values())),
        "copies under way": len(controller.copies._sent),
        "queued blocks": controller.copies.queues.blocks,
        "copies loading": controller.copies.loading,
        "open preemptions": len(controller.ledger),
        "decisions awaited": len(learner._awaited.keys() - alone.open_accounts(scheduler)),
        "steps in flight": len(controller._in_flight),
        "marks of requests": len(controller.marks),
        "block tables": sum(len(tables) for tables in _block_tables(scheduler)),
        "accounts": accounts if accounts > MAX_ACCOUNTS else 0,
    }
    for what, count in left.items():
        if count:
            yield f"{count} {what} left"


def _is_needed(block: HostBlock) -> bool:
    """Whether a copy needs the content, or it is kept for nothing: it is neither cached nor on the device."""
    return bool(block.holders) or block.node is None or block.key is None


def _slots_of_nothing(pool: HostStore) -> int:
    """Slots that are neither unused nor of a cached content."""
    cached = [block.slot for block in pool._by_key.values() if block.cached]
    known = 0 if pool.cache is None else len(pool.cache)
    return pool.total - len({*cached, *pool._unused}) + abs(len(cached) - known)


def _block_tables(scheduler: Any) -> Iterator[Any]:
    """Of each group of layers, the block tables of all requests."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        yield manager.req_to_blocks


def _miscounted(scheduler: Any, requests: list[Request]) -> Iterator[str]:
    controller, stats = scheduler.kvpolicy, scheduler.connector.stats()
    if controller.swaps.undecided:
        yield f"{len(controller.swaps.undecided)} decisions never counted"
    happened = sum(request.num_preemptions for request in requests)
    counted = int(harness.total(stats, "preemptions"))
    if happened != counted + len(controller.swaps.undecided):
        yield f"{happened} preemptions, {counted} counted"
    for name, labels in (("fallbacks", {"reason": "error"}), ("measuring_failed", {})):
        if harness.total(stats, name, **labels):
            yield f"counted {name} {labels or ''}".strip()


def _ended_badly(requests: list[Request], aborted: set[str]) -> Iterator[str]:
    right = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
    for request in requests:
        name, status = request.request_id, request.status
        if status == RequestStatus.FINISHED_ABORTED and (name in aborted or request.resumable):
            continue
        if status not in right:
            yield f"{name} is {status.name}"
        elif status == RequestStatus.FINISHED_LENGTH_CAPPED and request.num_output_tokens != request.max_tokens:
            yield f"{name} ended after {request.num_output_tokens} of {request.max_tokens} tokens"


def run(setup: Setup, model: Path) -> Outcome:
    """One schedule to its end, whatever goes wrong."""
    schedule = None
    try:
        schedule = Schedule(setup, model)
        schedule.run()
        return schedule.outcome()
    except Exception as error:  # noqa: BLE001  # whatever is raised is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        return Outcome(repr(setup), (told,), schedule.steps if schedule else 0)


def main(job_path: str, results_path: str) -> None:
    """JOB: ``setups``, each as its `repr`. Each outcome is written as soon as it is there, and at the end, beside them,
    the memory of this process after each."""
    logging.disable(logging.ERROR)
    job = json.loads(Path(job_path).read_text())
    results = Path(results_path)
    model = write_llama(results.parent / "model")
    resident = []
    gc.collect()
    gc.freeze()  # what was imported is not looked through after each schedule
    with results.open("a") as lines:
        for text in job["setups"]:
            outcome = run(Setup.parse(text), model)
            lines.write(json.dumps(asdict(outcome)) + "\n")
            lines.flush()
            resident.append(memory.resident_kib())
    memory.write(results, resident)


if __name__ == "__main__":
    main(*sys.argv[1:])
