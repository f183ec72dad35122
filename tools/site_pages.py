"""A hook of mkdocs: the documents beside `docs/` are pages of the site, and links between all of them hold there.

README is the first page. A link to a file that is no page, as LICENSE, becomes its text. Roles of docstrings, as
``:class:`Cost```, become code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "ARCHITECTURE.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
PAGES |= {"CHANGELOG.md": "CHANGELOG.md", "examples/README.md": "examples.md"}
"""Documents beside `docs/`, by their place on the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):<code>~?([\w.]+)</code>")


def on_files(files: Files, config: Any) -> Files:
    for document, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / document).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    document = next((name for name, place in PAGES.items() if place == page.file.src_uri), "")
    folder = posixpath.dirname(document) if document else "docs"

    def linked(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        place = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not place or not files.get_file_from_path(place):
            return words
        return f"{image}[{words}]({place}{anchor})"

    return "".join(
        part if number % 2 else LINK.sub(linked, part)
        for number, part in enumerate(re.split(r"(^ *```.*?^ *```)", markdown, flags=re.DOTALL | re.MULTILINE))
    )


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    return ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
