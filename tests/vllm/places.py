"""Who stands where among the running requests: an account by what is seen of a scheduler from outside."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

WRONG_SHOWN = 5


class Places:
    """Follows the running requests of ``scheduler`` from step to step.

    Under first come, first served a request that returns through a load stands where it was; any other one that is
    admitted comes last. Under priority scheduling everybody who is admitted comes last. Under another order of service
    all stand by their ranks.
    """

    def __init__(self, scheduler: Any) -> None:
        self.wrong: list[str] = []
        self.put_back = 0
        """Loaded requests that returned to a place before others."""
        self._scheduler = scheduler
        self._kept = scheduler.policy.value == "fcfs"
        self._numbers: dict[str, int] = {}
        self._given = 0
        self._preemptions: dict[str, int] = {}
        """Of every request that ran in the last step: how often it had been preempted."""
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    def before_step(self) -> None:
        scheduler = self._scheduler
        failed = scheduler.failed_recving_kv_req_ids
        again = {name for name in self._failed - failed if self._is_being_loaded(name)}
        self._failed = (self._failed | failed) - again  # the next load may bring what others left in host memory
        self._loaded = {name for name, request in scheduler.requests.items() if self._is_loaded(name, request)}

    def _is_being_loaded(self, name: str) -> bool:
        request = self._scheduler.requests.get(name)
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def _is_loaded(self, name: str, request: Any) -> bool:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return name in self._scheduler.finished_recving_kv_req_ids and name not in self._failed
        waits = request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING)
        return waits and request.num_computed_tokens > 0 and name not in self._failed

    def after_step(self) -> None:
        running, ordering = self._scheduler.running, getattr(self._scheduler, "ordering", None)
        if ordering is not None:
            if running != sorted(running, key=ordering.ranks.key):
                self.wrong.append(f"running in another order than that of the ranks: {running}")
                del self.wrong[WRONG_SHOWN:]
            return
        for request in running:
            name = request.request_id
            if self._preemptions.get(name) != request.num_preemptions:
                self._admitted(name)
        self._preemptions = {request.request_id: request.num_preemptions for request in running}
        numbers = [self._numbers[request.request_id] for request in running]
        if numbers != sorted(numbers):
            order = ", ".join(f"{request.request_id} ({self._numbers[request.request_id]})" for request in running)
            self.wrong.append(f"running in another order than that of the numbers: {order}")
            del self.wrong[WRONG_SHOWN:]

    def _admitted(self, name: str) -> None:
        if self._kept and name in self._loaded and name in self._numbers:
            self.put_back += any(self._numbers[name] < self._numbers[other] for other in self._preemptions)
        else:
            self._numbers[name] = self._given
            self._given += 1
        self._failed.discard(name)


class Stalls:
    """Counts who decodes and gets no token in a step, on an engine that preempts nobody."""

    def __init__(self, scheduler: Any) -> None:
        self.stalled: list[str] = []
        self.beside_prompts = 0
        """Steps in which some decoded while a running request's prompt had been computed in part."""
        self._scheduler = scheduler
        self._decoding: list[str] = []

    def before_step(self) -> None:
        running = self._scheduler.running
        decoding = [request for request in running if not request.is_prefill_chunk and not _is_ending(request)]
        self.beside_prompts += bool(decoding) and any(request.is_prefill_chunk for request in running)
        self._decoding = [request.request_id for request in decoding]

    def after_step(self, output: Any) -> None:
        self.stalled += [name for name in self._decoding if name not in output.num_scheduled_tokens]


def _is_ending(request: Any) -> bool:
    """Whether the step under way brings its last token, so that it is not scheduled again."""
    return bool(request.num_output_placeholders) and request.num_output_tokens + 1 >= request.max_tokens
