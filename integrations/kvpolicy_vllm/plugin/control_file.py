"""Another policy, another order or shadow mode while the server runs, by a file that the operator writes.

A thread looks at the file, reads it when it has changed, and loads what it names, so that no step waits for the file or
for a cost model. The scheduler takes the result before its next step. What is wrong in the file is logged and counted,
and changes nothing.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.extensions import names_module
from kvpolicy.order import Order
from kvpolicy.policy import Policy
from kvpolicy_vllm.plugin.settings_line import read_line

KEYS = ("policy", "order", "shadow")
OFF = "off"
SWITCHED_OFF = {"policy": "always-recompute", "order": "fcfs", "shadow": False}
"""What stock vLLM does."""
EVERY_S = 0.5
MAX_BYTES = 1 << 16

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the file asks for, loaded and fit for this engine."""

    policy_name: str
    policy: Policy
    order: Order
    shadow: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The settings of the start, which hold for whatever the file does not name. An empty ``policy`` or ``order`` is
    that of the settings, which may be an object without a name."""

    order: str
    shadow: bool
    policy: str = ""


def read(path: Path, of: int | None = None) -> str:
    """The content of the file; empty where there is none. ``of``: id of the server's user; None for this process's.

    Raises InputError where it is no file of this user's or of root's, may be read or written by others, or is too long.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path}: is no file")
        if found.st_uid not in (os.geteuid() if of is None else of, 0):
            raise InputError(f"{path}: belongs to user {found.st_uid}, should be the server's or root's")
        if found.st_mode & 0o077:
            mode = f"{stat.S_IMODE(found.st_mode):o}"
            raise InputError(f"{path}: has mode {mode}, others could change the server: give it mode 600")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: is longer than {MAX_BYTES} bytes")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no text") from None


class ControlFile:
    """One per engine core. ``load_policy`` and ``load_order`` load by name, and check that it fits this engine."""

    def __init__(
        self, path: Path, start: Start, load_policy: Callable[[str], Policy], load_order: Callable[[str], Order]
    ) -> None:
        self._path, self._start = path, start
        self._load_policy, self._load_order = load_policy, load_order
        self._seen: tuple[int, ...] | None = None
        self._wanted: Wanted | None = None
        self._refused = 0
        self._lock = threading.Lock()
        self.news = False
        """Whether there is something to take: asked before every step."""

    def watch(self) -> ControlFile:
        """Look at the file from now on, until this object is gone."""
        self.look()
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="kvpolicy-control", daemon=True).start()
        return self

    def look(self) -> None:
        """Read the file if it has changed, and load what it names."""
        seen = self._stamp()
        if seen == self._seen:
            return
        first, self._seen = self._seen is None, seen
        if first and not seen:
            return  # there is none, and was none: the flags hold
        wanted: Wanted | None = None
        wrong: BaseException | None = None
        try:
            wanted = self._load(read(self._path))
        # The boundary between what an operator wrote and a server: whatever is wrong there, it serves as before. Code
        # of a user's that exits would end the thread, and nothing would be looked at any more.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            wrong = error
        if self._stamp() != seen:
            return  # and looks again soon: a shell that writes to the file has emptied it first
        if wrong is not None:
            logger.warning("kvpolicy: the control file changes nothing (counted as control_changes): %s", wrong)
        with self._lock:
            self._wanted = self._wanted if wanted is None else wanted
            self._refused, self.news = self._refused + (wanted is None), True

    def take(self) -> tuple[Wanted | None, int]:
        """What the file asks for since it was last asked, and how often it asked for something wrong."""
        with self._lock:
            wanted, refused = self._wanted, self._refused
            self._wanted, self._refused, self.news = None, 0, False
        return wanted, refused

    def _stamp(self) -> tuple[int, ...]:
        """Changes with the file; empty where there is none."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size

    def _load(self, text: str) -> Wanted:
        start = self._start
        values: Mapping[str, Any] = SWITCHED_OFF if text == OFF else read_line(text, str(self._path), KEYS)
        name, shadow = values.get("policy", start.policy), values.get("shadow", start.shadow)
        order = values.get("order", start.order)
        for key, value in (("policy", name), ("order", order)):
            if not isinstance(value, str):
                raise InputError(f"{self._path}: {key} is {value!r}, should be a text")
            if names_module(value.replace("/", ":")) and value != getattr(start, key):
                raise InputError(
                    f"{self._path}: {key} is {value!r}, a module to run: this file never makes a server import code; "
                    "start it with that, or install a package that registers a name"
                )
        if not isinstance(shadow, bool):
            raise InputError(f"{self._path}: shadow is {shadow!r}, should be true or false")
        if start.shadow and not shadow and text != OFF:
            raise InputError(
                f"{self._path}: shadow is off, but a server that was started with --shadow has no host memory to swap "
                f"to; give {OFF} or shadow=on here, or start it without --shadow"
            )
        return Wanted(name, self._load_policy(name), self._load_order(order), shadow)


def _watch(control: weakref.ref[ControlFile]) -> None:
    while True:
        time.sleep(EVERY_S)
        present = control()
        if present is None:
            return
        present.look()
        del present
