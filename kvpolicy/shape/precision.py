"""Bits per weight and per KV value, from the quantization_config of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpolicy.shape.layers import ConfigError

Config = Mapping[str, Any]
Arithmetic = Literal["bf16", "fp8", "int8"]

FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "half": 16, "float": 32}
FP8_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})


_NOT_QUANTISED: tuple[Arithmetic, bool] = ("bf16", False)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits per weight by part of the model, scales and zero points included; bits per KV value; and the arithmetic."""

    attention: float
    mlp: float
    experts: float
    other: float
    """Embedding and head, which quantisations leave as they are."""
    kv: float
    arithmetic: Arithmetic
    """Number format of the linear layers' products; ``bf16`` stands for all 16-bit and wider types."""
    dtype: str
    """Data type of what is not quantised."""
    state: float = 0.0
    """Bits per value of a state that takes the place of KV."""


def precision_of(config: Config, text: Config, kv_cache_dtype: str) -> Precision:
    """Derive the precision. ``text``: the configuration's part about the language model.

    Raises ConfigError naming the field that is missing or not understood.
    """
    dtype = _dtype(config, text)
    other = FLOAT_BITS[dtype]
    quantised = config.get("quantization_config") or text.get("quantization_config")
    if quantised and not isinstance(quantised, Mapping):
        raise ConfigError(f"field quantization_config is {quantised!r}, should be an object")
    bits, arithmetic, experts_only = _quantised(quantised) if quantised else (other, *_NOT_QUANTISED)
    plain = other if experts_only else bits
    kv = _kv_bits(quantised or {}, kv_cache_dtype, other)
    return Precision(plain, plain, bits, other, kv, arithmetic, dtype, _state_bits(text, other))


def _state_bits(text: Config, model_bits: int) -> float:
    """Bits per value of a state: those that the configuration asks for, else the model's own."""
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        value = text.get(name)
        if value not in (None, "auto"):
            if value not in FLOAT_BITS:
                raise ConfigError(f"field {name} is {value!r}, should be auto or one of {', '.join(FLOAT_BITS)}")
            return FLOAT_BITS[value]
    return model_bits


def _dtype(config: Config, text: Config) -> str:
    for part in (text, config):
        for name in ("torch_dtype", "dtype"):
            if part.get(name) is not None:
                value = str(part[name]).removeprefix("torch.")
                if value not in FLOAT_BITS:
                    raise ConfigError(f"field {name} is {value!r}, should be one of {', '.join(FLOAT_BITS)}")
                return value
    raise ConfigError("field torch_dtype or dtype is missing")


def _quantised(config: Config) -> tuple[float, Arithmetic, bool]:
    """Bits per weight, the arithmetic, and whether only experts are quantised."""
    method = config.get("quant_method")
    if method in ("gptq", "awq", "gptq_marlin", "awq_marlin"):
        bits = _field(config, "bits")
        # Each group has a 16-bit scale and a zero point of the weights' width. -1 is one group per column: negligible.
        group = _field(config, "group_size")
        return bits + ((16 + bits) / group if group > 0 else 0.0), "bf16", False
    if method == "fp8":
        block = config.get("weight_block_size")
        return 8 + (32 / (block[0] * block[1]) if block else 0.0), "fp8", False
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "bitsandbytes":
        return (8.0, "int8", False) if config.get("load_in_8bit") else (4.5, "bf16", False)
    if method == "mxfp4":
        return 4.25, "bf16", True
    if method == "modelopt":
        return _modelopt(config)
    known = "gptq, awq, fp8, compressed-tensors, bitsandbytes, mxfp4, modelopt"
    raise ConfigError(f"field quantization_config.quant_method is {method!r}, known are {known}")


def _compressed(config: Config) -> tuple[float, Arithmetic, bool]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("field quantization_config.config_groups is missing")
    group = next(iter(groups.values()))
    _refuse_several(groups)
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError("field quantization_config.config_groups.*.weights is missing")
    bits = _field(weights, "num_bits")
    size = weights.get("group_size")
    # Groups of 4-bit floats (NVFP4, MXFP4) have 8-bit scales, groups of integers 16-bit scales.
    scale = 8 if bits == 4 and weights.get("type") == "float" else 16
    overhead = scale / size if isinstance(size, int) and size > 0 else 0.0
    if inputs and inputs.get("num_bits") == 8:
        return bits + overhead, "int8" if inputs.get("type") == "int" else "fp8", False
    return bits + overhead, "bf16", False


def _refuse_several(groups: Config) -> None:
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    widths = {group_weights.get("num_bits") for group_weights in weights if isinstance(group_weights, Mapping)}
    if len(widths) > 1:
        raise ConfigError(
            "field quantization_config.config_groups has weights of several widths: how many of each is unknown"
        )


def _modelopt(config: Config) -> tuple[float, Arithmetic, bool]:
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm == "FP8":
        return 8.0, "fp8", False
    if algorithm == "NVFP4":
        return 4.5, "bf16", False
    raise ConfigError(f"field quantization_config.quant_algo is {algorithm!r}, should be FP8 or NVFP4")


def _kv_bits(quantised: Config, kv_cache_dtype: str, model_bits: float) -> float:
    if kv_cache_dtype in FP8_KV:
        return 8
    if kv_cache_dtype in FLOAT_BITS:
        return FLOAT_BITS[kv_cache_dtype]
    if kv_cache_dtype != "auto":
        known = ", ".join(["auto", *FLOAT_BITS, *sorted(FP8_KV)])
        raise ConfigError(f"KV cache dtype is {kv_cache_dtype!r}, should be one of {known}")
    scheme = quantised.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _field(scheme, "num_bits")
    if str(quantised.get("kv_cache_quant_algo") or "").upper() == "FP8":
        return 8
    return model_bits


def _field(config: Config, name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"field quantization_config.{name} is {value!r}, should be a whole number")
    return float(value)
