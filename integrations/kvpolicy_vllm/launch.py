"""Writes the flags that switch the plugin on, as a command or as YAML. Works without an installed vLLM."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from kvpolicy.errors import InputError
from kvpolicy.integrations import require
from kvpolicy_vllm.config_file import merge, read_text, settings_of
from kvpolicy_vllm.given_transfer import given_transfer, put_first
from kvpolicy_vllm.plugin.settings import SCHEDULER, SHUTDOWN_S, options, transfer_config, writes_to_disk

__all__ = [
    "SHUTDOWN_S", "computes_on_cpu", "config_into", "config_yaml", "core_variables", "flags", "options",
    "refuse_measured", "refuse_missing_folder", "serve_command", "serve_flags", "server", "shell_line", "vllm_version",
]  # fmt: skip

TRANSFER = "--kv-transfer-config"
REFUSED = {
    "--scheduler-cls": "kvpolicy sets it itself",
    TRANSFER: "kvpolicy sets it itself; other connectors are taken from the whole flag on the command line",
    "--kv-offloading-size": "kvpolicy keeps evicted KV itself, in the memory set by --host-gib",
}
REFUSED_WHEN_MEASURED = REFUSED | {
    TRANSFER: "kvpolicy sets it itself",
    "--num-gpu-blocks-override": "kvpolicy sets it itself: as many blocks as the measured states need",
}
"""An engine that is measured gets what it needs of these."""
AMBIGUOUS_PREFIX = "--kv-"
"""vLLM accepts any unambiguous prefix of a flag. This prefix and shorter ones are ambiguous."""
SHUTDOWN = "--shutdown-timeout"
TP = "--tensor-parallel-size"
RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def flags(extra: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """The plugin's flags for ``vllm serve``. ``given``: the user's ``--kv-transfer-config``, see :func:`put_first`."""
    transfer = put_first(extra, given) if given else transfer_config(extra)
    return ["--scheduler-cls", SCHEDULER, TRANSFER, json.dumps(transfer)]


def config_into(file: Path, extra: Mapping[str, Any]) -> str:
    """Merge the same flags into a file for ``vllm serve --config``; return the difference, empty where there is none.

    Raises InputError as :func:`kvpolicy_vllm.config_file.merge`.
    """
    return merge(file, config_yaml(extra))


def config_yaml(extra: Mapping[str, Any]) -> str:
    """The same flags for ``vllm serve --config FILE.yaml``."""
    values: dict[str, Any] = {"scheduler-cls": SCHEDULER, "kv-transfer-config": transfer_config(extra)}
    note = ""
    if writes_to_disk(extra):
        name = SHUTDOWN.removeprefix("--")
        if _vllm_knows(SHUTDOWN):
            note = f"# {name}: vLLM's own 0 ends the engine before everything is written; 0.24 to 0.33 know it\n"
            values[name] = SHUTDOWN_S
        else:
            note = f"# the vLLM installed here does not know {SHUTDOWN}: it may end before everything is written\n"
    return note + yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def serve_command(llm: str, extra: Mapping[str, Any], vllm_flags: Sequence[str]) -> list[str]:
    """The command that starts the server. Raises InputError naming flags that would override the plugin's."""
    flags_of_both = serve_flags(llm, extra, vllm_flags)
    return [*server(llm), *flags_of_both]


def serve_flags(llm: str, extra: Mapping[str, Any], vllm_flags: Sequence[str]) -> list[str]:
    """The server's flags, after the model: the plugin's and vLLM's. Raises as :func:`serve_command`."""
    if llm.startswith("-"):
        raise InputError(f"the model comes before vLLM's flags, as in: LLM --policy P {llm} ...")
    given, vllm_flags = given_transfer(vllm_flags)
    present_flags = _present_flags(vllm_flags)
    _refuse_flags(present_flags)
    _refuse_second_model(present_flags)
    shutdown_flags = []
    if (
        writes_to_disk(extra)
        and not any(_may_mean(flag, SHUTDOWN, "--s") for flag, _ in present_flags)
        and _vllm_knows(SHUTDOWN)
    ):
        shutdown_flags = [SHUTDOWN, str(SHUTDOWN_S)]
    return [*flags(extra, given), *shutdown_flags, *vllm_flags]


