"""The user's own server, as far as a profile depends on it. Importing this loads no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.fields import WrongValue
from kvpolicy.settings import GIB, Measurement
from kvpolicy_vllm.bench.engine_process import FLAGS
from kvpolicy_vllm.launch import refuse_missing_folder

MIN_REQUESTS = 2
"""A victim and another request: with one at a time nobody is preempted."""
HUB_PARTS = 2
"""An id at a hub has no more: NAME or OWNER/NAME."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server's model, flags, and what vLLM makes of them."""

    llm: str
    """A folder, or an id at a hub."""
    flags: tuple[str, ...]
    """vLLM's, of the server."""
    block_size: int
    batched_tokens: int
    """``max_num_batched_tokens``, which its engine is given. The token budget may be less, by a flag of its own."""
    max_requests: int
    """``max_num_seqs``."""
    model_tokens: int
    """``max_model_len``."""
    gives_length: bool
    """Whether the flags say ``model_tokens``; otherwise it is the model's own."""
    kv_token_bytes: int
    """KV bytes of a token, over all ranks."""
    block_tables: int = 1
    """Block tables of a request; 1 where the model's layers are not understood, as the engine will say."""
    keeps_states: bool = False
    """Whether one of them is of states."""

    def __post_init__(self) -> None:
        if self.max_requests < MIN_REQUESTS:
            raise WrongValue(
                "vllm_flags", f"let {self.max_requests} request run at a time (--max-num-seqs), should be 2 or more"
            )

    def min_blocks(self, model_tokens: int, block_size: int) -> int:
        """Blocks that vLLM asks for: those of a request of ``model_tokens``, and the one that it keeps for itself."""
        return math.ceil(model_tokens / block_size) + 2

    def host_gib(self, tokens: int, min_gib: float) -> float:
        """Host memory for the KV of ``tokens`` tokens, with room for copies under way beside it."""
        return max(min_gib, 1.5 * tokens * self.kv_token_bytes / GIB)

    def engine_arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Arguments of :func:`kvpolicy_vllm.bench.engine_flags.start` for the server's engine, the size of its memory
        left out."""
        arguments = {
            FLAGS: [self.llm, *self.flags],
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.max_requests,
        }
        # A server's ranks are processes on the CPU, even a single one: only there threads are bound as it binds them.
        return arguments | ({"distributed_executor_backend": "mp"} if on_cpu else {})


def named_model(how: Measurement) -> str | None:
    """What vLLM is given for a model: its folder's absolute path, or its id at a hub. None for a model to be made.

    Raises InputError for a folder that is not there, WrongValue for what is no id either.
    """
    if how.llm is None:
        return None
    if folder := how.llm_folder:
        return str(folder.resolve())
    refuse_missing_folder(str(how.llm))
    if len(Path(how.llm).parts) > HUB_PARTS:
        raise WrongValue("llm", f"is {how.llm}, which is not there; should be a model's folder, or its id at a hub")
    return str(how.llm)
