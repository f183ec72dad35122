"""The flags that switch the plugin on, as a command or as YAML. Needs no vLLM to be installed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kvpolicy import policy as policies
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, written
from kvpolicy.integrations import require
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm.plugin.settings import SCHEDULER, TEACH, transfer_config

REFUSED = {
    "--scheduler-cls": "kvpolicy sets it itself",
    "--kv-transfer-config": "kvpolicy sets it itself; its options are kvpolicy's own, as --host-gib and --trace",
    "--kv-offloading-size": "kvpolicy keeps evicted KV itself, in as much memory as --host-gib says",
}
AMBIGUOUS_PREFIX = "--kv-"
"""vLLM takes any unambiguous prefix of a flag; this one and shorter ones are ambiguous there."""
SHUTDOWN = "--shutdown-timeout"
SHUTDOWN_S = 20
"""So long a server that records or remembers may take to end: its requests are served to their end first, and what is
written last may wait ten seconds for the disk. Less than the 30 s after which Kubernetes kills."""


def options(settings: ServerSettings) -> dict[str, Any]:
    """The plugin's ``kv_connector_extra_config``: what is given, and nothing else, so that its defaults have one home.

    Folders become absolute: a server may be started elsewhere. Raises ValueError for a policy that cannot be loaded.
    """
    policy, path = settings.policy, settings.online_state
    extra = written(replace(settings, policy=policies.anchored(policy)))
    if policies.needs_engine(policy):  # only the engine knows its model and its device
        return extra
    loaded = policies.load(extra["policy"], allow_python=settings.allow_python_policies)
    learns = isinstance(loaded, policies.LearningPolicy) and loaded.learned(loaded.initial_state()) is not None
    if path is not None and not learns:
        raise WrongValue("online_state", f"is {path}, and policy {policy} learns nothing while it serves; {TEACH}")
    return extra


def flags(extra: Mapping[str, Any]) -> list[str]:
    """The plugin's flags for ``vllm serve``."""
    return ["--scheduler-cls", SCHEDULER, "--kv-transfer-config", json.dumps(transfer_config(extra))]


def config_yaml(extra: Mapping[str, Any]) -> str:
    """The same flags for ``vllm serve --config FILE.yaml``."""
    values: dict[str, Any] = {"scheduler-cls": SCHEDULER, "kv-transfer-config": transfer_config(extra)}
    note = ""
    if _writes(extra):
        name = SHUTDOWN.removeprefix("--")
        if _vllm_knows(SHUTDOWN):
            note = f"# {name}: vLLM's own 0 ends the engine before everything is written; 0.24 to 0.33 know it\n"
            values[name] = SHUTDOWN_S
        else:
            note = f"# the vLLM installed here does not know {SHUTDOWN}: it may end before everything is written\n"
    return note + yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def serve_command(llm: str, extra: Mapping[str, Any], vllm_flags: Sequence[str]) -> list[str]:
    """The command that starts the server. Raises ValueError for flags that would undo the plugin's, by name."""
    if llm.startswith("-"):
        raise InputError(f"the model comes before vLLM's flags, as in: kvpolicy serve LLM --policy P {llm} ...")
    given = _given(vllm_flags)
    _refuse_flags(given)
    ending = []
    if _writes(extra) and not any(_may_mean(flag, SHUTDOWN, "--s") for flag, _ in given) and _vllm_knows(SHUTDOWN):
        ending = [SHUTDOWN, str(SHUTDOWN_S)]
    return [*server(llm), *flags(extra), *ending, *vllm_flags]


def _refuse_flags(given: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError naming the first flag that kvpolicy sets itself, also one in a ``--config`` file."""
    for flag, where in given:
        for refused, why in REFUSED.items():
            if _may_mean(flag, refused, AMBIGUOUS_PREFIX):
                raise InputError(f"{flag}{where} cannot be given together with --policy: {why}")


def _given(vllm_flags: Sequence[str]) -> list[tuple[str, str]]:
    """vLLM's flags, and where each is given beside the command line: in a ``--config`` file."""
    found = []
    for number, flag in enumerate(vllm_flags):
        name, _, value = flag.partition("=")
        found.append((name, ""))
        if name == "--config":
            following = vllm_flags[number + 1 : number + 2]
            found += _given_in_file(Path(value or "".join(following)))
    return found


def _given_in_file(path: Path) -> list[tuple[str, str]]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: cannot be read as YAML: {error}") from None
    return [(f"--{key}", f" in {path}") for key in (values if isinstance(values, dict) else ())]


def _may_mean(flag: str, meant: str, ambiguous: str) -> bool:
    """vLLM takes underscores for dashes, dotted names for fields, and prefixes longer than an ``ambiguous`` one."""
    name = flag.split(".")[0].replace("_", "-")
    return meant.startswith(name) and len(name) > len(ambiguous)


def _writes(extra: Mapping[str, Any]) -> bool:
    """Whether the plugin keeps anything on a disk."""
    return "trace" in extra or "online_state" in extra


def _vllm_knows(flag: str) -> bool:
    """Whether the installed vLLM takes ``flag``, by its source: importing it takes seconds. Without one, as all that
    are supported do."""
    folder = _vllm_folder()
    if folder is None:
        return True
    try:
        return f'"{flag}"' in (folder / "engine" / "arg_utils.py").read_text()
    except OSError:
        return False


def _vllm_folder() -> Path | None:
    spec = find_spec("vllm")
    places = () if spec is None else spec.submodule_search_locations or ()
    return next((Path(place) for place in places), None)


def server(llm: str) -> list[str]:
    """What starts vLLM's server for a model, with the Python that runs this."""
    require("vllm")
    if not _distribution("vllm"):
        # vLLM's CPU build as its index has it: `vllm serve` asks for a distribution named vllm and gives up. An
        # environment that this project's Makefile makes has one.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", llm]
    script = Path(sys.executable).parent / "vllm"
    if script.is_file():
        return [str(script), "serve", llm]
    # In an environment on top of another one the script lies with the other Python, which does not know this package.
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", llm]


def shell_line(command: Sequence[str]) -> str:
    return shlex.join(command)


def _distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
