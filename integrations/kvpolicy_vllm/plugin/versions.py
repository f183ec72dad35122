"""The version of vLLM, and the refusal of versions and configurations that the plugin does not support.

Each refusal names the setting and what would be right.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
import vllm.platforms
from vllm.config import KVTransferConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpolicy import policy as policies
from kvpolicy.caching import spec as caching
from kvpolicy.errors import KVPolicyError
from kvpolicy_vllm.plugin.connector_list import configured, own_settings, problem_of
from kvpolicy_vllm.plugin.engine_config import refuse_other_model
from kvpolicy_vllm.plugin.host_share import take_share
from kvpolicy_vllm.plugin.kv_layout import FULL_ATTENTION, is_plain, kind_of, state_kind
from kvpolicy_vllm.plugin.order_limits import drafts_beside, loads_beside, order_of, ranks_itself, refuse_ranking
from kvpolicy_vllm.plugin.prompt_room import longer_than_a_step
from kvpolicy_vllm.plugin.settings import CONNECTOR, MULTI_CONNECTOR, Settings
from kvpolicy_vllm.plugin.state_steps import beyond_a_block_of_states

if TYPE_CHECKING:
    from vllm.platforms import Platform
    from vllm.v1.kv_cache_interface import KVCacheConfig

OLDEST = (0, 24)
NEWEST = (0, 33)
OLDEST_WITH_TABLES = (0, 32)
"""For all but one group of full attention. Earlier versions take a failed load by its blocks, which they refuse where
there are several groups, and lay out the KV cache in another way."""
OLDEST_WITH_DEFERRED_FREES = (0, 30)
"""For blocks that come free a step late. Earlier versions preempt request after request for them."""
WITHIN_A_BLOCK_OF_STATES = (0, 32)
"""The version whose CPU build was seen to end beyond one. On earlier ones states are not served; of later ones no CPU
build is published, and one from sources is taken to end, too, as none was seen to come through."""
SERVED_GROUPS = (*FULL_ATTENTION, "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
"""Specifications of KV cache groups, by vLLM's names."""
SERVED_STATES = ("MAMBA2", "GDN_ATTN")
SERVED_KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype``. Others have scales of their own beside the keys and values, or pack several into a
byte; what a swap of those gives was never compared."""
SERVED_DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of ``--speculative-config``."""
SERVED_MLA_DRAFTERS = ("mtp",)
"""Those of models with latent attention. No other was compared there."""
BETWEEN_RELEASES = re.compile(r"\d(a|b|rc)\d|\.dev\d")
"""A release candidate, or a build from untagged sources. Not refused, since nearly all of its code is that of a release
and refusing would exclude all users who build vLLM."""

logger = logging.getLogger(f"vllm.{__name__}")


class UnsupportedEngine(KVPolicyError):
    """The engine has an unsupported version or configuration; the message says what would be right."""


def engine_version(allow_untested: bool = False) -> tuple[int, int]:
    """(major, minor) of the running vLLM; for a build without a version, the newest that was tested.

    Raises :class:`UnsupportedEngine` outside the tested range, above it only where ``allow_untested`` is not set.
    """
    version = _parsed_version()
    if version is None or version > NEWEST:
        if not allow_untested:
            raise UnsupportedEngine(_untested_message(version))
        return version or NEWEST
    if version < OLDEST:
        raise UnsupportedEngine(f"vLLM {vllm.__version__} is older than what kvpolicy serves: install {_range()}")
    return version


def warn_untested() -> None:
    """Log a warning where the running vLLM is not one of the tested releases."""
    version = _parsed_version()
    if version is not None and version <= NEWEST and not BETWEEN_RELEASES.search(vllm.__version__):
        return
    logger.warning(
        "kvpolicy: vLLM %s is taken as %s; tested are the releases %s. Whatever has changed beside them may show as "
        "errors at the start, or as requests that stall",
        vllm.__version__, ".".join(map(str, version or NEWEST)), _range(),
    )  # fmt: skip


def _parsed_version() -> tuple[int, int] | None:
    """(major, minor), or None for a build from source without a version, which vLLM calls ``dev`` or 0.1.dev1."""
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    return None if version == (0, 0) or (version == (0, 1) and "dev" in vllm.__version__) else version


