"""What the kernel says of memory: whether a core dump would have it, and how much of it is there."""

from __future__ import annotations

from pathlib import Path


def mapping_of(address: int) -> dict[str, str]:
    """What /proc says of the mapping that an address is in."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(edge, 16) for edge in first.split("-"))
            found = {"range": line} if begin <= address < end else {}
        elif found:
            name, _, value = line.partition(":")
            found[name] = value.strip()
            if name == "VmFlags":
                return found
    raise AssertionError(f"no mapping holds {address:#x}")


def refuse_dumped(address: int) -> dict[str, str]:
    """The mapping that an address is in, which no core dump may have."""
    mapping = mapping_of(address)
    assert "dd" in mapping["VmFlags"].split(), "would be in a core dump"
    return mapping
