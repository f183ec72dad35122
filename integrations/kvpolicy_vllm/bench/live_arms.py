"""The arms of a bench over HTTP, and the servers behind them. Loads no engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy.bench_settings import BenchTarget, is_http
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue, changed_values, read
from kvpolicy.settings import ServerSettings
from kvpolicy.stored_values import read_json
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.control_arm import Switch
from kvpolicy_vllm.bench.live_server import LiveServer, refuse_own_flags
from kvpolicy_vllm.bench.reservation import RESERVED
from kvpolicy_vllm.plugin.settings import refuse_unsafe_files

STOCK, PLUGIN, HINTS = "vllm", "kvpolicy", "hints"
RESERVING = {f"orca-{how}": how for how in RESERVED}
"""Arms whose requests wait until their reserved lengths fit into the KV cache, by name."""

DEFAULTS = changed_values(ServerSettings("always-swap"))
"""Of the plugin's settings, where none are given."""
SHARE = "--gpu-memory-utilization"
"""vLLM's flag for a server's share of the memory, on a CPU of the machine's."""
SHARE_FLAGS = (SHARE, "--kv-cache-memory-bytes")
SHARE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
OWN_FLAGS = "vllm_flags"
"""In an arm's JSON, vLLM's flags of its server alone."""
SHARED_FLAGS = (
    "--dtype", "--model", "--revision", "--quantization", "--max-model-len", "--config", "--tokenizer",
    "--hf-overrides", "--hf-config-path", "--load-format", "--generation-config", "--override-generation-config",
)  # fmt: skip
"""That an arm may not have for itself: its tokens, or the conversations that fit, would be others. vLLM puts a file of
flags before those of the command line, so that the flags of all arms would win over it."""
SHORT_FLAGS = {"-q": "--quantization"}
DTYPES = {"half": "float16", "float": "float32"}
"""Of vLLM's flag, what has another name elsewhere."""
CPU_SHARES = 0.6
"""Of a machine's memory, for all servers together: host memory, their processes and the client have the rest."""


@dataclass(frozen=True, slots=True)
class LiveArm:
    """One way to be served."""

    name: str
    url: str = ""
    """Of a server that runs; empty for one to be started."""
    command: tuple[str, ...] = ()
    """That starts the server, without host and port. Arms with equal ones share it."""
    hints: bool = False
    """Whether requests carry hints: those of a chat or an analysis, or of a rate's workload."""
    reserve: str = ""
    """What each request reserves of the KV cache before it is sent, one of :data:`RESERVED`; empty for nothing."""

    switch: Switch | None = None
    """What the server is switched to for a run; None for nothing."""

    def to_dict(self) -> dict[str, Any]:
        values = {"name": self.name, "url": self.url, "command": list(self.command), "hints": self.hints}
        values |= {"reserve": self.reserve} if self.reserve else {}
        return values | (self.switch.to_dict() if self.switch else {})


def arms_of(at: BenchTarget) -> tuple[LiveArm, ...]:
    """The arms that a bench compares, the first one what others are compared with.

    Raises WrongValue for an arm that cannot be read, InputError for a model's folder that is not there, and the errors
    of :func:`kvpolicy_vllm.launch.serve_command`.
    """
    refuse_own_flags(at.vllm_flags)
    if at.is_url and at.vllm_flags:
        raise InputError(
            f"vLLM's flags ({at.vllm_flags[0]} ...) are of servers to be started; {at.target} runs already"
        )
    if not at.is_url:
        launch.refuse_missing_folder(at.target)
    given = changed_values(at.settings)
    if at.is_url and (own := next((name for name, value in given.items() if DEFAULTS.get(name) != value), "")):
        raise WrongValue(own, f"is of servers to be started; {at.target} runs already, with settings of its own")
    texts = at.arms or ((PLUGIN,) if at.is_url else (STOCK, PLUGIN))
    arms = tuple(_arm(text, at) for text in texts)
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise WrongValue("arm", f"is given twice by the same name: {', '.join(names)}")
    return arms


