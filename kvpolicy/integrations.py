"""Integrations of engines, found by entry point, so that the library itself imports no engine.

A package registers, under :data:`GROUP` and the name of the package that it drives, a class whose instances, made
without arguments, are an :class:`Integration`.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from kvpolicy import overflow
from kvpolicy.bench_settings import BenchTarget, Load
from kvpolicy.errors import EngineFailed, KVPolicyError
from kvpolicy.fields import AMOUNT, refuse_no_path, refuse_non_integer, refuse_other, refuse_single
from kvpolicy.order import load_order
from kvpolicy.policy import Policy
from kvpolicy.settings import DEMO_ORDER, Measurement, ServerSettings, refuse_no_flags

if TYPE_CHECKING:  # not to load a simulator where flags are written
    from kvpolicy.simulator.base import Simulator

GROUP = "kvpolicy.integrations"
DEFAULT = "vllm"

HOW_TO_INSTALL = {
    "vllm": "`pip install 'kvpolicy[vllm]'` where there is a CUDA device, `pip install 'kvpolicy[cpu]'` elsewhere"
}


class EngineMissing(KVPolicyError):
    """No engine to work with; the message says what to install."""


class Report(Protocol):
    """Report of a measurement."""

    def text(self) -> str: ...


class NotServed(KVPolicyError):
    """A server that was not started, since its engine would refuse the plugin; the message says why, and what helps."""


class Checked(Report, Protocol):
    """Whether a model is served."""

    @property
    def served(self) -> bool | None:
        """None where only the engine itself can tell, at its start."""
        ...

    @property
    def ok(self) -> bool: ...

    @property
    def untested(self) -> str:
        """What no test has shown of it, though it is served; empty where there is nothing."""
        ...

    def to_dict(self) -> dict[str, Any]: ...


class Launcher(Protocol):
    """Writes a server's flags; the engine itself need not be installed."""

    def options(self, settings: ServerSettings) -> dict[str, Any]:
        """The plugin's settings that differ from the defaults. Raises KVPolicyError for what it would refuse."""
        ...

    def serve_command(self, llm: str, extra: Mapping[str, Any], vllm_flags: Sequence[str]) -> list[str]:
        """The command that starts a server with these settings. Raises InputError for flags that would undo them."""
        ...

    def config_yaml(self, extra: Mapping[str, Any]) -> str:
        """The same flags as a configuration file."""
        ...

    def config_into(self, file: Path, extra: Mapping[str, Any]) -> str:
        """Merge the same flags into a configuration file; return the difference. Raises InputError for what contradicts
        them."""
        ...

    def core_variables(self, vllm_flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        """Variables by which an engine on a CPU keeps as many cores free as without the plugin. ``environment``: what
        the user has set."""
        ...

    def shell_line(self, command: Sequence[str]) -> str: ...


class Integration(Protocol):
    """One engine: measures on it, simulates with its code, and writes its flags."""

    @property
    def launcher(self) -> Launcher: ...

    def simulator(self) -> Simulator:
        """A simulator that runs the engine's own code."""
        ...

    def check(self, llm: str, settings: ServerSettings, vllm_flags: Sequence[str]) -> Checked:
        """Whether the engine takes these flags and the plugin serves the model with them, without its weights."""
        ...

    def profile(self, out: Path, how: Measurement) -> Report: ...

    def demo(self, out: Path, quick: bool, seed: int, order: str = DEMO_ORDER) -> Report: ...

    def characterize(self, out: Path, figures: Sequence[str], how: Measurement) -> Report: ...

    def bench(self, out: Path, load: Load, at: BenchTarget) -> Report: ...


def integration(name: str = DEFAULT) -> Integration:
    """The integration of that name. Raises :class:`EngineMissing` where none is registered."""
    entries = entry_points(group=GROUP)
    if name not in entries.names:
        registered = ", ".join(sorted(entries.names)) or "none"
        raise EngineMissing(
            f"nothing is registered as {GROUP} {name!r} (registered: {registered}): "
            "install kvpolicy as a package, `pip install -e .` in a checkout"
        )
    instance: Integration = entries[name].load()()
    return instance


def engine(name: str = DEFAULT) -> Integration:
    """The integration of an installed engine. Raises :class:`EngineMissing` also where the engine is not installed."""
    found_integration = integration(name)
    require(name)
    return found_integration


def launcher(name: str = DEFAULT) -> Launcher:
    """The writer of flags for engine ``name``. Raises :class:`EngineMissing` where nothing is registered."""
    return integration(name).launcher


def simulator(name: str = DEFAULT) -> Simulator:
    """A simulator that runs engine ``name``'s own code. Raises :class:`EngineMissing` where it is not installed."""
    return engine(name).simulator()


def require(name: str = DEFAULT) -> None:
    """Raise :class:`EngineMissing`, which says what to install, where engine ``name`` is not installed."""
    if find_spec(name) is None:
        instructions = HOW_TO_INSTALL.get(name, f"install {name}")
        raise EngineMissing(
            f"this needs a live engine, and {name} is not installed in this environment: {instructions}; "
            "without an engine: demo --offline (offline_demo in Python), explain, evaluate and simulate"
        )


def serve_command(llm: str, settings: ServerSettings | str, vllm_flags: Sequence[str] = ()) -> list[str]:
    """The command that :func:`serve` runs; arguments and errors are the same."""
    settings = _served(llm, settings, vllm_flags)
    launch = launcher()
    return launch.serve_command(llm, launch.options(settings), vllm_flags)


def _served(llm: str, settings: ServerSettings | str, vllm_flags: Sequence[str]) -> ServerSettings:
    """The settings. Raises WrongValue for an argument of a wrong type."""
    if isinstance(settings, str | Policy) or (isinstance(settings, type) and issubclass(settings, Policy)):
        settings = ServerSettings(settings)  # which refuses an object, with its path
    refuse_other("settings", settings, ServerSettings, "a policy's name or ServerSettings")
    refuse_other("llm", llm, str, "a model's name or folder, as a text")
    refuse_no_flags(vllm_flags)
    return settings


def check(llm: str, settings: ServerSettings | str = "always-swap", vllm_flags: Sequence[str] = ()) -> Checked:
    """Whether the engine takes the flags and the plugin serves the model with them, without reading weights; arguments
    as for :func:`serve`. Whether the device's memory suffices is not looked at.

    Raises as :func:`serve`, and EngineFailed where the process that looks ends badly.
    """
    return engine().check(llm, _served(llm, settings, vllm_flags), vllm_flags)


def refuse_unserved(llm: str, settings: ServerSettings | str, vllm_flags: Sequence[str] = ()) -> str:
    """Look beforehand whether a server would serve the model; arguments as for :func:`serve`.

    Returns what was never tested of it, or why that cannot be told, which should stop no server; empty where there is
    nothing to say. Raises :class:`NotServed`.
    """
    try:
        found = check(llm, settings, vllm_flags)
    except (EngineFailed, EngineMissing) as error:
        return f"it could not be looked at beforehand: {str(error).strip().splitlines()[-1]}"
    if found.served is False:
        raise NotServed(f"{found.text()}\n  --no-check (check=False in Python) starts the server all the same")
    return found.untested if found.served else found.text()


def serve(
    llm: str, settings: ServerSettings | str, vllm_flags: Sequence[str] = (), check: bool = True
) -> subprocess.Popen[bytes]:
    """Start vLLM's server for model ``llm`` with the policy on, in a process of its own, and return that process.

    ``settings``: a policy by name, or its name with further settings. The server is another process, which no policy
    object can reach: a policy of one's own is named ``python:MODULE:FACTORY`` in
    ``ServerSettings(..., allow_python_policies=True)``. ``vllm_flags``: as on the command line, ``["--port", "8001"]``.
    ``check``: find out before, in some seconds, whether the plugin serves the model with these flags.

    The server answers some time after this returns. It inherits the output and the environment of this process, with
    :meth:`Launcher.core_variables` where that lacks them, and runs until ``terminate()`` is called. Its command is
    ``args`` of the process.

    Raises WrongValue for a wrong argument, a policy object included, InputError for a flag that would undo the
    plugin's, :class:`NotServed` by the check, :class:`EngineMissing` without an engine, and the errors of
    :func:`kvpolicy.policy.load` for the policy. Warns where the check cannot tell, and of what was never tested.
    """
    command = serve_command(llm, settings, vllm_flags)
    if check and (doubt := refuse_unserved(llm, settings, vllm_flags)):
        warnings.warn(doubt, stacklevel=2)
    return subprocess.Popen(command, env=os.environ | launcher().core_variables(vllm_flags, os.environ))


def profile(out: Path | str, how: Measurement = Measurement()) -> Report:
    """Measure both options in the same states on a live engine and write a trace to ``out``.

    An unfinished profile in ``out`` is resumed. Raises WrongValue for a wrong argument, InputError for flags with which
    a server would not start, EngineFailed where an engine fails, :class:`EngineMissing` without an engine.
    """
    refuse_no_path("out", out)
    refuse_other("how", how, Measurement, "a Measurement")
    return engine().profile(Path(out), how)


def demo(out: Path | str = Path("out/demo"), quick: bool = False, seed: int = 0, order: str = DEMO_ORDER) -> Report:
    """Measure on a small model what preemptions cost here, and serve two loads by the unmodified engine and with the
    plugin, in alternating rounds; writes ``out/demo.json``.

    ``order``: the name of the order of service that requests of one class are served by last. An unfinished demo in
    ``out`` is resumed. Raises WrongValue for a wrong argument, :class:`EngineMissing` without an engine.
    """
    refuse_no_path("out", out)
    refuse_non_integer("seed", seed, AMOUNT)
    refuse_other("order", order, str, "a name: engines are other processes")
    load_order(order)
    return engine().demo(Path(out), quick=quick, seed=seed, order=order)


def characterize(out: Path | str, figures: Sequence[str] = ("all",), how: Measurement = Measurement()) -> Report:
    """Measure the overflow study's figures on a live engine and write a trace to ``out``; see :mod:`kvpolicy.overflow`.

    ``figures``: names of figures, or ``all``; the rest as for :func:`profile`. Raises WrongValue for a wrong argument,
    :class:`EngineMissing` without an engine.
    """
    refuse_no_path("out", out)
    refuse_single(figures=figures)
    refuse_other("how", how, Measurement, "a Measurement")
    return engine().characterize(Path(out), overflow.named(figures), how)


def bench(out: Path | str, load: Load, at: BenchTarget) -> Report:
    """Put a load on live OpenAI servers over HTTP, arm by arm in alternation, and write ``out/bench.json``.

    An unfinished bench in ``out`` is resumed. Raises WrongValue for a wrong argument, InputError where ``out`` has a
    bench with other settings or a server does not answer, EngineFailed where a server that was started ends,
    :class:`EngineMissing` where one is to be started and there is no engine.
    """
    refuse_no_path("out", out)
    refuse_other("load", load, get_args(Load), "a ChatLoad, an AnalyticsLoad or a RateLoad")
    refuse_other("at", at, BenchTarget, "a BenchTarget")
    found = integration() if at.is_url else engine()
    return found.bench(Path(out), load, at)
