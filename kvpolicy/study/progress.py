"""A bar with the time that is left, on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WORDS = 60


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """What a sweep tells its progress to."""
    console = Console(stderr=True) if console is None else console
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None)

        def tell(done: int, total: int, words: str) -> None:
            shown.update(task, completed=done, total=total, description=words[:WORDS])

        yield tell