def sharing_memory(at: BenchTarget) -> BenchTarget:
    """The target, whose several servers on a CPU each get an equal share of :data:`CPU_SHARES` where none is given:
    vLLM takes 0.92 of all memory by default, so that the second server would not start. Raises as :func:`arms_of`."""
    servers = len({arm.command for arm in arms_of(at)})
    if at.is_url or servers < 2 or _has_share(at):
        return at
    return replace(at, vllm_flags=(*at.vllm_flags, SHARE, f"{int(100 * CPU_SHARES / servers) / 100:g}"))


def _has_share(at: BenchTarget) -> bool:
    """Whether somebody said what share of the memory servers take, or nobody needs to: on a GPU vLLM's is taken."""
    is_given = os.environ.get(SHARE_VARIABLE) or launch.has_any(at.vllm_flags, SHARE_FLAGS)
    return bool(is_given) or not launch.computes_on_cpu(os.environ)


def dtype_of(at: BenchTarget) -> str:
    """What the servers of all arms compute in, as float32; empty where nobody knows: of a server that runs already, and
    of a model at a hub without vLLM's flag. An arm's own flags cannot change it. Raises InputError as
    :func:`kvpolicy_vllm.launch.last_value`.

    By default vLLM 0.32 goes by the model's configuration, but serves one of float32 in bfloat16; on a GPU before
    Ampere in float16.
    """
    if at.is_url:
        return ""
    given = launch.last_value(at.vllm_flags, "--dtype", "--d") or "auto"
    if given != "auto":
        return DTYPES.get(given, given)
    try:
        config = read_json(Path(at.target) / "config.json")
    except (OSError, InputError):
        return ""
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict) and (named := part.get("dtype") or part.get("torch_dtype")):
            return "bfloat16" if named == "float32" else str(named)
    return ""


def _arm(text: str, at: BenchTarget) -> LiveArm:
    name, equals, value = text.partition("=")
    try:
        given = json.loads(value) if equals else {}
    except ValueError as error:
        raise WrongValue("arm", f"is {text!r}, should be NAME or NAME=JSON: {error}") from None
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name) or not isinstance(given, dict):
        raise WrongValue("arm", f"is {text!r}, should be NAME or NAME=JSON, a name of letters, digits, -, _ and .")
    hints = given.pop("hints", name == HINTS)
    if not isinstance(hints, bool):
        raise WrongValue("arm", f'is {text!r}, whose "hints" should be true or false')
    reserve = given.pop("reserve", RESERVING.get(name, ""))
    if reserve not in ("", *RESERVED):
        raise WrongValue("arm", f'is {text!r}, whose "reserve" should be one of {", ".join(RESERVED)}')
    if at.is_url:
        url = given.pop("url", at.target)
        switch = _switch(text, given)
        if given or not isinstance(url, str):
            raise WrongValue(
                "arm",
                f'is {text!r}: of a server that runs, JSON has "url", "hints", "reserve", and "control" with "policy" '
                'or "order" alone',
            )
        if not is_http(url):
            raise WrongValue("arm", f'is {text!r}, whose "url" should begin with http:// or https://')
        return LiveArm(name, url, hints=hints, reserve=reserve, switch=switch)
    has_plugin = given.pop("plugin", name != STOCK and not reserve)
    if not isinstance(has_plugin, bool) or (has_plugin and (name == STOCK or reserve)):
        raise WrongValue(
            "arm", f'is {text!r}, whose "plugin" should be true or false, and false for {STOCK} or reserve'
        )
    own_flags = _own_flags(text, given)
    if own_flags and launch.has_any(own_flags, SHARE_FLAGS) and not _has_share(at):
        raise WrongValue("arm", f"is {text!r}: give all arms a share of the memory, too, as {SHARE} 0.3")
    with_flags = replace(at, vllm_flags=(*at.vllm_flags, *own_flags))
    command = _command(name, given, with_flags, has_plugin, hints)
    return LiveArm(name, command=tuple(command), hints=hints, reserve=reserve)


