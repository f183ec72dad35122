"""The engine of a measured run, as its ``meta.json`` describes it, as a simulator's server.

``engine_kwargs`` are vLLM's arguments and ``kv_cache``, where it was recorded, says what memory they came to. An
argument that is not known here is refused: a run is never judged by settings that it may not have had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.hardware import Geometry
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.base import NULL_BLOCK

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of the LLMs that runs are known of, as their config.json has them; others are given by file."""
DEFAULT_BLOCK_SIZE = 16
"""vLLM's on CUDA, where a run says nothing."""
AMPLE_BLOCKS = 30_000
"""For a run whose memory was not recorded. It must not be short of it: a replay that preempts is refused."""
READ = frozenset(
    {"tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "kv_cache_dtype",
     "block_size", "enable_prefix_caching", "async_scheduling", "scheduling_policy", "watermark"}
)  # fmt: skip
NEEDED = ("max_num_seqs", "max_num_batched_tokens")
WITHOUT_EFFECT = frozenset({"model", "tokenizer", "seed", "gpu_memory_utilization", "trust_remote_code"})
"""On the schedule or on the times that tables hold, given ``kv_cache``."""
ONLY: Mapping[str, Any] = {
    "data_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False, "cpu_offload_gb": 0,
    "speculative_config": None, "kv_transfer_config": None, "enable_chunked_prefill": True,
}  # fmt: skip
"""Arguments that are understood at one value alone."""


class NotReadError(InputError):
    """A run that cannot be judged; the message says which of its settings, and what would be right."""


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What a run's ``meta.json`` says of its engine."""

    llm: str
    vllm_version: str
    settings: Mapping[str, Any]
    kv_cache: Mapping[str, Any] | None

    @classmethod
    def read(cls, file: Path) -> RecordedEngine:
        """Raises NotReadError for a file that is no description of a run, and for arguments that are not known."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            settings, kv_cache = dict(values["engine_kwargs"]), values.get("kv_cache")
            engine = cls(str(values["model"]), str(values.get("vllm_version")), settings, kv_cache)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotReadError(f"{file}: not the description of a run: {error!r}") from error
        engine._refuse(file)
        return engine

    def _refuse(self, file: Path) -> None:
        unknown = sorted(self.settings.keys() - READ - WITHOUT_EFFECT - ONLY.keys())
        if unknown:
            raise NotReadError(f"{file}: engine_kwargs.{unknown[0]} is not understood, known are {', '.join(_known())}")
        for name, only in ONLY.items():
            if self.settings.get(name) not in (None, only):
                raise NotReadError(
                    f"{file}: engine_kwargs.{name} is {self.settings[name]!r}, only {only!r} can be replayed"
                )
        for name in NEEDED:
            if type(self.settings.get(name)) is not int or self.settings[name] < 1:
                raise NotReadError(
                    f"{file}: engine_kwargs.{name} is {self.settings.get(name)!r}, should be a whole number above 0"
                )
        if self.kv_cache is not None:
            self._refuse_memory(file, self.kv_cache)

    def _refuse_memory(self, file: Path, kv_cache: Mapping[str, Any]) -> None:
        for name in ("num_gpu_blocks", "block_size"):
            if type(kv_cache.get(name)) is not int or kv_cache[name] < 1:
                raise NotReadError(
                    f"{file}: kv_cache.{name} is {kv_cache.get(name)!r}, should be a whole number above 0"
                )
        tokens = kv_cache["num_gpu_blocks"] * kv_cache["block_size"]
        if kv_cache.get("num_kv_tokens", tokens) != tokens:
            raise NotReadError(
                f"{file}: kv_cache.num_kv_tokens is {kv_cache['num_kv_tokens']}, its blocks hold {tokens}: a cache of "
                "several groups cannot be replayed"
            )
        if kv_cache.get("num_cpu_blocks"):
            raise NotReadError(f"{file}: kv_cache.num_cpu_blocks is {kv_cache['num_cpu_blocks']}, should be 0 or null")

    @property
    def ranks(self) -> int:
        return int(self.settings.get("tensor_parallel_size") or 1)

    def shape(self, configs: Mapping[str, Mapping[str, Any]]) -> ModelShape:
        """``configs``: config.json of LLMs beside :data:`CONFIGS`. Raises NotReadError for an LLM in neither."""
        config = {**CONFIGS, **configs}.get(self.llm)
        if config is None:
            raise NotReadError(f"no known shape of {self.llm}: give --config {self.llm}=FILE, its config.json")
        if self.settings.get("dtype") not in (None, "auto"):
            config = {**config, "torch_dtype": self.settings["dtype"]}
        return ModelShape.from_config(config, str(self.settings.get("kv_cache_dtype") or "auto"))

    def server(self, shape: ModelShape) -> Server:
        """As the run's engine. Where nothing is said of it, its scheduler ran ahead of the device, as vLLM's does."""
        settings, kv_cache = self.settings, self.kv_cache or {}
        block_size = int(kv_cache.get("block_size") or settings.get("block_size") or DEFAULT_BLOCK_SIZE)
        caching = kv_cache.get("enable_prefix_caching", settings.get("enable_prefix_caching"))
        longest = {} if settings.get("max_model_len") is None else {"max_model_len": int(settings["max_model_len"])}
        return Server(
            block_size=block_size,
            block_bytes=Geometry.of_shape(shape, self.ranks).kv_bytes_per_token * block_size,
            device_blocks=int(kv_cache.get("num_gpu_blocks", AMPLE_BLOCKS + NULL_BLOCK)) - NULL_BLOCK,
            host_blocks=0,
            token_budget=settings["max_num_batched_tokens"],
            max_running=settings["max_num_seqs"],
            prefix_caching=bool(caching),
            scheduling=settings.get("scheduling_policy") or "fcfs",
            watermark=float(settings.get("watermark") or 0.0),
            asynchronous=settings.get("async_scheduling") is not False,
            **longest,
        )


def _known() -> list[str]:
    return sorted(READ | WITHOUT_EFFECT | ONLY.keys())


def configs_of(texts: list[str]) -> dict[str, Mapping[str, Any]]:
    """``LLM=FILE`` each, FILE a config.json or its folder. Raises NotReadError."""
    configs: dict[str, Mapping[str, Any]] = {}
    for text in texts:
        llm, equals, name = text.partition("=")
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        if not (llm and equals and name):
            raise NotReadError(f"--config {text}: should be LLM=FILE, as in meta-llama/Llama-3.1-8B=config.json")
        try:
            configs[llm] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotReadError(f"--config {text}: {error}") from error
    return configs
