"""`kvpolicy list`: the names that commands take, with what each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from kvpolicy import cost, order, policy, shelf
from kvpolicy.caching import spec as caching
from kvpolicy.errors import InputError
from kvpolicy.hardware import sheets
from kvpolicy.workload import FORMATS, SHIPPED

GB = 1e9


def _models() -> Mapping[str, str]:
    return dict.fromkeys(cost.shipped(), "a cost model that ships, of that name's trace")


def _traces() -> Mapping[str, str]:
    return dict.fromkeys(shelf.names("traces"), "a profile that ships, measured on two cores without a GPU")


def _devices() -> Mapping[str, str]:
    return {
        name: f"{sheet.bf16_flops / 1e12:.0f} TFLOP/s in bf16, {sheet.memory_bytes / GB:.0f} GB at "
        f"{sheet.memory_bytes_per_s / GB:.0f} GB/s; link {sheet.link}"
        for name, sheet in sheets.devices().items()
    }


def _links() -> Mapping[str, str]:
    return {name: f"{sheet.bytes_per_s / GB:.1f} GB/s each way" for name, sheet in sheets.links().items()}


def _workloads() -> Mapping[str, str]:
    lengths = {name: f"lengths of a public trace: {one.source}" for name, one in SHIPPED.items()}
    return lengths | {f"{name}:FILE": one.about for name, one in FORMATS.items()}


KINDS: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "models": _models,
    "traces": _traces,
    "devices": _devices,
    "links": _links,
    "policies": lambda: policy.FORMS,
    "orders": lambda: order.FORMS,
    "caches": lambda: caching.FORMS,
    "workloads": _workloads,
}
"""What is listed, and where its names stand."""


def list_names(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help=f"{', '.join(KINDS)}. Default: all of them.")
    ] = None,
) -> None:
    """List the names that commands take: what ships, data sheets, policies, orders, caches and workloads."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"there is no list of {kind}; there are {', '.join(KINDS)}")
    for number, name in enumerate([kind] if kind else KINDS):
        if kind is None:
            typer.echo(f"{'' if number == 0 else chr(10)}{name}")
        names = KINDS[name]()
        width = max(map(len, names), default=0)
        for one, what in names.items():
            typer.echo(f"  {one:{width}}  {what}")


def add_to(app: typer.Typer) -> None:
    app.command("list")(list_names)
