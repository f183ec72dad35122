"""`kv_connector_extra_config`, read once and strictly: a misspelt key is an error, not a default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.hardware import available_memory_bytes
from kvpolicy.hardware.link import GivenLink

GIB = 1 << 30
DEFAULT_COPIER = "kvpolicy_vllm.plugin.copiers.copier_for"


@dataclass(frozen=True, slots=True)
class Settings:
    """The plugin's options. One field per key of ``kv_connector_extra_config``."""

    policy: str
    host_gib: float = 4.0
    """Host memory for saved KV blocks in all, over the ranks of one engine core, GiB. Each core has its own."""
    force_host_gib: bool = False
    """Accept a ``host_gib`` of more than half of the memory that is available now."""
    pin_memory: bool = True
    """Page-lock the host pool where there is an accelerator; without one it means nothing."""
    trace: Path | None = None
    """Folder to record into; each engine core makes a sub-folder of its own."""
    shadow: bool = False
    """Decide and record, but execute vLLM's own recompute."""
    seed: int = 0
    online_state: Path | None = None
    """File that keeps what a policy with ``online=on`` learned, over a restart."""
    link: GivenLink | None = None
    """A simulated link that copies go over; None: the machine's own."""
    source: str = "production"
    """What the trace's header says it is."""
    copier: str = DEFAULT_COPIER
    """Import path of what makes the worker-side copier. For tests that make copies fail."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ValueError naming the key that is unknown, missing or wrong, and what would be right."""
        known: dict[str, Callable[[str, Any], Any]] = {
            "policy": _text,
            "host_gib": _positive,
            "force_host_gib": _flag,
            "pin_memory": _flag,
            "trace": lambda key, value: Path(_text(key, value)),
            "shadow": _flag,
            "seed": _whole,
            "online_state": _file,
            "link": lambda key, value: GivenLink.parse(_text(key, value)),
            "source": _text,
            "copier": _text,
        }
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(known))}"
            )
        if "policy" not in extra:
            raise ValueError('kv_connector_extra_config: key \'policy\' is missing, as in {"policy": "always-swap"}')
        given = {key: known[key](key, value) for key, value in extra.items() if value is not None}
        return cls(**given)

    def refuse_too_much_memory(self, cores: int = 1) -> None:
        """Raises ValueError where the host pools would take more than half of the available memory, unless forced.

        ``cores``: data-parallel engine cores on this machine; each has a pool of its own.
        """
        available = available_memory_bytes()
        if self.host_gib * cores * GIB <= available / 2 or self.force_host_gib:
            return
        asked = f"host_gib is {self.host_gib:g}"
        if cores > 1:
            asked += f" for each of {cores} data-parallel engine cores here, {self.host_gib * cores:g} in all"
        raise ValueError(
            f"{asked}, more than half of the {available / GIB:.1f} GiB available now; "
            f'give at most {available / 2 / cores / GIB:.1f}, or "force_host_gib": true'
        )


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, should be a text")
    return value


def _file(key: str, value: Any) -> Path:
    path = Path(_text(key, value))
    if path.is_dir():
        raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, a folder; should be a file")
    return path


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, should be true or false")
    return value


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, should be a whole number")
    return value


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, should be a number above 0")
    return float(value)
