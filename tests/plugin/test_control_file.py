"""The control file: what it asks for, whose word counts, and that a wrong one changes nothing."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from kvpolicy.order import load as load_order
from kvpolicy.policy import load as load_policy
from kvpolicy_vllm.plugin import control_file
from kvpolicy_vllm.plugin.control_file import ControlFile, Start

START = Start("urgent", False, "threshold:300")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


def write(path: Path, text: str, mode: int = 0o600) -> None:
    scratch = path.with_name("scratch")  # another file, so that each is seen, however coarse the clock of the disk
    scratch.write_text(text)
    scratch.chmod(mode)
    scratch.replace(path)


def control(path: Path) -> ControlFile:
    return ControlFile(path, START, load_policy, load_order)


def asked(made: ControlFile) -> tuple[str, str, bool] | None:
    made.look()
    wanted, _ = made.take()
    return None if wanted is None else (wanted.policy.name, wanted.order.name, wanted.shadow)


def test_what_is_not_named_is_as_at_the_start(path: Path) -> None:
    made = control(path)
    assert asked(made) is None and not made.news, "there is no file: the flags hold"
    for text, wanted in {
        "always-swap": ("always-swap", "urgent", False),
        "order=mlfq:base=4\n": ("threshold:300", "mlfq:base=4", False),
        "always-swap,shadow=on": ("always-swap", "urgent", True),
        '{"policy": "always-swap", "shadow": true}': ("always-swap", "urgent", True),
        "off": ("always-recompute", "fcfs", False),
        "": ("threshold:300", "urgent", False),
    }.items():
        write(path, text)
        assert asked(made) == wanted, text
        assert asked(made) is None, "the same file is not read again"
    write(path, "off")
    assert asked(made) == ("always-recompute", "fcfs", False)
    path.unlink()
    assert asked(made) == ("threshold:300", "urgent", False), "without the file the flags hold again"


def test_a_file_that_is_written_to_while_it_is_read_is_read_again(path: Path) -> None:
    """A shell empties it first, and an empty one means the settings of the start."""
    made = control(path)
    write(path, "always-swap")
    assert asked(made) == ("always-swap", "urgent", False)
    made._load_policy = lambda name: (write(path, "threshold:500"), load_policy(name))[1]
    write(path, "")
    assert asked(made) is None and not made.news
    made._load_policy = load_policy
    assert asked(made) == ("threshold:500", "urgent", False)
    made._load_policy = lambda name: (write(path, "off"), load_policy("nonsense"))[1]
    write(path, "always-sw")
    made.look()
    assert made.take() == (None, 0), "half a name is not counted as wrong"
    made._load_policy = load_policy
    assert asked(made) == ("always-recompute", "fcfs", False)


def test_code_of_a_users_that_exits_ends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_file, "EVERY_S", 0.001)
    made = ControlFile(path, START, lambda name: exit(3) if name == "exits" else load_policy(name), load_order).watch()
    write(path, "exits")
    while not made.news:
        pass
    assert made.take() == (None, 1)
    write(path, "always-swap")
    while not made.news:
        pass
    assert made.take()[0] is not None


def test_a_server_in_shadow_mode_stays_in_it_unless_all_is_off(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no host memory to swap to."""
    made = ControlFile(path, Start("urgent", True, "threshold:300"), load_policy, load_order)
    write(path, "always-swap,shadow=off")
    assert asked(made) is None and "started with --shadow" in caplog.text
    write(path, "always-swap")
    assert asked(made) == ("always-swap", "urgent", True)
    write(path, "off")
    assert asked(made) == ("always-recompute", "fcfs", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("always-swop", "always-swop"),
        ("cheapest:no/such/model", "no/such/model"),
        ("always-swap,order=fastest", "fastest"),
        ("always-swap,shadow=perhaps", "shadow is 'perhaps', should be on or off"),
        ('{"shadow": 1}', "shadow is 1, should be true or false"),
        ('{"order": []}', "order is .., should be a text"),
        ('{"host_gib": 8}', "unknown key 'host_gib'; the keys are order, policy, shadow"),
        ("python:os:system", "python"),
        ("x" * (1 << 17), "is longer than 65536 bytes"),
        ("\udcff", "is no text"),
    ],
)
def test_what_is_wrong_changes_nothing_and_is_said(
    path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = control(path)
    write(path, "always-swap")
    assert asked(made) is not None
    path.write_bytes(os.fsencode(text))
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING):
        made.look()
    assert made.news and made.take() == (None, 1) and not made.news
    (message,) = caplog.messages
    assert re.search(words, message), message


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_file_that_others_may_read_or_write_is_not_heeded(
    path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, "off", mode)
    made = control(path)
    assert asked(made) is None and f"has mode {mode:o}" in caplog.text
    path.chmod(0o600)
    assert asked(made) == ("always-recompute", "fcfs", False), "its mode is mended"


def test_neither_links_nor_pipes_nor_the_files_of_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "elsewhere", "off")
    path.symlink_to(tmp_path / "elsewhere")
    assert asked(control(path)) is None and "cannot be read" in caplog.text
    path.unlink()
    os.mkfifo(path, 0o600)
    assert asked(control(path)) is None and "is no file" in caplog.text
    path.unlink()
    write(path, "off")
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert asked(control(path)) is None and "should be the server's or root's" in caplog.text


def test_it_is_watched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_file, "EVERY_S", 0.001)
    made = control(path).watch()
    write(path, "always-swap")
    while not made.news:
        pass
    assert made.take()[0] is not None


@pytest.mark.parametrize(
    "text", ["python:os:getcwd", "cheapest:python:os:getcwd", "order=python:os:getcwd", "order=mlfq/python:os:getcwd"]
)
def test_the_file_never_makes_a_server_import_code(path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Not even where the operator allowed it for the start: who writes the file need not be who started the server."""
    loaded: list[str] = []
    made = ControlFile(path, START, lambda name: (loaded.append(name), load_policy(name))[1], load_order)
    write(path, text)
    with caplog.at_level(logging.WARNING):
        made.look()
    assert made.take() == (None, 1) and not loaded
    assert "never makes a server import code" in caplog.text


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(path: Path, mode: int) -> None:
    write(path, "always-swap", mode)
    made = control(path)
    made.look()
    assert made.take() == (None, 1)
