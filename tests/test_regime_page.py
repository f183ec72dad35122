"""docs/when-to-switch-on.md in short: every regime once, with the verdict and the figures of the raw numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.test_environment import ROOT, tool

TABLES = tool("regime_tables")
PAGE = TABLES.PAGE.read_text()
ROWS: list[dict[str, Any]] = json.loads(TABLES.RAW.read_text())["rows"]
SAME_KIND = {"short requests": "one class"}
"""Told in the table of another kind."""


def name_of(row: Mapping[str, Any]) -> str:
    kind = row["regime"]["kind"]
    return f"{SAME_KIND.get(kind, kind)}: {TABLES.named(row['regime'])}"


REGIMES = {name_of(row): row for row in ROWS}


def in_short() -> Iterator[tuple[list[str], list[str]]]:
    """Of each row the names of its regimes, and its other cells."""
    table = re.search(r"\n\| regime \| do \|.*\n\| -- .*\n((?:\|.*\n)+)", PAGE)
    assert table is not None
    for line in table[1].splitlines():
        regimes, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        kind, _, names = regimes.partition(": ")
        yield [f"{kind}: {name}" for name in names.split("; ")], cells


def figures(value: Any) -> Iterator[float]:
    """Of arms, all numbers however deep."""
    if isinstance(value, Mapping):
        value = [one for name, one in value.items() if name != "pairs"]
    if isinstance(value, list):
        for one in value:
            yield from figures(one)
    elif isinstance(value, float):
        yield value


def test_every_regime_stands_in_one_row_with_its_verdict() -> None:
    assert len(REGIMES) == len(ROWS) == 30
    assert Counter(name for names, _ in in_short() for name in names) == Counter([*REGIMES])
    told = {name: cells[0].partition(":")[0] for names, cells in in_short() for name in names}
    assert told == {name: row["verdict"] for name, row in REGIMES.items()}


def test_figures_in_short_are_those_of_the_raw_numbers_of_their_row() -> None:
    for names, (_, *cells) in in_short():
        rows = [REGIMES[name] for name in names]
        known = {f"{value:.3f}" for row in rows for value in figures(row["arms"])}
        assert set(re.findall(r"(?<![\w.])\d\.\d{3}\b", " | ".join(cells))) <= known, names
        pauses = {f"{arm['longest_pause_s']:.0f}" for row in rows for arm in row["arms"].values()}
        for words in re.findall(r"pauses (?:are )?of (\d+(?: and \d+)*) s", cells[0]):
            assert set(words.split(" and ")) <= pauses, names
        bounds, _, taken = cells[1].partition("; ")
        if "%" in bounds:
            assert bounds == ", ".join(f"{row['bound']:.2%}" for row in rows), names
        if taken:
            assert taken == ", ".join(f"{row['share_of_bound']:.0%}" for row in rows), names


def over_learned(row: Mapping[str, Any]) -> list[float]:
    """How far swapping everything is behind the learned policy."""
    swap, learned = row["arms"]["swap"], row["arms"]["learned"]
    return [
        swap["headline"]["value"] / learned["headline"]["value"] - 1,
        learned["rate"]["value"] / swap["rate"]["value"] - 1,
    ]


def test_swapping_everything_does_as_well_as_the_page_and_the_readme_say() -> None:
    pages = {re.sub(r"\s+", " ", text) for text in (PAGE, (ROOT / "README.md").read_text())}
    assert all("within 0.6%" in text for text in pages)
    apart = max(abs(behind) for row in ROWS for behind in over_learned(row))
    assert f"{apart:.1%}" == "0.6%"


def test_the_best_watermark_is_the_upper_end_of_the_grid_as_often_as_the_page_says() -> None:
    best = [row["arms"]["watermark"]["arm"].rpartition(" ")[2] for row in ROWS if row["regime"]["shape"] != "hybrid"]
    assert f"in {best.count('0.05')} of the other {len(best)} regimes" in re.sub(r"\s+", " ", PAGE)
