"""A progress bar for what takes minutes."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Bar:
    """A bar on standard error that starts over with every part; :meth:`tell` moves it."""

    def __init__(self, what: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._what = what
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def tell(self, part: str, done: int, of: int) -> None:
        """``done`` windows of ``of`` in this part; 0 of 0 while its engine starts."""
        waiting = "" if of else ": engine starts"
        self._progress.update(
            self._task, description=f"{self._what}, {part}{waiting}", completed=done, total=of if of else None
        )
