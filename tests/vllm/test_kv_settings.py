"""Every setting of vLLM's decides where files of KV are found, but those of which it is said why they do not."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaConfig
from vllm.config.attention import HiSparseConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.config.mamba import MambaConfig
from vllm.config.parallel import EPLBConfig
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.engine.arg_utils import EngineArgs

from kvpolicy.errors import InputError
from kvpolicy.tiers import namespace_digest
from kvpolicy_vllm.plugin.kv_settings import LEFT_OUT, environment, left_out, settings_of
from tests.vllm.bare_configs import bare, bare_config, drafting, multimodal
from tests.vllm.models import write_llama
from tests.vllm.versions import INSTALLED, quick_and_others, source_or_skip

pytestmark = pytest.mark.scheduler

LOOKED_AT = {
    "VllmConfig": """
        model_config cache_config parallel_config load_config attention_config mamba_config kernel_config
        speculative_config diffusion_config compilation_config additional_config engram_config
    """,
    "ModelConfig": """
        model_weights runner convert trust_remote_code dtype hf_config hf_text_config hf_config_path code_revision
        max_model_len spec_target_max_model_len quantization quantization_config allow_deprecated_quantization
        enforce_eager disable_sliding_window disable_cascade_attn enable_prompt_embeds config_format hf_overrides
        model_impl override_attention_dtype multimodal_config model_class_overrides
        word_embeddings_untied_by_checkpoint is_submodel_config
    """,
    "CacheConfig": """
        block_size hash_block_size cache_dtype is_attention_free sliding_window calculate_kv_scales
        kv_cache_dtype_skip_layers mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype
        mamba_cache_mode kv_sharing_fast_prefill skip_page_size_padded replayssm_buffer_len use_replayssm
        kv_cache_layout use_kda_recoverssm enable_mamba_fine_grained_prefix_cache
        enable_mamba_shared_prefix_checkpoint swa_bounded_replay
    """,
    "ParallelConfig": """
        pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size data_parallel_size is_moe_model
        enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
        all2all_backend disable_custom_all_reduce enable_elastic_ep enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization worker_cls
        sd_worker_cls worker_extension_cls world_size decode_context_parallel_size dcp_kv_cache_interleave_size
        dcp_comm_backend cp_kv_cache_interleave_size enable_batch_sharded_sampling dcp_q_replicate dp_sync_interval
        elastic_ep_max_dp_size _allow_auto_resolve_cp_interleave_size enable_hc_sp
    """,
    "EPLBConfig": """
        window_size step_interval num_redundant_experts use_async policy communicator enable_migration_batching
    """,
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "LoadConfig": "load_format model_loader_extra_config ignore_patterns",
    "KernelConfig": """
        ir_op_priority moe_backend linear_backend linear_backend_per_quant enable_bf16x3_router_gemm
        sparse_indexer_topk_backend monokernel
    """,
    "IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "AttentionConfig": """
        backend backend_per_kind flash_attn_version use_prefill_decode_attention
        flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph use_trtllm_attention
        disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization use_fp4_indexer_cache
        indexer_kv_dtype use_non_causal flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
        flex_attn_kv_block_size sparse_mla_force_mqa minimax_m3_msa_decode_backend hisparse_config
        indexer_sparse_logits tokenspeed_mla_min_split_kv sparse_mla_prefill_workspace_factor trtllm_ragged_backend
        indexer_tp_shard_min_rows minimax_m3_indexer_cp
    """,
    "CompilationConfig": "mode backend custom_ops pass_config",
    "PassConfig": """
        fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops enable_sp fuse_gemm_comms fuse_allreduce_rms
        enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm
        fuse_rope_kvcache rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb sp_min_token_num
        fuse_qk_norm_rope_kvcache
    """,
    "EngramConfig": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
    "SpeculativeConfig": """
        enforce_eager num_speculative_tokens method draft_tensor_parallel_size tensor_parallel_size quantization
        moe_backend attention_backend max_model_len code_revision disable_padded_drafter_batch
        use_local_argmax_reduction prompt_lookup_max prompt_lookup_min parallel_drafting
        num_speculative_tokens_per_batch_size draft_model_config draft_parallel_config
        suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
        synthetic_acceptance_length draft_sample_method use_heterogeneous_vocab kv_cache_dtype
        enable_adaptive_verification dspark_draft_topk index_share_for_mtp_iteration disable_eagle_block_drop
        disable_lookahead_block_hashes draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold
        fly_entropy_top_k
    """,
    "MultiModalConfig": """
        language_model_only enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_encoder_only mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate
        video_pruning_method mm_device_do_normalize allow_missing_mm_embeddings
    """,
}
"""Fields, by class, that decide the bytes, or may. Of a new one, find out what it does. It belongs here unless it does
not change what is computed, nor how it lies in memory: then it belongs to ``LEFT_OUT``, with the reason."""


def declared(folder: Path) -> dict[str, dict[str, str]]:
    """Classes of vLLM's configurations, with the types of their fields, as its sources have them."""
    kinds: dict[str, dict[str, str]] = {}
    for path in sorted((folder / "config").glob("*.py")):
        for kind in (one for one in ast.parse(path.read_text()).body if isinstance(one, ast.ClassDef)):
            lines = [line for line in kind.body if isinstance(line, ast.AnnAssign)]
            types = {ast.unparse(line.target): ast.unparse(line.annotation) for line in lines}
            kinds[kind.name] = {name: of for name, of in types.items() if "ClassVar" not in of and "InitVar" not in of}
    return {name: types for name, types in kinds.items() if types}


