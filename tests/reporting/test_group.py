"""A group of traces in words: its link, and how many statements hold."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.reporting.group import Group, link_name
from tests.synthetic import make_trace


def group(*answers: str) -> Group:
    findings: Any = tuple(SimpleNamespace(figure="memory", evidence=SimpleNamespace(answer=each)) for each in answers)
    nothing: Any = None
    return Group("native link", (), nothing, findings, (), nothing)


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([], "These traces fill none of the study's figures."),
        (["yes", "no"], "2 statements of the study can be tested with these traces: 1 holds here, 1 does not."),
        (
            ["yes", "yes", "no", "no", "cannot tell"],
            "5 statements of the study can be tested with these traces: 2 hold here, 2 do not, 1 is undecided.",
        ),
    ],
)
def test_the_verdict_counts_answers(answers: list[str], verdict: str) -> None:
    assert group(*answers).verdict() == verdict


def test_findings_are_given_by_figure() -> None:
    assert len(group("yes", "no").findings_of("memory")) == 2
    assert group("yes").findings_of("timeline") == ()


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ({"kind": "native"}, "native link"),
        ({"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.005}, "simulated link, 0.1 GB/s and 5 ms"),
        ({"kind": "nvlink"}, "nvlink link"),
    ],
)
def test_a_link_in_words(link: dict[str, Any], words: str) -> None:
    header = next(iter(make_trace(states=1).headers.values()))
    assert link_name(replace(header, link=link)) == words
