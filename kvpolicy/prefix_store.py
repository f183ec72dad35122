"""`kvpolicy warm`: a prefix stored on a live server before anybody asks for it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any

from kvpolicy.client import authorization, counters_in, request_body
from kvpolicy.errors import InputError
from kvpolicy.fields import POSITIVE, WrongValue
from kvpolicy.stored_values import json_of, list_at, read_json, read_text, reason_of, text_at, whole_at

TIMEOUT_S = 3600.0
LOOKED_UP = "vllm:prefix_cache_queries_total"
FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
"""Tokens found on the device and by a connector."""
OWN, HINTED = "vllm:kvpolicy_", "vllm:kvpolicy_hinted_blocks_total"
HOST, HELD, NO_ROOM = 'tier="host"', 'event="held"', 'event="refused"'
"""The plugin's counters, that of blocks that hints are about, and its labels: of blocks in host memory, of those that
are held back, and of those that are not since as much is held as may be."""
REFUSED = ("vllm:kvpolicy_invalid_marks_total", "vllm:kvpolicy_clamped_marks_total")
ADDRESS = re.compile(r"https?://[^/\s]+")
MAX_ANSWER_BYTES = 64 << 20
LETTERS = 300
"""Of a server's error message that are shown."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a server stored, by its own counters: other requests at the same time count, too."""

    model: str
    prompt_tokens: int
    found_before: int
    """Tokens that were cached already."""
    found_after: int
    """Tokens that a second request with the same prompt found."""
    first_s: float
    """What the first request took, which computes what was missing."""
    second_s: float
    """What the second one took."""
    has_plugin: bool
    """Whether the server has any of the plugin's counters."""
    held_blocks: float
    """Blocks of host memory that hints hold back from eviction since then, or for longer: each counts when the request
    ends, and one that was there when it came counts then, too."""
    no_room_blocks: float
    """Blocks that are not held back, as hints hold as much of host memory as they may."""
    refused: float
    """Marks that the server did not read or not grant as they were sent, as far as it counts them."""
    grown: Mapping[str, float]
    """The plugin's counters that rose meanwhile."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"grown": dict(self.grown)}

    def text(self) -> str:
        computed = self.prompt_tokens - self.found_before
        lines = [
            f"{self.model}: {self.prompt_tokens} tokens, of which {self.found_before} were cached; {computed} were "
            f"computed, in {self.first_s:.3g} s",
            f"a second request found {self.found_after} of them and took {self.second_s:.3g} s",
        ]
        if not self.has_plugin:
            lines.append("nothing is pinned: the server shows no counter of kvpolicy's, and vLLM alone heeds no hint")
        elif self.no_room_blocks > 0:
            what = "not all of it is pinned" if self.held_blocks > 0 else "nothing more is pinned"
            lines.append(f"{what}: hints hold back as many blocks as they may, see the server's --hints")
        elif self.held_blocks <= 0:
            lines.append(
                "no further block is held back from eviction: it was pinned for longer before, it is shorter than a "
                "block, or see the server's --cache and --hints"
            )
        if self.refused:
            lines.append(f"{self.refused:g} marks were refused or cut: see the server's --hints and --classes")
        lines += [f"  {name.removeprefix('vllm:')}: {value:g}" for name, value in self.grown.items()]
        return "\n".join(lines)


def warm(
    url: str,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    keep_s: float | None = None,
    class_name: str | None = None,
    cache_salt: str | None = None,
    model: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Warmed:
    """Ask for one token behind a prompt, or messages, which the server then has cached and is asked to pin.

    ``keep_s``: seconds for which it stays pinned; None: as long as the server grants. ``cache_salt``: only requests
    with the same one find it; None: only those without. ``model``: one of those that the server names, as a LoRA
    adapter; None: the first. Where the environment has OPENAI_API_KEY, it is sent along. Raises InputError where the
    server cannot be reached, does not serve the model or refuses the request, and where both or neither of prompt and
    messages are given.
    """
    if (prompt is None) == (messages is None):
        raise InputError("a prompt or messages are to be stored: give one of the two")
    if not ADDRESS.match(url):
        raise InputError(f"{url!r} is no address of a server, as http://localhost:8000")
    if keep_s is not None:
        POSITIVE.refuse("keep_s", keep_s)
    # Nothing beside the pin is asked for again: an order by hints serves it after those that somebody waits for.
    said = request_body(pin=True, once=True, keep_s=keep_s, class_name=class_name)
    base = url.rstrip("/").removesuffix("/v1")
    model = _served_model(f"{base}/v1/models", model)
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0.0}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if messages is None:
        path, body["prompt"] = "/v1/completions", prompt if isinstance(prompt, str) else list(prompt or ())
    else:
        path, body["messages"] = "/v1/chat/completions", list(messages)
        body["add_generation_prompt"] = False  # what is stored ends where the messages do
    (before, hinted_before), start_s = _counters(base), clock()
    prompt_tokens = _prompt_tokens(f"{base}{path}", body | said)
    first_s, (between, _) = clock() - start_s, _counters(base)
    start_s = clock()
    _call(f"{base}{path}", body)
    second_s, (after, hinted_after) = clock() - start_s, _counters(base)
    held, no_room = (new - old for new, old in zip(hinted_after, hinted_before, strict=True))
    grown = {name: after[name] - before.get(name, 0.0) for name in after if name.startswith(OWN)}
    return Warmed(
        model,
        prompt_tokens,
        _found(before, between),
        _found(between, after),
        first_s,
        second_s,
        any(name.startswith(OWN) for name in after),
        held,
        no_room,
        sum(between.get(name, 0.0) - before.get(name, 0.0) for name in REFUSED),
        {name: value for name, value in grown.items() if value},
    )


def read_prompt(path: Path) -> str | list[int]:
    """A prompt's file: text, or a JSON list of token ids. Raises InputError."""
    if path.suffix != ".json":
        return str(_read_file(path, read_text))
    ids = _read_file(path, read_json)
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise InputError(f"{path}: should be a JSON list of token ids, whole numbers, 0 or above")
    return ids


