"""Small tables of operator times in published layouts, made up by laws that a test can compute itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 4096, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = 4
CHUNKS, CONTEXTS = (16, 64, 256, 1024), (0, 64, 1024, 4096)
REQUESTS, DECODED = (1, 4, 16, 64), (16, 256, 1024, 4096)
TOKENS = (1, 16, 64, 128, 256, 512, 1024)
DENSE_US = {
    "qkv_proj": (9.0, 0.02), "o_proj": (7.0, 0.015), "gate_up_proj": (20.0, 0.05), "down_proj": (12.0, 0.03),
    "act_fn": (2.0, 0.001), "layernorm": (2.0, 0.001), "rotary_emb": (2.0, 0.001),
}  # fmt: skip
ONCE_US = {"embedding": (3.0, 0.001), "final_layernorm": (2.0, 0.001)}


def dense_us(tokens: float) -> float:
    """A step's operators by token: norms twice a layer, embedding and last norm once."""
    per_layer = sum((2 if name == "layernorm" else 1) * (a + b * tokens) for name, (a, b) in DENSE_US.items())
    return LAYERS * per_layer + sum(a + b * tokens for a, b in ONCE_US.values())


def sequences_us(sequences: float) -> float:
    return (30.0 + 0.1 * sequences) + (5.0 + 0.05 * sequences)


def attention_us(chunk: float, context: float, requests: float, decoded: float) -> float:
    """One layer's. Linear in everything but the chunk, between whose measured sizes it is not."""
    prefill = 0.3 * chunk + 0.001 * (chunk * context + chunk * (chunk + 1) / 2) if chunk else 0.0
    return 8.0 + prefill + (0.2 * requests + 0.01 * requests * decoded if requests else 0.0)


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    table = pa.Table.from_pylist([dict(row) for row in rows])
    if file.name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, file)
    else:
        pyarrow.csv.write_csv(table, file)
    return file


def llmservingsim(folder: Path, attention: Callable[[float, float, float, float], float] = attention_us) -> list[Path]:
    """Attention of mixed batches, dense layers and per-sequence layers."""
    batches = [
        *((c, k, 0, 0) for c, k in product(CHUNKS, CONTEXTS)),
        *((0, 0, n, d) for n, d in product(REQUESTS, DECODED)),
        *product(CHUNKS, CONTEXTS, REQUESTS, DECODED),
    ]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    mixed = [dict(zip(names, batch, strict=True)) | {"time_us": float(attention(*batch))} for batch in batches]
    dense = [
        {"layer": name, "tokens": tokens, "time_us": a + b * tokens}
        for name, (a, b) in (DENSE_US | ONCE_US).items()
        for tokens in TOKENS
    ]
    each = [
        {"layer": name, "sequences": count, "time_us": a + b * count}
        for name, a, b in (("lm_head", 30.0, 0.1), ("sampler", 5.0, 0.05))
        for count in (1, 8, 64, 128)
    ]
    return [
        write(folder / "attention.csv", mixed),
        write(folder / "dense.csv", dense),
        write(folder / "per_sequence.csv", each),
    ]


def aiconfigurator_attention(folder: Path, heads: int = 8, kv_heads: int = 2) -> list[Path]:
    """Prefill of 1 us a token and 1 ns a pair, decode of 10 ns a context token; 5 us of launch each."""
    same = {
        "kernel_source": "flash", "device": "NVIDIA H100 80GB HBM3", "num_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 64, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
    }  # fmt: skip
    context = [
        same | {"op_name": "context_attention", "batch_size": b, "isl": n, "step": 0,
                "latency": 1e-3 * (5 + b * n + 1e-3 * b * n * (n + 1) / 2)}
        for b, n in product((1, 2, 4), (16, 64, 256, 1024, 4096))
    ]  # fmt: skip
    generation = [
        same | {"op_name": "generation_attention", "batch_size": b, "isl": 1, "step": s,
                "latency": 1e-3 * (5 + 0.01 * b * (s + 1))}
        for b, s in product((1, 4, 16, 64), (15, 255, 1023, 4095))
    ]  # fmt: skip
    return [write(folder / "context.parquet", context), write(folder / "generation.parquet", generation)]


def gemm(folder: Path, shapes: Iterable[tuple[int, int]]) -> Path:
    """10 us and 1 us per 1e6 multiply-adds."""
    rows = [
        {"device": "NVIDIA H100 80GB HBM3", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k,
         "latency": 1e-3 * (10 + m * n * k / 1e6)}
        for n, k in shapes
        for m in (1, 16, 128, 1024)
    ]  # fmt: skip
    return write(folder / "gemm.parquet", rows)


def vidur(folder: Path, workers: int = 1) -> Path:
    """Nine operators of a layer at 5 us and 10 ns a token, the embedding at 2 us; of another model, ten times that."""
    operators = (
        "input_layernorm_ms", "attn_pre_proj_ms", "attn_rope_ms", "attn_post_proj_ms", "post_attention_layernorm_ms",
        "mlp_up_proj_ms", "mlp_act_ms", "mlp_down_proj_ms", "add_ms",
    )  # fmt: skip
    rows = []
    for times, width in ((1.0, 512), (10.0, 1024)):
        for tokens in TOKENS:
            rows.append(
                {"model": f"m{width}", "num_tokens": tokens, "num_tensor_parallel_workers": workers, "n_head": 8,
                 "n_kv_head": 2, "n_embd": width, "n_expanded_embd": 1024, "emb_ms": 2e-3 * times}
                | dict.fromkeys(operators, times * (5e-3 + 1e-5 * tokens))
            )  # fmt: skip
    return write(folder / "vidur.csv", rows)
