"""What a process holds on to: its memory, and whatever of the plugin still names a request."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kvpolicy.order.queue import MAX_VOID

WARM_UP = 25
"""Schedules in which caches fill: those of vLLM's configurations, of imports and of the allocator."""
MIN_COMPARED = 5
"""Schedules at either end that are compared, at least."""
MAX_GROWTH_KIB = 8 * 1024
"""What the memory of a process may grow by from the first schedules after the warm-up to the last ones."""
SUFFIX = ".memory.json"
OWN = ("kvpolicy", "tests.holds", "tests.unruly", "tests.fickle")
"""Modules whose objects are looked into."""


def resident_kib() -> int:
    """Memory of this process that is in use, once garbage is collected and what is free is given back."""
    gc.collect()
    with suppress(AttributeError, OSError):  # where the C library is another than glibc, free memory stays
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def grown_kib(resident: Sequence[int]) -> int | None:
    """What memory grew by, from its values after each schedule: the median of the last third of those after the warm-up
    less that of the first third. None for too few."""
    later = resident[WARM_UP:]
    third = len(later) // 3
    return int(median(later[-third:]) - median(later[:third])) if third >= MIN_COMPARED else None


def write(results: Path, resident: Sequence[int]) -> None:
    """Beside the outcomes of a process, its memory after each schedule, KiB."""
    results.with_suffix(SUFFIX).write_text(json.dumps(resident))


def read_growth(results: Path) -> int | None:
    """What the memory of the process grew by that wrote these outcomes, KiB; None where that is not known."""
    file = results.with_suffix(SUFFIX)
    return grown_kib(json.loads(file.read_text())) if file.exists() else None


def naming(root: Any, names: set[str]) -> Iterator[str]:
    """Containers below ``root``, with their number of entries that hold one of the requests ``names``, or name one.

    Below are the attributes of the plugin's own objects and what is in their containers; what is referred to weakly
    is not. A list may hold up to :data:`MAX_VOID` of them, a dictionary or a set none.
    """
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([(type(root).__name__, root)])
    while queue:
        path, one = queue.popleft()
        if id(one) in seen or isinstance(one, WeakKeyDictionary | WeakSet):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping | list | set | frozenset | deque):
            entries = [*one.items()] if isinstance(one, Mapping) else list(one)
            count = sum(_names_any(entry, names) for entry in entries)
            if count > (MAX_VOID if isinstance(one, list | deque) else 0):
                yield f"{path} holds {count} requests that have ended"
            queue.extend((f"{path}[]", part) for entry in entries for part in _parts(entry))
        elif type(one).__module__.startswith(OWN):
            queue.extend((f"{path}.{name}", value) for name, value in _fields(one))


def _parts(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _names_any(entry: Any, names: set[str]) -> bool:
    parts = _parts(entry)
    return any((part if isinstance(part, str) else getattr(part, "request_id", None)) in names for part in parts)


def _fields(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for cls in type(one).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)
