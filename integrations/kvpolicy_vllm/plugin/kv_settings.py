"""vLLM's settings that decide the bytes of keys and values, for files of KV: all but those that are listed here.

So a setting that a newer vLLM brings counts as one that decides them: at worst, files are not found. The test of this
module has the list of those that were looked at and do decide, or may, and fails for one that is in neither.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping, Set
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs

from kvpolicy.errors import InputError
from kvpolicy.tiers import namespace_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEFT_OUT: dict[str, dict[str, tuple[str, ...]]] = {
    "VllmConfig": {
        "which requests are in a step, as it changes all the time": ("scheduler_config", "performance_mode"),
        "what becomes of computed tokens": (
            "structured_outputs_config", "reasoning_config", "watermark_config", "aux_output_config",
        ),
        "what is watched and written": (
            "observability_config", "profiler_config", "logging_config", "watchdog_config", "instance_id",
            "shutdown_timeout",
        ),
        "where KV and pictures travel, and where weights lie": (
            "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config", "offload_config",
        ),
        "it brings weights that are not on disk; files are refused with it": ("weight_transfer_config",),
        "the namespace names the device itself": ("device_config",),
        "follows from the model's settings and its files": ("quant_config",),
        "what it decides is set in compilation_config": ("optimization_level",),
        "keys have the adapter; prompts in files are refused with it": ("lora_config",),
    },
    "ModelConfig": {
        "the weights have a digest, drawn ones with their seed": ("model", "revision", "seed"),
        "texts and tokens, before the model and after it": (
            "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "served_model_name",
            "max_logprobs", "logprobs_mode", "logits_processors", "io_processor_plugin", "renderer_num_workers",
            "pooler_config", "generation_config", "override_generation_config", "allowed_local_media_path",
            "allowed_media_domains", "use_fp64_gumbel", "return_sampling_mask", "enable_return_routed_experts",
            "enable_trace_replay",
        ),
        "a secret": ("hf_token",),
        "where memory comes from and goes to": (
            "enable_sleep_mode", "sleep_mode_backend", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
            "enable_cumem_allocator", "enable_nccl_comm_suspend",
        ),
    },
    "CacheConfig": {
        "how much memory there is": (
            "gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks", "num_cpu_blocks",
            "kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_offloading_size",
            "kv_offloading_backend", "simple_cpu_offload_num_blocks",
        ),
        "how prompts are looked up": (
            "enable_prefix_caching", "prefix_match_unit", "prefix_cache_retention_interval",
            "cache_hit_alignment_tokens",
        ),
        "the namespace has it with the seed of hashes": ("prefix_caching_hash_algo",),
        "how block_size came about": (
            "user_specified_block_size", "user_specified_mamba_block_size", "_block_size_resolved",
            "effective_attention_block_size",
        ),
    },
    "ParallelConfig": {
        "which process of the server it is; the namespace has its rank": (
            "rank", "node_rank", "data_parallel_rank", "data_parallel_rank_local", "data_parallel_index",
            "_api_process_count", "_api_process_rank",
        ),
        "where the processes are, and how they reach each other": (
            "nnodes", "data_parallel_size_local", "data_parallel_master_ip", "data_parallel_rpc_port",
            "data_parallel_master_port", "data_parallel_backend", "data_parallel_external_lb",
            "data_parallel_hybrid_lb", "_data_parallel_master_port_list", "_coord_store_port", "master_addr",
            "master_port", "distributed_executor_backend", "placement_group", "ray_workers_use_nsight",
            "ray_runtime_env", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "assigned_physical_gpu_ids",
            "enable_shm_tensor_arena",
        ),
        "how long they wait, and what they do where one fails": (
            "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "max_parallel_loading_workers",
            "enable_fault_tolerance", "fault_tolerance_config",
        ),
    },
    "EPLBConfig": {
        "what is watched and written": ("log_balancedness", "log_balancedness_interval"),
    },
    "LoadConfig": {
        "by which way the weights come to memory": (
            "download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads",
            "safetensors_prefetch_block_size", "device", "use_tqdm_on_load", "pt_load_map_location",
        ),
    },
    "KernelConfig": {
        "what is done before the first request": (
            "enable_flashinfer_autotune", "enable_cutedsl_warmup", "enable_jit_warmup",
            "enable_rocm_segmented_attn_autotune",
        ),
    },
    "CompilationConfig": {
        "where compiled code lies": ("debug_dump_path", "cache_dir", "local_cache_dir", "compile_cache_save_format"),
        "which sizes of a step are compiled and captured": (
            "splitting_ops", "compile_sizes", "compile_ranges_endpoints", "dynamic_shapes_config", "cudagraph_mode",
            "cudagraph_num_of_warmups", "cudagraph_capture_sizes", "cudagraph_copy_inputs",
            "cudagraph_specialize_lora", "max_cudagraph_capture_size", "cudagraph_decoder_replay",
            "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "compile_mm_encoder",
            "cudagraph_mm_encoder", "encoder_cudagraph_token_budgets", "encoder_cudagraph_max_vision_items_per_batch",
            "encoder_cudagraph_max_frames_per_batch",
        ),
        "how the compiler works; what it makes of the same settings differs by rounding": (
            "inductor_compile_config", "inductor_passes", "use_inductor_graph_partition", "ir_enable_torch_wrap",
            "fast_moe_cold_start",
        ),
        "filled in while the model is made": (
            "enabled_custom_ops", "disabled_custom_ops", "traced_files", "compilation_time",
            "encoder_compilation_time", "static_forward_context", "static_all_moe_layers",
        ),
    },
    "SpeculativeConfig": {
        "the server's own, which are there already": ("target_model_config", "target_parallel_config"),
        "its weights have a digest": ("model", "revision"),
    },
    "MultiModalConfig": {
        "how many pictures there may be, and where they wait": (
            "limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type",
            "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling",
            "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
        ),
        "what comes of it is in the tokens, or in the hash": ("interleave_mm_strings", "mm_hasher_algorithm"),
    },
}  # fmt: skip
"""Fields of vLLM's configurations that do not decide the bytes, by class and by why not. Settings that change no more
than rounding are left out where they do as steps of one server do among each other: their sizes, and what is captured
for which. Others that may, as compilation and the kernels that are chosen, are not."""

ENVIRONMENT_LEFT_OUT: dict[str, tuple[str, ...]] = {
    "a secret": ("VLLM_API_KEY",),
    "which process it is, and how it reaches others": (
        "*_PORT", "*_HOST", "*_HOSTNAME", "*_IP", "*_IPS", "VLLM_DP_*", "VLLM_RAY_*", "RAY_*", "VLLM_P2P_*",
        "VLLM_MOONCAKE_*", "MOONCAKE_*", "VLLM_PROCESS_NAME_PREFIX", "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH",
    ),
    "the date in prompts, which is in their tokens": ("VLLM_SYSTEM_START_DATE",),
    "which cores it has": ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
    "how long is waited": ("*_TIMEOUT", "*_TIMEOUT_S", "*_TIMEOUT_SECONDS"),
    "what is watched and written": (
        "VLLM_LOG_*", "VLLM_CONFIGURE_LOGGING", "VLLM_DISABLE_LOG_LOGO", "VLLM_DEBUG_*", "VLLM_GC_DEBUG",
        "VLLM_TRACE_FUNCTION", "VLLM_USAGE_SOURCE", "*_PROFILING",
    ),
    "how vLLM was built": (
        "VLLM_BUILD_*", "VLLM_IMAGE_TAG", "VLLM_DOCKER_BUILD_CONTEXT", "CMAKE_BUILD_TYPE", "NVCC_THREADS", "VERBOSE",
        "CUDA_HOME",
    ),
    "where files of vLLM's lie": ("VLLM_CONFIG_ROOT", "VLLM_XLA_CACHE_PATH"),
}  # fmt: skip
"""Patterns of environment variables that do not decide the bytes, and why not. vLLM itself leaves out others, as those
of its log, where it tells compiled code apart."""

DIGESTED = {"VllmConfig": ("additional_config",), "LoadConfig": ("model_loader_extra_config",)}
"""Fields, by class, that may hold secrets, as the key of a bucket: a manifest has no more than their digest."""
PLACE = "_name_or_path"
"""Where a model's configuration came from, as it says itself. Its contents are there, and the weights have a digest."""
FITTED = -1
"""As the longest context: what fits into memory, which vLLM finds out once the layers are made."""


