"""A hook of the build: the README as a package index shows it, and the project's URLs.

An index knows neither this repository's files nor its pictures, so relative links become absolute ones below the
``repository`` of pyproject.toml. Where that is empty, a link becomes its text and a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": shown(text, repository)}
        metadata["urls"] = urls(repository)


def shown(text: str, repository: str) -> str:
    """A document with its relative links absolute, or without them where there is no repository."""

    def linked(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(linked, text)


def urls(repository: str) -> dict[str, str]:
    """The links that an index shows beside the page."""
    if not repository:
        return {}
    pages = {"Documentation": "blob/main/docs/tutorial.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": repository} | {name: f"{repository}/{page}" for name, page in pages.items()}
