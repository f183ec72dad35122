"""Published figures beside simulated ones, one a line, with the bar that each has to meet; for ``published_*.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Line:
    """A figure and the one that was published; the bar is on ``ours`` / ``published`` - 1, None for no bar."""

    name: str
    published: float
    ours: float
    bar: float | None = None
    spread: tuple[float, float] | None = None
    """Least and largest over seeds."""

    @property
    def error(self) -> float:
        return self.ours / self.published - 1

    @property
    def met(self) -> bool:
        return self.bar is None or abs(self.error) <= self.bar


@dataclass(frozen=True, slots=True)
class Statement:
    """What was published in words, and whether it holds here."""

    text: str
    holds: bool
    figures: str = ""


def show(title: str, lines: Iterable[Line], statements: Iterable[Statement], console: Console) -> None:
    table = Table("", "published", "ours", "over seeds", "error", "bar", "", title=title)
    for line in lines:
        spread = "" if line.spread is None else f"{line.spread[0]:.4g} to {line.spread[1]:.4g}"
        bar = "" if line.bar is None else f"{line.bar:.0%}"
        mark = "" if line.bar is None else "met" if line.met else "MISSED"
        table.add_row(line.name, f"{line.published:.5g}", f"{line.ours:.5g}", spread, f"{line.error:+.1%}", bar, mark)
    console.print(table)
    for statement in statements:
        holds = "holds" if statement.holds else "DOES NOT HOLD"
        console.print(f"{holds}: {statement.text}{f' ({statement.figures})' if statement.figures else ''}")


def status(lines: Sequence[Line], statements: Sequence[Statement]) -> int:
    """1 where a bar is missed or a statement does not hold, for the end of a script."""
    return int(not all([*(line.met for line in lines), *(statement.holds for statement in statements)]))


def write(
    file: Path, lines: Sequence[Line], statements: Sequence[Statement], more: Mapping[str, Any] | None = None
) -> None:
    """``more``: further tables of the script, by name."""
    rows = {
        "lines": [asdict(line) | {"error": line.error, "met": line.met} for line in lines],
        "statements": [asdict(statement) for statement in statements],
        **(more or {}),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")
