"""The error that ended a server, from the lines of its log. Called by :mod:`kvpolicy_vllm.bench.live_server`.

vLLM's processes each log the traceback of their own failure, and the last one only points at an earlier one ("See root
cause above").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

PREFIX = re.compile(r"(\(\S+ pid=\d+\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""What vLLM puts before each line: the process; level, time and place."""
ERROR = re.compile(r"([A-Za-z_]\w*\.)*\w*(Error|Exception)(: .*)?")
"""The last line of a traceback, or the first one of a message of several lines."""
POINTS_ABOVE = re.compile(r"see (root cause above|stack trace for root cause)", re.IGNORECASE)
MORE_LINES = 2
"""Indented lines of a message that are shown after its first."""
NO_MEMORY = re.compile(r"memory on (?:device|node) .*\(([\d.]+)/([\d.]+) GiB\) on startup is less than")
"""Of a device on which less is free than the flag asks for: GiB that are free, and all there are."""


def root_cause(lines: Sequence[str]) -> str:
    """The last error before the first one that points above, in one line; empty where the log has none.

    Where the server wanted more memory than is free, what its flag can be at most follows.
    """
    texts = [line[found.end() :] if (found := PREFIX.match(line)) else line for line in lines]
    errors = [at for at, text in enumerate(texts) if ERROR.fullmatch(text)]
    own = [*takewhile(lambda at: not POINTS_ABOVE.search(texts[at]), errors)]
    if not own:
        return ""
    following = texts[own[-1] + 1 :][:MORE_LINES]
    cause = " ".join([texts[own[-1]], *map(str.strip, takewhile(lambda text: text.startswith(" "), following))])
    short = NO_MEMORY.search(cause)
    return cause if short is None else f"{cause} {_smaller(float(short[1]), float(short[2]))}"


def is_short_of_memory(cause: str) -> bool:
    """Whether a cause says all there is to know: that the server wanted more memory than is free."""
    return NO_MEMORY.search(cause) is not None


def _smaller(free_gib: float, total_gib: float) -> str:
    """What to give, rounded down to whole per cents."""
    return f"(Give --gpu-memory-utilization {int(100 * free_gib / total_gib) / 100:g} or less.)"
