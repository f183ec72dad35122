"""What clients send as ``kv_transfer_params``, well-meant or not, for tests."""

from __future__ import annotations

import random
from typing import Any

NESTED: dict[str, Any] = {}
for _ in range(100):
    NESTED = {"class": NESTED}
MEANT_WELL = (
    {"class": "chat"},
    {"class": "batch"},
    {"class": "chat", "ttft_s": 2.0, "tpot_s": 0.1},
    {"ttft_s": 1},
    {},
)
MALICIOUS: tuple[Any, ...] = (
    "chat", 7, True, ["class"], NESTED, {"class": NESTED}, {"class": "x" * 100_000}, {"class": "chat\nx 1"},
    {"class": True}, {"class": ""}, {"ttft_s": True}, {"ttft_s": float("nan")}, {"tpot_s": float("inf")},
    {"tpot_s": -1e-9}, {"tpot_s": 5e-324}, {"ttft_s": 1e308}, {"ttft_s": 10**400}, {"priority": -1000},
    {"class": "chat", "ttft_s": "1"}, {None: 1}, {"class": "root"},
)  # fmt: skip


def drawn(rng: random.Random) -> Any:
    """The parameters of one request: none, or a dictionary, as vLLM takes nothing else, with marks."""
    kind = rng.random()
    if kind < 0.3:
        return None
    return {"kvpolicy": rng.choice(MEANT_WELL if kind < 0.6 else MALICIOUS), "other": 1}
