"""The whole command line, flag by flag: what a command takes, with its default and its help.

``tests/golden/command_line.json`` is what users know. Written anew by ``python -m tests.test_command_line``: read the
difference, for every line of it is a flag, a default or a sentence that changed under somebody's hands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from kvpolicy.cli import app, main

GOLDEN = Path(__file__).parent / "golden" / "command_line.json"


def every_command(group: Any, before: str = "") -> dict[str, Any]:
    """Commands by name; those of a group with its name before theirs."""
    commands: dict[str, Any] = {}
    for name, one in group.commands.items():
        commands |= every_command(one, f"{before}{name} ") if hasattr(one, "commands") else {before + name: one}
    return commands


COMMANDS = every_command(typer.main.get_command(app))


def described(command: Any) -> dict[str, Any]:
    """Everything of a command that a user meets."""
    types = get_type_hints(command.callback)
    taken = {parameter.opts[0]: _parameter(parameter, types[parameter.name]) for parameter in command.params}
    return {"help": command.help, "takes": taken}


def _parameter(one: Any, type_: Any) -> dict[str, Any]:
    values = {
        "help": one.help.replace("\\[", "["),
        "default": str(one.default) if isinstance(one.default, Path) else one.default,
        "required": one.required,
        "type": str(type_.__name__ if isinstance(type_, type) else type_).replace("pathlib.", ""),
        "metavar": one.metavar,
        "off": one.secondary_opts,
        "aliases": one.opts[1:],
    }
    return {
        name: value
        for name, value in values.items()
        if value not in ([], "") and value is not None and value is not False
    }


@pytest.mark.parametrize("name", sorted({*json.loads(GOLDEN.read_text()), *COMMANDS}))
def test_no_flag_default_or_help_is_lost(name: str) -> None:
    assert described(COMMANDS[name]) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_shows_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit) as stopped:
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    words = " ".join(shown.replace("│", " ").split())
    for parameter in COMMANDS[name].params:
        assert " ".join(parameter.help.replace("\\[", "[").split()) in words
        assert all(flag in shown for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("-"))
        assert parameter.name == "help" or parameter.help, f"{name} {parameter.name}: nothing says what it is"


def write() -> None:
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(
        json.dumps({name: described(one) for name, one in sorted(COMMANDS.items())}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    write()
