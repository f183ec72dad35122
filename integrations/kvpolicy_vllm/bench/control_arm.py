"""An arm that switches a running server by its control file before a run, and back after it.

Called by :mod:`kvpolicy_vllm.bench.run_bench`. What the file may have is in :mod:`kvpolicy_vllm.plugin.control_file`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.errors import InputError
from kvpolicy.server_metrics import OURS, Metrics
from kvpolicy.stored_values import read_sealed, sealed
from kvpolicy_vllm.bench.openai_api import Api, connected
from kvpolicy_vllm.plugin import control_file

SEEN_S = 60.0
"""Seconds within which a server has to show a change; a cost model is loaded in them."""
EVERY_S = 0.2
PROBES_PER_CORE = 2
"""Requests that are sent at a time, per engine core: an idle one changes with its next request."""


@dataclass(frozen=True, slots=True)
class Switch:
    """What a server is switched to. An empty policy or order is that of its start."""

    control: str
    """The file that the server was started with by ``--control``."""
    policy: str = ""
    order: str = ""

    def settings(self) -> dict[str, str]:
        return {name: value for name in ("policy", "order") if (value := str(getattr(self, name)))}

    def to_dict(self) -> dict[str, str]:
        return {"control": self.control} | self.settings()


@asynccontextmanager
async def switched(switch: Switch, api: Api, prompt: Sequence[int], state: Path) -> AsyncIterator[dict[str, str]]:
    """The server, switched; gives policy and order as its metrics name them. Afterwards the file is as it was.

    ``prompt``: of requests by which an idle engine takes the change. ``state``: a file for :func:`put_back`, which is
    there until the server has taken what the control file had. Raises InputError where a file cannot be written or was
    not written by whom it should be, where the server refuses the change, where its metrics do not show one within
    :data:`SEEN_S`, and where a policy is switched to in shadow mode.
    """
    file, wanted = Path(switch.control), switch.settings()
    former, content = _content(file), json.dumps(wanted)
    await _metrics(api, switch)
    if former is not None:  # what the server refuses by now could not be put back after the run
        await _put(switch, api, prompt, former, {})
    keeps = {"url": api.url, "control": str(file.absolute()), "former": former, "arm": content, "prompt": list(prompt)}
    _write(state, json.dumps(sealed(keeps)))
    try:
        yield await _put(switch, api, prompt, content, wanted)
    except BaseException:
        with suppress(InputError):  # the first error is the one to report, and the state stays
            _restore(file, former)
            _restore(state, None)
        raise
    await _put(switch, api, prompt, former, {})
    _restore(state, None)


async def put_back(state: Path) -> bool:
    """What :func:`switched` does at its end, where it was killed before; whether it was. ``state``: as given there.

    A control file that somebody has written or deleted since is left as it is. Raises InputError as it does, and where
    the state was damaged or the server does not answer.
    """
    if not state.exists():
        return False
    try:
        kept = read_sealed(state)
    except InputError as error:
        raise InputError(f"{error}: give the control file what it should have, and delete {state}") from None
    switch, prompt = Switch(kept["control"]), kept["prompt"]
    file = Path(switch.control)
    present = _content(file)
    former = kept["former"] if present == kept["arm"] else present
    _restore(file, former)
    async with connected(kept["url"]) as api:
        if former is None:  # that there is still no file is no change that could be waited for
            await _put(switch, api, prompt, "", {})
        await _put(switch, api, prompt, former, {})
    _restore(state, None)
    return True


async def _put(
    switch: Switch, api: Api, prompt: Sequence[int], content: str | None, wanted: dict[str, str]
) -> dict[str, str]:
    """Give the file this content, and wait as :func:`_taken` does."""
    before = _changes(await _metrics(api, switch))
    _restore(Path(switch.control), content)
    return await _taken(switch, api, prompt, before, content, wanted)


async def _taken(
    switch: Switch,
    api: Api,
    prompt: Sequence[int],
    before: dict[tuple[str, ...], float],
    content: str | None,
    wanted: dict[str, str],
) -> dict[str, str]:
    """Wait until every engine core has taken a change and serves by what is ``wanted``; returns what it serves by."""
    last_s = time.monotonic() + SEEN_S
    cores = {core for core, _ in before}
    while True:
        probes = (api.complete(prompt, 1, "switch") for _ in range(PROBES_PER_CORE * len(cores)))
        if failed := next((answer.error for answer in await asyncio.gather(*probes) if answer.error), ""):
            raise InputError(f"{api.url} does not serve while it is switched: {failed}")
        metrics = await _metrics(api, switch)
        now = _changes(metrics)
        grown = {key for key, count in now.items() if count > before.get(key, 0.0)}
        cores = {core for core, _ in now}
        if refused := [core for core, result in grown if result == "refused"]:
            raise InputError(
                f"{api.url} refuses what {switch.control} has, {content or 'nothing'} (engine core {refused[0]}): its "
                "log says why"
            )
        in_force = _in_force(metrics)
        if {(core, "applied") for core in cores} <= grown and all(
            _kind(in_force[name]) == _kind(value) for name, value in wanted.items()
        ):
            _refuse_shadow(metrics, api, wanted)
            return in_force
        if time.monotonic() > last_s:
            raise InputError(
                f"{api.url} shows no change in its metrics within {SEEN_S:g} s of one of {switch.control}: the file "
                "should be the one that this server was started with by --control, on this machine"
            )
        await asyncio.sleep(EVERY_S)


async def _metrics(api: Api, switch: Switch) -> Metrics:
    metrics = Metrics.of(await api.metrics())
    if not _changes(metrics):
        raise InputError(
            f"{api.url} serves without kvpolicy: an arm with a control file ({switch.control}) is of a server with the "
            "plugin, started with --control"
        )
    return metrics


def _changes(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Changes of the file so far, by engine core and result."""
    return metrics.by(f"{OURS}control_changes_total", "engine", "result")


