"""Requests that say of their KV what a client that knows their sessions would say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvpolicy.request_marks import NO_HINTS, Hints
from kvpolicy.workload.requests import Request, WorkloadError
from kvpolicy.workload.scaling import Scaled

SESSIONS, HINDSIGHT = "sessions", "hindsight"
KINDS = (SESSIONS, HINDSIGHT)
DEFAULT_KEEP_S = 600.0
"""As long as a server grants unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Hinting(Scaled):
    """Requests with hints by their sessions; hints that they had are replaced.

    A request without the name of a session continues that of the longest prompt before it which it begins with, as far
    as that fills blocks of prefix ids, and which no other one has continued. One without prefix ids says nothing.

    ``kind``: :data:`SESSIONS` is what a client knows: which session a request is of, and that it may go on. Every
    request asks to keep its window for ``keep_s`` seconds, the last one of its session, too. :data:`HINDSIGHT` also
    knows the end, which no client does: the last request of a session says that it has ended, one that is its whole
    session that nothing of it will be repeated, and only the others ask to keep their windows. It reads the source
    twice and is a reference.
    """

    kind: str = SESSIONS
    keep_s: float = DEFAULT_KEEP_S

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise WorkloadError(f"{self.inner.name}: hints is {self.kind!r}, should be {' or '.join(KINDS)}")
        if not (math.isfinite(self.keep_s) and self.keep_s > 0):
            raise WorkloadError(f"{self.inner.name}: keep is {self.keep_s:g}, should be above 0, in seconds")

    @property
    def name(self) -> str:
        return f"{self.inner.name},hints={self.kind},keep={self.keep_s:g}"

    def __iter__(self) -> Iterator[Request]:
        counts: Counter[int | None] = Counter()
        if self.kind == HINDSIGHT:
            counts.update(session for _, session in with_sessions(self.inner))
        left = counts.copy()
        for request, session in with_sessions(self.inner):
            left[session] -= 1
            yield replace(request, hints=self._hints(session, counts[session], left[session]))

    def _hints(self, session: int | None, count: int, left: int) -> Hints:
        """Of a request of this session, which has ``count`` requests, ``left`` of them after this one; in hindsight."""
        if session is None:
            return NO_HINTS
        if self.kind == SESSIONS or left > 0:
            return Hints(self.keep_s, session=f"s{session}")
        return Hints(session=f"s{session}", ended=True) if count > 1 else Hints(once=True)


def with_sessions(requests: Iterable[Request]) -> Iterator[tuple[Request, int | None]]:
    """Each request with the number of its session; None where nothing says of which it is.

    Memory: O(sessions with names + distinct prefix ids of requests without)."""
    by_name: dict[str, int] = {}
    prompts = _Prompts()
    number = 0
    for request in requests:
        if request.session:
            session: int | None = by_name.setdefault(request.session, number)
        elif request.prefix:
            session = prompts.session_of(request, number)
        else:
            session = None
        number += session == number
        yield request, session


class _Prompts:
    """A tree of prefix ids, with the session of each prompt where that ends, until another one continues it: a short
    prompt with which all begin, such as a system prompt, is not taken for the turn before each of them."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        """Number of each node by its parent's, 0 for the root, and its id."""
        self._session: dict[int, int] = {}

    def session_of(self, request: Request, new: int) -> int:
        """That of the longest prompt so far with which this one begins and that none has continued, or else ``new``;
        this one is of it, too."""
        node = continued = 0
        for prefix_id in request.prefix[: request.prompt_tokens // request.prefix_block_tokens]:
            node = self._nodes.setdefault((node, prefix_id), len(self._nodes) + 1)
            continued = node if node in self._session else continued
        session = self._session.pop(continued, new)
        if node:
            self._session[node] = session
        return session
