"""The page: one file, nothing fetched, no id twice."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.synthetic import make_trace


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        for name, value in attributes:
            expected = name in ("src", "href", "xlink:href", "srcset", "data")
            if expected and value and not value.startswith(("#", "data:")):
                self.found.append(f"{tag} {name} {value}")


def test_one_page_that_fetches_nothing(report_folder: Path) -> None:
    text = (report_folder / "page.html").read_text()
    page = Outside()
    page.feed(text)
    assert page.found == [] and page.svgs >= 2
    assert not re.search(r"url\((?!#)|@import|<script[^>]* src", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_every_id_that_is_used_is_there_once(report_folder: Path) -> None:
    """Two figures must not clip or mark each other."""
    text = (report_folder / "page.html").read_text()
    used = {*re.findall(r'xlink:href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)}
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert used and all(ids.count(part) == 1 for part in used)


def test_links_are_labelled_and_missing_parts_are_named(report_folder: Path) -> None:
    text = (report_folder / "page.html").read_text()
    assert "native link" in text and "simulated link, 0.1 GB/s and 5 ms" in text
    assert "at least 20 are needed" in text
    assert "Not drawn:" in text
    assert "no whole run was served under recompute" in text
    values = json.loads((report_folder / "found.json").read_text())
    assert set(values) == {"native link", "simulated link, 0.1 GB/s and 5 ms"}


def test_the_page_shows_the_best_threshold_beside_the_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    pipeline = pytest.importorskip("kvpolicy.reporting.pipeline")
    make_trace(states=60, repeats=2).write(tmp_path / "trace")
    pipeline.report([tmp_path / "trace"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<tr><td>learned</td>" in text
    assert "<tr><td>best threshold</td>" in text
    assert "learned less the best threshold: " in text
    assert re.search(r"chosen on \d+ states that a model was trained on", text)
    assert "cheapest:/" not in text, "the model's folder was a temporary one"
