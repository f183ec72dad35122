"""Rows of a study in a JSON file, one a line, which is written anew with every row: those that it has are not made
again by studies. For ``caching_policies.py``, ``caching_study.py``, ``file_tier.py`` and ``own_time.py``."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy import __version__
from kvpolicy.code_digest import LABEL_DIGITS
from kvpolicy.json_values import finite, rounded

Fields = dict[str, Any]


PACKAGE = Path(__file__).resolve().parent.parent / "kvpolicy"
CODE = ("caching", "host_store", "simulator")
"""Packages below kvpolicy that decide what is in rows of caches."""


def versions() -> dict[str, str]:
    """Of what makes the rows, with a digest of its code."""
    own = {"kvpolicy": __version__, "code": code_digest()}
    return own | {"python": platform.python_version(), "numpy": np.__version__}


def code_digest(root: Path = PACKAGE) -> str:
    """The beginning of the SHA-256 of the sources of :data:`CODE`: rows of other code are not these."""
    sha256 = hashlib.sha256()
    for file in sorted(file for name in CODE for file in (root / name).rglob("*.py")):
        sha256.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return sha256.hexdigest()[:LABEL_DIGITS]


def text_of(settings: Mapping[str, Any], rows: Sequence[Fields]) -> str:
    """The JSON, a line for every row."""
    lines = ",\n".join(map(json.dumps, rows))
    return f'{{"settings": {json.dumps(settings)}, "rows": [\n{lines}\n]}}\n'


@dataclass
class RowFile:
    """Without a file they are in memory alone. Numbers have six digits, so that a row is the same read as made."""

    file: Path | None
    settings: Mapping[str, Any]
    """What all rows depend on, beside what they say of themselves."""
    rows: list[Fields] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path | None, settings: Mapping[str, Any]) -> RowFile:
        """What the file has; no rows where there is none. Raises ValueError for a file of other settings."""
        if file is None or not file.exists():
            return cls(file, settings)
        held = json.loads(file.read_text())
        for name, value in settings.items():
            if held["settings"].get(name) != value:
                raise ValueError(f"{file}: was made with {name} {held['settings'].get(name)}, not {value}")
        return cls(file, settings, held["rows"])

    def add(self, row: Fields) -> Fields:
        """The row as it is kept, in the file, too."""
        kept: Fields = rounded(finite(row))
        self.rows.append(kept)
        if self.file is not None:
            part = self.file.with_name(f".{self.file.name}")
            part.write_text(text_of(self.settings, self.rows))
            part.replace(self.file)
        return kept
