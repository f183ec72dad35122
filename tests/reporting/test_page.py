"""The page: one file, nothing fetched, no id twice."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        for name, value in attributes:
            wanted = name in ("src", "href", "xlink:href", "srcset", "data")
            if wanted and value and not value.startswith(("#", "data:")):
                self.found.append(f"{tag} {name} {value}")


def test_one_page_that_fetches_nothing(written: Path) -> None:
    text = (written / "page.html").read_text()
    page = Outside()
    page.feed(text)
    assert page.found == [] and page.svgs >= 2
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_every_id_that_is_used_is_there_once(written: Path) -> None:
    """Two figures must not clip or mark each other."""
    text = (written / "page.html").read_text()
    used = {*re.findall(r'xlink:href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)}
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert used and all(ids.count(one) == 1 for one in used)


def test_links_are_labelled_and_what_is_lacking_is_said(written: Path) -> None:
    text = (written / "page.html").read_text()
    assert "native link" in text and "simulated link, 0.1 GB/s and 5 ms" in text
    assert "at least 20 are needed" in text
    assert "Not drawn:" in text
    found = json.loads((written / "found.json").read_text())
    assert set(found) == {"native link", "simulated link, 0.1 GB/s and 5 ms"}
