"""The Python of the documents for contributors, run, so that contract tests hold it to what the documents promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def snippets(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def names_of(snippet: str) -> dict[str, Any]:
    """What running it defines."""
    names: dict[str, Any] = {"__name__": "a_snippet"}
    exec(compile(snippet, "a snippet", "exec"), names)
    return names


def shown(name: str, document: str = "CONTRIBUTING.md") -> Any:
    """The class of that name that a document shows."""
    (found,) = (names for snippet in snippets(document) if name in (names := names_of(snippet)))
    return found[name]
