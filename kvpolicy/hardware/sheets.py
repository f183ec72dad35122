"""What vendors say of devices and links: facts with sources, read from ``sheets.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kvpolicy.errors import KVPolicyError


class SheetError(KVPolicyError):
    """There is no sheet of that device or link; the message lists those there are."""


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """An accelerator. Rates are dense ones, never those with sparsity."""

    name: str
    device_names: tuple[str, ...]
    """What drivers call it."""
    bf16_flops: float
    """Floating-point operations per second on 16-bit types, 32-bit accumulation."""
    fp8_flops: float | None
    int8_ops: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    link: str
    """What joins it to its host in its usual machine, by name of a :class:`LinkSheet`: full width, 16 lanes of PCIe."""
    source: str

    def flops(self, arithmetic: str) -> float:
        """In that arithmetic; 16-bit where the device does not have it, as engines then widen the weights."""
        found = {"fp8": self.fp8_flops, "int8": self.int8_ops}.get(arithmetic)
        return self.bf16_flops if found is None else found


@dataclass(frozen=True, slots=True)
class LinkSheet:
    """What joins host and device memory."""

    name: str
    bytes_per_s: float
    """In each direction, before protocol overhead."""
    source: str


@cache
def devices() -> Mapping[str, DeviceSheet]:
    """By short name."""
    return {name: _device(name, values) for name, values in _read()["devices"].items()}


@cache
def links() -> Mapping[str, LinkSheet]:
    """By name."""
    return {name: LinkSheet(name=name, **values) for name, values in _read()["links"].items()}


def device_sheet(device: str) -> DeviceSheet:
    """The sheet of a device by its short name or the name its driver gives. Raises SheetError where there is none."""
    wanted = device.strip().casefold()
    for name, sheet in devices().items():
        if wanted == name.casefold() or wanted in map(str.casefold, sheet.device_names):
            return sheet
    raise SheetError(
        f"there is no hardware sheet for device {device!r} (there are {', '.join(devices())}); "
        "measure this machine instead: `kvpolicy profile`, then `kvpolicy train`"
    )


def known_sheet(device: object) -> DeviceSheet | None:
    """As :func:`device_sheet`; None of a device without a sheet."""
    try:
        return device_sheet(str(device))
    except SheetError:
        return None


def link_sheet(link: str) -> LinkSheet:
    """Raises SheetError for a name that is none."""
    if link.casefold() not in links():
        raise SheetError(f"there is no link {link!r}; there are {', '.join(links())}")
    return links()[link.casefold()]


def _read() -> dict[str, Any]:
    text = resources.files("kvpolicy.hardware").joinpath("sheets.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _device(name: str, values: Mapping[str, Any]) -> DeviceSheet:
    rest = {key: value for key, value in values.items() if key != "names"}
    return DeviceSheet(name=name, device_names=tuple(values["names"]), **rest)
