"""Workloads and hardware of a study: texts, or objects, which are identified by a digest of their contents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvpolicy.code_digest import LABEL_DIGITS, digest_of
from kvpolicy.cost import FittedModel
from kvpolicy.fields import WrongValue, refuse_class
from kvpolicy.simulator.hardware.table_times import HardwareModel
from kvpolicy.study.config import HARDWARE_FORMS
from kvpolicy.workload import Workload

HardwareObject = FittedModel | HardwareModel
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Named(Generic[Value]):
    """A text, or an object with a label. Objects with equal contents are equal."""

    label: str
    """The text; for an object its name and the beginning of its digest."""
    digest: str = ""
    """Digest of an object, the same in every process; empty for a text."""
    value: Value | None = field(default=None, compare=False, repr=False)


def workload_named(workload: str | Workload) -> Named[Workload]:
    """A workload with its label. Raises WrongValue, naming it, for an object without a digest: a mutable one."""
    if isinstance(workload, str):
        return Named(workload)
    refuse_class("workloads", workload)
    if type(workload) is not Workload:
        raise WrongValue(
            "workloads",
            f"hold {getattr(workload, 'name', workload)!r}, a {type(workload).__name__}, should be texts or "
            "Workload objects, which have a digest: Workload(name, tuple(source), seed) makes one from any source",
        )
    digest = workload.digest
    return Named(f"{workload.name}@{digest[:LABEL_DIGITS]}", digest, workload)


def hardware_named(hardware: str | HardwareObject) -> Named[HardwareObject]:
    """Hardware with its label. Raises WrongValue, naming it, for an object of another kind."""
    refuse_class("hardware", hardware)
    if isinstance(hardware, str):
        return Named(hardware)
    if isinstance(hardware, HardwareModel):
        return Named(f"{hardware.device}@{hardware.digest[:LABEL_DIGITS]}", hardware.digest, hardware)
    if isinstance(hardware, FittedModel):
        if not hardware.provenance.trace_digests:
            raise WrongValue("hardware", f"{hardware.name!r}: is untrained, should be named as DEVICE[@LINK]:CONFIG")
        # Its own digest is that of files, from which it may differ.
        digest = digest_of(replace(hardware, name="", digest=""))
        return Named(f"{hardware.provenance.family.partition('@')[0]}@{digest[:LABEL_DIGITS]}", digest, hardware)
    raise WrongValue(
        "hardware",
        f"is {getattr(hardware, 'name', hardware)!r}, a {type(hardware).__name__}, should be a text "
        f"({HARDWARE_FORMS}), a cost model with laws, as `train` makes one, or a HardwareModel",
    )