def read_messages(path: Path) -> list[dict[str, Any]]:
    """A file of messages: a JSON list of objects with role and content. Raises InputError."""
    messages = _read_file(path, read_json)
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        raise InputError(f'{path}: should be a JSON list of objects, as in [{{"role": "system", "content": "..."}}]')
    return messages


def _read_file(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _found(before: Mapping[str, float], after: Mapping[str, float]) -> int:
    return round(sum(after.get(name, 0.0) - before.get(name, 0.0) for name in FOUND))


def _counters(base: str) -> tuple[dict[str, float], tuple[float, float]]:
    """All of them, and the blocks that hints hold back, and for which they have no room, so far."""
    text = _read(f"{base}/metrics").decode(errors="replace")
    counters = counters_in(text)
    if LOOKED_UP not in counters:
        raise InputError(f"{base}/metrics has no {LOOKED_UP}: the server is no vLLM, or its metrics are off")
    held, no_room = (counters_in(text, HOST, label).get(HINTED, 0.0) for label in (HELD, NO_ROOM))
    return counters, (held, no_room)


def _served_model(url: str, model: str | None) -> str:
    answer = _call(url)
    try:
        names = [text_at(one, "id") for one in list_at(answer, "data")]
        if not names:
            raise InputError("serves no model")
    except InputError as error:
        raise _no_server(url, error) from None
    if model is not None and model not in names:
        raise WrongValue("model", f"is {model!r}, should be one that the server has: {', '.join(names)}")
    return model or names[0]


def _prompt_tokens(url: str, body: Mapping[str, Any]) -> int:
    answer = _call(url, body)
    try:
        return whole_at(answer, "usage", "prompt_tokens")
    except InputError as error:
        raise _no_server(url, error) from None


def _no_server(url: str, error: InputError) -> InputError:
    return InputError(f"{url} does not answer as an OpenAI server: {error}")


def _call(url: str, body: Mapping[str, Any] | None = None) -> Any:
    content = _read(url, body)
    try:
        return json_of(content)
    except InputError as error:
        raise _no_server(url, error) from None


def _read(url: str, body: Mapping[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | authorization()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content = bytes(answer.read(MAX_ANSWER_BYTES + 1))
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(MAX_ANSWER_BYTES).decode(errors="replace").split())[:LETTERS]
        raise InputError(f"{url} answers {error.code}: {said}") from None
    except (ValueError, InvalidURL) as error:  # such as a port that is no number
        raise InputError(f"{url} is no address of a server, as http://localhost:8000: {error}") from None
    except (OSError, HTTPException) as error:
        raise InputError(f"{url} cannot be reached: {error}") from None
    if len(content) > MAX_ANSWER_BYTES:
        raise InputError(f"{url} answers with more than {MAX_ANSWER_BYTES:,} bytes, which is the most that is read")
    return content
