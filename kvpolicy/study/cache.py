"""The cache of results, and digests of what a cell names (files, models, program), which are part of its keys.

Finished cells are on disk, one JSON file each, so that an interrupted sweep can be resumed.
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

from kvpolicy.errors import InputError
from kvpolicy.stored_values import read_sealed, sealed, sha256_of
from kvpolicy.version import __version__
from kvpolicy.workload.join_text import files_of


def workload_digest(workload: str) -> str:
    """Digest of the files or folders that a workload is read from; empty for a synthetic one."""
    digests = [path_digest(file) for file in files_of(workload)]
    return digests[0] if len(digests) == 1 else " ".join(digests)


def path_digest(path: Path) -> str:
    """SHA-256 of the file, or of all files below the folder."""
    files = sorted(member for member in path.rglob("*") if member.is_file()) if path.is_dir() else [path]
    sha256 = hashlib.sha256()
    for file in files:
        sha256.update(_file_digest(file, file.stat().st_mtime_ns, file.stat().st_size).encode())
    return sha256.hexdigest()


@cache
def _file_digest(path: Path, changed_ns: int, size_bytes: int) -> str:
    """SHA-256 of the file, which is read once per process unless it has changed."""
    return sha256_of(path)


@cache
def program_digest(engine: str) -> str:
    """SHA-256 of this package's sources, and of the engine's version where the engine is another package: results of an
    older program are not reused by a newer one."""
    sha256 = hashlib.sha256(__version__.encode())
    for path in sorted(_sources(Path(str(resources.files("kvpolicy"))))):
        sha256.update(path.name.encode() + path.read_bytes())
    if engine != "builtin":
        sha256.update(_installed(engine).encode())
    return sha256.hexdigest()


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".py", ".json") and "shipped" not in path.parts]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


Result = dict[str, Any]


def default_folder() -> Path:
    """Default folder for results: in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvpolicy" / "cells"


@dataclass(frozen=True, slots=True)
class ResultCache:
    """A folder of results by digest. Files are put in place by rename, so that none is ever partial."""

    folder: Path

    def find(self, digest: str) -> Result | None:
        """The result of that digest; None where there is none. One that is not as it was written counts as none, so
        that it is simulated again and replaced."""
        try:
            result = read_sealed(self._path(digest))
        except InputError:
            return None
        return result if result.get("digest") == digest else None

    def store(self, digest: str, result: Result) -> None:
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(sealed(result), indent=1, allow_nan=False) + "\n")
        scratch.replace(path)

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
