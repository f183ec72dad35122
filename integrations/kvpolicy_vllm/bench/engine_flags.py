"""vLLM's own reading of a server's flags: its parser, its configuration, and an engine made from both.

The check, the inspection before a profile and the measuring engines call it; it imports vLLM.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy_vllm.bench.engine_process import FLAGS
from kvpolicy_vllm.plugin.config_refusals import refuse_unsupported
from kvpolicy_vllm.plugin.one_flag import own_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROGRAM_FIRST = re.compile(r"^\S+( serve)?: error: ")
"""What argparse puts before an error: the name of this process's program, which is no user's."""

INSPECTION = logging.getLogger("vllm.model_executor.models.registry")
"""Where vLLM logs that a model's code could not be loaded, as without a package that it imports."""
IN_THE_LOG = "Please check the logs"


class RefusedByVllm(InputError):
    """vLLM itself does not take the flags, or not with this model; the message is vLLM's."""


def parsed(flags: Sequence[str]) -> Namespace:
    """``[LLM, FLAG, ...]`` as ``vllm serve`` reads them. Raises RefusedByVllm with what argparse prints."""
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            arguments = parser.parse_args(["serve", *flags])
    except SystemExit:
        last_line = (printed.getvalue().strip().splitlines() or ["--help and --version start no server"])[-1]
        raise RefusedByVllm(PROGRAM_FIRST.sub("", last_line)) from None
    arguments.model = arguments.model_tag or arguments.model
    command.validate(arguments)
    return cast(Namespace, arguments)


def server_arguments(flags: Sequence[str]) -> AsyncEngineArgs:
    """The engine's arguments of a server with these flags. Raises RefusedByVllm, also for a file of flags."""
    try:
        return cast(AsyncEngineArgs, AsyncEngineArgs.from_cli_args(parsed(flags)))
    except RefusedByVllm:
        raise
    except (ValueError, OSError, TypeError) as error:
        raise refusal_of(error) from error


def server_config(arguments: EngineArgs) -> VllmConfig:
    """The configuration of a server with these arguments, the plugin's included.

    Raises UnsupportedEngine where the plugin does not serve it, RefusedByVllm where vLLM does not.
    """
    causes = _Causes()
    INSPECTION.addFilter(causes)
    try:
        # The token budget's default is that of a server; the LLM class has a higher one.
        config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        refuse_unsupported(config, None)
    # Whatever it is, the engine would end with the same.
    except Exception as error:
        raise _with_cause(refusal_of(error), causes.lines) from error
    finally:
        INSPECTION.removeFilter(causes)
    return config


class _Causes(logging.Filter):
    """Sees what was raised, of each error that is logged: "No module named ..." where a package is missing, else the
    last line. A filter, since vLLM takes handlers away when it configures its logs anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            lines = str(record.exc_info[1]).strip().splitlines()
            self.lines += [line for line in lines if "No module named" in line][:1] or lines[-1:]
        return True


def _with_cause(refusal: KVPolicyError, causes: Sequence[str]) -> KVPolicyError:
    """The refusal, with why the model's code could not be loaded: vLLM logs that, and names the log alone."""
    if not causes or IN_THE_LOG not in str(refusal):
        return refusal
    return RefusedByVllm(f"{str(refusal).partition(IN_THE_LOG)[0].rstrip(' .')}: {causes[-1]}")


def refusal_of(error: Exception) -> KVPolicyError:
    """The error to report. vLLM's configuration wraps what is raised while it is made in an error of its own."""
    if (refusal := own_refusal(error)) is not None:
        return refusal
    causes = error.errors() if isinstance(error, ValidationError) else []
    words = "; ".join(str(one.get("ctx", {}).get("error") or one["msg"]) for one in causes)
    return RefusedByVllm(words or str(error) or type(error).__name__)


def start(engine: Mapping[str, Any]) -> LLM:
    """An engine in this process. ``engine``: arguments of :class:`vllm.LLM`; under :data:`FLAGS`, ``[LLM, FLAG, ...]``
    of a server whose arguments hold where there are no others."""
    arguments = dict(engine)
    flags = arguments.pop(FLAGS, None)
    if flags is None:
        return LLM(**arguments)
    return LLM(**vars(EngineArgs.from_cli_args(parsed(flags))) | arguments)
