"""The simulator itself: vLLM's engine loop over its own scheduler, with time that is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as EngineRequest

from kvpolicy.policy import Policy
from kvpolicy.simulator import Run, Server, Sink, Times
from kvpolicy.workload import Request, Source
from kvpolicy_vllm.plugin.versions import engine_version
from kvpolicy_vllm.simulator.arrivals import Arrival, Arrivals
from kvpolicy_vllm.simulator.clock import VirtualClock
from kvpolicy_vllm.simulator.controlling import take_control
from kvpolicy_vllm.simulator.copying import VirtualWorker, load_of
from kvpolicy_vllm.simulator.deployment import scheduler_for
from kvpolicy_vllm.simulator.summing import Sums
from kvpolicy_vllm.simulator.texts import prompt_of, token_at


class VllmScheduler:
    """A :class:`kvpolicy.simulator.Simulator`. ``wall``: the clock that the run itself is timed by.

    Rows of the trace are those that the plugin would write; ids of requests are their places in the source.
    """

    name = "vllm"

    def __init__(self, wall: Callable[[], float] = time.perf_counter) -> None:
        self._wall = wall

    @property
    def rules(self) -> str:
        """What :attr:`Server.rules` has to be: the version of vLLM that is installed."""
        return ".".join(map(str, engine_version()))

    def run(
        self, requests: Source, policy: Policy, server: Server, times: Times, seed: int = 0, sink: Sink | None = None
    ) -> Run:
        """See :meth:`kvpolicy.simulator.Simulator.run`."""
        if server.rules != self.rules:
            raise ValueError(f"rules are {server.rules!r}, but vLLM {self.rules} is installed: give {self.rules!r}")
        began = self._wall()
        sums = Engine(requests, policy, server, times, seed, sink).serve()
        trace = None if sink is None else sink.finish()
        return Run(sums.summary(self._wall() - began), trace)


class Flight(NamedTuple):
    """A scheduled step whose output has not been read."""

    output: Any
    sampled: dict[str, bool]
    disturbed: bool
    """Whether it took somebody's blocks or brings saves, so that it is more than waiting."""
    ends_s: float

    @property
    def computes(self) -> bool:
        return bool(self.output.num_scheduled_tokens)


class Engine:
    """One run: state that goes when it ends."""

    def __init__(
        self, requests: Source, policy: Policy, server: Server, times: Times, seed: int, sink: Sink | None
    ) -> None:
        self.server = server
        self.clock = VirtualClock()
        self.scheduler = scheduler_for(server)
        self.controller = take_control(self.scheduler, server, policy, seed, self.clock, sink)
        self.worker = VirtualWorker(server, times)
        self.arrivals = Arrivals(requests, self._refuse)
        self.sums = Sums()
        self._served: dict[str, Arrival] = {}
        self._hasher: Any = None
        if server.prefix_caching:
            init_none_hash(sha256)
            self._hasher = get_request_block_hasher(server.block_size, sha256)
        self._flying = deque[Flight]()
        self._depth = 2 if server.asynchronous else 1

    def serve(self) -> Sums:
        """Until nobody is left. The order of things is that of vLLM's ``EngineCore.step_with_batch_queue``."""
        while True:
            self._admit()
            if self._served:
                self._flying.append(self._schedule())
                if len(self._flying) < self._depth:
                    continue
            elif not self._flying:
                arrives_s = self.arrivals.next_s()
                if arrives_s is None:
                    break
                self.clock.advance(arrives_s)
                continue
            self._read_oldest()
        self.controller.close()
        self.sums.count(self.controller.tally.totals)
        return self.sums

    def _admit(self) -> None:
        for arrival in self.arrivals.until(self.clock.now_s):
            request = self._made(arrival)
            self._served[request.request_id] = arrival
            self.sums.arrived(request.request_id, arrival.at_s)
            self.scheduler.add_request(request)

    def _made(self, arrival: Arrival) -> EngineRequest:
        parameters = SamplingParams(temperature=0.0, max_tokens=arrival.request.output_tokens, ignore_eos=True)
        return EngineRequest(
            f"{arrival.number:09d}",  # vLLM breaks ties by name
            prompt_of(arrival.request, arrival.number),
            parameters,
            None,
            arrival_time=arrival.at_s,
            priority=arrival.request.priority,
            block_hasher=self._hasher,
        )

    def _schedule(self) -> Flight:
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        load = load_of(output, requests)
        ends_s = self.worker.execute(output.kv_connector_metadata, load, self.clock.now_s)
        sampled = {name: not requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        return Flight(output, sampled, self.controller.disturbed, ends_s)

    def _read_oldest(self) -> None:
        flight = self._flying.popleft()
        self.clock.advance(flight.ends_s)
        if self._served and self._idle(flight):
            self._wait()
        told = self.scheduler.update_from_output(flight.output, self._answer(flight))
        for outputs in told.values():
            for one in outputs.outputs:
                self._tell(one)
        self.tallied.steps += flight.computes or flight.disturbed or bool(self._served)

    def _idle(self, flight: Flight) -> bool:
        return not any(one.computes or one.disturbed for one in (flight, *self._flying))

    def _wait(self) -> None:
        """Nothing can be computed until a copy has come or somebody arrives."""
        events = [at_s for at_s in (self.worker.next_copied_s(), self.arrivals.next_s()) if at_s is not None]
        if not events:
            waiting = ", ".join(sorted(self._served)[:5])
            raise RuntimeError(f"vLLM's scheduler schedules nothing at {self.clock.now_s} s; unfinished: {waiting}")
        self.clock.advance(min(events))

    def _answer(self, flight: Flight) -> ModelRunnerOutput:
        names = list(flight.sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[self._token(name)] if flight.sampled[name] else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.worker.finished(self.clock.now_s),
        )

    def _token(self, name: str) -> int:
        """The next token of a request; any where it has finished and the engine ran ahead."""
        request = self.scheduler.requests.get(name)
        return 0 if request is None else token_at(int(name), request.num_tokens)

    def _tell(self, output: Any) -> None:
        if output.new_token_ids:
            self.sums.token(output.request_id, self.clock.now_s)
        if output.finish_reason is not None:
            arrival = self._served.pop(output.request_id)
            self.sums.finished(output.request_id)
            self.arrivals.finished(arrival.number, arrival.request, self.clock.now_s)

    def _refuse(self, number: int, request: Request) -> None:
        """Raises ValueError for a request that could never be served."""
        tokens, room = request.total_tokens, self.server.device_blocks * self.server.block_size
        if tokens > min(room, self.server.max_model_len):
            raise ValueError(
                f"request {number}: {request.prompt_tokens} + {request.output_tokens} tokens; the server holds {room} "
                f"in {self.server.device_blocks} blocks of {self.server.block_size}, and max_model_len is "
                f"{self.server.max_model_len}"
            )
