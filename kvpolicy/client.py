"""What a client of a server with the plugin sends besides a prompt, and the counters that it can read there.

For any client of OpenAI's API; none is imported. With the package `openai`::

    client.completions.create(..., extra_body=request_body(session="user-7", keep_s=300))
"""

from __future__ import annotations

import os
from math import isfinite, nan
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.request_marks import KEY, InvalidMarks, read_marks

COUNTED = ("vllm:prefix_cache_", "vllm:external_prefix_cache_", "vllm:num_preemptions", "vllm:kvpolicy_")
"""Beginnings of the names of counters that are read."""
NOT_COUNTED = ("_created", "_bucket")
"""Ends of the names of those that are not."""


def request_body(
    *,
    class_name: str | None = None,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    keep_s: float | None = None,
    once: bool = False,
    pin: bool | int = False,
    session: str | None = None,
    ended: bool = False,
) -> dict[str, Any]:
    """What a request says of itself, as keys to add to its body: ``extra_body`` of the package `openai`.

    ``class_name``: one that the operator listed. ``ttft_s``, ``tpot_s``: deadlines, seconds to the first token and per
    token after it. ``keep_s``: seconds for which its whole window will be wanted again. ``once``: nothing of it will
    be. ``pin``: others share its prompt (True), or so many of its leading tokens. ``session``: name of the
    conversation, 1 to 64 letters, digits, dots, dashes or underscores. ``ended``: it is the session's last request.

    Raises InputError for what a server would refuse to read.
    """
    said = {
        "class": class_name, "ttft_s": ttft_s, "tpot_s": tpot_s, "keep_s": keep_s, "once": once, "pin": pin,
        "session": session, "ended": ended,
    }  # fmt: skip
    marks = {name: value for name, value in said.items() if value is not None and value is not False}
    try:
        read_marks(marks)
    except InvalidMarks as invalid:
        raise InputError(f"what the request says of itself {invalid}") from None
    return {"kv_transfer_params": {KEY: marks}} if marks else {}


def authorization() -> dict[str, str]:
    """The header with the key in the environment variable OPENAI_API_KEY, as the package `openai` sends it; without
    one no header. Raises InputError, which does not show it, for a key that no header can have."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError("OPENAI_API_KEY: should be one line of printable ASCII characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


def counters_in(text: str, *labels: str) -> dict[str, float]:
    """The counters that :data:`COUNTED` names in a text of Prometheus, each summed over its labels; ``labels``: over
    those alone that have all of these, as ``event="held"``.

    Lines that are no sample, and values that are no finite number, are passed over.
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(COUNTED) or any(label not in line for label in labels):
            continue
        series, _, text = line.rpartition(" ")
        name = series.partition("{")[0].strip()
        value = _number(text)
        if isfinite(value) and not name.endswith(NOT_COUNTED):
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _number(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return nan