def settings_of(config: VllmConfig) -> dict[str, Any]:
    """All settings that may decide the bytes, as JSON has them. Raises InputError, naming it, for one that cannot be
    read."""
    return dict(_fields(config, ""))


def environment() -> dict[str, str]:
    """The environment variables that are set and may decide the bytes. Those that are not set have the default of the
    engine's version."""
    left_out = [pattern for patterns in ENVIRONMENT_LEFT_OUT.values() for pattern in patterns]
    return {
        name: os.environ[name]
        for name in sorted(envs.compile_factors())
        if name in os.environ and not any(fnmatchcase(name, pattern) for pattern in left_out)
    }


@cache
def left_out(class_name: str) -> frozenset[str]:
    """Names of the fields of a class of vLLM's configurations that do not decide the bytes."""
    return frozenset(name for names in LEFT_OUT.get(class_name, {}).values() for name in names)


def _fields(config: Any, where: str) -> dict[str, Any]:
    skipped = left_out(type(config).__name__)
    names = [field.name for field in dataclasses.fields(config) if field.name not in skipped]
    told = {name: _told(getattr(config, name, None), f"{where}.{name}".lstrip(".")) for name in names}
    for name in DIGESTED.get(type(config).__name__, ()):
        told[name] = namespace_digest({"is": told[name]})
    if "max_model_len" in told and getattr(config, "original_max_model_len", None) == FITTED:
        told["max_model_len"] = FITTED  # the layers were made for all that the model takes, which its files say
    return told


def _told(value: Any, where: str) -> Any:
    """A value as JSON has it, the same in every process."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, float | torch.dtype | Path):
        return str(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):  # a model's configuration, which may be too long for a manifest
        return namespace_digest({"is": json.dumps(_placeless(value.to_dict()), sort_keys=True, default=str)})
    if dataclasses.is_dataclass(value):
        return _fields(value, where)
    if isinstance(value, Mapping):
        return {str(key): _told(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_told(one, where) for one in value]
    if isinstance(value, Set):
        return sorted(json.dumps(_told(one, where), sort_keys=True) for one in value)
    raise InputError(
        f"files of KV: {where} of vLLM's configuration is of {type(value).__qualname__}, by which files cannot be told "
        "apart; leave that setting out, or serve without files"
    )


def _placeless(value: Any) -> Any:
    """A model's configuration, with those of its parts, without :data:`PLACE`."""
    if isinstance(value, Mapping):
        return {key: _placeless(one) for key, one in value.items() if key != PLACE}
    return [_placeless(one) for one in value] if isinstance(value, list | tuple) else value
