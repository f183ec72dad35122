"""Whether the plugin serves a model with vLLM's flags, without reading its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.settings import GIB, ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.engine_process import EngineProcess

KINDS = {
    "FullAttentionSpec": "full attention",
    "SlidingWindowSpec": "sliding-window attention",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MLAAttentionSpec": "multi-head latent attention",
    "MambaSpec": "a recurrent state",
}
"""By vLLM's class of a KV cache group."""
LIMIT_S = 300.0
"""Seconds that the process may take to answer: it imports vLLM, and may fetch the model's configuration from a hub."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with the same kind of KV cache."""

    kind: str
    """vLLM's class, as FullAttentionSpec."""
    layers: int
    block_size: int
    """Tokens."""
    window: int | None
    """Tokens, where attention is limited to as many."""

    def text(self) -> str:
        window = "" if self.window is None else f" over {self.window:,} tokens"
        kind = KINDS.get(self.kind, self.kind)
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{layers} of {kind}{window}, blocks of {self.block_size} tokens"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Whether vLLM takes the flags and the plugin serves the model with them."""

    llm: str
    engine: str
    """Such as vllm 0.32.0."""
    device: str
    refused: str
    """Why it is not served, by vLLM or the plugin, and what would be right; empty where it is."""
    groups: tuple[Group, ...]
    """Empty where the model was refused before it was laid out, or could not be."""
    block_bytes: int
    """Of one block in all layers that share it, over all ranks, or of one rank where they keep the same KV once; 0 as
    above."""
    not_laid_out: str
    """Why the model's layers could not be made without weights; empty where they were made, or refused before."""
    host_gib: float
    """Host memory for evicted KV; 0 where a block's bytes are not known."""
    helps: tuple[str, ...] = ()
    """Changes with any one of which it would be served, where it is the plugin that refuses; each was tried. One may be
    of two flags."""
    untested: str = ""
    """What no test has shown of the model with these flags, though it is served; empty where there is nothing."""

    @property
    def served(self) -> bool | None:
        """None where only the engine itself can tell, at its start."""
        return False if self.refused else None if self.not_laid_out else True

    @property
    def ok(self) -> bool:
        return self.served is True

    @property
    def host_blocks(self) -> int:
        """Blocks that the host memory holds; 0 where a block's bytes are not known."""
        return int(self.host_gib * GIB / self.block_bytes) if self.block_bytes else 0

    def text(self) -> str:
        answer = {True: "served", False: "not served", None: "not known whether it is served"}[self.served]
        lines = [f"{self.llm}: {answer} by {self.engine} on {self.device}"]
        lines += [f"  {group.text()}" for group in self.groups]
        if self.ok and self.host_blocks:
            tokens = f", {self.host_blocks * self.groups[0].block_size:,} tokens" if len(self.groups) == 1 else ""
            lines.append(f"  {self.host_gib:g} GiB of host memory hold {self.host_blocks:,} blocks{tokens}")
        if self.untested:
            lines.append(f"  {self.untested}")
        if self.refused:
            lines.append(f"  {self.refused}")
        if self.helps:
            lines.append(f"  it would be served with {', or with '.join(self.helps)}")
        if self.not_laid_out:
            lines.append(
                f"  its layers could not be made without its weights, so only the engine can tell: {self.not_laid_out}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "llm": self.llm,
            "served": self.served,
            "engine": self.engine,
            "device": self.device,
            "refused": self.refused or None,
            "groups": [
                {"kind": one.kind, "layers": one.layers, "block_size": one.block_size, "window": one.window}
                for one in self.groups
            ],
            "block_bytes": self.block_bytes or None,
            "host_blocks": self.host_blocks or None,
            "not_laid_out": self.not_laid_out or None,
            "helps": list(self.helps),
            "untested": self.untested or None,
        }


def check(llm: str, settings: ServerSettings, vllm_flags: Sequence[str]) -> CheckReport:
    """What the engine would say; it is a process of its own, since vLLM binds its process to a device and cores.

    Raises InputError as :func:`kvpolicy_vllm.launch.serve_command` and for a folder that is not there, EngineFailed
    where the process ends badly or takes over :data:`LIMIT_S`.
    """
    launch.refuse_missing_folder(llm)
    flags = launch.serve_flags(llm, launch.options(settings), vllm_flags)
    with EngineProcess("kvpolicy_vllm.check.lay_out", measures=False) as process:
        found = process.ask_in_time({"flags": [llm, *flags]}, LIMIT_S)
    groups, helps = tuple(Group(**group) for group in found.pop("groups")), tuple(found.pop("helps"))
    return CheckReport(llm=llm, groups=groups, helps=helps, **found)