def _in_force(metrics: Metrics) -> dict[str, str]:
    """Policy and order by which the server serves now; joined where its cores differ."""
    names = {"policy": f"{OURS}cost_model", "order": f"{OURS}order"}
    return {label: ", ".join(value for (value,), on in sorted(metrics.by(name, label).items()) if on)
            for label, name in names.items()}  # fmt: skip


def _refuse_shadow(metrics: Metrics, api: Api, wanted: dict[str, str]) -> None:
    """Raise InputError where a policy is wanted of a server that executes none."""
    in_shadow = [core for (core,), on in sorted(metrics.by(f"{OURS}shadow", "engine").items()) if on]
    if in_shadow and "policy" in wanted:
        raise InputError(
            f"{api.url} is in shadow mode (engine core {in_shadow[0]}), where every victim is recomputed whatever the "
            f"policy: a server for an arm with policy {wanted['policy']} is started without --shadow"
        )


def _kind(name: str) -> str:
    """Of a policy or an order, without its options and paths, which metrics shorten."""
    return re.split("[:,/@]", name)[0]


def _content(file: Path) -> str | None:
    """What the file has; None where there is none. Raises InputError where a server would not read it."""
    try:
        control_file.read(file, of=_owner(file)[0])
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error}") from None


def _owner(file: Path) -> tuple[int, int]:
    """Ids of the user and the group that a new content belongs to: those of this process; for root, who measures
    servers of other users, those of the file, or of its folder where there is none. Raises OSError."""
    if os.geteuid():
        return os.geteuid(), os.getegid()
    try:
        found = file.lstat()
    except FileNotFoundError:
        found = file.parent.stat()
    return found.st_uid, found.st_gid


def _write(file: Path, content: str) -> None:
    """Replace the whole file, of mode 600. Raises InputError."""
    beside = file.with_name(f"{file.name}.bench-{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            if not os.geteuid():
                os.fchown(new.fileno(), *_owner(file))
            new.write(content.encode())
        beside.replace(file)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be deleted either
            beside.unlink()
        raise InputError(f"{file}: cannot be written: {error}") from None


def _restore(file: Path, former: str | None) -> None:
    """Give the file what it had. Raises InputError."""
    if former is not None:
        _write(file, former)
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{file}: cannot be deleted: {error}") from None
