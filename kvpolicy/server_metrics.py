"""What a live server says of its preemptions, from its ``/metrics`` and its trace. Called by `kvpolicy watch`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvpolicy import trace as traces
from kvpolicy.errors import InputError
from kvpolicy.trace.parts import parts_of

OURS = "vllm:kvpolicy_"
MAX_BYTES = 16 * 2**20
"""Of an answer: vLLM's metrics are some 100 kB."""
PARTS = 3
"""Newest part files of a core's decisions and outcomes that are looked at."""
ROWS = 1000
"""Last rows of each: a merged part may have a hundred thousand."""
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """One answer of ``/metrics``: samples by name and labels."""

    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def of(cls, text: str) -> Metrics:
        """From Prometheus' text format. Lines that are no sample are passed over, and so are NaN and infinities, which
        count nothing."""
        samples: dict[tuple[str, Labels], float] = {}
        for line in text.splitlines():
            found = None if line.startswith("#") else _SAMPLE.match(line.strip())
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            if isfinite(value):
                samples[found[1], tuple(sorted(_LABEL.findall(found[2] or "")))] = value
        return cls(samples)

    @property
    def has_plugin(self) -> bool:
        return any(name.startswith(OURS) for name, _ in self.samples)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all cores and labels but those given; 0 where there is none."""
        return sum(
            value for (one, of), value in self.samples.items() if one == name and labels.items() <= dict(of).items()
        )

    def largest(self, name: str) -> float | None:
        """Of the cores' values: of a share, which cannot be added up."""
        return max((value for (one, _), value in self.samples.items() if one == name), default=None)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of these labels."""
        sums: dict[tuple[str, ...], float] = {}
        for (one, of), value in self.samples.items():
            if one == name:
                key = tuple(dict(of).get(label, "") for label in labels)
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def restarted_since(self, earlier: Metrics) -> bool:
        """Whether a counter is lower than it was: a server that began anew counts from 0."""
        return any(
            name.endswith("_total") and self.samples.get((name, labels), 0.0) < value
            for (name, labels), value in earlier.samples.items()
        )


def fetch(url: str, timeout_s: float = 10.0) -> Metrics:
    """Ask a server. Raises OSError where it does not answer, InputError where what it answers is not vLLM's metrics
    and where the address is wrong."""
    try:
        with urlopen(metrics_address(url), timeout=timeout_s) as answer:
            text = answer.read(MAX_BYTES + 1)
    except InvalidURL as error:
        raise InputError(f"{url!r} is no address of a server, as http://localhost:8000: {error}") from None
    except HTTPException as error:
        raise OSError(f"it does not speak HTTP: {type(error).__name__}") from error
    metrics = Metrics.of(text.decode(errors="replace"))
    if len(text) > MAX_BYTES or not any(name.startswith("vllm:") for name, _ in metrics.samples):
        raise InputError(f"{metrics_address(url)} has no metrics of vLLM")
    return metrics


def metrics_address(url: str) -> str:
    """``http://host:port``, with or without ``/metrics`` or ``/v1``. Raises InputError for what is no such address."""
    if not re.match(r"https?://[^/\s]+", url):
        raise InputError(f"{url!r} is no address of a server, as http://localhost:8000")
    return re.sub(r"(/metrics|/v1)?/*$", "", url) + "/metrics"


def last_decisions(folder: Path, number: int) -> list[dict[str, Any]]:
    """The last decisions of all cores of a trace, newest first, with ``measured_s``: engine time, None if unknown.

    Only the newest part files are read: a server's trace may hold weeks. Raises TraceError.
    """
    decisions: list[dict[str, Any]] = []
    measured: dict[tuple[str, str], float | None] = {}
    for core in traces.core_folders(folder):
        for row in _newest(core, "outcomes"):
            measured[core.name, row["preemption_id"]] = row["engine_s"]
        decisions += [row | {"core": core.name} for row in _newest(core, "decisions")]
    decisions.sort(key=lambda row: float(row["time_s"]), reverse=True)
    return [row | {"measured_s": measured.get((row["core"], row["preemption_id"]))} for row in decisions[:number]]


def _newest(core: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in parts_of(core / name)[-PARTS:]:
        with suppress(FileNotFoundError):  # a server that merges its parts may have replaced it meanwhile
            table = traces.read_part(part.path, name)
            rows += table.slice(max(0, table.num_rows - ROWS)).to_pylist()
    return rows
