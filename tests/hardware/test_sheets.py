"""Data sheets of devices and links: figures, sources and names."""

from __future__ import annotations

import pytest

from kvpolicy.hardware.sheets import SheetError, device_sheet, devices, link_sheet, links


@pytest.mark.parametrize(
    ("device", "bf16", "memory"),
    [
        ("A100-SXM-80GB", 312e12, 2039e9), ("A100-PCIe-80GB", 312e12, 1935e9), ("A100-SXM-40GB", 312e12, 1555e9),
        ("H100-SXM", 1979e12 / 2, 3350e9), ("H100-PCIe", 1513e12 / 2, 2000e9), ("H200", 1979e12 / 2, 4800e9),
        ("L40S", 362.05e12, 864e9), ("RTX-4090", 165.2e12, 1008e9), ("H20", 148e12, 4000e9),
    ],
)  # fmt: skip
def test_peaks_are_the_dense_ones(device: str, bf16: float, memory: float) -> None:
    sheet = device_sheet(device)
    assert (sheet.bf16_flops, sheet.memory_bytes_per_s) == (bf16, memory)


def test_every_fact_has_a_source_and_every_device_a_link() -> None:
    for sheet in devices().values():
        assert sheet.source
        assert sheet.device_names
        assert link_sheet(sheet.link).source
        assert sheet.flops("fp8") in (sheet.fp8_flops, sheet.bf16_flops)
    lanes = {"pcie3": 8e9, "pcie4": 16e9, "pcie5": 32e9}
    for name, transfers_per_s in lanes.items():
        assert links()[name].bytes_per_s == pytest.approx(16 * transfers_per_s * 128 / 130 / 8, rel=1e-4)
    assert device_sheet("A100-SXM-80GB").flops("fp8") == 312e12


def test_devices_are_found_by_what_drivers_call_them() -> None:
    assert device_sheet("NVIDIA H100 80GB HBM3") == device_sheet("H100-SXM")
    assert device_sheet("nvidia geforce rtx 4090").name == "RTX-4090"
    names = [name for sheet in devices().values() for name in sheet.device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H1000", ""])
def test_a_device_without_a_sheet_says_what_to_do(device: str) -> None:
    with pytest.raises(SheetError, match=r"no hardware sheet.*kvpolicy profile"):
        device_sheet(device)


def test_a_misspelt_device_is_answered_with_the_one_that_was_probably_meant() -> None:
    with pytest.raises(SheetError, match=r"device 'h100-sx' \(did you mean H100-SXM\?\); there are A100-SXM-40GB,"):
        device_sheet("h100-sx")


def test_an_unknown_link_lists_the_known_ones() -> None:
    with pytest.raises(SheetError, match=r"no link 'pcie9'.*nvlink-c2c"):
        link_sheet("pcie9")
