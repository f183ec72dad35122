"""Hugging Face configurations of well-known models: the fields that decide costs, as published."""

from __future__ import annotations

from typing import Any

LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = LLAMA_31_8B | {
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip
MIXTRAL_8X7B = LLAMA_31_8B | {
    "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "vocab_size": 129280, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 48,
}  # fmt: skip
GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "full_attention_interval": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "intermediate_size": 5120, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
GRANITE_4_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72,
    "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)], "vocab_size": 100352,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "expand": 2,
    "use_conv_bias": True, "mamba_hidden_act": "silu", "vocab_size": 131072, "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = NEMOTRON_H_8B | {
    "hidden_size": 2688, "num_key_value_heads": 2, "intermediate_size": 1856, "mamba_num_heads": 64,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "mamba_ssm_cache_dtype": "float32",
    "hybrid_override_pattern": "ME" * 20 + "M*E" * 3 + "***",
}  # fmt: skip
