"""Engines and servers, found by entry point, so that the library itself imports none.

``kvpolicy.engines``: modules with ``profile(out, llm, quick, link, seed)``, ``demo(out, quick, seed)`` and
``characterize(out, figures, quick, llm, link, seed)``, each under the name of the package it drives.
``kvpolicy.launchers``: modules that write server flags, under the same names.
``kvpolicy.simulators``: classes, made without arguments, of simulators that need an engine's own code; same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpolicy import overflow
from kvpolicy.errors import InputError, KVPolicyError

ENGINES = "kvpolicy.engines"
LAUNCHERS = "kvpolicy.launchers"
SIMULATORS = "kvpolicy.simulators"
DEFAULT = "vllm"

HOW_TO_INSTALL = {
    "vllm": "`pip install 'kvpolicy[vllm]'` where there is a CUDA device, `pip install 'kvpolicy[cpu]'` elsewhere"
}


class EngineMissing(KVPolicyError):
    """No engine to work with; the message says what to install."""


def engine(name: str = DEFAULT) -> Any:
    """The module that drives engine ``name``. Raises :class:`EngineMissing` where the engine is not installed."""
    found = _entry_point(ENGINES, name)
    require(name)
    return found.load()


def launcher(name: str = DEFAULT) -> Any:
    """The module that writes server flags for engine ``name``; the engine itself need not be installed."""
    return _entry_point(LAUNCHERS, name).load()


def simulator(name: str = DEFAULT) -> Any:
    """A simulator made of engine ``name``'s own code. Raises :class:`EngineMissing` where it is not installed."""
    found = _entry_point(SIMULATORS, name)
    require(name)
    return found.load()()


def require(name: str = DEFAULT) -> None:
    """Raises :class:`EngineMissing`, which says what to install, where engine ``name`` is not installed."""
    if find_spec(name) is None:
        how = HOW_TO_INSTALL.get(name, f"install {name}")
        raise EngineMissing(f"this needs a live engine, and {name} is not installed in this environment: {how}")


def profile(
    out: Path | str, llm: Path | str | None = None, quick: bool = False, link: str | None = None, seed: int = 0
) -> Any:
    """Measure both options in the same states on a live engine and write a trace to ``out``.

    ``llm``: folder of the model to serve; ``None`` makes a small one from a seed. ``quick``: fewer states.
    ``link``: ``BYTES_PER_S[,LATENCY_S]`` puts the copies behind a simulated link. Where ``out`` holds an unfinished
    profile it is taken up again. Raises ValueError for a wrong argument, :class:`EngineMissing` without an engine.
    """
    _refuse_seed(seed)
    return engine().profile(Path(out), None if llm is None else Path(llm), quick=quick, link=link, seed=seed)


def demo(out: Path | str = Path("out/demo"), quick: bool = False, seed: int = 0) -> Any:
    """The whole loop and an overload in four arms, on a small model; writes ``out/demo.json``."""
    _refuse_seed(seed)
    return engine().demo(Path(out), quick=quick, seed=seed)


def characterize(
    out: Path | str,
    figures: Sequence[str] = ("all",),
    quick: bool = False,
    llm: Path | str | None = None,
    link: str | None = None,
    seed: int = 0,
) -> Any:
    """Measure the overflow study's figures on a live engine and write a trace to ``out``; see :mod:`kvpolicy.overflow`.

    ``figures``: which, or ``all``; the rest as for :func:`profile`. Raises ValueError for a wrong argument,
    :class:`EngineMissing` without an engine.
    """
    known = overflow.named(figures)
    _refuse_seed(seed)
    folder = None if llm is None else Path(llm)
    return engine().characterize(Path(out), known, quick=quick, llm=folder, link=link, seed=seed)


def _refuse_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"seed is {seed}, should be 0 or above")


def _entry_point(group: str, name: str) -> EntryPoint:
    found = entry_points(group=group)
    if name not in found.names:
        have = ", ".join(sorted(found.names)) or "none"
        raise EngineMissing(
            f"nothing is registered as {group} {name!r} (registered: {have}): "
            "install kvpolicy as a package, `pip install -e .` in a checkout"
        )
    return found[name]
