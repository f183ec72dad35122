"""Layouts of published operator timings: their columns, and the physics of each operator.

* AIConfigurator (ai-dynamo/aiconfigurator, systems/data): prefill attention, decode attention, matrix products.
* LLMServingSim (casys-kaist/LLMServingSim, profiler): attention of mixed batches, dense layers, per-sequence layers.
* Vidur (microsoft/vidur, data/profiling): the linear operators of a layer.
* Splitwise (Mutinifni/splitwise-sim, data/perf_model.csv): whole prompt and token phases.
* Sarathi (microsoft/sarathi-serve, osdi-experiments): whole batches by tokens in them.

Kernels work in tiles, a tile per multiprocessor at a time: a matrix product of 129 rows takes as long as one of 256,
and of 109 tiles on 108 multiprocessors as long as of 216. Features therefore include work rounded up to tiles and to
waves (rounds of tiles over all multiprocessors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvpolicy.arrays import Flags, Floats, causal_pairs
from kvpolicy.errors import InputError
from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.simulator.hardware.layout import Layout, Part, Rows, Times

Features = dict[str, Floats]

TILE = 128
"""Rows and columns of a tile of today's matrix and attention kernels; some are smaller, which the residual learns."""
ELEMENT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "float32": 4.0}
NATIVE_DTYPE = "bfloat16"
MULTIPROCESSORS = {
    "A100": 108, "H100": 132, "H200": 132, "B200": 148, "L40S": 142, "4090": 128,
}  # fmt: skip
"""Multiprocessors by part of the device's name. Source: vendor's papers (GA100, GH100 SXM, GB200, AD102)."""

UNITS = {
    "flops": "FLOP", "tile_flops": "FLOP", "wave_flops": "FLOP", "bytes": "B", "kv_bytes": "B", "inner": "element",
    "pairs": "(token, earlier token) pair", "serial": "element of the longest row", "tokens": "token",
    "tile_tokens": "token", "prefill_pairs": "(token, earlier token) pair", "kv_read": "token read",
    "decode_read": "token read", "weights": "weight", "row_outputs": "element",
}  # fmt: skip


def _physics(*ceilings: tuple[str, ...], known: Mapping[str, Floats]) -> Ceilings:
    """These ceilings without terms that are unknown for this file, as waves of an unknown device."""
    known_terms = tuple(tuple(name for name in ceiling if name == LAUNCH or name in known) for ceiling in ceilings)
    return Ceilings(tuple(terms for terms in known_terms if terms), UNITS)


def _tiles(count: Floats) -> Floats:
    return np.ceil(count / TILE)


def _multiprocessors(rows: Rows) -> Floats | None:
    """Multiprocessors per row, by the device's name; None where a device is unknown."""
    if "device" not in rows.names:
        return None
    counts = {
        device: next((count for part, count in MULTIPROCESSORS.items() if part in device), None)
        for device in set(rows.text("device").tolist())
    }
    if None in counts.values():
        return None
    return np.array([counts[device] for device in rows.text("device").tolist()], np.float64)


def _with_waves(features: Features, rows: Rows, tile_flops: Floats) -> None:
    """Add features of the multiprocessors' occupancy, where their number is known."""
    processors = _multiprocessors(rows)
    if processors is None:
        return
    waves = np.ceil(features["tiles"] / processors)
    features["waves"] = waves
    features["fill"] = features["tiles"] / processors / waves
    features["wave_flops"] = waves * processors * tile_flops


# ---- AIConfigurator ----


def _native(rows: Rows, names: tuple[str, ...]) -> tuple[Flags, tuple[str, ...]]:
    """The rows in bfloat16, and a note on the others."""
    native = np.ones(len(rows), np.bool_)
    for name in names:
        if name in rows.names:
            native &= rows.text(name) == NATIVE_DTYPE
    note = () if native.all() else (f"{int(native.sum())} of {len(rows)} rows are {NATIVE_DTYPE}, the others left out",)
    return native, note