def _own_flags(text: str, given: dict[str, Any]) -> Sequence[str]:
    """vLLM's flags of an arm alone, which come after those of all; taken out of ``given``."""
    own_flags: list[str] = given.pop(OWN_FLAGS, [])
    if not isinstance(own_flags, list) or not all(isinstance(word, str) and word for word in own_flags):
        raise WrongValue("arm", f'is {text!r}, whose "{OWN_FLAGS}" should be a list of texts, words of the command')
    if own_flags and not own_flags[0].startswith("-"):
        raise WrongValue("arm", f'is {text!r}, whose "{OWN_FLAGS}" should begin with a flag, as --max-num-seqs')
    refuse_own_flags(own_flags)
    written_out = [SHORT_FLAGS.get(word[:2], word) for word in own_flags]
    for flag in SHARED_FLAGS:
        if launch.has_any(written_out, (flag,)):
            raise WrongValue("arm", f"is {text!r}: {flag} should be that of all arms, whose tokens are compared")
    return own_flags


def _switch(text: str, given: dict[str, Any]) -> Switch | None:
    """What an arm switches a server to; taken out of ``given``. None where it names no control file."""
    if "control" not in given:
        return None
    control, settings = given.pop("control"), {name: given.pop(name) for name in ("policy", "order") if name in given}
    if not settings or not all(isinstance(value, str) and value for value in (control, *settings.values())):
        raise WrongValue("arm", f'is {text!r}: beside "control", a file, should be "policy" or "order", as texts')
    read(ServerSettings, {"policy": "always-recompute"} | settings, f"arm {text}")
    return Switch(control, **settings)


def _command(name: str, given: Mapping[str, Any], at: BenchTarget, has_plugin: bool, hints: bool) -> Sequence[str]:
    if not has_plugin:
        if given:
            raise WrongValue(
                "arm", f"{name} is vLLM without the plugin, and takes no settings of it ({', '.join(given)})"
            )
        return [*launch.server(at.target), *at.vllm_flags]
    settings = read(ServerSettings, changed_values(at.settings) | dict(given), f"arm {name}")
    if hints and not settings.heeds_hints:
        raise WrongValue(
            "arm", f"{name} sends hints, of which nothing comes without a cache: give it --cache, or --order hints"
        )
    if hints and settings.hints is not None and not settings.hints.keep_s:
        raise WrongValue("arm", f"{name} asks to keep windows, which --hints none refuses: let hints grant keep_s")
    refuse_unsafe_files(settings)
    return launch.serve_command(at.target, launch.options(settings), at.vllm_flags)


class Servers:
    """The servers of arms, started when they are first asked for. A context manager, which ends them."""

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        self._logs, self._say = logs, say
        self._stack = ExitStack()
        self._alive: dict[tuple[str, ...], LiveServer] = {}
        # An interrupted bench that goes on leaves the logs of the servers before as they are.
        self._logged = 1 + max((int(log.name.partition("-")[0]) for log in logs.glob("[0-9]*-*.log")), default=-1)

    def url(self, arm: LiveArm) -> str:
        """Where the arm is served. Raises EngineFailed where its server does not start, or has ended."""
        if arm.url:
            return arm.url
        server = self._alive.get(arm.command)
        if server is None:
            log = self._logs / f"{self._logged}-{arm.name}.log"
            self._logged += 1
            server = self._stack.enter_context(LiveServer(arm.command, log, self._say))
            self._alive[arm.command] = server
        server.refuse_ended()
        return server.url

    def cpu_s(self, arm: LiveArm) -> float | None:
        """Seconds on processors that the arm's server took so far; None for one that was not started here."""
        server = self._alive.get(arm.command)
        return None if arm.url or server is None else server.cpu_s

    @property
    def any_started(self) -> bool:
        """Whether servers that were started here run."""
        return bool(self._alive)

    def all_cpu_s(self) -> list[float]:
        """Seconds on processors that each of these took so far."""
        return [server.cpu_s for server in self._alive.values()]

    def cores(self, arm: LiveArm) -> list[str] | None:
        """What cores threads of the arm's server may run on; None for one that was not started here."""
        server = self._alive.get(arm.command)
        return None if arm.url or server is None else server.cores

    def end(self) -> None:
        """End all that were started. Whoever asks for one afterwards gets a new process."""
        self._alive.clear()
        self._stack.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
