"""The connector: vLLM's interface, wired to the controller on the scheduler side and the copier on the worker side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import all_gather_object
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpolicy.errors import InputError
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.request_marks import HintLimits
from kvpolicy.settings import GIB
from kvpolicy.tiers import FileTier
from kvpolicy_vllm.plugin.assembly import controller_for
from kvpolicy_vllm.plugin.boot_ids import boot_id, noted_machine
from kvpolicy_vllm.plugin.config_refusals import SEVERAL_NODES, refuse_unsupported
from kvpolicy_vllm.plugin.controller import Controller
from kvpolicy_vllm.plugin.copiers.base import Copier, unique_segments
from kvpolicy_vllm.plugin.copiers.pool_of_ranks import SharedPool
from kvpolicy_vllm.plugin.file_namespace import namespace_of, orders_in_memory, refuse_unnameable
from kvpolicy_vllm.plugin.forward_timer import ForwardTimer
from kvpolicy_vllm.plugin.kv_layout import block_bytes, is_replicated, says_where_layers_lie, segments_of_layers
from kvpolicy_vllm.plugin.messages import NO_REQUEST, Job, StepJobs, Transfers
from kvpolicy_vllm.plugin.metrics import KVPolicyPromMetrics, KVPolicyStats
from kvpolicy_vllm.plugin.rank_files import RankFiles
from kvpolicy_vllm.plugin.settings import Settings
from kvpolicy_vllm.plugin.shadow import ShadowCopier
from kvpolicy_vllm.plugin.versions import WITHOUT_PLUGIN, UnsupportedEngine, engine_version, platform, warn_untested

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM carries these from the scheduler to the workers and back. They are plain records that do not know vLLM.
KVConnectorMetadata.register(StepJobs)
KVConnectorWorkerMetadata.register(Transfers)


class KVPolicyConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves a preempted request's own blocks, including a partial last one, and loads exactly these back."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config, kv_cache_config)
        self.settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self.block_bytes = block_bytes(kv_cache_config)
        pool_count = pools(vllm_config, kv_cache_config, self.settings)
        self.slots = host_slots(self.settings, self.block_bytes, pool_count)
        self._shares = pool_count < vllm_config.parallel_config.world_size
        self._shared: SharedPool | None = None
        self.controller: Controller | None = None
        self.copier: Copier | None = None
        self.forward_timer = ForwardTimer()
        if role == KVConnectorRole.WORKER:
            # Checked here because workers start first: the scheduler would see memory that they have already taken.
            refuse_several_machines(vllm_config)
            self.settings.refuse_too_much_memory(available_to_all_ranks(), cores_here(vllm_config))
        else:
            warn_untested()
            self.controller = controller_for(
                self.settings, vllm_config, kv_cache_config, self.slots, self.block_bytes, pool_count
            )
        self._pool_count = pool_count
        self.files: RankFiles | None = None
        """This rank's files."""
        if self.settings.cache_files is not None:
            refuse_unnameable(vllm_config, kv_cache_config, self._shares)
            self.settings.refuse_small_files(self.block_bytes, pool_count)
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._saved_step = -1
        reports_results = engine_version(self.settings.allow_untested_version) >= (0, 32)
        # A build without a version may be older than assumed, hence the second check.
        self._reports_requests = reports_results and hasattr(KVConnectorBase_V1, "get_transfer_results")

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is recomputed, so vLLM need not discard anything in flight."""
        return False

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, in process. Raises AttributeError on the worker's side."""
        if self.controller is None:
            raise AttributeError("stats() is the scheduler side's")
        return self.controller.stats()

    # ---- worker side ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the copier. If called again with other memory, earlier saves can no longer be loaded."""
        kv_cache = self._kv_cache_config
        if says_where_layers_lie(kv_cache):
            segments = segments_of_layers(kv_caches, kv_cache)
        else:
            segments = unique_segments(kv_caches, kv_cache.num_blocks)
        block_size_bytes = sum(segment.shape[1] * segment.element_size() for segment in segments)
        if block_size_bytes != self.block_bytes:
            raise InputError(
                f"a KV block takes {block_size_bytes} bytes in this worker, {self.block_bytes} were configured"
            )
        if self.copier is not None and self.copier.copies_on(segments):
            return
        self.forward_timer = ForwardTimer(segments[0].device.type)
        leftover = None
        if self.copier is not None:
            leftover = self.copier.give_up()
            if self.files is not None:
                self.files.let_go()
            self.copier = None  # frees its host memory before the next copier allocates
        self.copier = copier = self._make_copier(segments)
        if leftover is not None:
            copier.take_over(leftover)
        self._keep_files(copier, kv_caches)

    def _make_copier(self, segments: list[torch.Tensor]) -> Copier:
        """With a host pool of its own, unless in shadow mode."""
        if self.settings.shadow:
            return ShadowCopier(segments)
        if self._shares and self._shared is None:
            self._shared = shared_by_ranks(self.slots, self.block_bytes)
        more = {} if self._shared is None else {"shared": self._shared}
        copier_factory = resolve_obj_by_qualname(self.settings.copier)
        copier: Copier = copier_factory(segments, self.slots, self.settings.pin_memory, self.settings.link, **more)
        return copier

    def _keep_files(self, copier: Copier, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this rank's files, or go on with them from and to the slots of another copier."""
        directory = self.settings.cache_files
        if self.files is not None:
            self.files.copy_with(copier)
        elif directory is not None:
            config, kv_cache = self._vllm_config, self._kv_cache_config
            layers = orders_in_memory(kv_caches, kv_cache.num_blocks)
            pieces = [segment.shape[1] * segment.element_size() for segment in copier.device_segments]
            namespace = namespace_of(config, kv_cache, int(config.parallel_config.rank), pieces, layers)
            capacity = int(self.settings.cache_files_gib * GIB) // self._pool_count
            failures: list[str] = []
            open_tier = partial(
                FileTier.open, directory, namespace, self.block_bytes, capacity, self.settings.cache_files_policy,
                hints=HintLimits() if self.settings.hints is None else self.settings.hints,
                block_tokens=int(kv_cache.kv_cache_groups[0].kv_cache_spec.block_size),
                allow_python=self.settings.allow_python_policies, failed=failures.append, processes=self._pool_count,
            )  # fmt: skip
            try:
                tier = in_folders_of_one_number(lambda number: open_tier(number=number))
            except OSError as error:
                raise InputError(
                    f"cache_files: nothing can be written to {directory} ({error}); give another folder, or leave "
                    "cache_files out"
                ) from error
            self.files = RankFiles(tier, copier, failures, counts_hints=int(config.parallel_config.rank) == 0)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the forward pass, during which files are read and written. On a GPU they are anyway: what comes
        after the launch runs while it computes."""
        self._save(kv_connector_metadata)
        if self.files is not None and platform().is_cpu() and isinstance(kv_connector_metadata, StepJobs):
            self.files.begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called right before the forward pass, by both of vLLM's model runners."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepJobs)
        self.forward_timer.begin(connector_metadata.timed)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called before the forward pass or after it, which depends on vLLM's version."""
        jobs = self._get_connector_metadata()
        self._save(jobs)
        assert isinstance(jobs, StepJobs)
        if not jobs.loads:
            return
        self.forward_timer.interrupt()
        for job in jobs.loads:
            self._working_copier.load(job)
        self.forward_timer.go_on()

    def finish_forward(self) -> None:
        """Called right after the forward pass, where the model runner does; else what it calls next ends the pass."""
        self.forward_timer.end()

    def _save(self, jobs: KVConnectorMetadata) -> None:
        assert isinstance(jobs, StepJobs)
        if jobs.step == self._saved_step:  # vLLM may call twice per step
            return
        self._saved_step = jobs.step
        if jobs.overwritten:
            self._working_copier.finish(jobs.overwritten)
        for job in jobs.saves:
            self._working_copier.save(job, jobs.overwritten)
        if jobs.at_once:
            self._working_copier.drain()

    @property
    def _working_copier(self) -> Copier:
        assert self.copier is not None, "no KV cache was registered"
        return self.copier

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are asynchronous, and requests wait for them, not layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: nothing is saved while a step computes."""

    def wait_for_save(self) -> None:
        """Nothing to save: a step waits only for saves of blocks that it writes to, before it computes."""
        self.finish_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.finish_forward()  # while tokens are drafted, vLLM asks this first
        jobs = self._connector_metadata
        idle = isinstance(jobs, StepJobs) and jobs.idle
        finished = self._working_copier.poll(idle)
        if self.files is not None and isinstance(jobs, StepJobs):
            self.files.begin(jobs)  # where there is no forward pass, and what saves were in the way of
            if idle:
                self.files.nap()
        for load in finished:
            if not load.ok:
                self._fail(load.job)
        return None, {load.job.request_id for load in finished if load.job.request_id != NO_REQUEST} or None

    def _fail(self, job: Job) -> None:
        if job.request_id == NO_REQUEST:
            return
        if self._reports_requests:
            self._failed_requests.add(job.request_id)
        else:
            self._failed_blocks.update(job.block_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Failed requests, for vLLM 0.32 and later; earlier versions ask for failed blocks."""
        results = super().get_transfer_results(finished_req_ids)
        if not self._failed_requests:
            return results
        failed, self._failed_requests = self._failed_requests, set()
        return dataclasses.replace(results, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Transfers | None:
        reports = [] if self.files is None else self.files.reports()
        forwards = self.forward_timer.take()
        if self.copier is None or not (self.copier.transfers or reports or forwards):
            return None
        done, self.copier.transfers = self.copier.transfers, []
        return Transfers(done, reports, forwards)

    # ---- scheduler side ----

    @property
    def _controlling(self) -> Controller:
        assert self.controller is not None, "this is the worker's side"
        return self.controller

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All: what a request needs of each group is loaded. vLLM 0.32 and later ask."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        prompts = self._controlling.prompts
        if prompts is not None and prompts.waits_for_files(request, num_computed_tokens):
            return None, False
        tokens = self._controlling.loadable_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._controlling.admitted(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        controller = self._controlling
        jobs = controller.take_jobs(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens and controller.observers.follows("forwards_timed"):
            return dataclasses.replace(jobs, timed=controller.next_step - 1)
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, Transfers):
            self._controlling.transferred(done.done)
            if done.forwards:
                self._controlling.observers.tell("forwards_timed", done.forwards)
            prompts = self._controlling.prompts
            if prompts is not None and prompts.files is not None:
                prompts.files.acknowledge(done.files)

    def on_new_request(self, request: Request) -> None:
        self._controlling.arrived(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._controlling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._controlling.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether an otherwise idle engine should go on stepping, until copies have ended and metrics are reported."""
        return self.controller is not None and self.controller.unsettled

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free when saves have ended, so that nobody need be preempted for them. vLLM 0.32 and
        later ask."""
        pinned = None if self.controller is None else self.controller.copies.pinned
        return pinned is not None and pinned.any

    def reset_cache(self) -> bool:
        self._controlling.forget_saved()
        return True

    def shutdown(self) -> None:
        """Further calls do nothing."""
        if self.controller is not None:
            self.controller.close()
        files, self.files = self.files, None
        if files is not None:
            files.close()

    # ---- both ----

    def get_kv_connector_stats(self) -> KVPolicyStats | None:
        changed = None if self.controller is None else self.controller.metrics.report()
        return None if changed is None else KVPolicyStats(changed)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPolicyStats | None:
        return KVPolicyStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVPolicyPromMetrics:
        return KVPolicyPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def cores_here(vllm_config: VllmConfig) -> int:
    """Number of data-parallel engine cores on this machine, as far as this core can tell.

    With a dense model each core is configured as if alone, and only the last one can tell the number, by its rank. It
    then refuses for all.
    """
    parallel = vllm_config.parallel_config
    return max(int(parallel.data_parallel_size_local), int(parallel.data_parallel_rank_local or 0) + 1, 1)


def refuse_several_machines(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngine where ranks of this engine are on several machines, or on another one than was noted of
    its scheduler. Every rank hears of all others, so that all refuse together."""
    if not model_parallel_is_initialized():  # the connector is made without an engine
        return
    group = get_tp_group()
    boots = [boot_id()] * group.world_size
    if group.world_size > 1:
        all_gather_object(boots, boots[0], group=group.cpu_group)
    if scheduler := noted_machine(vllm_config):
        boots.append(scheduler)
    if len(set(boots)) > 1:
        raise UnsupportedEngine(
            f"kvpolicy does not serve {SEVERAL_NODES}: the scheduler and all ranks of --tensor-parallel-size should be "
            f"on one, by --distributed-executor-backend or where it places them, or {WITHOUT_PLUGIN}"
        )


def available_to_all_ranks() -> int:
    """Bytes of host memory available before any rank of this engine allocates its share of the pool.

    Rank 0 measures and broadcasts while the other ranks wait, so that all judge by one number and refuse together.
    """
    if not model_parallel_is_initialized():  # the connector is made without an engine
        return available_memory_bytes()
    group = get_tp_group()
    return int(group.broadcast_object(available_memory_bytes() if group.rank_in_group == 0 else None, src=0))


def in_folders_of_one_number(open_tier: Callable[[int | None], FileTier]) -> FileTier:
    """A rank's files, where another server has some, too, in the folder of the number that rank 0 has, if it is free:
    the next server finds a block only where all ranks find their parts. All of them must call this at the same time;
    the others wait until rank 0 has opened its own."""
    if not model_parallel_is_initialized():  # the connector is made without an engine
        return open_tier(None)
    group, number = get_tp_group(), None
    if group.rank_in_group > 0:
        return open_tier(group.broadcast_object(None, src=0))
    try:
        tier = open_tier(None)
        number = getattr(tier, "number", None)  # one's own tier need not have one
    finally:  # nobody waits for a rank that has failed
        group.broadcast_object(number, src=0)
    return tier


def pools(vllm_config: VllmConfig, kv_cache: KVCacheConfig, settings: Settings) -> int:
    """Number of host pools: one for each rank, or one for all where they have the same KV and share it."""
    shares = is_replicated(kv_cache) and (settings.share_replicated_kv or platform().is_cpu())
    return 1 if shares else int(vllm_config.parallel_config.world_size)


def shared_by_ranks(slots: int, block_bytes: int) -> SharedPool:
    """The one host pool of all ranks. All of them must call this at the same time."""
    group = get_tp_group()

    def tell_all(what: Any) -> Any:
        told = group.broadcast_object(what, src=0)
        group.barrier()
        return told

    return SharedPool(slots, block_bytes, group.rank_in_group, tell_all)


def host_slots(settings: Settings, block_bytes: int, ranks: int) -> int:
    """Number of blocks that the host pool holds, which ``ranks`` ranks keep each a part of. Raises InputError where it
    holds none."""
    slots = int(settings.pool_gib * GIB // (block_bytes * ranks))
    if slots < 1:
        raise InputError(
            f"host_gib {settings.pool_gib:g} holds no KV block of {block_bytes * ranks} bytes over {ranks} ranks; "
            f"give at least {block_bytes * ranks / GIB:.3g}"
        )
    return slots
