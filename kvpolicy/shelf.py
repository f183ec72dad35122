"""Where the models and traces that ship are: in an installed package, or in the checkout of this file."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


def shelves(kind: str) -> tuple[Traversable, ...]:
    """The folders that hold what ships of a ``kind``, ``models`` or ``traces``; either may be missing."""
    package = resources.files("kvpolicy")
    return package / "shipped" / kind, Path(__file__).resolve().parents[1] / kind


def names(kind: str) -> tuple[str, ...]:
    """Names of what ships of a ``kind``, sorted."""
    found = {folder.name for shelf in shelves(kind) if shelf.is_dir() for folder in shelf.iterdir() if folder.is_dir()}
    return tuple(sorted(found))


def trace_folder(name_or_folder: Path | str) -> Path:
    """The folder of a trace: of that path, or, where there is none, the trace that ships under this bare name.

    What ships is read in place; where there is neither, the path itself is returned.
    """
    folder = Path(name_or_folder)
    if folder.is_dir() or len(folder.parts) != 1:
        return folder
    shipped = (Path(str(shelf / folder.name)) for shelf in shelves("traces"))
    return next((path for path in shipped if path.is_dir()), folder)
