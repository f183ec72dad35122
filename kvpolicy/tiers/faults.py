"""Faults of a medium: why something failed, in a word for counts, and the first few of them in the log."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

from kvpolicy.tiers.block_format import Damaged

logger = logging.getLogger(__name__)

MAX_WARNINGS = 5
FULL = (errno.ENOSPC, errno.EDQUOT)


class Faults:
    """Those of one folder. Its method may be called by several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warnings = MAX_WARNINGS
        self.disk_is_full = False
        """Whether something had no room on the disk. Its owner resets it once a block was stored."""

    def reason(self, what: str, action: Callable[[], None], may_miss: bool = True) -> str:
        """Why the action failed; empty where it did not. ``what``: what is logged then; nothing where empty.
        ``may_miss``: whether a file that is not there is no fault, as it is of a folder to write to."""
        try:
            action()
        except FileNotFoundError as error:
            if may_miss:
                return "missing"
            self._warn(what, error)
            return "io_error"
        except Damaged as error:
            return error.reason
        # The boundary between a medium and a server: whatever happens to files, the request is recomputed.
        except Exception as error:  # noqa: BLE001
            if isinstance(error, OSError) and error.errno in FULL:
                self.disk_is_full = True
            self._warn(what, error)
            return "io_error"
        return ""

    def _warn(self, what: str, error: Exception) -> None:
        if what and self._warnings > 0:
            self._warnings -= 1
            more = "" if self._warnings else "; further ones are only counted"
            logger.warning("kvpolicy: %s in %s: %s%s", what, self._folder, error, more)