def _context_attention(rows: Rows) -> Iterator[Part]:
    batch, length = rows.number("batch_size"), rows.number("isl")
    heads, kv_heads, dim = rows.number("num_heads"), rows.number("num_key_value_heads"), rows.number("head_dim")
    window = _window(rows)
    seen = np.where((window > 0) & (window < length), window, length)
    pairs = causal_pairs(0, seen) + (length - seen) * seen
    flops = 4 * batch * heads * dim * pairs
    moved = batch * length * dim * (2 * heads + 2 * kv_heads) * ELEMENT_BYTES[NATIVE_DTYPE]
    features: Features = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim, "length": length, "seen": seen,
        "window": window, "kernel": rows.codes("kernel_source"), "flops": flops, "bytes": moved,
        "intensity": flops / moved, "tiles": batch * heads * _tiles(length), "serial": seen * dim,
        "row_outputs": batch * heads * length,
    }  # fmt: skip
    _with_waves(features, rows, seen * dim)
    physics = _physics(
        (LAUNCH,), ("flops",), ("bytes",), ("serial",), ("row_outputs",), ("wave_flops",), known=features
    )
    yield from _attention(rows, "prefill attention", features, physics, length, batch)


def _generation_attention(rows: Rows) -> Iterator[Part]:
    batch, length = rows.number("batch_size"), rows.number("step") + rows.number("isl")
    heads, kv_heads, dim = rows.number("num_heads"), rows.number("num_key_value_heads"), rows.number("head_dim")
    window = _window(rows)
    seen = np.where((window > 0) & (window < length), window, length)
    flops = 4 * batch * heads * dim * seen
    moved = 2 * batch * kv_heads * dim * seen * ELEMENT_BYTES[NATIVE_DTYPE]
    # The context of a sequence is split over idle multiprocessors: a tile is 128 tokens of one KV head's context.
    features: Features = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim, "length": length, "seen": seen,
        "window": window, "kernel": rows.codes("kernel_source"), "flops": flops, "bytes": moved,
        "sharing": heads / kv_heads, "tiles": batch * kv_heads * _tiles(seen), "sequences": batch * kv_heads,
        "row_outputs": batch * heads * dim,
    }  # fmt: skip
    _with_waves(features, rows, TILE * dim)
    physics = _physics((LAUNCH,), ("flops",), ("bytes",), ("row_outputs",), ("wave_flops",), known=features)
    yield from _attention(rows, "decode attention", features, physics, length, batch)


def _window(rows: Rows) -> Floats:
    """Tokens that a query attends to; 0 for all."""
    return rows.number("window_size") if "window_size" in rows.names else np.zeros(len(rows))


def _attention(
    rows: Rows, operator: str, features: Features, physics: Ceilings, length: Floats, batch: Floats
) -> Iterator[Part]:
    native, note = _native(rows, ("attn_dtype", "kv_cache_dtype"))
    names = ("batch", "heads", "kv_heads", "dim", "length", "window", "kernel")
    settings = {name: features[name] for name in names}
    yield Part(operator, "latency", native, Times(settings, features, length, batch, "context tokens", physics), note)


def _gemm(rows: Rows) -> Iterator[Part]:
    m, n, k = rows.number("m"), rows.number("n"), rows.number("k")
    native, note = _native(rows, ("gemm_dtype",))
    flops, moved = 2 * m * n * k, (m * k + k * n + m * n) * ELEMENT_BYTES[NATIVE_DTYPE]
    tiles = _tiles(m) * _tiles(n)
    features: Features = {
        "m": m, "n": n, "k": k, "flops": flops, "bytes": moved, "intensity": flops / moved, "tiles": tiles,
        "tile_flops": 2 * TILE * TILE * tiles * k, "inner": k,
    }  # fmt: skip
    _with_waves(features, rows, 2 * TILE * TILE * k)
    physics = _physics((LAUNCH,), ("flops", "bytes"), ("inner",), ("wave_flops",), ("tile_flops",), known=features)
    settings = {name: features[name] for name in ("m", "n", "k")}
    yield Part("matrix product", "latency", native, Times(settings, features, m, n * k, "tokens", physics), note)


