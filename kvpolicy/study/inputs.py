"""Workloads and hardware of a study: texts, or objects, which go by a digest of all that they hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from kvpolicy.code_digest import SHOWN, digest_of
from kvpolicy.cost import FittedModel
from kvpolicy.fields import WrongValue
from kvpolicy.simulator.hardware.table_times import HardwareModel
from kvpolicy.study.config import HARDWARE_FORMS
from kvpolicy.workload import Workload

HardwareObject = FittedModel | HardwareModel
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Named(Generic[Given]):
    """A text, or an object under its label. Two objects that hold the same are equal."""

    label: str
    """The text; of an object its name, with the digest's beginning."""
    digest: str = ""
    """Of an object, the same in every process."""
    given: Given | None = field(default=None, compare=False, repr=False)


def workload_named(workload: str | Workload) -> Named[Workload]:
    """Raises WrongValue, naming it, for an object without a digest: one that may change, or is read elsewhere."""
    if isinstance(workload, str):
        return Named(workload)
    if type(workload) is not Workload:
        raise WrongValue(
            "workloads",
            f"hold {getattr(workload, 'name', workload)!r}, a {type(workload).__name__}, should be texts or of the "
            "class Workload, which has a digest: Workload(name, tuple(source), seed) makes one of any source",
        )
    digest = workload.digest
    return Named(f"{workload.name}@{digest[:SHOWN]}", digest, workload)


def hardware_named(hardware: str | HardwareObject) -> Named[HardwareObject]:
    """Raises WrongValue, naming it, for an object that is no hardware."""
    if isinstance(hardware, str):
        return Named(hardware)
    if isinstance(hardware, HardwareModel):
        return Named(f"{hardware.device}@{hardware.digest[:SHOWN]}", hardware.digest, hardware)
    if isinstance(hardware, FittedModel):
        if not hardware.provenance.trace_digests:
            raise WrongValue("hardware", f"{hardware.name!r}: is untrained, should be given as DEVICE[@LINK]:CONFIG")
        digest = digest_of(replace(hardware, name="", digest=""))  # its own is of files, which it may no longer be like
        return Named(f"{hardware.provenance.family.partition('@')[0]}@{digest[:SHOWN]}", digest, hardware)
    raise WrongValue(
        "hardware",
        f"is {getattr(hardware, 'name', hardware)!r}, a {type(hardware).__name__}, should be a text "
        f"({HARDWARE_FORMS}), a cost model with laws, as `train` makes one, or a HardwareModel",
    )
