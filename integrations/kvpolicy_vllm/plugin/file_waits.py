"""Which requests wait until what files have of their prompts is in host memory, and which of them bring it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Any

from kvpolicy_vllm.plugin.file_index import FileIndex

THE_START = 0
"""In the place of a load: ranks have yet to say what an earlier server left."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a request was last told of a load."""

    load: int
    """Its number, or :data:`THE_START`."""
    waits: bool
    local_blocks: int
    """What it had on the device."""


class FileWaits:
    """One per engine core. ``keys_of``: keys of a request's blocks between two indices. ``is_worth``: whether a request
    that has so many blocks better loads so many after them than computes them, with so many seconds until they have
    come."""

    def __init__(
        self,
        files: FileIndex,
        keys_of: Callable[[Any, int, int], Sequence[bytes]],
        is_worth: Callable[[Any, int, int, float], bool],
    ) -> None:
        self._files, self._keys_of, self._is_worth = files, keys_of, is_worth
        self._asked: dict[str, float] = {}
        """By unfinished request that has asked whether it brings what files have to host memory, how many jobs of files
        had ended then: the answer may be another one once more have. Infinite where it will not be."""
        self._fetched: dict[str, int] = {}
        """By such a request for which a load has begun, how many blocks are before what it brings."""
        self._awaited: dict[str, Awaited] = {}
        """By request that waits, the last load that has begun to bring what it needs next, its own or another's."""

    @property
    def names(self) -> Set[str]:
        """Requests of which anything is remembered."""
        return self._awaited.keys() | self._asked.keys()

    def known(self, name: str, local_blocks: int) -> bool | None:
        """Whether the request waits, where that is known already; vLLM asks in every step. It is known while the load
        for which it was decided is under way, and, of a request that has looked files up, while no load is. None where
        it has to be decided anew."""
        if not self._files.is_loading and self._has_looked_up(name):
            return False
        known = self._awaited.get(name)
        if known is None or known.local_blocks != local_blocks:
            return None
        lasts = self._files.starting if known.load == THE_START else self._files.is_coming(known.load)
        return known.waits if lasts else None

    def waits(self, request: Any, local_blocks: int, first: int, keys: Sequence[bytes]) -> bool:
        """Whether the request goes on in files, and is better admitted when that has come to host memory. Begins to
        bring as much of it there as comes in time and has room, and the rest when that has come. ``keys``: of what it
        needs, behind the ``first`` blocks that the device and host memory have."""
        files, name = self._files, request.request_id
        if files.load_of(keys[0]):
            return self._awaits(request, local_blocks, first, keys)
        if self._has_looked_up(name):
            return False
        if files.starting:
            self._awaited[name] = Awaited(THE_START, True, local_blocks)
            return True
        return self._fetches(request, local_blocks, first, keys)

    def _has_looked_up(self, name: str) -> bool:
        """Whether the request has looked its blocks up in files already, and a further lookup would end the same."""
        return self._files.settled <= self._asked.get(name, -1)

    def _fetches(self, request: Any, local_blocks: int, first: int, keys: Sequence[bytes]) -> bool:
        """Whether the request begins to bring what files have of these blocks, which follow the ``first`` ones, or as
        much of it as comes in time and has room, to host memory, and waits for it."""
        files, name = self._files, request.request_id
        self._asked[name] = inf
        if first <= self._fetched.get(name, -1):  # what a load has brought is gone again, or it brought nothing
            return False
        if not (files.suspended or (files.room and files.in_time(1))):
            self._asked[name] = files.settled
            return False
        found, backlog_s = files.lookup(keys), files.backlog_s()
        if not found:
            return False
        blocks = found if files.suspended else max(1, files.in_time(min(found, files.room)))
        # Beside going on with what host memory has: that can be loaded without waiting for a file.
        worth = self._is_worth(request, first, blocks, backlog_s + files.read_s(blocks))
        if not files.suspended and (worth or backlog_s):
            self._asked[name] = files.settled
        if not worth or not files.fetch(self._keys_of(request, 0, first + blocks), first, blocks):
            return False
        self._awaited[name] = Awaited(files.load_of(keys[0]), True, local_blocks)
        self._fetched[name] = first
        return True

    def _awaits(self, request: Any, local_blocks: int, first: int, keys: Sequence[bytes]) -> bool:
        """Whether the request is better admitted when a load, which may be another's, has brought these blocks, which
        follow the ``first`` ones. Asked once for each load."""
        load, known = self._files.load_of(keys[0]), self._awaited.get(request.request_id)
        waits = known.waits if known is not None and known.load == load else None
        if waits is None:
            blocks, read_s = self._files.ahead(keys, load)
            waits = self._is_worth(request, first, blocks, read_s)
        self._awaited[request.request_id] = Awaited(load, waits, local_blocks)
        return waits

    def admitted(self, name: str) -> None:
        """The request waits no more."""
        self._awaited.pop(name, None)

    def forget(self, name: str) -> None:
        """The request has ended, or has lost its blocks and will need them again: it may ask anew."""
        for of in (self._asked, self._fetched, self._awaited):
            of.pop(name, None)
