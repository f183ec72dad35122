"""What has passed on the same code does not run again: ``python -m pytest -p tests.resume``, as `make test-all`.

The ids of tests that passed lie in ``.test-all``, in a file named by a digest of all that they may depend on: the files
of the repository, the Python that runs them, what is installed there, and our variables of the environment. What was
skipped or failed runs again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / ".test-all"
NOT_CODE = ("__pycache__", "out", "build", "dist")
"""Folders; and those that begin with a dot."""


def files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_CODE:
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def digest(root: Path = ROOT) -> str:
    """Of everything that may decide whether a test passes."""
    state = hashlib.sha256(sys.version.encode())
    for path in files(root):
        content = path.read_bytes()
        state.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    installed = {(result.name, result.version) for result in importlib.metadata.distributions()}
    ours = [(name, value) for name, value in os.environ.items() if name.startswith("KVPOLICY_")]
    state.update(repr((sorted(installed), sorted(ours))).encode())
    return state.hexdigest()[:16]


class Resume:
    """Leaves out what has passed, and notes what passes: at once, so that an interruption loses one test."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed = set(file.read_text().splitlines()) if file.exists() else set()
        self._outcomes: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The last of a test's three reports is that of its teardown."""
        outcomes = self._outcomes.setdefault(report.nodeid, set())
        outcomes.add(report.outcome)
        if report.when == "teardown" and outcomes == {"passed"}:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Resume(PASSED / digest()), "resume")