def within_settings(kinds: dict[str, dict[str, str]]) -> set[str]:
    """Classes of which vLLM's settings are made, without what is left out."""
    found: set[str] = set()
    ahead = ["VllmConfig"]
    while ahead:
        kind = ahead.pop()
        if kind not in found:
            found.add(kind)
            types = " ".join(of for name, of in kinds[kind].items() if name not in left_out(kind))
            ahead += [word for word in re.findall(r"\w+", types) if word in kinds]
    return found


@pytest.mark.parametrize("version", quick_and_others(INSTALLED))
def test_every_setting_was_looked_at(version: str) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = source_or_skip(version)
    known = {kind: {*names.split(), *left_out(kind)} for kind, names in LOOKED_AT.items()}
    kinds = declared(Path(source, "vllm") if source else Path(spec.origin).parent)
    within = within_settings(kinds)
    assert {*LEFT_OUT, *LOOKED_AT} <= {*known} and {"VllmConfig", "PassConfig", "QuantSpec"} <= within <= {*known}
    assert [f"{kind}.{name}" for kind in {*known} & {*kinds} for name in kinds[kind] if name not in known[kind]] == []


def test_what_is_looked_at_is_not_left_out_as_well() -> None:
    assert not [(kind, name) for kind, names in LOOKED_AT.items() for name in names.split() if name in left_out(kind)]


NESTED: dict[str, Any] = {
    "mamba_config": bare(MambaConfig), "diffusion_config": bare(DiffusionConfig), "eplb_config": bare(EPLBConfig),
    "ir_op_priority": bare(IrOpPriorityConfig), "hisparse_config": bare(HiSparseConfig),
    "quantization_config": bare(QuantizationConfigArgs, linear=bare(QuantSpec)),
}  # fmt: skip
"""Configurations within others, by the names of their fields."""


def parts_of(config: Any) -> Iterator[Any]:
    """It, and what lies in it of vLLM's classes and is not left out."""
    yield config
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and field.name not in left_out(type(config).__name__):
            yield from parts_of(value)