# ---- LLMServingSim ----


def _mixed_attention(rows: Rows) -> Iterator[Part]:
    chunk, before = rows.number("prefill_chunk"), rows.number("kv_prefill")
    decoding, context = rows.number("n_decode"), rows.number("kv_decode")
    pairs = causal_pairs(before, before + chunk)
    features: Features = {
        "chunk": chunk, "before": before, "decoding": decoding, "context": context,
        "prefill_pairs": pairs, "tile_pairs": _tiles(chunk) * TILE * (before + chunk),
        "kv_read": np.where(chunk > 0, before + chunk, 0.0), "decode_read": decoding * context,
        "tiles": _tiles(chunk) + decoding, "tokens": chunk + decoding,
        "context_read": np.where(decoding > 0, context, 0.0),
        "mixed": ((chunk > 0) & (decoding > 0)).astype(np.float64),
    }  # fmt: skip
    physics = _physics(
        (LAUNCH,), ("prefill_pairs",), ("tile_pairs",), ("kv_read",), ("decode_read",), ("context_read",), ("tokens",),
        known=features,
    )  # fmt: skip
    settings = {name: features[name] for name in ("chunk", "before", "decoding", "context")}
    length = np.maximum(np.where(chunk > 0, before + chunk, 0.0), np.where(decoding > 0, context, 0.0))
    times = Times(settings, features, length, chunk + decoding, "context tokens", physics)
    yield Part("attention", "time_us", np.ones(len(rows), np.bool_), times)


WITHOUT_WEIGHTS = ("norm", "act", "rope", "rotary", "embedding", "sampler")
"""Words in the names of operators that read hardly any weights and are never compute-bound."""
ELEMENTWISE = Ceilings(((LAUNCH,), ("tokens",)), UNITS)
WITH_WEIGHTS = Ceilings(((LAUNCH, "tile_tokens"), ("tokens",), ("tile_tokens",)), UNITS)
WHOLE = "all operators together"
"""The sum of all operators at equal settings: what a step of the model takes."""


def _by_tokens(rows: Rows, operator: str, tokens: str, time: str) -> Iterator[Part]:
    """Layers whose weights are read once however many tokens there are: the slower of compute and weights counts."""
    count, names, seconds = rows.number(tokens), rows.text(operator), rows.number(time)
    settings = {"tokens": count}
    tiles = _tiles(count)
    features: Features = settings | {"tile_tokens": tiles * TILE, "half_tiles": np.ceil(count / (TILE / 2))}
    operators = sorted(set(names.tolist()))
    for name in operators:
        physics = ELEMENTWISE if any(word in name for word in WITHOUT_WEIGHTS) else WITH_WEIGHTS
        times = Times(settings, features, count, np.ones(len(rows)), "tokens", physics)
        yield Part(name, time, names == name, times)
    if len(operators) > 1:
        first_operator = names == operators[0]
        total = np.full(len(rows), np.nan)
        total[first_operator] = [seconds[count == value].sum() for value in count[first_operator]]
        complete = first_operator & np.array([(count == value).sum() == len(operators) for value in count])
        times = Times(settings, features, count, np.ones(len(rows)), "tokens", WITH_WEIGHTS)
        yield Part(WHOLE, time, complete, times, seconds=np.where(complete, total, 1.0))


# ---- Vidur ----

VIDUR_OPERATORS = {
    "attn_pre_proj_ms": ("qkv", True), "attn_post_proj_ms": ("out", True), "mlp_up_proj_ms": ("mlp", True),
    "mlp_down_proj_ms": ("mlp", True), "attn_rope_ms": ("rope", True), "mlp_act_ms": ("act", True),
    "input_layernorm_ms": ("norm", False), "post_attention_layernorm_ms": ("norm", False),
    "add_ms": ("norm", False), "emb_ms": ("norm", True),
}  # fmt: skip
"""Size of the layer that an operator works on, and whether tensor-parallel workers share it."""


