"""What the requests of a server say of themselves: read once each, clamped by the operator's settings, and counted.

Orders of service, traces and the cache of prompts ask for it; where none is in use nothing is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.request_marks import KEY, NO_MARKS, REASONS, Client, InvalidMarks, Marks, read_marks
from kvpolicy_vllm.plugin.observers import Tally

logger = logging.getLogger(f"vllm.{__name__}")

ACTION_VERSION = "1"
"""Version of the KV hint action that is read."""
Grant = Callable[[Marks], tuple[Marks, tuple[str, ...]]]
"""Gives what a request is allowed to be, and names of what it claimed in vain."""


def client_of(request: Any, marks: Marks) -> Client:
    """Whose hints those of the request are, which was granted these marks.

    Of its ``cache_salt`` only a digest goes on, to the workers too: it is short whatever a client sent.
    """
    salt = request.cache_salt
    if not salt:
        return Client(marks.class_name)
    sent = salt.encode("utf-8", "surrogatepass")  # JSON may hold halves of surrogate pairs, which UTF-8 has not
    return Client(marks.class_name, hashlib.blake2b(sent, digest_size=16).digest())


class MarkReader:
    """Marks of the unfinished requests of one engine core. Never raises: a request whose marks cannot be read is one
    that says nothing."""

    def __init__(self, grant: Grant, tally: Tally) -> None:
        self._grant = grant
        self._tally = tally
        self._marks: dict[str, Marks] = {}
        self._unmarked: tuple[Marks, tuple[str, ...]] | None = None
        """What is granted to a request that says nothing, as most do."""
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._marks)

    def grant_by(self, grant: Grant) -> None:
        """Let requests be what ``grant`` gives them from now on; marks that were read before are read anew."""
        self._grant, self._unmarked = grant, None
        self._marks.clear()

    def of(self, request: Any) -> Marks:
        """What the request is, read when it is first asked for."""
        marks = self._marks.get(request.request_id)
        if marks is None:
            marks = self._marks[request.request_id] = self._read(request)
        return marks

    def columns(self, request: Any) -> Mapping[str, Any]:
        """The same as arguments of :func:`kvpolicy.trace.request_row`."""
        marks = self.of(request)
        return {
            "class_name": marks.class_name,
            "priority": marks.priority,
            "ttft_deadline_s": marks.ttft_s,
            "tpot_deadline_s": marks.tpot_s,
        }

    def forget(self, request: Any) -> None:
        """The request has ended."""
        self._marks.pop(request.request_id, None)

    def _read(self, request: Any) -> Marks:
        try:
            said = read_marks(_sent_with(request), request.priority)
        except InvalidMarks as invalid:
            said = self._refuse(request, invalid.reason)
        # The boundary between a client and a server: whatever was sent, the request is served.
        except Exception:  # noqa: BLE001
            said = self._refuse(request, "error")
        granted, vain = self._granted(said)
        for mark in vain:
            self._tally.add("clamped_marks", mark=mark)
        return granted

    def _granted(self, said: Marks) -> tuple[Marks, tuple[str, ...]]:
        if said is not NO_MARKS:
            return self._grant(said)
        if self._unmarked is None:
            self._unmarked = self._grant(said)
        return self._unmarked

    def _refuse(self, request: Any, reason: str) -> Marks:
        self._tally.add("invalid_marks", reason=reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "kvpolicy: kv_transfer_params[%r] of a request %s; it is of the default class, without deadlines and "
                "hints of its own (counted as invalid_marks, reported once)", KEY, REASONS[reason],
            )  # fmt: skip
        return Marks(priority=request.priority)


def _sent_with(request: Any) -> Any:
    """The marks that came with a request; None where it has none.

    Those of a KV hint, which only the server's own process can send (vLLM 0.31 and later), go before a client's.
    """
    hints = getattr(request, "kv_hints", None)
    for action in () if hints is None else hints.actions:
        if action.action_type == KEY:
            if action.action_version != ACTION_VERSION:
                raise InvalidMarks("version")
            return action.payload
    parameters = getattr(request, "kv_transfer_params", None)
    return parameters.get(KEY) if isinstance(parameters, dict) else None