def test_every_field_is_told_apart_but_those_left_out(tmp_path: Path) -> None:
    config = bare_config(tmp_path, speculative_config=drafting(tmp_path), multimodal_config=multimodal(), **NESTED)
    before, wrong, seen = namespace_digest(settings_of(config)), [], set()
    for part in [*parts_of(config)]:
        kind = type(part).__name__
        for field in fields(part):
            value = getattr(part, field.name)
            setattr(part, field.name, "another")
            if (namespace_digest(settings_of(config)) == before) != (field.name in left_out(kind)):
                wrong.append(f"{kind}.{field.name}")
            setattr(part, field.name, value)
            seen.add(kind)
    assert wrong == [] and seen == {*LOOKED_AT} - {"EngramConfig"}
    assert namespace_digest(settings_of(config)) == before


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.float16, "torch.float16"), (Path("/a"), "/a"), (Color.RED, "Color.RED"), (float("inf"), "inf"),
        ({1: (2, None)}, {"1": [2, None]}), ({"b", "a"}, ['"a"', '"b"']), (Path, f"{Path.__module__}.Path"),
        (write_llama, "tests.vllm.models.write_llama"),
    ],
)  # fmt: skip
def test_values_have_a_form_that_is_the_same_in_every_process(tmp_path: Path, value: Any, told: Any) -> None:
    assert settings_of(bare_config(tmp_path, hf_overrides=value))["model_config"]["hf_overrides"] == told


def test_secrets_are_in_no_manifest(tmp_path: Path) -> None:
    def written(secret: str) -> str:
        given = {"model_loader_extra_config": {"s3_secret_access_key": secret}, "additional_config": {"key": secret}}
        return json.dumps(settings_of(bare_config(tmp_path, **given)))

    assert "hidden" not in written("hidden") and written("hidden") != written("another")


def test_a_value_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    config = bare_config(tmp_path, additional_config={"mine": object()})
    with pytest.raises(InputError, match=r"additional_config\.mine of vLLM's configuration is of object"):
        settings_of(config)


@pytest.mark.parametrize("fitted", [False, True])
def test_a_longest_context_that_vllm_fits_to_memory_is_none_of_its_own(tmp_path: Path, fitted: bool) -> None:
    """The layers were made before: positions of LongRoPE go by the longest context of that time."""
    config = bare_config(tmp_path)
    config.model_config.original_max_model_len = -1 if fitted else 4096
    before = settings_of(config)
    config.model_config.max_model_len = 2048
    assert (settings_of(config) == before) == fitted


def test_where_a_model_lies_is_no_setting(tmp_path: Path) -> None:
    def settings(place: str, layers: int = 2) -> dict[str, Any]:
        whole: Any = LlamaConfig()
        part = whole.text_config = LlamaConfig(num_hidden_layers=layers)
        whole.name_or_path = part.name_or_path = place
        return settings_of(bare_config(tmp_path, hf_config=whole, hf_text_config=part))

    assert settings("/models/llama") == settings("llama")
    assert settings("llama", layers=3)["model_config"]["hf_config"] != settings("llama")["model_config"]["hf_config"]


def test_the_environment_is_told_apart_without_secrets_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment()
    for name in (
        "VLLM_API_KEY", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL",
        "VLLM_SYSTEM_START_DATE",
    ):  # fmt: skip
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NO_VARIABLE_OF_VLLM", "1")
    assert environment() == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert environment() == before | {"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_KV_CACHE_LAYOUT": "HND"}


def test_vllms_own_configurations_can_be_read(tmp_path: Path) -> None:
    def settings(folder: str = "here", **more: Any) -> dict[str, Any]:
        model = str(write_llama(tmp_path / folder))
        arguments = EngineArgs(model=model, dtype="float32", skip_tokenizer_init=True, **{"max_model_len": 512} | more)
        return settings_of(arguments.create_engine_config())

    plain = settings()
    assert settings("elsewhere") == plain
    assert settings(max_num_seqs=7, max_num_batched_tokens=640, num_gpu_blocks_override=99, seed=3) == plain
    assert len(json.dumps(plain)) < 1 << 16  # a manifest has it
    rope = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    others: list[dict[str, Any]] = [
        {"max_model_len": 1024},
        {"hf_overrides": rope},
        {"block_size": 64},
        {"enforce_eager": True},
    ]
    digests = [namespace_digest(one) for one in (plain, *(settings(**other) for other in others))]
    assert len({*digests}) == len(digests)