def _untested_message(version: tuple[int, int] | None) -> str:
    untested = (
        'to try it all the same, set "allow_untested_version": true in kv_connector_extra_config (kvpolicy serve '
    )
    untested += "and config: --allow-untested-version)"
    if version is not None:
        return (
            f"vLLM {vllm.__version__} is newer than what kvpolicy was tested with: install {_range()}, or, {untested}"
        )
    return (
        f"vLLM calls itself {vllm.__version__!r}, as a build from sources without their tags does; kvpolicy serves "
        f"{_range()}: build it with its tags or with VLLM_VERSION_OVERRIDE set to the release it comes from, or, "
        f"{untested}"
    )


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


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
    settings = Settings.read(own_settings(config.kv_transfer_config))
    refuse_ranking(settings, config.scheduler_config.policy)
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
        _refuse_kv_cache(config, kv_cache)


def platform() -> Platform:
    """The platform that vLLM runs on."""
    return vllm.platforms.current_platform


def _refuse_device() -> None:
    # To torch, ROCm looks like CUDA, but its KV layouts and page-locking are untested.
    if not (platform().is_cuda() or platform().is_cpu()):
        raise UnsupportedEngine(
            f"kvpolicy copies KV blocks on CUDA devices and CPUs only, device: {platform().device_name}; "
            "run this engine without the kvpolicy flags"
        )


def allows_untested(config: VllmConfig) -> bool:
    """Whether the settings allow an untested vLLM."""
    return _has_set(config, "allow_untested_version")


def _has_set(config: VllmConfig, name: str) -> bool:
    """Whether a setting is true. The settings themselves are checked later."""
    transfer = config.kv_transfer_config
    return transfer is not None and own_settings(transfer).get(name) is True


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


def connectors_beside(config: VllmConfig) -> list[str]:
    """Names of the connectors that serve beside kvpolicy's."""
    transfer = config.kv_transfer_config
    listed = [] if transfer is None else configured(transfer)
    return [name for one in listed if (name := str(one.get("kv_connector"))) != CONNECTOR]


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
        (
            getattr(parallel, "nnodes_within_dp", 1) > 1,
            "an engine over several nodes, whose clocks cannot be compared: --nnodes should be 1 for each engine core",
        ),
        (
            str(config.cache_config.cache_dtype) not in SERVED_KV_DTYPES,
            f"--kv-cache-dtype {config.cache_config.cache_dtype}, only {', '.join(SERVED_KV_DTYPES)}",
        ),
    )
    _refuse_first(refusals)


def _refuse_model(config: VllmConfig) -> None:
    model = config.model_config
    refusals = (
        (model.is_encoder_decoder, "encoder-decoder models"),
        (model.runner_type == "pooling", "pooling models"),
        # They need their own scheduler, which the plugin's would silently replace.
        (config.diffusion_config is not None or model.is_diffusion, "diffusion models"),
        (model.is_attention_free, "attention-free models"),
        (
            model.use_mla and getattr(model.hf_text_config, "index_topk", None) is not None,
            "MLA models with an indexer, whose keys are kept beside the latent KV",
        ),
    )
    _refuse_first(refusals)
    if model.is_hybrid:
        _refuse_older(config, "a model whose layers keep states beside attention")
        if names := without_groups(config):
            raise UnsupportedEngine(
                f"--kv-transfer-config: {', '.join(names)} knows one KV cache group only, and a model whose layers "
                "keep states beside attention has several, which vLLM cannot make one of: leave it out"
            )
        if config.use_v2_model_runner:
            _refuse_overwritten(config, "a model whose layers keep states beside attention")
    if model.use_mla:
        _refuse_older(config, "an MLA model")