def _vidur(rows: Rows) -> Iterator[Part]:
    tokens, width = rows.number("num_tokens"), rows.number("n_embd")
    head, kv_head = rows.number("n_head"), rows.number("n_kv_head")
    workers, inner = rows.number("num_tensor_parallel_workers"), rows.number("n_expanded_embd")
    kv_share = kv_head / head
    outputs = {
        "qkv": width * (1 + 2 * kv_share), "out": width, "mlp": inner, "rope": width * (1 + kv_share), "act": inner,
        "norm": np.ones(len(rows)),
    }  # fmt: skip
    settings = {
        "tokens": tokens, "workers": workers, "model": rows.codes("model"), "width": width, "head": head,
        "kv_head": kv_head, "inner": inner,
    }  # fmt: skip
    for time, (size, shared) in VIDUR_OPERATORS.items():
        if time not in rows.names:
            continue
        share = workers if shared else np.ones(len(rows))
        wide = outputs[size] / share
        features = (
            _linear_features(tokens, width, wide) if size in ("qkv", "out", "mlp") else _elementwise(tokens, wide)
        )
        if size == "norm":
            features = _elementwise(tokens, width / share)
        physics = _vidur_physics(features)
        times = Times(settings, settings | features, tokens, 1 / workers, "tokens", physics)
        yield Part(time.removesuffix("_ms"), time, np.ones(len(rows), np.bool_), times)
    yield _vidur_layer(rows, settings, {size: outputs[size] / workers for size in ("qkv", "out", "mlp")})


def _vidur_layer(rows: Rows, settings: Features, outputs: Features) -> Part:
    """The sum of the operators of one layer, without the embedding."""
    tokens, width = settings["tokens"], settings["width"]
    weights = width * (outputs["qkv"] + outputs["out"] + 2 * outputs["mlp"])
    features: Features = {
        "weights": weights, "flops": 2 * tokens * weights, "tile_flops": 2 * _tiles(tokens) * TILE * weights,
        "bytes": 2 * weights, "moved": 2 * tokens * width,
    }  # fmt: skip
    physics = _physics((LAUNCH,), ("tile_flops", "bytes"), ("flops",), ("moved",), known=features)
    times = [name for name in VIDUR_OPERATORS if name in rows.names and name != "emb_ms"]
    total = np.nansum([rows.number(name) for name in times], axis=0)
    layer_times = Times(settings, settings | features, tokens, 1 / settings["workers"], "tokens", physics)
    return Part(WHOLE, "attn_pre_proj_ms", np.ones(len(rows), np.bool_), layer_times, seconds=total)


def _linear_features(tokens: Floats, inputs: Floats, outputs: Floats) -> Features:
    flops, weights = 2 * tokens * inputs * outputs, inputs * outputs
    return {
        "flops": flops, "weights": weights, "bytes": 2 * (weights + tokens * (inputs + outputs)),
        "tile_flops": 2 * _tiles(tokens) * TILE * inputs * outputs, "tiles": _tiles(tokens) * _tiles(outputs),
        "wide": outputs,
    }  # fmt: skip


def _elementwise(tokens: Floats, wide: Floats) -> Features:
    return {"bytes": 2 * tokens * wide, "wide": wide}


def _vidur_physics(features: Features) -> Ceilings:
    if "flops" in features:
        return _physics((LAUNCH,), ("tile_flops", "bytes"), ("flops",), ("bytes",), known=features)
    return _physics((LAUNCH, "bytes"), ("bytes",), known=features)


# ---- Splitwise, Sarathi ----