def refuse_measured(vllm_flags: Sequence[str], has_model: bool, also: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise InputError for a flag that an engine to be measured may not have.

    ``has_model``: whether a model is named; only then a file of flags may name one as well, which vLLM ignores.
    ``also``: further flags, each with the reason.
    """
    refused = REFUSED_WHEN_MEASURED | dict(also)
    if not has_model:
        refused["--model"] = "the model to measure is given by --llm"
    present_flags = _present_flags(vllm_flags)
    _refuse_flags(present_flags, refused, " of an engine that is measured")
    _refuse_second_model(present_flags)


def refuse_missing_folder(llm: str) -> None:
    """Raise InputError for a model's folder that is not there: vLLM would take the path for an id at a hub.

    With a colon it may be a URL, or a file and what to read of it.
    """
    path = Path(llm).expanduser()
    if (path.is_absolute() or llm.startswith(".")) and ":" not in llm and not path.exists():
        raise InputError(f"{llm}: no such folder; should be a model's folder, or its id at a hub")


def _refuse_flags(
    present_flags: Iterable[tuple[str, str]],
    refused_flags: Mapping[str, str] = MappingProxyType(REFUSED),
    when: str = "",
) -> None:
    """Raise InputError naming the first flag that kvpolicy sets itself, also in a ``--config`` file."""
    for flag, where in present_flags:
        for refused, reason in refused_flags.items():
            if _may_mean(flag, refused, AMBIGUOUS_PREFIX):
                raise InputError(f"{flag}{where} cannot be given{when}: {reason}")


def _refuse_second_model(present_flags: Iterable[tuple[str, str]]) -> None:
    """Raise InputError where the command line names a model by its flag, too. In a file vLLM ignores it."""
    if ("--model", "") in present_flags:
        raise InputError("--model cannot be given: the model comes before vLLM's flags, without a flag")


def _present_flags(vllm_flags: Sequence[str]) -> list[tuple[str, str]]:
    """vLLM's flags, each with its source: empty for the command line, else a text that names the ``--config`` file."""
    present_flags = []
    for number, flag in enumerate(vllm_flags):
        name, _, value = flag.partition("=")
        present_flags.append((name, ""))
        if name == "--config":
            file = value or "".join(vllm_flags[number + 1 : number + 2])
            if not file:
                raise InputError("--config should be followed by a YAML file of vLLM's flags")
            present_flags += _flags_in_file(Path(file))
    return present_flags


def _flags_in_file(path: Path) -> list[tuple[str, str]]:
    _, settings = settings_of(read_text(path, "--config"), f"--config {path}")
    return [(f"--{key}", f" in {path}") for key in settings]


def has_any(vllm_flags: Sequence[str], names: Iterable[str]) -> bool:
    """Whether vLLM may read one of these flags in what is given, on the command line or in its ``--config`` file.

    Raises InputError for such a file that cannot be read.
    """
    present_flags = _present_flags(vllm_flags)
    return any(_may_mean(flag, name, "--") for flag, _ in present_flags for name in names)


def _may_mean(flag: str, meant: str, ambiguous: str) -> bool:
    """Whether vLLM may read ``flag`` as ``meant``.

    It accepts underscores for dashes, dotted names for fields, and prefixes longer than ``ambiguous``.
    """
    name = flag.split(".")[0].replace("_", "-")
    return meant.startswith(name) and len(name) > len(ambiguous)


def _vllm_knows(flag: str) -> bool:
    """Whether the installed vLLM has ``flag``. Searches its source text, since importing it takes seconds.

    True where no vLLM is installed: all supported versions have the flag.
    """
    folder = _vllm_folder()
    if folder is None:
        return True
    try:
        return f'"{flag}"' in (folder / "engine" / "arg_utils.py").read_text()
    except OSError:
        return False


def _vllm_folder() -> Path | None:
    spec = find_spec("vllm")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next((Path(folder) for folder in folders), None)


def server(llm: str) -> list[str]:
    """The command that starts vLLM's server for a model with the running Python, without further flags."""
    require("vllm")
    if not _distribution("vllm"):
        # vLLM's CPU build as published: `vllm serve` fails there, since it looks for a distribution named vllm. An
        # environment made by this project's Makefile has one.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", llm]
    script = Path(sys.executable).parent / "vllm"
    if script.is_file():
        return [str(script), "serve", llm]
    # In an environment layered on another one the script belongs to the other Python, which lacks this package.
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", llm]


def core_variables(vllm_flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server with which vLLM's CPU engine keeps as many cores free as one without a KV connector.

    vLLM 0.32 keeps one free for each rank, and for any connector another one, which it means for NIXL's. On a machine
    of two cores it finds none left then, and keeps none free: two threads compute on the cores that everything else
    needs. Nothing where the user has set it, and nothing on an accelerator, where it would have one effect: it is a
    part of the key of vLLM's compiled code, which servers with and without the plugin share. Raises InputError as
    :func:`has_any`.
    """
    if RESERVED_CORES in environment or not computes_on_cpu(environment):
        return {}
    return {RESERVED_CORES: str(_ranks(vllm_flags))}


def computes_on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the CPU is what the installed vLLM computes on, by what it goes by itself; importing it takes seconds."""
    target = environment.get("VLLM_TARGET_DEVICE", "").lower()
    return target == "cpu" or "cpu" in vllm_version() or sys.platform.startswith("darwin")


def vllm_version() -> str:
    """Version of the installed vLLM, with +cpu at its end for the CPU build; empty where none is installed."""
    for name, build in (("vllm", ""), ("vllm-cpu", "+cpu")):  # as published, the CPU build has a name of its own
        with suppress(PackageNotFoundError):
            return version(name) + build
    return ""


def _ranks(vllm_flags: Sequence[str]) -> int:
    """Tensor-parallel ranks by these flags; 1 where vLLM will refuse what they say."""
    ranks = last_value(vllm_flags, TP, "--t", "-tp")
    return int(ranks) if ranks.isdecimal() and int(ranks) else 1


def last_value(vllm_flags: Sequence[str], meant: str, ambiguous: str, short: str = "") -> str:
    """The value of a flag of vLLM's; empty where it is not given. ``ambiguous``: the longest of its prefixes that is
    one of another flag, too. ``short``: another name of it.

    As vLLM reads them: the command line wins over a ``--config`` file wherever that stands, and the last flag over
    others. Raises InputError for such a file that cannot be read.
    """
    in_file: list[Any] = []
    on_line: list[Any] = []
    for number, flag in enumerate(vllm_flags):
        name, equals, value = flag.partition("=")
        value = value if equals else "".join(vllm_flags[number + 1 : number + 2])
        if name == "--config" and value:
            _, settings = settings_of(read_text(Path(value), "--config"), f"--config {value}")
            in_file += [given for key, given in settings.items() if _may_mean(f"--{key}", meant, ambiguous)]
        elif (short and name == short) or _may_mean(name, meant, ambiguous):
            on_line.append(value)
    return str(["", *in_file, *on_line][-1])


def shell_line(command: Sequence[str]) -> str:
    return shlex.join(command)


def _distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
