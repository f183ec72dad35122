"""A policy of one's own is judged like any other, on profiles and on logs; a trace makes nobody run its code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.events import Option, Preemption
from kvpolicy.trace import TraceError
from tests.policy.by_length import ByLength
from tests.policy.ten_line_policy import Longer
from tests.synthetic import make_trace
from tests.synthetic_logs import make_log

OWN = "python:tests.policy.ten_line_policy:Longer"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "profile"
    make_trace(seed=1, states=80).write(folder)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "log"
    make_log(1, decisions=600).write(folder)
    return folder


def test_by_module_path_and_as_an_object_a_profile_says_the_same(profile: Path) -> None:
    by_path = kvpolicy.evaluate([profile], [OWN, "always-recompute", "always-swap"])
    itself = kvpolicy.evaluate([profile], [Longer(), "always-recompute", "always-swap"])
    assert by_path == itself
    own, *fixed = by_path.policies
    assert own.policy == Longer().label and Longer().label in by_path.text()
    assert own.total_s not in [one.total_s for one in fixed], "it does either at times"
    json.dumps(by_path.to_dict())


def test_a_log_says_the_same_too(log: Path) -> None:
    by_path, itself = (kvpolicy.evaluate([log], [policy]).to_dict() for policy in (OWN, Longer()))
    assert (by_path.pop("specs"), itself.pop("specs")) == ({Longer().label: OWN}, {})
    assert by_path == itself
    (judged,) = by_path["policies"]
    assert judged["policy"] == Longer().label


def test_reports_say_which_arguments_a_digest_stands_for(profile: Path, log: Path) -> None:
    """As given where it is text; of objects, those of a dataclass."""
    module = "python:tests.policy.by_length:ByLength"
    specs = [f"{module},tokens=256", f"{module},tokens=512"]
    objects = [ByLength(tokens=tokens) for tokens in (256, 512)]
    for folder in (profile, log):
        texts, shown = (
            kvpolicy.evaluate([folder], [*policies, "always-swap"]).text().splitlines() for policies in (specs, objects)
        )
        labels = [ByLength(tokens="256").label, ByLength(tokens="512").label]
        assert [line for line in texts if " is python:" in line] == [
            f"{label} is {spec}" for label, spec in zip(labels, specs, strict=True)
        ]
        assert [line for line in shown if " is ByLength(" in line] == [
            f"{policy.label} is ByLength(tokens={policy.tokens})" for policy in objects
        ]


def test_the_same_twice_is_an_error_however_it_is_given(profile: Path) -> None:
    with pytest.raises(ValueError, match=f"policy {Longer().label}: given twice"):
        kvpolicy.evaluate([profile], [OWN, Longer()])


def test_wrong_probabilities_are_refused_with_the_policys_name(profile: Path, log: Path) -> None:
    class Wrong(Longer):
        name = "wrong"

        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> list[float]:
            return [0.7] * len(options)

    for trace in (profile, log):
        with pytest.raises(ValueError, match=r"policy wrong: probabilities \(0.7, 0.7\) for 2 options"):
            kvpolicy.evaluate([trace], [Wrong()])


def test_a_trace_that_names_a_module_is_refused_and_runs_nothing(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header may come from anybody: what it names is a policy's name, and never what to load."""
    (tmp_path / "bait.py").write_text("raise SystemExit('was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    make_trace(seed=1, states=80).write(tmp_path / "forged")
    for header in (tmp_path / "forged").glob("*/header.json"):
        header.write_text(json.dumps(json.loads(header.read_text()) | {"policy": "python:bait:Policy"}))
    with pytest.raises(TraceError, match=r"field policy is 'python:bait:Policy', should be a policy's name"):
        kvpolicy.evaluate([tmp_path / "forged"], ["always-swap"])
    with pytest.raises(TraceError, match=r"field policy is 'python:bait:Policy'"):
        kvpolicy.read_trace(tmp_path / "forged")
    assert "bait" not in sys.modules
