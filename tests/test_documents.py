"""What the documents for contributors show runs, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import Policy
from kvpolicy.training.family import Family, family_of
from tests.synthetic import options_for, situation
from tests.test_imports import LAYERS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = sorted(str(path.relative_to(ROOT)) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
MAX_COLUMNS = 120


def snippets(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def names_of(snippet: str) -> dict[str, Any]:
    """What running it defines."""
    names: dict[str, Any] = {"__name__": "a_snippet"}
    exec(compile(snippet, "a snippet", "exec"), names)
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run(document: str) -> None:
    for snippet in snippets(document):
        names_of(snippet)


def test_the_policy_decides_as_it_says() -> None:
    (longest,) = (
        one for one in names_of(snippets("CONTRIBUTING.md")[0]).values()
        if isinstance(one, type) and issubclass(one, Policy) and one is not Policy
    )  # fmt: skip
    for tokens, expected in ((100, [1.0, 0.0]), (5000, [0.0, 1.0])):
        one = situation(tokens, running_requests=2, batch_tokens=2000)
        assert longest().probabilities(one, options_for(one), None) == expected
    assert longest().probabilities(one, options_for(one)[:1], None) == [1.0], "what must be recomputed is"


def test_the_family_is_one() -> None:
    plain = names_of(snippets("CONTRIBUTING.md")[1])["Plain"]
    assert isinstance(family_of(plain()), Family)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:kvpolicy|integrations|tests|benchmarks|tools|docs)/[\w/.-]+)`|\]\(([\w/.-]+)\)", text)
    paths = [first or second for first, second in named]
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


def prose_of(page: str) -> list[str]:
    """Lines outside of code and tables."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_can_be_read_in_a_terminal(page: str) -> None:
    """A line that cannot be broken, as a long command in backticks, may be longer."""
    assert [
        line for line in prose_of(page) if len(line) > MAX_COLUMNS and not re.fullmatch(r"\s*(\S|`[^`]*`)+", line)
    ] == []


def test_the_layers_that_are_shown_are_those_of_the_imports() -> None:
    (table,) = re.findall(r"```\n(errors .*?)\n\n", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    shown = [re.split(r"  +", line)[:-1] for line in table.splitlines()]
    assert [set(line) for line in shown] == [set(layer) for layer in LAYERS]
