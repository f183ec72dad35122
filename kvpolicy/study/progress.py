"""A progress bar with the remaining time, on stderr where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MAX_CHARACTERS = 60


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A progress callback for a sweep."""
    console = Console(stderr=True) if console is None else console
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        task = display.add_task("", total=None)

        def update(done: int, total: int, words: str) -> None:
            display.update(task, completed=done, total=total, description=words[:MAX_CHARACTERS])

        yield update
