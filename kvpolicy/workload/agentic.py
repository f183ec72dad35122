"""Sessions of coding agents: JSONL, one line per model call, with the lines of a session together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.workload.files import (
    Care,
    Counts,
    DamagedFile,
    DamagedRow,
    block_ids,
    lines,
    member,
    real,
    record,
    whole,
)
from kvpolicy.workload.requests import WorkloadError
from kvpolicy.workload.sessions import ID_BITS, Beginning, Session, SessionFile, Turn, Users, Windows

BLOCK_TOKENS = 64
"""Tokens of one of the format's ``hash_ids``; only full blocks have one."""

FIELDS = ("session", "t", "in", "out", "think_time", "hash_ids")


class Call(NamedTuple):
    """A model call: one line of the file."""

    session: str
    at_s: float
    """Seconds since the session's start."""
    prompt_tokens: int
    output_tokens: int
    think_s: float | None
    """Seconds between the previous response and this request, where the client recorded both."""
    served_s: float | None
    """Seconds that the client waited for the response, where they were measured."""
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """What counts towards the pause before the next request."""

    previous: Call | None = None
    carried_s: float = 0.0
    """Pauses and service times of calls left out since the last call that was included."""


class AgentSessions(SessionFile):
    """Sessions of one file: a :class:`kvpolicy.workload.Source`.

    The data does not say when sessions start: ``beginning`` does. In a closed loop (``closed``) a call comes after its
    predecessor's answer and the recorded pause; otherwise at its recorded time, whatever the server does.

    The lines of a session must be together in the file; to check this, the names of all sessions so far are held in
    memory.

    Where the time of the previous response was not recorded, ``think_time`` counts from an earlier one. The time
    between the two calls is used instead, which is too long by the service time of the previous call.
    """

    def __init__(
        self,
        path: Path | str,
        beginning: Beginning | None = None,
        care: Care | None = None,
        seed: int = 0,
        closed: bool = True,
        count: int | None = None,
        windows: Windows | None = None,
    ) -> None:
        """``count``: read only so many sessions. ``windows``: of those calls alone.

        Raises :class:`WorkloadError` for users outside a closed loop.
        """
        if isinstance(beginning, Users) and not closed:
            raise WorkloadError(
                f"{path}: users wait for their answers; recorded times (closed=false) need starts instead"
            )
        super().__init__(path, beginning, care, seed, count, windows)
        self.closed = closed

    @property
    def source(self) -> str:
        return f"{self.path.name}: sessions of coding agents, callanjfox/kv-cache-tester, Apache-2.0"

    def _sessions(self, counts: Counts) -> Iterator[Session]:
        name, gap, number = "", Gap(), 0
        turns: list[Turn] = []
        seen: set[str] = set()
        for line, call in self._calls(counts):
            if call.session != name or not seen:
                if call.session in seen:
                    where = f"{self.path}, line {line}"
                    counts.damage(self.care, f"{where}: session {call.session} was over; its lines should be together")
                    continue
                if turns:
                    yield Session(name, tuple(turns), BLOCK_TOKENS)
                    number += 1
                name, turns, gap = call.session, [], Gap()
                seen.add(name)
            if gap.previous and call.at_s < gap.previous.at_s:
                counts.damage(self.care, f"{self.path}, line {line}: t is {call.at_s}, before the call above it")
                continue
            think_s = gap.carried_s + _pause_s(gap.previous, call)
            if not call.prompt_tokens or not call.output_tokens:
                counts.empty += 1
                gap = Gap(call, think_s + (call.served_s or 0.0) if gap.previous else 0.0)
                continue
            base = (number + 1) << ID_BITS
            ids = tuple(base + block_id for block_id in call.ids)
            turns.append(Turn(call.prompt_tokens, call.output_tokens, think_s if turns else 0.0, call.at_s, ids))
            gap = Gap(call)
        if turns:
            yield Session(name, tuple(turns), BLOCK_TOKENS)

    def _calls(self, counts: Counts) -> Iterator[tuple[int, Call]]:
        try:
            for number, line in lines(self.path):
                counts.rows += 1
                try:
                    call = _call(record(line))
                except DamagedRow as error:
                    counts.damage(self.care, f"{self.path}, line {number}: {error}")
                    continue
                yield number, call
        except DamagedFile as error:
            counts.damage(self.care, str(error))


def _call(fields: Mapping[str, Any]) -> Call:
    session, at_s, prompt_tokens, output_tokens, think_s, ids = (member(fields, field) for field in FIELDS)
    if not isinstance(session, str) or not session:
        raise DamagedRow(f"session is {session!r}, should be a name")
    call = Call(
        session,
        _seconds(at_s, "t"),
        whole(prompt_tokens, "in"),
        whole(output_tokens, "out"),
        None if think_s is None else _seconds(think_s, "think_time"),
        None if fields.get("api_time") is None else _seconds(fields["api_time"], "api_time"),
        block_ids(ids, "hash_ids"),
    )
    if len(call.ids) * BLOCK_TOKENS > call.prompt_tokens:
        blocks = call.prompt_tokens // BLOCK_TOKENS
        raise DamagedRow(f"hash_ids holds {len(call.ids)} ids, {call.prompt_tokens} tokens are {blocks} full blocks")
    if call.ids and max(call.ids) >= 1 << ID_BITS:
        raise DamagedRow(f"hash_ids holds {max(call.ids)}, should be under {1 << ID_BITS}")
    return call


def _seconds(value: Any, field: str) -> float:
    number = real(value, field)
    if number < 0:
        raise DamagedRow(f"{field} is {number}, should be 0 or more")
    return number


def _pause_s(previous: Call | None, call: Call) -> float:
    if previous is None:
        return 0.0
    if previous.served_s is None:
        return call.at_s - previous.at_s
    if call.think_s is None:
        return max(0.0, call.at_s - previous.at_s - previous.served_s)
    return call.think_s
