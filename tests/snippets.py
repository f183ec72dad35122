"""The Python and the commands that documents show, so that tests can hold the code to them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def snippets(name: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def names_of(snippet: str) -> dict[str, Any]:
    """What running it defines, as a file of a reader that has no imports from the future but its own."""
    names: dict[str, Any] = {"__name__": "a_snippet"}
    exec(compile(snippet, "a snippet", "exec", dont_inherit=True), names)
    return names


def shown(name: str, document: str = "CONTRIBUTING.md") -> Any:
    """The class of that name that a document shows."""
    (found,) = (names for snippet in snippets(document) if name in (names := names_of(snippet)))
    return found[name]


@dataclass(frozen=True)
class Shown:
    """A command that a document shows."""

    words: tuple[str, ...]
    """Without what stands in brackets, and without what a shell does with its output."""
    flags: frozenset[str]
    """All of its flags, those in brackets as well."""
    whole: bool
    """It has no dots for what a reader has to add."""


COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*((?:kvpolicy|make|pip|python) .*)", re.DOTALL)
"""A line with a command of ours, behind a prompt or variables."""


def commands(name: str) -> list[Shown]:
    """The commands in a document's blocks that have no language; a block's continued lines are joined, and words may be
    variables that the block sets: ``TOOL="python tool.py --all"``, then ``$TOOL --more``."""
    fenced = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language in ("", "sh")]
    lines = [line for block in blocks for line in _commands_of(_expanded(re.sub(r"\\\n", " ", block)).splitlines())]
    return [_shown(match[1]) for line in lines if (match := COMMAND.match(line))]


def _commands_of(lines: list[str]) -> Iterator[str]:
    """Lines with a command, each with what follows until its quotes are closed; no others."""
    command = ""
    for line in map(str.strip, lines):
        if not command and not COMMAND.match(line):
            continue
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:
            command += "\n"
        else:
            yield command
            command = ""
    assert not command, f"quotes that nothing closes: {command}"


def _expanded(block: str) -> str:
    for variable, _, value in re.findall(r"""^([A-Z_]+)=(["'])(.*)\2$""", block, re.MULTILINE):
        block = re.sub(rf"\${variable}\b", lambda _, value=value: value, block)
    return block


def _shown(line: str) -> Shown:
    line = re.sub(r"\s(>|\||#|&&)\s.*", "", line)
    flags = re.findall(r"(?<=[\s\[])--[a-z][\w-]+", line)
    short, dots = line, " ..." in line
    while (shorter := re.sub(r"\s?\[[^\[\]]*\]", "", short)) != short:
        short = shorter
    words = [word.removesuffix("...") for word in shlex.split(short)]
    return Shown(tuple(word for word in words if word), frozenset(flags), not dots)


def posted(name: str) -> list[tuple[str, dict[str, Any]]]:
    """What the `curl` commands of a document send: path and body, with a message for the reader's."""
    found = re.findall(r"curl http://localhost:8000(\S+) [^\n]*-d '(\{.*?\})'", (ROOT / name).read_text(), re.DOTALL)
    return [(path, json.loads(body.replace("[...]", '[{"role": "user", "content": "hello"}]'))) for path, body in found]


def block_below(words: str, name: str = "README.md") -> list[list[str]]:
    """Every line of the first block below these words, split as a shell does it; variables that it sets come first."""
    _, found, below = (ROOT / name).read_text().partition(words)
    assert found, f"{name}: no {words!r}"
    return [shlex.split(line, comments=True) for line in below.split("```")[1].splitlines() if line]


if __name__ == "__main__":
    for page in sys.argv[1:]:
        for snippet in snippets(page):
            names_of(snippet)