def _splitwise(rows: Rows) -> Iterator[Part]:
    batch, workers = rows.number("batch_size"), rows.number("tensor_parallel")
    prompt, output = rows.number("prompt_size"), rows.number("token_size")
    models = np.char.add(np.char.add(rows.text("model"), " on "), rows.text("hardware"))
    settings = {"prompt": prompt, "batch": batch, "output": output, "workers": workers}
    tokens, context = batch * prompt, batch * (prompt + output / 2)
    prefill: Features = {
        "prompt": prompt, "batch": batch, "workers": workers, "tokens": tokens / workers,
        "pairs": batch * causal_pairs(0, prompt) / workers, "weights": 1 / workers, "moved": tokens,
    }  # fmt: skip
    decode: Features = settings | {"tokens": batch / workers, "kv_read": context / workers, "weights": 1 / workers}
    for name in sorted(set(models.tolist())):
        of_model = models == name
        prompt_times = Times(
            {key: settings[key] for key in ("prompt", "batch", "workers")}, prefill, prompt, batch, "prompt tokens",
            _physics((LAUNCH,), ("tokens", "weights"), ("pairs",), ("moved",), known=prefill),
        )  # fmt: skip
        yield Part(f"prompt of {name}", "prompt_time", of_model, prompt_times)
        token_times = Times(
            settings, decode, prompt + output, batch, "context tokens",
            _physics((LAUNCH,), ("weights",), ("tokens",), ("kv_read",), known=decode),
        )  # fmt: skip
        yield Part(f"token of {name}", "token_time", of_model, token_times)


def _sarathi(rows: Rows) -> Iterator[Part]:
    prefill, decode = rows.number("batch_num_prefill_tokens"), rows.number("batch_num_decode_tokens")
    settings = {"prefill": prefill, "decode": decode}
    features: Features = settings | {"tokens": prefill + decode, "pairs": causal_pairs(0, prefill)}
    physics = _physics((LAUNCH,), ("tokens",), ("pairs",), known=features)
    times = Times(settings, features, prefill + decode, decode, "tokens in the batch", physics)
    yield Part("whole batch", "batch_execution_time", np.ones(len(rows), np.bool_), times)


def _layout(
    name: str,
    counts: str,
    others: str,
    seconds_per_unit: float,
    parts: Callable[[Rows], Iterator[Part]],
    may_be_absent: bool = False,
) -> Layout:
    numbers = frozenset(counts.split())
    return Layout(name, numbers | frozenset(others.split()), numbers, seconds_per_unit, parts, may_be_absent)


_HEADS = "batch_size isl num_heads num_key_value_heads head_dim step"


def _aiconfigurator_attention(rows: Rows) -> Iterator[Part]:
    """Attention of the phase named in ``op_name``; both phases have the same columns."""
    words = set(rows.text("op_name").tolist())
    if words == {"context_attention"}:
        yield from _context_attention(rows)
    elif words == {"generation_attention"}:
        yield from _generation_attention(rows)
    else:
        raise InputError(f"{rows.file}: op_name is {sorted(words)}, should be context_ or generation_attention")


LAYOUTS: tuple[Layout, ...] = (
    _layout("aiconfigurator attention", _HEADS, "op_name kernel_source latency", 1e-3, _aiconfigurator_attention),
    _layout("aiconfigurator gemm", "m n k", "gemm_dtype latency", 1e-3, _gemm),
    _layout("llmservingsim attention", "prefill_chunk kv_prefill n_decode kv_decode", "time_us", 1e-6,
            _mixed_attention),
    _layout("llmservingsim dense", "tokens", "layer time_us", 1e-6,
            lambda rows: _by_tokens(rows, "layer", "tokens", "time_us")),
    _layout("llmservingsim per-sequence", "sequences", "layer time_us", 1e-6,
            lambda rows: _by_tokens(rows, "layer", "sequences", "time_us")),
    _layout("llmservingsim layers", "input kv_cache", "layer_name latency(ns)", 1e-9,
            lambda rows: _by_tokens(rows, "layer_name", "input", "latency(ns)")),
    _layout("vidur linear operators", "num_tokens num_tensor_parallel_workers n_head n_kv_head n_embd n_expanded_embd",
            "model attn_pre_proj_ms", 1e-3, _vidur, True),
    _layout("splitwise", "prompt_size batch_size token_size tensor_parallel",
            "model hardware prompt_time token_time", 1e-3, _splitwise),
    _layout("sarathi", "batch_num_prefill_tokens batch_num_decode_tokens", "batch_execution_time", 1.0, _sarathi),
)  # fmt: skip
