"""What the plugin refuses of an engine's configuration. Called while vLLM makes it, and when it makes the connector and
the scheduler.

Each refusal names the setting and what would be right. Versions of vLLM are refused in
:mod:`kvpolicy_vllm.plugin.versions`, layers in :mod:`kvpolicy_vllm.plugin.layer_refusals`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpolicy import policy as policies
from kvpolicy.caching import spec as caching
from kvpolicy_vllm.plugin.boot_ids import note_machine
from kvpolicy_vllm.plugin.connector_list import configured, connectors_beside, own_settings, problem_of
from kvpolicy_vllm.plugin.engine_config import refuse_other_model
from kvpolicy_vllm.plugin.file_namespace import refuse_unnameable
from kvpolicy_vllm.plugin.host_share import take_share
from kvpolicy_vllm.plugin.kv_layout import is_plain
from kvpolicy_vllm.plugin.layer_refusals import (
    LATENT_BESIDE_STATES,
    refuse_kv_cache,
    refuse_layout,
    refuse_overwritten,
)
from kvpolicy_vllm.plugin.order_limits import drafts_beside, loads_beside, order_of, ranks_itself, refuse_ranking
from kvpolicy_vllm.plugin.prompt_room import longer_than_a_step
from kvpolicy_vllm.plugin.served_weights import note_weights
from kvpolicy_vllm.plugin.settings import CONNECTOR, MULTI_CONNECTOR, Settings
from kvpolicy_vllm.plugin.versions import (
    OLDEST_WITH_DEFERRED_FREES,
    WITHOUT_PLUGIN,
    UnsupportedEngine,
    allows_untested,
    engine_version,
    platform,
    refuse_older,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SERVED_KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype``, beside the name of the model's own type. Others have scales of their own beside the
keys and values, pack several into a byte, or are another type than the model computes in; what a swap of those gives
was never compared."""
SERVED_DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of ``--speculative-config``."""
SERVED_MLA_DRAFTERS = ("mtp",)
"""Those of models with latent attention. No other was compared there."""
DRAFTERS_OF_OTHER_SHAPE = ("draft_model", "eagle", "eagle3")
"""Those with layers of another model's. Layers of MTP are of the model itself."""
SEVERAL_NODES = "an engine over several nodes, whose clocks cannot be compared"


def refuse_early() -> VllmConfig | None:
    """Refuse what can be refused while vLLM makes its configuration, minutes before it loads the weights.

    At that time vLLM looks up the connector's class. It passes the configuration only when it makes the connector,
    with the weights in memory, so here the configuration is taken from the stack, and returned where there is one. All
    checks are repeated later.
    """
    config = _configuration_being_made()
    if config is None or config.kv_transfer_config is None or config.model_config is None:
        return None
    refuse_unsupported(config, None)
    note_machine(config)
    settings = Settings.read(own_settings(config.kv_transfer_config))
    refuse_ranking(settings, config.scheduler_config.policy)
    if settings.cache_files is not None:
        refuse_unnameable(config, None)
        note_weights(config)
    if settings.host_gib is None:
        take_share(config, bool(platform().is_cpu()))
    if not policies.needs_engine(settings.policy):
        refuse_other_model(settings.load_policy().cost_model, config)
    return config


def _configuration_being_made() -> VllmConfig | None:
    if get_current_vllm_config_or_none() is not None:
        return None  # within an engine, configurations of parts of a model are made, which need not be supported alone
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), VllmConfig):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def refuse_unsupported(config: VllmConfig, kv_cache: KVCacheConfig | None) -> None:
    """Raise :class:`UnsupportedEngine` for the first unsupported setting. ``kv_cache``: None where not known yet."""
    engine_version(allow_untested=allows_untested(config))
    _refuse_device()
    _refuse_transfer_settings(config)
    _refuse_engine_settings(config)
    _refuse_model(config)
    _refuse_speculation(config)
    if problem := longer_than_a_step(config):
        raise UnsupportedEngine(problem)
    _refuse_routed_experts(config)
    _refuse_cache(config, kv_cache)
    if kv_cache is not None:
        refuse_kv_cache(config, kv_cache)
        refuse_layout(kv_cache)


