"""``KVPOLICY=cheapest:models/mine,order=urgent vllm serve ...``: the plugin's flags from an environment variable.

vLLM calls the plugin's entry point in every process, before the process makes an engine's configuration. Where the
variable is set, two methods of ``EngineArgs`` are wrapped there, which vLLM 0.24 to 0.33 have alike:

- ``create_engine_config``, through which every engine comes, of the command line and of ``vllm.LLM``. The wrapper sets
  the scheduler class and the transfer configuration just as the flags would, and calls the original. An error in the
  variable, or beside flags that contradict it, is raised there, and so is what the plugin refuses while vLLM makes the
  configuration: a cost model of another model, an engine that it does not serve.
- ``from_cli_args``, which makes the arguments of a program from its command line. The wrapper tries the flags on a
  copy, and shows an error in one line as the parser shows that of a flag, where an exception would end a server in a
  page of calls. So does ``create_engine_config`` from then on. It is in force where the program's parser has loaded
  vLLM's plugins, as that of ``vllm serve`` has. Elsewhere ``create_engine_config`` raises the error.

By then the policy with its cost model, and the order, are loaded, and nothing of the engine has started. A policy that
needs the engine, as ``cheapest:analytic`` does, is loaded later, by the scheduler. Nothing is changed where the
variable is not set.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.fields import WrongValue
from kvpolicy_vllm.plugin.settings_line import read_line, server_settings

VARIABLE = "KVPOLICY"
OFF = "off"
CONFLICTS = ("scheduler_cls", "kv_transfer_config", "kv_offloading_size")
"""Engine arguments that the variable stands in for, or that exclude the plugin."""
SET = ("scheduler_cls", "kv_transfer_config", "shutdown_timeout")
"""Engine arguments that :func:`set_flags` sets, where vLLM has them."""


@dataclass
class Program:
    """What is known of the program of this process."""

    parsed_flags: bool = False
    """Whether it made engine arguments from its command line: it ends in one line, then, where others get an error."""


PROGRAM = Program()


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

    if hasattr(EngineArgs.create_engine_config, "heeds_kvpolicy"):
        return
    EngineArgs.create_engine_config = _heeding(EngineArgs.create_engine_config)
    # A class method: its function gets the class, which may be a subclass.
    EngineArgs.from_cli_args = classmethod(_refusing_in_one_line(EngineArgs.from_cli_args.__func__))


def _heeding(original: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineArgs.create_engine_config`` that has the plugin's flags set.

    The arguments are as they were afterwards: vLLM makes further configurations of them, and further arguments of all
    their attributes, and what the plugin sets in the configuration's transfer settings would be in these.
    """

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        line = line_of_environment()
        if not line:
            return original(self, *args, **kwargs)
        given = {name: getattr(self, name) for name in SET if hasattr(self, name)}
        try:
            set_flags(self, line)
            return original(self, *args, **kwargs)
        except Exception as error:
            if not PROGRAM.parsed_flags or (refusal := own_refusal(error)) is None:
                raise
            _end(refusal)
        finally:
            for name, value in given.items():
                setattr(self, name, value)

    create_engine_config.heeds_kvpolicy = True  # type: ignore[attr-defined]
    return create_engine_config


def _refusing_in_one_line(original: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineArgs.from_cli_args`` that ends the program, with the exit status of a wrong flag, where the flags
    cannot be set. What it made is left as it is."""

    @functools.wraps(original)
    def from_cli_args(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        arguments = original(cls, *args, **kwargs)
        if line := line_of_environment():
            try:
                set_flags(copy.copy(arguments), line)
            except (KVPolicyError, OSError) as error:
                _end(error)
            PROGRAM.parsed_flags = True
        return arguments

    return from_cli_args


def _end(error: Exception) -> NoReturn:
    print(f"kvpolicy: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def own_refusal(error: Exception) -> KVPolicyError | None:
    """The plugin's refusal, also where vLLM's configuration wraps what is raised while it is made in a validation error
    of pydantic's; None for another error."""
    from pydantic import ValidationError

    if isinstance(error, KVPolicyError):
        return error
    causes = error.errors() if isinstance(error, ValidationError) else []
    raised = (cause.get("ctx", {}).get("error") for cause in causes)
    return next((one for one in raised if isinstance(one, KVPolicyError)), None)


def set_flags(arguments: Any, line: str) -> None:
    """Set the plugin's flags in vLLM's engine arguments, which may already have these very ones.

    Raises InputError for what is wrong in the line, and for arguments that contradict it.
    """
    from vllm.config import KVTransferConfig

    from kvpolicy_vllm.plugin.order_limits import refuse_ranking
    from kvpolicy_vllm.plugin.settings import SCHEDULER, SHUTDOWN_S, Settings, transfer_config, writes_to_disk

    extra = extra_config(line)
    refuse_ranking(Settings.read(extra), arguments.scheduling_policy)
    ours: dict[str, Any] = {"scheduler_cls": SCHEDULER, "kv_transfer_config": transfer_config(extra)}
    for name in CONFLICTS:
        given = getattr(arguments, name, None)
        if given is None or _same(given, ours.get(name)):
            continue
        raise InputError(
            f"{VARIABLE} is set and --{name.replace('_', '-')} is given as well, which the variable stands for or "
            f"excludes: leave one of them out ({VARIABLE}={OFF} switches the variable off)"
        )
    arguments.scheduler_cls = SCHEDULER
    given = arguments.kv_transfer_config
    arguments.kv_transfer_config = (
        KVTransferConfig(**ours["kv_transfer_config"]) if given is None else copy.deepcopy(given)
    )
    if writes_to_disk(extra) and not getattr(arguments, "shutdown_timeout", SHUTDOWN_S):
        arguments.shutdown_timeout = SHUTDOWN_S


def extra_config(line: str) -> dict[str, Any]:
    """The plugin's ``kv_connector_extra_config`` for a line, whose policy and order were loaded, except a policy that
    needs the engine.

    Raises InputError naming the variable and the key that is wrong, for a cost model its file and field, too.
    """
    from kvpolicy_vllm.plugin.settings import keys_of, refuse_unloadable, refuse_unsafe_files

    settings = server_settings(read_line(line, VARIABLE), VARIABLE)
    try:
        refuse_unsafe_files(settings)
        refuse_unloadable(settings)
    except WrongValue as wrong:  # which names the key itself
        raise InputError(f"{VARIABLE}: {wrong}") from wrong
    except (KVPolicyError, OSError) as error:
        raise InputError(f"{VARIABLE}: policy is {settings.policy!r}, which cannot be loaded: {error}") from error
    return keys_of(settings)


def _same(given: Any, ours: Any) -> bool:
    """Whether an argument is what the variable would set. vLLM's object has further fields, left at their defaults."""
    if isinstance(ours, dict):
        return all(getattr(given, name, None) == value for name, value in ours.items())
    return bool(given == ours)
