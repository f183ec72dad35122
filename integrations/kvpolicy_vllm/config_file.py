"""Merges the plugin's flags into a user's YAML file for ``vllm serve --config``, whose comments and order stay.

Only lines of the plugin's own keys are written: the file is read with PyYAML for what it means and where its top-level
values stand, and edited as text. The edited text is then read again: what it means must be what was to be written.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

import yaml

from kvpolicy import stored_values
from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.settings import CONNECTOR

MAX_BYTES = 1 << 20
"""Of a file of settings: PyYAML takes a hundred times as much memory."""
TRANSFER = "kv-transfer-config"
KEPT = ("shutdown-timeout",)
"""Keys that hold as they are where the user has them."""
EXCLUDED = {"kv-offloading-size": "kvpolicy keeps evicted KV itself, in the memory set by --host-gib"}


def merge(file: Path, addition: str) -> str:
    """Merge top-level keys, the YAML text ``addition``, into ``file``, and return the difference; empty where there is
    none, and nothing is written then. A file that is not there is made.

    A reader finds the old file or the new one, never a part. Raises InputError, and leaves the file alone, where it
    cannot be read or edited, or contradicts the addition.
    """
    target = file.resolve()
    before = read_text(file, "--into") if target.exists() else ""
    after = merged(before, addition, str(file))
    if after == before:
        return ""
    try:
        _write(target, after)
    except OSError as error:
        raise InputError(f"--into {file}: cannot be written: {error}") from None
    lines = unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), "before", "after", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def merged(before: str, addition: str, name: str) -> str:
    """The text of a file, ``before``, with the addition. ``name``: of the file, for errors, raised as :func:`merge`."""
    wanted: dict[str, Any] = yaml.safe_load(addition)
    present, values = _top_level(before, name)
    spelling = _spellings(present, name)
    for key, reason in EXCLUDED.items():
        if key in spelling:
            raise InputError(f"{name}: has {spelling[key]}, which excludes kvpolicy: {reason}")
    _refuse_two_orders(name, spelling, values, wanted)
    added: list[str] = []
    expected, edits = dict(values), []
    for key, value in wanted.items():
        own = spelling.get(key)
        if own is None:
            added.append(key)
            expected[key] = value
        elif key not in KEPT and values[own] != value:
            _refuse_other(name, own, key, values[own], value)
            edits.append((*present[own], f"{own}:{_dumped({key: value})[len(key) + 1 :]}"))
            expected[own] = value
    newline = "\r\n" if "\r\n" in before else "\n"
    text = before
    for start, end, replaced in sorted(edits, reverse=True):
        text = text[:start] + replaced.rstrip("\n").replace("\n", newline) + text[end:]
    if added:
        block = _lines_of(addition, added).replace("\n", newline)
        text += (newline if text and not text.endswith("\n") else "") + block
    _refuse_misread(text, expected, name)
    return text


def read_text(file: Path, flag: str) -> str:
    """The text of a YAML file that is named with ``flag``. Raises InputError."""
    try:
        return stored_values.read_text(file, MAX_BYTES)
    except (OSError, InputError) as error:
        raise InputError(f"{flag} {file}: cannot be read: {stored_values.reason_of(error)}") from None


def settings_of(text: str, name: str) -> tuple[Any, dict[str, Any]]:
    """The root node of a YAML text and its top-level settings; None and no settings for an empty one.

    ``name``: of the file, for errors. Raises InputError for what is no YAML, or no settings by name.
    """
    try:
        root, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except RecursionError:
        raise InputError(f"{name}: is nested too deeply to be read") from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # PyYAML refuses a syntax error in its own way, and a value that is no date or number in Python's.
        raise InputError(f"{name}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return None, {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{name}: is no list of settings, should have lines such as `port: 8000`")
    return root, values


def _top_level(text: str, name: str) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """From where to where in the text each top-level entry stands, and the values."""
    root, values = settings_of(text, name)
    if root is None:
        return {}, {}
    if root.flow_style:
        raise InputError(f"{name}: is no list of settings, should have lines such as `port: 8000`")
    spans: dict[str, tuple[int, int]] = {}
    for key, value in root.value:
        if key.value in spans:
            raise InputError(f"{name}: has {key.value} twice")
        written = text[key.start_mark.index : _end(value)].rstrip()
        spans[key.value] = key.start_mark.index, key.start_mark.index + len(written)
    return spans, values


def _end(node: Any) -> int:
    """Where a value ends, without the comments that follow a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _spellings(present: Mapping[str, Any], name: str) -> dict[str, str]:
    """The file's keys as it spells them, by the name of the flag, which vLLM also takes with underscores."""
    spelling: dict[str, str] = {}
    for key in present:
        flag = key.replace("_", "-")
        if flag in spelling:
            raise InputError(f"{name}: has {spelling[flag]} and {key}, which are the same flag")
        if "." in flag and flag.split(".")[0] == TRANSFER:
            raise InputError(f"{name}: has {key}; write {TRANSFER} as one entry, or leave it out")
        spelling[flag] = key
    return spelling


def _refuse_other(name: str, own: str, key: str, present: Any, wanted: Any) -> None:
    """Raise InputError unless the present value is an earlier one of kvpolicy's."""
    if key == TRANSFER and isinstance(present, dict) and present.get("kv_connector") == CONNECTOR:
        return
    shown = present.get("kv_connector", present) if isinstance(present, dict) else present
    needed = wanted.get("kv_connector", wanted) if isinstance(wanted, dict) else wanted
    way = "take it out first"
    if key == TRANSFER:
        way += ", or write both into a MultiConnector as the page on other connectors says"
    raise InputError(f"{name}: has {own} {shown!r}, and kvpolicy needs {needed!r} there: {way}")


def _refuse_two_orders(name: str, spelling: Mapping[str, str], values: Mapping[str, Any], wanted: Any) -> None:
    """Raise InputError where vLLM's priority scheduling and an order of ours would both rank requests: a server with
    both does not start."""
    own = spelling.get("scheduling-policy")
    order = wanted.get(TRANSFER, {}).get("kv_connector_extra_config", {}).get("order", "fcfs")
    if own is not None and order != "fcfs" and values[own] not in ("fcfs", order):
        raise InputError(
            f"{name}: has {own}: {values[own]}, and --order {order} ranks requests itself: take {own} out of the file, "
            "or leave --order out"
        )


def _dumped(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=False))


def _lines_of(addition: str, keys: list[str]) -> str:
    """The addition without the entries that the file has, and without notes about these."""
    values = yaml.safe_load(addition)
    notes = [line for line in addition.splitlines() if line.startswith("#")]
    kept = [note for note in notes if not any(note.startswith(f"# {key}:") for key in values if key not in keys)]
    return "".join(f"{note}\n" for note in kept) + _dumped({key: values[key] for key in keys})


def _refuse_misread(text: str, expected: Mapping[str, Any], name: str) -> None:
    """Raise InputError where the edited text does not mean what was to be written, as after a `...` that ends it."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if found != expected:
        raise InputError(f"{name}: is written in a way that cannot be edited: paste what `kvpolicy config` prints")


def _write(target: Path, text: str) -> None:
    """Replace the file as a whole, with its permissions."""
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
    handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(scratch).replace(target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
