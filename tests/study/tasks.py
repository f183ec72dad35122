"""Tasks for worker processes, which import this module by its name."""

from __future__ import annotations

import os
import signal


def double(task: int) -> int:
    """Twice the task; 13 fails, 99 takes its process along."""
    if task == 13:
        raise RuntimeError("thirteen")
    if task == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * task


def process_of(task: int) -> int:
    return os.getpid()
