"""A progress bar for measurements that take minutes."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Bar:
    """A bar on standard error that starts over with every part; :meth:`tell` advances it."""

    def __init__(self, title: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._title = title
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def tell(self, part: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` windows of this part; 0 of 0 while its engine starts."""
        suffix = "" if total else ": engine starts"
        self._progress.update(
            self._task, description=f"{self._title}, {part}{suffix}", completed=done, total=total if total else None
        )
