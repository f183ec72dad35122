"""Why something failed, as a word for counts, and what of it is logged."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy.tiers.block_format import Damaged
from kvpolicy.tiers.faults import MAX_WARNINGS, Faults


def failing(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), "missing"), (Damaged("corrupt"), "corrupt"),
        (OSError(errno.EIO, "broken"), "io_error"), (ValueError("anything"), "io_error"),
    ],
)  # fmt: skip
def test_a_fault_is_a_word(error: Exception, reason: str) -> None:
    faults = Faults(Path("kv"))
    assert faults.reason("", failing(error)) == reason and faults.reason("", lambda: None) == ""
    assert not faults.disk_is_full


def test_a_folder_that_is_gone_is_no_missing_file(caplog: pytest.LogCaptureFixture) -> None:
    """A block cannot be written to it, and the log says so."""
    faults, gone = Faults(Path("kv")), failing(FileNotFoundError(errno.ENOENT, "gone"))
    assert faults.reason("a block was not stored", gone, may_miss=False) == "io_error"
    assert "a block was not stored in kv" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_as_one(number: int) -> None:
    faults = Faults(Path("kv"))
    assert faults.reason("", failing(OSError(number, "full"))) == "io_error" and faults.disk_is_full


def test_the_first_faults_are_logged_but_for_those_that_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(Path("kv"))
    for _ in range(MAX_WARNINGS + 2):
        faults.reason("", failing(OSError(errno.EIO, "unsaid")))
        faults.reason("a block was not stored", failing(OSError(errno.EIO, "broken")))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == MAX_WARNINGS and all("a block was not stored in kv" in text for text in told)
    assert "only counted" in told[-1] and "only counted" not in told[-2]