def _refuse_device() -> None:
    # To torch, ROCm looks like CUDA, but its KV layouts and page-locking are untested.
    if not (platform().is_cuda() or platform().is_cpu()):
        raise UnsupportedEngine(
            f"kvpolicy copies KV blocks on CUDA devices and CPUs only, device: {platform().device_name}; "
            f"{WITHOUT_PLUGIN}"
        )


def _refuse_transfer_settings(config: VllmConfig) -> None:
    transfer = config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_connector == MULTI_CONNECTOR:
        refuse_connectors(config)
        beside = connectors_beside(config)
        if beside and ranks_itself(config):
            raise UnsupportedEngine(loads_beside(order_of(config), beside[0]))
    elif transfer.kv_connector != CONNECTOR:
        raise UnsupportedEngine(
            f"--kv-transfer-config names {transfer.kv_connector}; kvpolicy needs its own connector: "
            f'"kv_connector": "{CONNECTOR}", or "{MULTI_CONNECTOR}" with {CONNECTOR} as the first of its connectors'
        )
    elif transfer.kv_role != "kv_producer":
        raise UnsupportedEngine(
            f'--kv-transfer-config: kv_role of {CONNECTOR} is {transfer.kv_role}, should be "kv_producer" '
            "(a consumer role makes the scheduler hold back freed blocks, which brings more preemptions)"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedEngine(
            f"--kv-transfer-config: kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, should be "
            '"recompute": otherwise a failed load ends its request'
        )
    refuse_offloading(config)
    if not is_adaptive(config.scheduler_config.scheduler_cls):
        raise UnsupportedEngine(
            f"--scheduler-cls is {config.scheduler_config.scheduler_cls}, but KVPolicyConnector needs "
            "--scheduler-cls kvpolicy_vllm.AdaptiveScheduler: without it nothing is ever saved"
        )


def refuse_connectors(config: VllmConfig) -> None:
    """Refuse lists of connectors in which kvpolicy's cannot serve; called before the connectors are made."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != MULTI_CONNECTOR:
        return
    problem = problem_of(transfer)
    if problem:
        raise UnsupportedEngine(problem)
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedEngine(
            f"--kv-transfer-config: kv_load_failure_policy of {MULTI_CONNECTOR} is "
            f'{transfer.kv_load_failure_policy!r}, should be "recompute": otherwise a failed load ends its request'
        )
    if transfer.is_kv_consumer and config.scheduler_config.async_scheduling:
        version = engine_version(allow_untested=allows_untested(config))
        if version < OLDEST_WITH_DEFERRED_FREES:
            oldest = ".".join(map(str, OLDEST_WITH_DEFERRED_FREES))
            raise UnsupportedEngine(
                f"--kv-transfer-config: kv_role of {MULTI_CONNECTOR} is {transfer.kv_role}, with which a vLLM older "
                f"than {oldest} preempts request after request under asynchronous scheduling: give "
                "--no-async-scheduling"
            )


def without_groups(config: VllmConfig) -> list[str]:
    """Names of the connectors beside kvpolicy's for which vLLM, from 0.32 on, puts all layers into one KV cache
    group."""
    transfer = config.kv_transfer_config
    listed = [] if transfer is None else configured(transfer)
    others = [KVTransferConfig(**one) for one in listed if one.get("kv_connector") != CONNECTOR]
    return [str(one.kv_connector) for one in others if not KVConnectorFactory.supports_hma_config(one)]


def refuse_offloading(config: VllmConfig) -> None:
    """Refuse KV offloading, for which some versions replace this connector; called before the connector is made."""
    if getattr(config.cache_config, "kv_offloading_size", None) is not None:
        raise UnsupportedEngine("--kv-offloading-size brings a connector of its own; leave it out with kvpolicy")


def is_adaptive(scheduler_cls: Any) -> bool:
    """Whether a ``--scheduler-cls`` value is kvpolicy's scheduler or made from it."""
    scheduler_class = resolve_obj_by_qualname(scheduler_cls) if isinstance(scheduler_cls, str) else scheduler_cls
    return bool(getattr(scheduler_class, "asks_kvpolicy", False))


def _refuse_engine_settings(config: VllmConfig) -> None:
    parallel = config.parallel_config
    kv_dtype, own_dtype = str(config.cache_config.cache_dtype), str(config.model_config.dtype).removeprefix("torch.")
    refusals = (
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism: --pipeline-parallel-size should be 1 (vLLM's CPU build cannot run it, and nowhere "
            "else was a swap tested with it)",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism: the decode and prefill context-parallel sizes should be 1",
        ),
        (bool(problem := _several_nodes(parallel)), f"{SEVERAL_NODES}: {problem}"),
        (
            # The world is that of the ranks of data parallelism as well. A scheduler hears of its own worker's copies
            # alone: it decides by what these took, and would wait for those of all others.
            parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1,
            "several ranks of which each has a scheduler that hears of its own copies alone: leave "
            "--distributed-executor-backend external_launcher out, or give --tensor-parallel-size 1 and no data "
            "parallelism",
        ),
        (
            bool(getattr(parallel, "enable_fault_tolerance", False)),  # not in all versions
            "engines that go on after a step has failed, whose reports of copies are lost: leave "
            "--enable-fault-tolerance out, and --fault-tolerance-config, which sets it",
        ),
        (
            kv_dtype not in (*SERVED_KV_DTYPES, own_dtype),
            f"--kv-cache-dtype {kv_dtype}, only {', '.join(SERVED_KV_DTYPES)} (auto is the model's own type, "
            f"{own_dtype})",
        ),
    )
    _refuse_first(refusals)


def _several_nodes(parallel: ParallelConfig) -> str:
    """What would be right, where the configuration tells that an engine core is over several nodes; else empty. Where
    it does not tell, as with Ray, the workers do: :func:`kvpolicy_vllm.plugin.connector.refuse_several_machines`."""
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        return "--nnodes should be 1 for each engine core"
    if not parallel.use_ray or parallel.data_parallel_backend == "ray" or not platform().is_cuda():
        return ""  # Ray may place an engine core on a node with other devices than this one
    devices = int(platform().device_count())
    if not 0 < devices < parallel.world_size:  # from a process that is to use none, Ray hides all
        return ""
    return (
        f"with --distributed-executor-backend ray, --tensor-parallel-size should be at most {devices}, the number of "
        f"devices that this process sees (CUDA_VISIBLE_DEVICES), not {parallel.tensor_parallel_size}"
    )


def _refuse_model(config: VllmConfig) -> None:
    model = config.model_config
    refusals = (
        (model.is_encoder_decoder, "encoder-decoder models"),
        (model.runner_type == "pooling", "pooling models"),
        # They need their own scheduler, which the plugin's would silently replace.
        (config.diffusion_config is not None or model.is_diffusion, "diffusion models"),
        (model.is_attention_free, "attention-free models"),
        (
            _encodes_only(config),
            "an engine that runs the encoder of a multimodal model alone (--mm-encoder-only, or ec_role ec_producer in "
            "--ec-transfer-config), which has no KV cache",
        ),
        (
            model.use_mla and getattr(model.hf_text_config, "index_topk", None) is not None,
            "MLA models with an indexer, whose keys are kept beside the latent KV",
        ),
        (model.use_mla and model.is_hybrid, LATENT_BESIDE_STATES),
    )
    _refuse_first(refusals)
    if model.is_hybrid:
        refuse_older(config, "a model whose layers keep states beside attention")
        if names := without_groups(config):
            raise UnsupportedEngine(
                f"--kv-transfer-config: {', '.join(names)} knows one KV cache group only, and a model whose layers "
                "keep states beside attention has several, which vLLM cannot make one of: leave it out"
            )
        if config.use_v2_model_runner:
            refuse_overwritten(config, "a model whose layers keep states beside attention")
    if model.use_mla:
        refuse_older(config, "an MLA model")


def _encodes_only(config: VllmConfig) -> bool:
    """Whether the engine makes embeddings of pictures for others, and runs no language model."""
    multimodal, transfer = config.model_config.multimodal_config, getattr(config, "ec_transfer_config", None)
    hands_on = getattr(transfer, "ec_connector", None) is not None  # without a connector vLLM heeds no role
    produces = hands_on and getattr(transfer, "ec_role", None) == "ec_producer"
    return produces or bool(getattr(multimodal, "mm_encoder_only", False))


def _refuse_speculation(config: VllmConfig) -> None:
    """Refuse drafted tokens where no test has shown that a swap changes nothing."""
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return
    instead = "leave --speculative-config out"
    refuse_older(config, "speculative decoding", instead)
    method = speculation.method
    refusals = (
        (method not in SERVED_DRAFTERS, f"speculation by {method}, only by {', '.join(SERVED_DRAFTERS)}: {instead}"),
        # Which of a request's states is the one after its last accepted token only the worker knows.
        (model.is_hybrid, f"speculative decoding of a model whose layers keep states beside attention: {instead}"),
        (
            model.use_mla and method not in SERVED_MLA_DRAFTERS,
            f"speculation by {method} of an MLA model, only by {', '.join(SERVED_MLA_DRAFTERS)}: {instead}",
        ),
        (bool(shapes := _unlike_drafter(config)), f"{shapes}: {instead}"),
        # A CPU turns it off after this is asked first.
        (
            bool(config.scheduler_config.async_scheduling) and not platform().is_cpu(),
            "speculative decoding with asynchronous scheduling: give --no-async-scheduling",
        ),
        (ranks_itself(config), drafts_beside(order_of(config))),
    )
    _refuse_first(refusals)


def _unlike_drafter(config: VllmConfig) -> str:
    """That a drafter keeps other KV of a token than the model; empty where it does not.

    Of layers that attend to everything vLLM makes one KV cache group, which is not served with pages of several sizes.
    Layers with windows have groups of their own, which only vLLM knows.
    """
    speculation = config.speculative_config
    assert speculation is not None
    drafter = getattr(speculation, "draft_model_config", None)
    if drafter is None or speculation.method not in DRAFTERS_OF_OTHER_SHAPE:
        return ""
    models = config.model_config, drafter
    if any(one.get_sliding_window() or getattr(one, "attention_chunk_size", None) for one in models):
        return ""
    kept, drafted = ((one.get_num_kv_heads(config.parallel_config), one.get_head_size()) for one in models)
    if kept == drafted:
        return ""
    return (
        f"speculation by {speculation.method} with layers of {drafted[0]} KV heads of {drafted[1]} values on a rank, "
        f"beside the model's of {kept[0]} of {kept[1]}"
    )


def _refuse_routed_experts(config: VllmConfig) -> None:
    """Refuse returning routed experts below 0.33. Below 0.31 vLLM itself refuses it, and lacks the configuration."""
    if engine_version(allow_untested=allows_untested(config)) >= (0, 33):
        return
    if hasattr(config, "aux_output_config") and config.aux_output_config.enabled:
        raise UnsupportedEngine(
            "kvpolicy does not serve --enable-return-routed-experts on a vLLM older than 0.33, where a request that is "
            f"loaded ends the engine; install 0.33, or {WITHOUT_PLUGIN}"
        )


def _refuse_cache(config: VllmConfig, kv_cache: KVCacheConfig | None) -> None:
    """Refuse to cache prompts where no test has shown that what is found is right."""
    transfer, model = config.kv_transfer_config, config.model_config
    if transfer is None or own_settings(transfer).get("cache", caching.OFF) == caching.OFF:
        return
    beside = connectors_beside(config)
    refusals = (
        (config.speculative_config is not None, "with speculative decoding"),
        (model.use_mla, "of an MLA model"),
        (model.is_hybrid, "of a model whose layers keep states beside attention"),
        (bool(beside), f"beside {beside[0]}" if beside else ""),
        (
            hasattr(config, "aux_output_config") and config.aux_output_config.enabled,
            "with --enable-return-routed-experts",
        ),
        (kv_cache is not None and not is_plain(kv_cache), "of a model with several KV cache groups, or windows"),
        (bool(getattr(kv_cache, "needs_kv_cache_zeroing", False)), "of a model whose new blocks are cleared"),
        (not config.cache_config.enable_prefix_caching, "without prefix caching: leave --no-enable-prefix-caching out"),
    )
    for is_refused, what in refusals:
        if is_refused:
            instead = " or" if ": " in what else ":"
            raise UnsupportedEngine(f"kvpolicy does not cache prompts {what}{instead} leave --cache out")


def _refuse_first(refusals: Iterable[tuple[bool, str]]) -> None:
    """Refuse the first that holds. Behind the colon of its words, where they have one, is what would be right."""
    for is_refused, what in refusals:
        if is_refused:
            further = ", or" if ": " in what else ";"
            raise UnsupportedEngine(f"kvpolicy does not serve {what}{further} {WITHOUT_PLUGIN}")
