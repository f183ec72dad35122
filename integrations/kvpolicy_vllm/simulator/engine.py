"""The simulator: vLLM's engine loop over its own scheduler, with computed instead of measured time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import vllm
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as EngineRequest

from kvpolicy.errors import InputError
from kvpolicy.events import KINDS
from kvpolicy.latency import NO_SLO, ClassTally, Slo
from kvpolicy.policy import Policy
from kvpolicy.policy.failures import raise_order_failure
from kvpolicy.simulator import DecisionObserver, Run, Server, Sink, Times
from kvpolicy.simulator.builtin.arrival_queue import ArrivalQueue
from kvpolicy.simulator.builtin.costs import without
from kvpolicy.simulator.sinks import FIXED_DAY, Identity
from kvpolicy.simulator.summary import SummaryBuilder
from kvpolicy.workload import Request, Source
from kvpolicy_vllm.plugin.versions import engine_version
from kvpolicy_vllm.simulator.clock import VirtualClock
from kvpolicy_vllm.simulator.controller import WorkObserver, name_of, take_control, transfer_params
from kvpolicy_vllm.simulator.deployment import scheduler_for
from kvpolicy_vllm.simulator.model_layers import ModelLayers, max_blocks
from kvpolicy_vllm.simulator.texts import prompt_of, token_at
from kvpolicy_vllm.simulator.virtual_worker import VirtualWorker, load_of_output


class VllmScheduler:
    """A :class:`kvpolicy.simulator.Simulator`.

    ``wall``: clock that times the simulation itself. ``created``: date in the trace's header, fixed so that equal runs
    give equal traces. The trace has the rows that the plugin would write; requests are named by their index in the
    source. ``layers``: what the model's layers keep of a request, and None for full attention alone. They say what is
    scheduled, saved and loaded; steps take as long as ``Times`` says, whatever the layers are.
    """

    name = "vllm"

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        created: str = FIXED_DAY,
        layers: ModelLayers | None = None,
    ) -> None:
        self._wall = wall
        self._created = created
        self._layers = layers

    @property
    def rules(self) -> str:
        """The value that :attr:`Server.rules` must have: the version of the installed vLLM."""
        return ".".join(map(str, engine_version()))

    def run(
        self,
        requests: Source,
        policy: Policy,
        server: Server,
        times: Times,
        seed: int = 0,
        sink: Sink | None = None,
        on_decision: DecisionObserver | None = None,
        slo: Slo = NO_SLO,
    ) -> Run:
        """See :meth:`kvpolicy.simulator.Simulator.run`."""
        if server.rules != self.rules:
            raise InputError(f"rules are {server.rules!r}, but vLLM {self.rules} is installed: give {self.rules!r}")
        if server.cache is not None and server.cache.file_blocks:
            raise InputError("cache.file_blocks is given: vLLM's scheduler is simulated without files")
        if server.cache is not None and self._layers is not None:
            raise InputError("cache is given: of a model with other layers than full attention host memory caches none")
        start_s = self._wall()
        identity = Identity(requests, policy, server, times, seed)
        engine = f"vllm {vllm.__version__}, its scheduler alone"
        core = identity.core("vllm")
        if self._layers is not None:
            core, engine = identity.core(f"vllm-{self._layers.digest}"), f"{engine}, {self._layers}"
        if sink is not None:
            sink.begin(core, identity.header(core, engine, self._created))
        try:
            tallied = Engine(core, identity, sink, on_decision, slo, self._layers).serve()
        except Exception as error:  # noqa: BLE001  # raised again
            raise_order_failure(server.order, error)
        trace = None if sink is None else sink.finish()
        return Run(tallied.summary(self._wall() - start_s), trace)


class Flight(NamedTuple):
    """A scheduled step in flight: its output has not been processed."""

    output: Any
    sampled: dict[str, bool]
    disturbed: bool
    """Whether it preempts a request or has saves, so that it does more than wait."""
    ends_s: float

    @property
    def computes(self) -> bool:
        return bool(self.output.num_scheduled_tokens)


@dataclass(slots=True)
class Served:
    """A request that is being served."""

    number: int
    request: Request
    arrival_s: float
    tally: ClassTally
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    tokens: int = 0


class Engine:
    """State of one run."""

    def __init__(
        self,
        core: str,
        identity: Identity,
        sink: Sink | None,
        on_decision: DecisionObserver | None = None,
        slo: Slo = NO_SLO,
        layers: ModelLayers | None = None,
    ) -> None:
        """``identity`` and ``layers``: all that the run follows from."""
        self.server = server = identity.server
        times, policy, seed = identity.times, identity.policy, identity.seed
        self.clock = VirtualClock()
        self.scheduler = scheduler_for(server, layers)
        self.controller = take_control(self.scheduler, core, server, policy, seed, self.clock, sink, on_decision)
        self.scheduler.serve_by(server.order)
        if self.scheduler.ordering is not None:
            self.scheduler.ordering.arrived_at = attrgetter("arrival_time")
        self.worker = VirtualWorker(server, times)
        self.arrivals = ArrivalQueue(identity.requests, self._refuse)
        self.tallied = SummaryBuilder(server, times, slo)
        self.controller.observers.add(WorkObserver(self.tallied.work))
        self._served: dict[str, Served] = {}
        self._hasher: Any = None
        if server.prefix_caching:
            init_none_hash(sha256)
            hashed_tokens = server.block_size if layers is None else self.scheduler.hash_block_size
            self._hasher = get_request_block_hasher(hashed_tokens, sha256)
        self._flying = deque[Flight]()
        self._depth = 2 if server.asynchronous else 1

    def serve(self) -> SummaryBuilder:
        """Run until no request is left, in the order of vLLM's ``EngineCore.step_with_batch_queue``."""
        while True:
            self._admit()
            if self._served:
                self._flying.append(self._schedule())
                if len(self._flying) < self._depth:
                    continue
            elif not self._flying:
                if self.arrivals.next_s is None:
                    break
                self.clock.advance(self.arrivals.next_s)
                continue
            self._read_oldest()
        self.controller.close()
        return self._with_counters()

    def _with_counters(self) -> SummaryBuilder:
        count = self.controller.counted
        self.tallied.recomputed_tokens = count("recomputed_tokens")
        self.tallied.moved_bytes = count("copy_bytes")
        for kind in KINDS:
            self.tallied.preemptions[kind] = count("preemptions", f"executed={kind}")
        return self.tallied

    def _admit(self) -> None:
        for arrival_s, number, request in self.arrivals.until(self.clock.now_s):
            served = Served(number, request, arrival_s, self.tallied.tally_of(request.class_name))
            engine_request = self._engine_request(served)
            self._served[engine_request.request_id] = served
            self.scheduler.add_request(engine_request)

    def _engine_request(self, served: Served) -> EngineRequest:
        marks = transfer_params(served.request)
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=served.request.output_tokens,
            ignore_eos=True,
            extra_args=None if marks is None else {"kv_transfer_params": marks},
        )
        return EngineRequest(
            name_of(served.number),
            prompt_of(served.request, served.number),
            parameters,
            None,
            arrival_time=served.arrival_s,
            priority=served.request.priority,
            block_hasher=self._hasher,
        )

    def _schedule(self) -> Flight:
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        load = load_of_output(output, requests)
        if self.tallied.beyond is not None and load.scheduled_tokens:
            self.tallied.beyond.add(load)
        ends_s = self.worker.execute(output.kv_connector_metadata, load, self.clock.now_s)
        if load.scheduled_tokens:
            repeated = self.controller.repeated
            self.tallied.work.step(load, without(load, repeated), *self.worker.last_step_s, repeated)
        sampled = {name: not requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        return Flight(output, sampled, self.controller.disturbed, ends_s)

    def _read_oldest(self) -> None:
        flight = self._flying.popleft()
        self.clock.advance(flight.ends_s)
        if self._served and self._idle(flight):
            self._wait()
        outputs_by_client = self.scheduler.update_from_output(flight.output, self._answer(flight))
        tokens = 0
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                tokens += bool(output.new_token_ids)
                self._record_output(output)
        if tokens:
            self.tallied.output.add(self.clock.now_s, tokens)
            if self.tallied.several:
                self.tallied.note_classes(self.clock.now_s)
        self.tallied.steps += flight.computes or flight.disturbed or bool(self._served)

    def _idle(self, flight: Flight) -> bool:
        return not any(step.computes or step.disturbed for step in (flight, *self._flying))

    def _wait(self) -> None:
        """Advance to the next end of a copy or arrival: until then nothing can be computed."""
        events = [at_s for at_s in (self.worker.next_copied_s(), self.arrivals.next_s) if at_s is not None]
        if not events:
            waiting = ", ".join(sorted(self._served)[:5])
            raise RuntimeError(f"vLLM's scheduler schedules nothing at {self.clock.now_s} s; unfinished: {waiting}")
        self.clock.advance(min(events))

    def _answer(self, flight: Flight) -> ModelRunnerOutput:
        names = list(flight.sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[self._token(name)] if flight.sampled[name] else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.worker.finished(self.clock.now_s),
        )

    def _token(self, name: str) -> int:
        """The next token of a request; 0 where the request has finished and the engine ran one step ahead."""
        request, served = self.scheduler.requests.get(name), self._served.get(name)
        if request is None or served is None:
            return 0
        return token_at(served.request, served.number, request.num_tokens)

    def _record_output(self, output: Any) -> None:
        served, now_s = self._served[output.request_id], self.clock.now_s
        found = output.prefill_stats
        if found is not None:  # with the first token
            served.tally.hits.admitted(
                found.num_prompt_tokens,
                found.num_local_cached_tokens,
                host_tokens=self.controller.take_first_hit(output.request_id),
                loaded_tokens=found.num_external_cached_tokens,
            )
        if output.new_token_ids:
            if served.first_s is None:
                served.first_s = now_s
            else:
                gap_s = now_s - served.last_s
                served.tally.itl.add(gap_s)
                served.longest_gap_s = max(served.longest_gap_s, gap_s)
            served.last_s = now_s
            served.tokens += 1
            served.tally.tokens += 1
        if output.finish_reason is not None:
            self._finish(output.request_id, served)

    def _finish(self, name: str, served: Served) -> None:
        del self._served[name]
        assert served.first_s is not None
        request = served.request
        served.tally.finished(
            served.arrival_s,
            served.first_s,
            served.last_s,
            served.tokens,
            served.longest_gap_s,
            request.ttft_s,
            request.tpot_s,
            request.prompt_tokens,
        )
        self.arrivals.finished(served.number, request, self.clock.now_s)

    def _refuse(self, number: int, request: Request) -> None:
        """Raise InputError for a request that could never be served."""
        server, tokens = self.server, request.total_tokens
        if tokens > server.max_model_len:
            raise InputError(
                f"request {number} has {tokens} tokens, prompt and output; max_model_len is {server.max_model_len}; "
                "should be at least as many (--max-model-len), or the workload limited (?context=)"
            )
        blocks = max_blocks(self.scheduler.kv_cache_manager.coordinator.single_type_managers, tokens - 1)
        if blocks > server.device_blocks:
            raise InputError(
                f"request {number} needs {blocks} blocks of {server.block_size} tokens for its {tokens} tokens; "
                f"device_blocks is {server.device_blocks}"
            )
