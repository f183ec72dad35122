"""What `test_warm` has a warm process do."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path

print("printed while it is imported")


def main(what: str, path: str) -> None:
    atexit.register(print, "ended as an interpreter does")
    if what == "fail":
        raise ValueError("made up")
    if what == "hang":
        time.sleep(600)
    Path(path).write_text(f"{os.environ['GIVEN']} {os.getpid()} {os.getppid()}")
