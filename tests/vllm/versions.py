"""The vLLM versions that tests run: what is installed, and sources that `tools/vllm_sources.py` unpacked."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.feature_record import WITHOUT_VLLM, installed_version

ROOT = Path(__file__).resolve().parents[2]
FETCHED = ROOT / ".vllm-sources"
INSTALLED = "installed"
FETCHED_BY_MAKE = "0.30.0"
"""`make test` fetches its sources: the newest version whose scheduler needs help with loaded requests."""


FIRST_WITH_TABLES = (0, 32)
"""The first that several block tables, MLA and speculation are served on; the plugin has the same, and needs vLLM."""


def tool() -> ModuleType:
    """`tools/vllm_sources.py`, which is no package."""
    spec = importlib.util.spec_from_file_location("vllm_sources", ROOT / "tools" / "vllm_sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLAIMED: tuple[str, ...] = tool().VERSIONS
"""One of each minor version that kvpolicy claims to serve, oldest first."""


def quick_and_others(*quick: str) -> list[Any]:
    """Parameters of a test that each version can be driven through: ``quick`` ones in `make test`, every other claimed
    one and those that ``KVPOLICY_VLLM_SOURCES`` names in `make test-all` alone."""
    others = dict.fromkeys([*CLAIMED, *(Path(folder).name for folder in named_sources())])
    return [*quick, *(pytest.param(one, marks=pytest.mark.slow) for one in others if one not in quick)]


def named_sources() -> list[str]:
    """Folders that ``KVPOLICY_VLLM_SOURCES`` names, separated as in PATH."""
    return [folder for folder in os.environ.get("KVPOLICY_VLLM_SOURCES", "").split(os.pathsep) if folder]


def source_of(version: str) -> str | None:
    """The folder of a version's sources, empty for what is installed; None where there is none."""
    if version == INSTALLED:
        return ""
    folders = [FETCHED / version, *(Path(folder) for folder in named_sources())]
    return next((str(folder) for folder in folders if folder.name == version and folder.is_dir()), None)


def source_or_skip(version: str) -> str:
    """As :func:`source_of`; the test that asks is skipped where there is none, or fails where `make test` should have
    fetched them."""
    source = source_of(version)
    if source is not None:
        return source
    reason = f"no sources of vLLM {version}: `python tools/vllm_sources.py .vllm-sources {version}` fetches them"
    if version == FETCHED_BY_MAKE and os.environ.get("KVPOLICY_REQUIRE_SOURCES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def before_tables() -> bool:
    """Whether the installed vLLM is older than :data:`FIRST_WITH_TABLES`."""
    found = installed_version()
    return found != WITHOUT_VLLM and tuple(map(int, found.split("."))) < FIRST_WITH_TABLES


def skip_before_tables(what: str) -> None:
    """Skip the test that asks where ``what`` is not served yet by the installed vLLM."""
    if before_tables():
        pytest.skip(f"{what} served from vLLM {'.'.join(map(str, FIRST_WITH_TABLES))} on")
