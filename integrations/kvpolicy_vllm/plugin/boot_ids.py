"""Which machine a process is on, and on which one vLLM made its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOTED = "kvpolicy_machine"
"""Attribute of vLLM's ModelConfig, with which it travels to every process."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Tells Linux machines of one name apart."""


def boot_id() -> str:
    """Of this machine's last start, the same in all of its containers; empty where it is not known."""
    try:
        return BOOT.read_text().strip()
    except OSError:  # not on Linux
        return ""


def note_machine(config: VllmConfig) -> None:
    """Keep in vLLM's configuration that it is made here, where the scheduler will run, if Ray places the ranks: it may
    place all of them elsewhere. Not where Ray places engine cores as well, whose schedulers then are anywhere."""
    parallel = config.parallel_config
    if parallel.use_ray and parallel.data_parallel_backend != "ray":
        setattr(config.model_config, NOTED, boot_id())


def noted_machine(config: VllmConfig) -> str:
    """The ``boot_id`` of the scheduler's machine; empty where it was not noted, or not known there."""
    return str(getattr(config.model_config, NOTED, ""))
