"""Cost-related counts from a Hugging Face config.json: parameters, weight and KV bytes, FLOPs, by kind of layer.

Counts cover the text model only. FLOPs are multiply-adds times two. ``linear_flops_per_token`` leaves out embedding
look-ups, which multiply nothing, and the head, which a prefill applies to its last token only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.shape import recurrent
from kvpolicy.shape.layers import Attention, Config, ConfigError, Mlp, attentions_of, mlps_of, number, text_of
from kvpolicy.shape.precision import FLOAT_BITS, Precision, precision_of
from kvpolicy.shape.refusals import refuse_uncounted
from kvpolicy.stored_values import read_json, reason_of

TIED_UNLESS_SAID = frozenset(
    {"bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt"}
)
"""Families in which the head shares the embedding's weights unless ``tie_word_embeddings`` says otherwise."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Identical layers, and how many there are."""

    layers: int
    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the costs of a decoder-only model depend on, summed over all ranks."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    kinds: tuple[LayerKind, ...]
    precision: Precision

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> ModelShape:
        """Derive the shape from a config.json's content.

        ``kv_cache_dtype`` is vLLM's flag of that name: ``auto``, a float type or ``fp8``.

        Raises :class:`ConfigError` naming the field that is missing or not understood.
        """
        text = text_of(config)
        family = str(text.get("model_type", ""))
        layers_of, counted = recurrent.UNDERSTOOD.get(family, (_attending, frozenset()))
        refuse_uncounted(text, counted)
        pairs = list(zip(*layers_of(text, family), strict=True))
        kinds = tuple(LayerKind(pairs.count(pair), *pair) for pair in dict.fromkeys(pairs))
        return cls(
            name=str(config.get("_name_or_path") or family),
            hidden=number(text, "hidden_size", "n_embd", "d_model"),
            vocab=number(text, "vocab_size"),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in TIED_UNLESS_SAID))),
            kinds=kinds,
            precision=precision_of(config, text, kv_cache_dtype),
        )

    @classmethod
    def read(cls, path: Path | str, kv_cache_dtype: str = "auto") -> ModelShape:
        """Read a config.json, or the one in a model folder. Raises ConfigError naming file and field."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            config = read_json(file)
        except FileNotFoundError as error:
            raise ConfigError(f"{file}: no such file; should be a model's config.json, or its folder") from error
        except (OSError, InputError) as error:
            raise ConfigError(f"{file}: not a readable config.json: {reason_of(error)}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{file}: not a readable config.json: holds no object")
        try:
            return cls.from_config(config, kv_cache_dtype)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A field of a family that holds something else than every published model's does.
            raise ConfigError(f"{file}: a field is of an unexpected kind: {type(error).__name__}: {error}") from error

    @property
    def layers(self) -> int:
        return sum(kind.layers for kind in self.kinds)

    def layers_with(self, wanted: Callable[[Attention], bool]) -> int:
        """Number of layers whose attention, or what takes its place, is as wanted."""
        return sum(kind.layers for kind in self.kinds if wanted(kind.attention))

    # ---- parameters and weights ----

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and, unless they are shared, of the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters, without the vectors of norms."""
        return self.embedding_parameters + self._layer_parameters(active=False)

    def _layer_parameters(self, active: bool) -> int:
        return sum(
            kind.layers * (kind.attention.parameters + (kind.mlp.active if active else kind.mlp.parameters))
            for kind in self.kinds
        )

    @property
    def steady_weight_bytes(self) -> float:
        """Bytes of weights that every step reads: all layers without the routed experts, and the head."""
        bits = self.precision
        steady = sum(
            kind.layers
            * (kind.attention.parameters * bits.attention + (kind.mlp.parameters - kind.mlp.routed) * bits.mlp)
            for kind in self.kinds
        )
        return (steady + self.vocab * self.hidden * bits.other) / 8

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of the weights of all routed experts."""
        return sum(kind.layers * kind.mlp.routed for kind in self.kinds) * self.precision.experts / 8

    @property
    def expert_miss(self) -> float:
        """Share of the routed experts that one token does not use; 0 without experts."""
        routed = [kind.mlp for kind in self.kinds if kind.mlp.experts]
        return 1.0 - routed[0].chosen / routed[0].experts if routed else 0.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        embedding = 0 if self.tied else self.vocab * self.hidden * self.precision.other / 8
        return self.steady_weight_bytes + self.expert_weight_bytes + embedding

    # ---- KV ----

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has any. Raises ConfigError for a model without."""
        found = next((kind.attention for kind in self.kinds if kind.attention.attends), None)
        if found is None:
            raise ConfigError("no layer is one of attention: not understood")
        return found

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one token that is inside the windows of all layers."""
        return self.kv_bytes(1)

    def kv_bytes(self, tokens: float) -> float:
        """KV bytes of a sequence; layers with a window keep only the tokens inside it."""
        values = sum(
            kind.layers * kind.attention.kv_values * _capped(tokens, kind.attention.window) for kind in self.kinds
        )
        return values * self.precision.kv / 8

    @property
    def full_kv_bytes_per_token(self) -> float:
        """KV bytes per token of the layers that see the whole context."""
        full_kinds = [kind for kind in self.kinds if kind.attention.window is None]
        return sum(kind.layers * kind.attention.kv_values for kind in full_kinds) * self.precision.kv / 8

    @property
    def state_bytes(self) -> float:
        """Bytes of the states that a request keeps, however long it is; 0 without layers of states."""
        bits = self.precision
        return sum(
            kind.layers
            * (kind.attention.state_values * bits.state + kind.attention.convolution_values * FLOAT_BITS[bits.dtype])
            for kind in self.kinds
        ) / 8  # fmt: skip

    # ---- work ----

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs of projections, MLPs and states for one token of a prefill: all that does not grow with its context."""
        states = sum(kind.layers * kind.attention.state_flops for kind in self.kinds)
        return 2.0 * self._layer_parameters(active=True) + states

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs per (query, key) pair in layers that see the whole context."""
        return self._pair_flops(windowed=False)

    @property
    def window_flops_per_pair(self) -> float:
        """FLOPs per (query, key) pair in layers with a window."""
        return self._pair_flops(windowed=True)

    def _pair_flops(self, windowed: bool) -> float:
        kinds = (kind for kind in self.kinds if (kind.attention.window is not None) == windowed)
        return float(sum(kind.layers * kind.attention.pair_flops for kind in kinds))

    @property
    def window_tokens(self) -> int | None:
        """The window, tokens; None where no layer has one. Raises ConfigError for windows of several sizes."""
        windows = {kind.attention.window for kind in self.kinds} - {None}
        if len(windows) > 1:
            raise ConfigError(f"layers have windows of several sizes: {sorted(map(int, filter(None, windows)))}")
        return windows.pop() if windows else None


def _attending(text: Config, family: str) -> recurrent.Layers:
    """The layers of a family all of which attend."""
    return attentions_of(text, family), mlps_of(text, family)


def _capped(tokens: float, window: int | None) -> float:
    return tokens if window is None else min(tokens, window)
