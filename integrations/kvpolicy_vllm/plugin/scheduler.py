"""The scheduler: vLLM's own, extended to ask the controller before a request loses its blocks.

Only `schedule`, `update_from_output`, `_preempt_request`, `_update_request_as_session`,
`_update_waiting_for_remote_kv`, `_inflight_prefill_reserved_blocks`, `reset_prefix_cache` and, up to vLLM 0.30,
`_select_waiting_queue_for_scheduling` are extended, each by calling the original. None of vLLM's scheduling is
reimplemented. In the order `fcfs` what is added concerns only requests that are loaded, so `always-recompute` schedules
exactly as stock vLLM does, but that no request finds blocks which no step has computed.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvpolicy.order import Order, is_stock
from kvpolicy.policy import Policy
from kvpolicy_vllm.plugin.config_refusals import refuse_connectors, refuse_offloading
from kvpolicy_vllm.plugin.connector_list import connectors_beside, own_connector
from kvpolicy_vllm.plugin.control_file import ControlFile, Start
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.loaded_requests import LoadedRequests
from kvpolicy_vllm.plugin.operator_log import named
from kvpolicy_vllm.plugin.order_limits import drafts_beside, loads_beside, ranks_twice
from kvpolicy_vllm.plugin.ordering import Ordering, by_arrival
from kvpolicy_vllm.plugin.pinned_blocks import PinnedBlocks, overwrites_before_saves
from kvpolicy_vllm.plugin.running_order import RunningOrder
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.tested_setups import warn_untested_setup
from kvpolicy_vllm.plugin.versions import UnsupportedEngine

if TYPE_CHECKING:
    from kvpolicy.events import Cause


logger = logging.getLogger(f"vllm.{__name__}")


def control_of(settings: Settings, controller: Controller) -> ControlFile | None:
    """The file by which the operator switches; None where there is none."""
    if settings.control is None:
        return None
    # An empty policy or order: the one of the start.
    start = Start("" if settings.order_object is not None else settings.order, settings.shadow)
    return ControlFile(settings.control, start, controller.load_policy, settings.load_order).watch()


def same_policy(one: Policy, other: Policy) -> bool:
    """Whether two policies decide alike: of one name, and by one cost model, which may have been made anew."""
    digests = {None if policy.cost_model is None else policy.cost_model.digest for policy in (one, other)}
    return one.label == other.label and len(digests) == 1


def _throttles(throttle_prefills: bool = False, *args: Any, **kwargs: Any) -> bool:
    """What vLLM passes to `schedule`: whether to compute no prompts in this step."""
    return bool(throttle_prefills)


def _is_hashed_beyond(block: Any, computed_tokens: int) -> bool:
    """Whether the hash of a block that is not full of these tokens stands for more than them.

    Where blocks of states are larger than those of attention, or with ``--prefix-match-unit``, vLLM enters the end of a
    prompt by a part of its block, which may be computed. Of several hashes of a block this is the longest.
    """
    hashed_tokens = getattr(block, "block_hash_num_tokens", None)  # without it, only full blocks are entered
    return hashed_tokens is None or bool(hashed_tokens > computed_tokens)


def refuse_order(order: Order, scheduling: str) -> None:
    """Raise UnsupportedEngine for an order that this engine cannot serve by. ``scheduling``: vLLM's
    ``--scheduling-policy``."""
    if problem := ranks_twice(order, scheduling):
        raise UnsupportedEngine(problem)


class PolicyHooks:
    """Mixin over vLLM's scheduler classes."""

    asks_kvpolicy = True
    kvpolicy: Controller

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        refuse_offloading(config)
        refuse_connectors(config)
        super().__init__(*args, **kwargs)
        connector = getattr(self, "connector", None)
        own = own_connector(connector)
        if own is None or own.controller is None:
            problem = "there is none" if connector is None else f"there is {type(connector).__name__}"
            raise UnsupportedEngine(
                f"--scheduler-cls kvpolicy_vllm.AdaptiveScheduler needs its own connector and {problem}: "
                "--kv-transfer-config "
                '\'{"kv_connector": "KVPolicyConnector", "kv_connector_module_path": "kvpolicy_vllm.connector", '
                '"kv_role": "kv_producer", '
                '"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"policy": "..."}}\''
            )
        self.kvpolicy = own.controller
        self.kvpolicy.beside = connectors_beside(config)
        warn_untested_setup(config, self.kv_cache_config)
        if overwrites_before_saves(config, self.kv_cache_config):
            self.kvpolicy.copies.pinned = PinnedBlocks(self.kv_cache_manager.block_pool)
        self._cause: Cause = "reset"  # outside schedule() only a reset preempts requests
        self._forced_out: list[str] = []
        self.loaded_requests = LoadedRequests(self, self.kvpolicy.tables)
        self.running_order = RunningOrder(self)
        self.ordering: Ordering | None = None
        """None where vLLM's own order serves."""
        self.serve_by(self.kvpolicy.order)
        self.kvpolicy.show_service()
        self.control = control_of(own.settings, self.kvpolicy)

    def serve_by(self, order: Order) -> None:
        """Serve by this order from now on, between two steps; whoever runs or waits is ranked anew.

        Raises UnsupportedEngine, and changes nothing, where this engine cannot serve by it.
        """
        self.refuse_order(order)
        former, self.ordering = self.ordering, None
        if former is not None:
            self._back_to_vllm(former)
        if is_stock(order, self.policy.value):
            return
        controller = self.kvpolicy
        self.ordering = Ordering(
            order, self, lambda: controller.clock(), controller.price, controller.order_failed,
            lambda request: controller.marks.of(request), controller.tables,
        )  # fmt: skip
        self.ordering.count = controller.metrics.tally.add
        self.ordering.on_choice = partial(controller.displacing, order.label)
        self.ordering.records_choices = partial(controller.observers.follows, "displacing")
        if self.requests:
            self.ordering.take_over(self.running, self.ordering.queues.taken_from_vllm())

    def _back_to_vllm(self, former: Ordering) -> None:
        """Queue those who wait in vLLM's own queues, and put those who run in the order in which they came."""
        for name, requests in former.queues.give_back().items():
            for request in sorted(requests, key=by_arrival):
                getattr(self, name).add_request(request)
        self.running.sort(key=by_arrival)
        self.running_order = RunningOrder(self)
        for request in self.running:
            self.running_order.put_last(request)

    def refuse_order(self, order: Order) -> None:
        """Raise UnsupportedEngine for an order that this engine cannot serve by."""
        if is_stock(order, self.policy.value):
            return
        refuse_order(order, self.policy.value)
        if self.vllm_config.speculative_config is not None:
            raise UnsupportedEngine(f"kvpolicy does not serve {drafts_beside(order.name)}")
        if self.kvpolicy.beside:
            raise UnsupportedEngine(loads_beside(order.name, self.kvpolicy.beside[0]))

    def _heed(self, control: ControlFile) -> None:
        """Switch to what the control file asks for, before a step."""
        controller = self.kvpolicy
        wanted, refused = control.take()
        tally = controller.metrics.tally
        if refused:
            tally.add("control_changes", refused, result="refused")
        if wanted is None:
            return
        try:
            self.refuse_order(wanted.order)
            if not same_policy(wanted.policy, controller.decider.policy):
                controller.adopt(wanted.policy)
        # The boundary between what an operator wrote and a server: whatever a policy raises, it serves as before.
        except Exception as error:  # noqa: BLE001
            tally.add("control_changes", result="refused")
            logger.warning("kvpolicy: the control file changes nothing (counted as control_changes): %s", error)
            return
        if wanted.order.label != controller.order.label:
            controller.serve_by(wanted.order)
            self.serve_by(controller.order)
        controller.decider.shadow = wanted.shadow
        controller.show_service()
        tally.add("control_changes", result="applied")
        logger.info(
            "kvpolicy: by the control file from now on: policy %s; order %s; shadow %s",
            named(wanted.policy), wanted.order.name, "on" if wanted.shadow else "off",
        )  # fmt: skip

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        controller, loaded_requests = self.kvpolicy, self.loaded_requests
        if self.control is not None and self.control.news:
            self._heed(self.control)
        controller.step_begins(self)
        forced_out = self._force_out() if self._forced_out else []
        ordering = self.ordering
        held: list[Any] = []
        if ordering is not None:
            forced_out += self._displace(ordering, _throttles(*args, **kwargs))
            held = ordering.hold()
        self._cause = "memory"
        try:
            if loaded_requests.requests:
                loaded_requests.hold_places()
            if held:
                loaded_requests.keep_places(len(held))
            if ordering is not None:
                ordering.put_decodes_first()
                ordering.scheduling(True)
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]  # the mixin's base comes from vLLM
        finally:
            self._cause = "reset"
            if ordering is not None:
                ordering.scheduling(False)
                ordering.release()
            if loaded_requests.configured is not None:
                loaded_requests.give_places()
            for request in reversed(forced_out):
                self.waiting.prepend_request(request)
        if ordering is None:
            self.running_order.settle(output)
        else:
            ordering.settle(output)
        # Up to vLLM 0.31 no loaded request is admitted in a pause: a load would seem to last as long as the pause.
        if self.pause_state == PauseState.UNPAUSED:
            loaded_requests.growth.steps += output.total_num_scheduled_tokens > 0
            if loaded_requests.requests:
                loaded_requests.settle(output.total_num_scheduled_tokens)
        controller.step_scheduled(output)
        return output

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Offer requests that hold blocks first. vLLM 0.24 to 0.30 call this for every admission; later versions admit
        such requests first by themselves.

        A loaded request that waits for a last block must come before any request that cannot be allocated. That one
        would end the scan, and where no request runs, the memory it needs would stay with those behind it for good.
        """
        queue = self.loaded_requests.in_front(self.skipped_waiting)
        if queue is not None:
            return queue
        if self.ordering is not None:
            return self.ordering.queues.first_queue(self.waiting, self.skipped_waiting)
        return super()._select_waiting_queue_for_scheduling()  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        unfinished = len(self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.ordering is not None and len(self.requests) < unfinished:
            self.ordering.forget_ended(scheduler_output.num_scheduled_tokens)
        self.kvpolicy.step_done(scheduler_output)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.kvpolicy.preempting(request, self._cause)
        self.running_order.preempted(request)
        if self.ordering is not None:
            self.ordering.preempted(request)
        self._withdraw_uncomputed(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _withdraw_uncomputed(self, request: Any) -> None:
        """Take blocks that hold nothing yet out of the prefix cache.

        vLLM enters the blocks that a step fills when it schedules the request, and may preempt it later in that step,
        under priority scheduling. Whoever found them, most likely the request itself, would read what was there before
        (vllm#57580).
        """
        manager = self.kv_cache_manager
        if not manager.enable_caching:
            return
        groups, computed_tokens = self.kv_cache_config.kv_cache_groups, request.num_computed_tokens
        tables = manager.get_blocks(request.request_id).blocks
        uncomputed = {
            block.block_id
            for group, table in zip(groups, tables, strict=True)
            for block in table[computed_tokens // group.kv_cache_spec.block_size :]
            if block.block_hash is not None and not block.is_null and _is_hashed_beyond(block, computed_tokens)
        }
        if uncomputed:
            manager.evict_blocks(uncomputed)

    def _update_request_as_session(self, session: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)  # type: ignore[misc]
        if self.ordering is not None:
            self.ordering.next_turn(session)

    def _update_waiting_for_remote_kv(self, request: Any) -> None:
        """The request's load has ended. After a failed load vLLM frees the blocks but keeps the same number reserved.

        The next load that does not fit beside the reservation would then end the scan of waiting requests, for good
        where no request runs. So the reservation is removed.
        """
        failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)  # type: ignore[misc]
        if request.num_computed_tokens == 0:
            self._inflight_prefills.discard(request)
            self.loaded_requests.requests.pop(request.request_id, None)  # it holds no blocks any more
        elif not failed and request.request_id in self.loaded_requests.requests:  # not another connector's load
            self.loaded_requests.load_ended(request)
            self.running_order.loaded(request)

    def _inflight_prefill_reserved_blocks(self) -> int:
        """Blocks that a load must leave free, which vLLM asks for before it begins one. Included are those that the
        running requests will take while the load lasts: for want of them a request would be preempted.

        Where no request runs a load must leave none for that, so it begins in the end. Nor, where no load is under way
        either, for the tokens that will be drafted after it, which vLLM adds to this number: a request that takes all
        of the memory by itself could not be loaded for them, and would wait for good.
        """
        reserved = int(super()._inflight_prefill_reserved_blocks())  # type: ignore[misc]
        if self.vllm_config.speculative_config is not None and not (reserved or self.running):
            return -self._spec_decode_step_blocks
        return reserved + (self.loaded_requests.growth.blocks(len(self.running)) if self.running_order.counts else 0)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Weights may have changed: nothing saved, queued or being loaded may be used again."""
        self.kvpolicy.forget_saved()
        for request in self.requests.values():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                if request.request_id in self.loaded_requests.requests:  # not another connector's load
                    self.discard_load(request)
            elif request.num_computed_tokens > 0 and (
                request.status == RequestStatus.PREEMPTED
                or (request.status == RequestStatus.WAITING and request.request_id in self.loaded_requests.requests)
            ):
                # Loaded but not yet admitted, as a block is missing: vLLM's own reset would leave it its blocks.
                self._take_blocks(request)
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        finally:
            self.kvpolicy.reset_ended()

    def discard_load(self, request: Any) -> None:
        """Discard the request's load. A load that may still be under way ends as a failed one.

        After a load that has ended the blocks are freed at once. vLLM would free them at the next admission, but while
        the engine is paused it admits no request.
        """
        if request.request_id not in self.finished_recving_kv_req_ids:
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request.request_id)
            return
        self.finished_recving_kv_req_ids.remove(request.request_id)
        self.failed_recving_kv_req_ids.discard(request.request_id)
        self._take_blocks(request)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING

    def give_up_loaded(self, request: Any) -> None:
        """Take the blocks of a request whose load has ended and that is not running: it comes back like one
        without a copy."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.discard_load(request)
        else:
            self._take_blocks(request)

    def _take_blocks(self, request: Any) -> None:
        self.kv_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        self.running_order.lost(request)
        request.num_computed_tokens = 0
        # From vLLM 0.31 on those that hold blocks have a queue of their own, which goes first. One that holds none any
        # more and does not fit would keep those behind it, and what they hold, there for good where no request runs.
        holding: Any = getattr(self, "kv_holding_waiting", ())
        if request in holding:
            holding.remove_request(request)
            self.waiting.prepend_request(request)

    # ---- for tools that drive an engine in process ----

    requests: dict[str, Any]
    pause_state: PauseState
    policy: Any
    running: list[Any]
    waiting: Any
    skipped_waiting: Any
    vllm_config: Any
    loaded_requests: LoadedRequests
    running_order: RunningOrder
    failed_recving_kv_req_ids: set[str]
    finished_recving_kv_req_ids: set[str]
    kv_cache_config: Any
    kv_cache_manager: Any
    _inflight_prefills: set[Any]
    _spec_decode_step_blocks: int

    def preempt_at_next_step(self, request_id: str) -> None:
        """Preempt a running request at the next step; it can be admitted again from the step after that on."""
        self._forced_out.append(request_id)

    def pause_at_next_step(self, request_id: str) -> None:
        """Remove a running request from the batch; it keeps its blocks. Undone by :meth:`resume_request`."""
        self.running.remove(self.requests[request_id])

    def resume_request(self, request_id: str) -> None:
        """Put a paused request back at the end of the batch."""
        request = self.requests[request_id]
        self.running.append(request)
        self.running_order.put_last(request)

    def _displace(self, ordering: Ordering, throttled: bool) -> list[Any]:
        """Preempt the running requests that make room for others, and unqueue them so that this step does not admit
        them."""
        victims = ordering.step_begins(throttled)
        self._cause = "displaced"
        for request in victims:
            self.running.remove(request)
            self._preempt_request(request, self.kvpolicy.clock())
            self.waiting.remove_request(request)
        return victims

    def _force_out(self) -> list[Any]:
        """Preempt the requests that a tool forces out, and unqueue them so that this step does not admit them."""
        forced_out = []
        self._cause = "forced"
        for request_id in self._forced_out:
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING or request not in self.running:
                continue
            self.running.remove(request)
            self._preempt_request(request, self.kvpolicy.clock())
            self.waiting.remove_request(request)
            forced_out.append(request)
        self._forced_out.clear()
        return forced_out


class AdaptiveSyncScheduler(PolicyHooks, Scheduler):
    """The plugin over vLLM's plain scheduler."""


class AdaptiveAsyncScheduler(PolicyHooks, AsyncScheduler):
    """The plugin over vLLM's asynchronous scheduler."""


class AdaptiveScheduler:
    """The class for ``--scheduler-cls``: makes the plain or the asynchronous scheduler, as the engine is configured."""

    asks_kvpolicy = True

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        scheduler_class = AdaptiveAsyncScheduler if asynchronous else AdaptiveSyncScheduler
        return scheduler_class(vllm_config, *args, **kwargs)
