"""Vendors' data of devices and links: facts with sources, read from ``sheets.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kvpolicy.errors import KVPolicyError
from kvpolicy.fields import like


class SheetError(KVPolicyError):
    """There is no sheet for a device or link; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """Data sheet of an accelerator. Rates are without sparsity."""

    name: str
    device_names: tuple[str, ...]
    """Names that drivers report."""
    bf16_flops: float
    """Floating-point operations per second on 16-bit types, 32-bit accumulation."""
    fp8_flops: float | None
    int8_ops: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    link: str
    """Name of the :class:`LinkSheet` of its usual link to the host, at full width (16 lanes of PCIe)."""
    source: str

    def flops(self, arithmetic: str) -> float:
        """Operations per second in an arithmetic. If the device lacks it, the 16-bit rate, because engines then widen
        the weights."""
        native = {"fp8": self.fp8_flops, "int8": self.int8_ops}.get(arithmetic)
        return self.bf16_flops if native is None else native


@dataclass(frozen=True, slots=True)
class LinkSheet:
    """Data sheet of a link between host and device memory."""

    name: str
    bytes_per_s: float
    """In each direction, before protocol overhead."""
    source: str


@cache
def devices() -> Mapping[str, DeviceSheet]:
    """Data sheets of devices by short name."""
    return {name: _device(name, values) for name, values in _read()["devices"].items()}


@cache
def links() -> Mapping[str, LinkSheet]:
    """Data sheets of links by name."""
    return {name: LinkSheet(name=name, **values) for name, values in _read()["links"].items()}


def device_sheet(device: str) -> DeviceSheet:
    """The sheet of a device, by short name or by its driver's name. Raises SheetError if there is none."""
    wanted = device.strip().casefold()
    for name, sheet in devices().items():
        if wanted == name.casefold() or wanted in map(str.casefold, sheet.device_names):
            return sheet
    meant = like(device.strip().upper(), devices())
    raise SheetError(
        f"there is no hardware sheet for device {device!r}{meant}; there are {', '.join(devices())}; "
        "measure this machine instead: `kvpolicy profile`, then `kvpolicy train`"
    )


def known_sheet(device: object) -> DeviceSheet | None:
    """Like :func:`device_sheet`; None for a device without a sheet."""
    try:
        return device_sheet(str(device))
    except SheetError:
        return None


def link_sheet(link: str) -> LinkSheet:
    """The sheet of a link by name. Raises SheetError if there is none."""
    if link.casefold() not in links():
        raise SheetError(f"there is no link {link!r}; there are {', '.join(links())}")
    return links()[link.casefold()]


def _read() -> dict[str, Any]:
    text = resources.files("kvpolicy.hardware").joinpath("sheets.json").read_text(encoding="utf-8")
    sheets: dict[str, Any] = json.loads(text)
    return sheets


def _device(name: str, values: Mapping[str, Any]) -> DeviceSheet:
    rest = {key: value for key, value in values.items() if key != "names"}
    return DeviceSheet(name=name, device_names=tuple(values["names"]), **rest)
