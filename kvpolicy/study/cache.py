"""Digests of what a cell names but does not hold: results are kept by them, and what is open in memory goes by them.

Finished cells are on disk, one JSON file each, so that a sweep that was cut off is taken up where it stood.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvpolicy.version import __version__


def workload_place(workload: str) -> Path | None:
    """The file, or folder of a trace, that a workload is read from; None where it is made up."""
    place, _, _ = workload.partition("?")
    found = (Path(one) for one in (place, place.partition(":")[2]) if one)
    return next((path for path in found if path.exists()), None)


def workload_digest(workload: str) -> str:
    """Of what it is read from; empty where it is made up."""
    place = workload_place(workload)
    return "" if place is None else path_digest(place)


def path_digest(path: Path) -> str:
    """SHA-256 of the file, or of all files below the folder."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    told = hashlib.sha256()
    for file in files:
        told.update(_file_digest(file, file.stat().st_mtime_ns, file.stat().st_size).encode())
    return told.hexdigest()


@cache
def _file_digest(path: Path, changed_ns: int, size_bytes: int) -> str:
    """Read once per process, unless it was changed since."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def program_digest(engine: str) -> str:
    """SHA-256 over this package's sources, and the version of the engine where that is another's: a result of an
    older program is not taken up by a newer one."""
    told = hashlib.sha256(__version__.encode())
    for path in sorted(_sources(Path(str(resources.files("kvpolicy"))))):
        told.update(path.name.encode() + path.read_bytes())
    if engine != "builtin":
        told.update(_installed(engine).encode())
    return told.hexdigest()


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".py", ".json") and "shipped" not in path.parts]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


Result = dict[str, Any]


def usual_folder() -> Path:
    """Where results are kept where nothing else is said: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvpolicy" / "cells"


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder of results by digest. Files appear by rename, whole or not at all."""

    folder: Path

    def find(self, digest: str) -> Result | None:
        """The result of that digest; None where there is none. One that cannot be read counts as none: it is made
        again and replaced."""
        try:
            found = json.loads(self._path(digest).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("digest") == digest else None

    def keep(self, digest: str, result: Result) -> None:
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        scratch.replace(path)

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
