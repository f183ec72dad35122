"""Finished cells on disk, one JSON file each, so that a sweep that was cut off is taken up where it stood."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
