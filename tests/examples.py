"""How many examples a property is held against: the same few at every run, or many new ones on `make fuzz`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FACTOR = int(os.environ.get("KVPOLICY_FUZZ", "1"))
"""Over 1: that many times as many examples, drawn anew at every run."""


def examples(count: int = 100, **kwargs: Any) -> settings:
    return settings(max_examples=count * FACTOR, **kwargs)
