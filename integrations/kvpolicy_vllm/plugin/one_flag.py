"""``KVPOLICY=cheapest:models/mine,order=urgent vllm serve ...``: the plugin's flags from an environment variable.

vLLM calls the plugin's entry point in every process, before the process makes an engine's configuration. Where the
variable is set, ``EngineArgs.create_engine_config`` is wrapped there: the wrapper sets the scheduler class and the
transfer configuration just as the flags would, and calls the original. It is the one method through which every engine
comes, of the server's command line and of ``vllm.LLM`` alike, in vLLM 0.24 to 0.33. An error in the variable, or beside
flags that contradict it, is raised there and ends the start. Nothing is changed where the variable is not set.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.settings_line import read_line, server_settings

VARIABLE = "KVPOLICY"
OFF = "off"
CONFLICTS = ("scheduler_cls", "kv_transfer_config", "kv_offloading_size")
"""Engine arguments that the variable stands in for, or that exclude the plugin."""


def line_of_environment() -> str:
    """The variable; empty where the plugin is not to be switched on by it."""
    line = os.environ.get(VARIABLE, "").strip()
    return "" if line == OFF else line


def heed_environment() -> None:
    """Let every engine configuration made in this process have the plugin's flags, where the variable is set. May be
    called more than once."""
    if not line_of_environment():
        return
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "heeds_kvpolicy"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if line := line_of_environment():
            set_flags(self, line)
        return original(self, *args, **kwargs)

    create_engine_config.heeds_kvpolicy = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def set_flags(arguments: Any, line: str) -> None:
    """Set the plugin's flags in vLLM's engine arguments, which may already have these very ones.

    Raises InputError for what is wrong in the line, and for arguments that contradict it.
    """
    from vllm.config import KVTransferConfig

    from kvpolicy_vllm.plugin.settings import (
        SCHEDULER,
        SHUTDOWN_S,
        options,
        refuse_unsafe_files,
        transfer_config,
        writes_to_disk,
    )

    if getattr(arguments, "kvpolicy_line", None) == line:  # vLLM makes a configuration of the same arguments again
        return
    settings = server_settings(read_line(line, VARIABLE), VARIABLE)
    refuse_unsafe_files(settings)
    extra = options(settings)
    ours: dict[str, Any] = {"scheduler_cls": SCHEDULER, "kv_transfer_config": transfer_config(extra)}
    for name in CONFLICTS:
        given = getattr(arguments, name, None)
        if given is None or _same(given, ours.get(name)):
            continue
        raise InputError(
            f"{VARIABLE} is set and --{name.replace('_', '-')} is given as well, which the variable stands for or "
            f"excludes: leave one of them out ({VARIABLE}={OFF} switches the variable off)"
        )
    arguments.kvpolicy_line = line
    arguments.scheduler_cls = SCHEDULER
    if arguments.kv_transfer_config is None:
        arguments.kv_transfer_config = KVTransferConfig(**ours["kv_transfer_config"])
    if writes_to_disk(extra) and not getattr(arguments, "shutdown_timeout", SHUTDOWN_S):
        arguments.shutdown_timeout = SHUTDOWN_S


def _same(given: Any, ours: Any) -> bool:
    """Whether an argument is what the variable would set. vLLM's object has further fields, left at their defaults."""
    if isinstance(ours, dict):
        return all(getattr(given, name, None) == value for name, value in ours.items())
    return bool(given == ours)
