"""Shares of `benchmarks/family_survival.py`, over all loads together, and the file that its rows are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from benchmarks.survival_cells import (
    MIN_LOADS,
    Row,
    far_survival,
    over_loads,
    read,
    survival,
    surviving_share,
    tax,
    write,
)
from kvpolicy.errors import InputError

MADE = {"requests": 48, "share": 0.6, "vllm": "0.32.0"}


def row(**changes: Any) -> Row:
    """10 victims with 1,000 tokens each, of which 4 found half; of the 5 that went far one did."""
    values = {
        "model": "gpt-oss-20b", "setting": "default", "output_tokens": 50, "seed": 0, "device_blocks": 100,
        "block_size": 16, "request_tokens": 80_000, "recomputed_tokens": 8_000, "preemptions": 10,
        "computed_tokens": 10_000, "found_tokens": 2_000, "with_hits": 4, "far": 5, "far_computed_tokens": 5_000,
        "far_found_tokens": 500, "far_with_hits": 1,
    }  # fmt: skip
    return Row(**(values | changes))


def test_victims_of_all_loads_count_together() -> None:
    """Not the mean of the loads' shares; a load without victims changes nothing."""
    none = row(seed=2, preemptions=0, computed_tokens=0, found_tokens=0, far=0, far_computed_tokens=0)
    rows = [row(), row(seed=1, preemptions=20, computed_tokens=30_000, found_tokens=10_000), none]
    share = survival(rows)
    assert share is not None and share.value == 12_000 / 40_000
    far = far_survival([row(), row(seed=1, far=1, far_computed_tokens=15_000, far_found_tokens=0)])
    assert far is not None and far.value == 500 / 20_000
    assert survival([none]) is None and far_survival([]) is None
    assert tax([row(), row(seed=1, recomputed_tokens=0, request_tokens=20_000)]).value == 8_000 / 100_000


@pytest.mark.parametrize(
    ("found", "whole"),
    [(3_000, (3, 3)), (2_600, (2, 3)), (2_400, (2, 3)), (1, (0, 1)), (0, (0, 0)), (10_000, (10, 10))],
)
def test_few_loads_have_the_interval_of_their_victims(found: int, whole: tuple[int, int]) -> None:
    """Of 10 victims, rounded outwards: 2.6 and 2.4 are from 2 to 3."""
    share = surviving_share([(found, 10_000, 10)])
    ends = [binomtest(count, 10).proportion_ci(0.95, "exact") for count in whole]
    assert share is not None and not share.over_loads
    assert (share.low, share.high) == (pytest.approx(ends[0].low), pytest.approx(ends[1].high))


def test_where_too_few_loads_found_anything_or_lost_anything_it_is_of_their_victims_too() -> None:
    """A bootstrap over loads of which none found anything would be from 0 to 0."""
    nothing = surviving_share([(0, 1000, 2)] * 10)
    assert nothing is not None and not nothing.over_loads and nothing.low == 0
    assert nothing.high == pytest.approx(1 - 0.025 ** (1 / 20))
    for few in (0, 1000):
        for count in (MIN_LOADS - 1, MIN_LOADS):
            share = surviving_share([(few, 1000, 2)] * 10 + [(500, 1000, 2)] * (count - 1) + [(1000 - few, 1000, 2)])
            assert share is not None and share.over_loads == (count == MIN_LOADS), (few, count)


def test_loads_are_drawn_and_not_victims() -> None:
    """Seven times as many victims, which found and lost as the others of their load, say nothing more."""
    loads = [(100, 1000, 2), (400, 1200, 3), (300, 900, 2), (50, 1000, 2), (250, 800, 2), (500, 1000, 2)]
    once, often = surviving_share(loads), surviving_share([tuple(7 * part for part in load) for load in loads])
    assert once is not None and once.over_loads and once == often
    assert 50 / 1000 <= once.low < once.value < once.high <= 500 / 1000


def test_19_of_20_intervals_over_loads_hold_the_share() -> None:
    """Ten loads of one to eight victims, which find everything or nothing, with a probability of the load's own."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        victims = rng.integers(1, 9, 10)
        found = rng.binomial(victims, rng.beta(3, 7, 10))
        low, high = over_loads([(1000 * int(some), 1000 * int(of)) for some, of in zip(found, victims, strict=True)])
        held += low <= 0.3 <= high
    assert 0.90 <= held / 300 <= 0.99, held


def test_a_tax_has_an_interval_from_five_loads_on() -> None:
    rows = [row(seed=seed, recomputed_tokens=8_000 * (1 + seed)) for seed in range(MIN_LOADS)]
    assert tax(rows[1:]).text(".2f") == "0.35" and tax(rows).text(".2f").startswith("0.30 (0.1")
    low, high = tax(rows).low, tax(rows).high
    assert low is not None and high is not None and 0.1 <= low < 0.15 and 0.45 < high <= 0.5


def test_brackets_say_what_an_interval_is_over() -> None:
    share = surviving_share([(100, 1000, 2), (300, 1000, 2)])
    assert share is not None and share.text() == "20% [0% to 81%]"
    wide = surviving_share([(100, 1000, 2), (300, 1000, 2)] * 5)
    assert wide is not None and wide.text().startswith("20% (1") and wide.text().endswith("%)")
    rare = surviving_share([(1, 1000, 500)])
    assert rare is not None and rare.text() == "0.1% [0% to 1%]"


# ---- the file ----


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    file, rows = tmp_path / "new" / "rows.json", [row(), row(seed=1)]
    assert read(file, MADE) == []
    write(file, MADE, rows)
    assert read(file, MADE) == rows
    assert len(file.read_text().splitlines()) == len(MADE) + len(rows) + 4, "a row a line"
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]


def test_rows_of_other_loads_are_not_added_to(tmp_path: Path) -> None:
    write(tmp_path / "rows.json", MADE, [row()])
    with pytest.raises(InputError, match="is of requests 48, not 24: should be another file"):
        read(tmp_path / "rows.json", MADE | {"requests": 24})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"model": "gpt-oss-20b"}]}', '{"rows": 3}'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"rows\.json: should have rows of model, setting, "):
        read(file, MADE)


def test_an_interrupted_write_leaves_the_rows_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write_text = tmp_path / "rows.json", Path.write_text
    write(file, MADE, [row()])

    def interrupted(self: Path, text: str) -> None:
        write_text(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(file, MADE, [row(), row(seed=1)])
    assert read(file, MADE) == [row()] and json.loads(file.read_text())["vllm"] == "0.32.0"
