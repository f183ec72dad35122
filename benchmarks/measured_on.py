"""What a measurement says above its figures: what was asked for, with which versions, on which machine, and how busy
that machine was. Called by benchmarks that start engines and write raw numbers; loads no engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from kvpolicy.hardware import describe
from kvpolicy_vllm.bench.resumed_inputs import versions


def head_of(options: argparse.Namespace, asked: Sequence[str]) -> dict[str, Any]:
    """``asked``: names of the options that the figures depend on."""
    machine = describe()
    return {
        "asked": {name: getattr(options, name) for name in asked},
        "versions": versions(),
        "machine": {name: machine[name] for name in ("processor", "cores")},
    }


def load_average() -> float:
    """The machine's over the last minute: how many processes ran or wanted to."""
    return os.getloadavg()[0]