def _refuse_overwritten(config: VllmConfig, what: str) -> None:
    """Refuse to save from blocks that a step overwrites before it calls a connector, unless the settings have it, in an
    order of service that reckons with blocks which come free late."""
    if not _has_set(config, "allow_untested_states_v2"):
        raise UnsupportedEngine(
            f"kvpolicy does not serve {what} on vLLM's model runner v2, which overwrites blocks before they can be "
            'saved; set VLLM_USE_V2_MODEL_RUNNER=0, or "allow_untested_states_v2": true in kv_connector_extra_config: '
            "blocks are held until they are saved, which was never tested on a GPU"
        )
    if ranks_itself(config):
        raise UnsupportedEngine(
            f"order {order_of(config)}: reckons with blocks that come free at once, and on vLLM's model runner v2 "
            "those of a model with states are held until they are saved: leave the order out, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def overwrites_before_saves(config: VllmConfig, kv_cache: KVCacheConfig) -> bool:
    """Whether a step clears new blocks, or copies states into them, before a connector can save what was there."""
    clears = getattr(kv_cache, "needs_kv_cache_zeroing", False)  # not in all versions, nor is the model runner v2
    return bool(clears and getattr(config, "use_v2_model_runner", False))


def _refuse_speculation(config: VllmConfig) -> None:
    """Refuse drafted tokens where no test has shown that a swap changes nothing."""
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return
    instead = "leave --speculative-config out"
    _refuse_older(config, "speculative decoding", instead)
    method = speculation.method
    refusals = (
        (method not in SERVED_DRAFTERS, f"speculation by {method}, only by {', '.join(SERVED_DRAFTERS)}: {instead}"),
        # Which of a request's states is the one after its last accepted token only the worker knows.
        (model.is_hybrid, f"speculative decoding of a model whose layers keep states beside attention: {instead}"),
        (
            model.use_mla and method not in SERVED_MLA_DRAFTERS,
            f"speculation by {method} of an MLA model, only by {', '.join(SERVED_MLA_DRAFTERS)}: {instead}",
        ),
        # A CPU turns it off after this is asked first.
        (
            bool(config.scheduler_config.async_scheduling) and not platform().is_cpu(),
            "speculative decoding with asynchronous scheduling: give --no-async-scheduling",
        ),
        (ranks_itself(config), drafts_beside(order_of(config))),
    )
    _refuse_first(refusals)


def _refuse_routed_experts(config: VllmConfig) -> None:
    """Refuse returning routed experts below 0.33. Below 0.31 vLLM itself refuses it, and lacks the configuration."""
    if engine_version(allow_untested=allows_untested(config)) >= (0, 33):
        return
    if hasattr(config, "aux_output_config") and config.aux_output_config.enabled:
        raise UnsupportedEngine(
            "kvpolicy does not serve --enable-return-routed-experts on a vLLM older than 0.33, where a request that is "
            "loaded ends the engine; install 0.33, or run this engine without the kvpolicy flags"
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
    for is_refused, what in refusals:
        if is_refused:
            raise UnsupportedEngine(f"kvpolicy does not serve {what}; run this engine without the kvpolicy flags")


def _refuse_older(config: VllmConfig, what: str, instead: str = "run this engine without the kvpolicy flags") -> None:
    if engine_version(allow_untested=allows_untested(config)) < OLDEST_WITH_TABLES:
        raise UnsupportedEngine(_older_message(what, instead))


def _older_message(what: str, instead: str) -> str:
    oldest = ".".join(map(str, OLDEST_WITH_TABLES))
    return f"kvpolicy does not serve {what} on a vLLM older than {oldest}; {instead}"


def _refuse_kv_cache(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    for group in kv_cache.kv_cache_groups:
        problem = _problem_of(group)
        if problem:
            raise UnsupportedEngine(f"kvpolicy does not serve {problem}; run this engine without the kvpolicy flags")
    if is_plain(kv_cache):
        return
    kinds = sorted({kind_of(group) for group in kv_cache.kv_cache_groups})
    named = f"{len(kv_cache.kv_cache_groups)} KV cache groups ({', '.join(kinds)})"
    instead = "run this engine without the kvpolicy flags"
    if kinds == ["FullAttentionSpec", "SlidingWindowSpec"]:  # only beside full attention are windows stored whole then
        instead = "install 0.32, or give --disable-hybrid-kv-cache-manager, which takes more memory"
    _refuse_older(config, named, instead)
    if not all(hasattr(tensor, "layers") for tensor in kv_cache.kv_cache_tensors):  # a build without a version
        raise UnsupportedEngine(_older_message(named, instead))
    if overwrites_before_saves(config, kv_cache):
        _refuse_overwritten(config, f"{named} of several precisions, or with states,")
    may_end = platform().is_cpu() and engine_version(allow_untested=allows_untested(config)) >= WITHIN_A_BLOCK_OF_STATES
    if may_end and (problem := beyond_a_block_of_states(config, kv_cache)):
        raise UnsupportedEngine(problem)


def _problem_of(group: Any) -> str:
    """What is not served about a KV cache group; empty where all is."""
    spec, kind = group.kv_cache_spec, kind_of(group)
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return f"a KV cache group ({kind}) that is in host memory or may not be transferred"
    if kind not in SERVED_GROUPS:
        return f"KV cache groups of the kind {kind}, only {', '.join(SERVED_GROUPS)}"
    if not (state := state_kind(group)):
        return ""
    if state not in SERVED_STATES:
        return f"states of the kind {state}, only {', '.join(SERVED_STATES)}"
    if spec.mamba_cache_mode not in ("none", "align"):
        return f"--mamba-cache-mode {spec.mamba_cache_mode}, only none and align"
    return ""
