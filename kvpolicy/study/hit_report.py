"""What was found of the prompts, by tier, as means over runs, for reports: of all requests and of each class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvpolicy.study.cache import Result

TIERS = ("device", "host", "file")
HEADS = ("class", "prompt tok", *TIERS, "loaded")
"""Of the tokens of all prompts, the shares found on each tier, and the share loaded from the lower ones."""
ALL = "all"


def has_hits(results: Sequence[Result]) -> bool:
    """Whether any prompt found anything in a cache."""
    return any(result["prefix_hits"][f"{tier}_tokens"] for result in results for tier in TIERS)


def hit_rows(groups: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """Rows of a table with its heads: each policy's prompts, all of them and those of each of several classes."""
    rows = [["policy", *HEADS]]
    for policy, results in groups.items():
        for name, hits in _by_class(results):
            rows.append([policy, name, *_cells(hits)])
    return rows


def _by_class(results: Sequence[Result]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Each class with its hits in those runs that have it, all requests first."""
    yield ALL, [result["prefix_hits"] for result in results]
    names = sorted({name for result in results for name in result["classes"]})
    for name in names if len(names) > 1 else ():
        yield name, [result["classes"][name]["prefix_hits"] for result in results if name in result["classes"]]


def _cells(hits: Sequence[Mapping[str, Any]]) -> list[str]:
    prompt_tokens = sum(one["prompt_tokens"] for one in hits)
    found = (sum(one[f"{name}_tokens"] for one in hits) for name in (*TIERS, "loaded"))
    shares = (f"{tokens / prompt_tokens:.1%}" if prompt_tokens else "" for tokens in found)
    return [f"{fmean(one['prompt_tokens'] for one in hits):.0f}", *shares]
