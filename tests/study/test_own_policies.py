"""Policies of one's own in studies: by module path and as objects, in this process and in others; their results are
kept by what they are, not by what they are called."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import Option, Preemption
from kvpolicy.policy.cheapest import Threshold
from kvpolicy.study.config import Run
from kvpolicy.study.report import SweepReport
from kvpolicy.trace import read
from tests.policy.ten_line_policy import Longer

WORKLOAD = "azure-conversation-2023?n=30&context=1024"
OWN = "python:tests.policy.ten_line_policy:Longer"
TIGHT = 200
LABEL = Longer().label


def simulate(hardware: str, cache: Path, policies: Sequence[Any], **more: Any) -> SweepReport:
    return kvpolicy.simulate([WORKLOAD], policies, [TIGHT], hardware, run=Run(cache=cache, **({"jobs": 0} | more)))


def test_a_module_path_and_an_object_come_to_the_same_in_any_process(hardware: str, tmp_path: Path) -> None:
    found = []
    for jobs in (0, 2):
        report = simulate(hardware, tmp_path / f"{jobs}", [OWN, "always-swap"], jobs=jobs, out=tmp_path / f"out{jobs}")
        assert report.ok, report.text()
        found.append(report.results[0])
        objects = simulate(hardware, tmp_path / f"objects {jobs}", [Longer(), "always-swap"], jobs=jobs)
        assert objects.ok, objects.text()
        found.append(objects.results[0])
    for one in found:
        assert one["inputs"]["policy"] == LABEL
        assert one["preemptions"] == found[0]["preemptions"] and one["makespan_s"] == found[0]["makespan_s"]
        json.dumps(one, allow_nan=False)
    assert min(found[0]["preemptions"].values()) > 0, "it swaps some and recomputes others"
    assert [one["inputs"].get("module") for one in found] == [OWN, None, OWN, None]
    assert [one["inputs"].get("policy_digest") for one in found] == [None, Longer().digest] * 2
    for folder in (tmp_path / "out2").iterdir():
        (header,) = read(folder).headers.values()
        assert header.policy in (LABEL, "always-swap")
    assert LABEL in simulate(hardware, tmp_path / "0", [OWN]).text()


def test_what_is_finished_is_taken_up(hardware: str, tmp_path: Path) -> None:
    for policy in (OWN, Longer(), Threshold("own", 512)):
        first, again = (simulate(hardware, tmp_path, [policy]) for _ in range(2))
        assert (first.taken_up, again.taken_up) == (0, 1)
        assert again.results == first.results


SOURCE = """
from kvpolicy import Policy

LIMIT = 300

class Rule(Policy):
    name = "rule"

    def probabilities(self, situation, options, state):
        swap = len(options) > 1 and situation.computed_tokens > LIMIT
        return [1.0 - swap, float(swap)][: len(options)]
"""


@pytest.fixture
def rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "modules" / "changing_rule.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(file.parent)
    yield file
    sys.modules.pop("changing_rule", None)


def test_a_policy_that_changed_is_simulated_again(hardware: str, tmp_path: Path, rule: Path) -> None:
    """In this process only once it is loaded anew: until then what runs is what was loaded."""
    policies, cache = ["python:changing_rule:Rule"], tmp_path / "cache"
    first = simulate(hardware, cache, policies)
    rule.write_text(SOURCE.replace("LIMIT = 300", "LIMIT = 30000"))
    assert simulate(hardware, cache, policies).results == first.results
    del sys.modules["changing_rule"]
    changed = simulate(hardware, cache, policies)
    assert changed.taken_up == 0
    assert changed.results[0]["inputs"]["policy"] != first.results[0]["inputs"]["policy"]
    assert changed.results[0]["preemptions"]["swap"] == 0 < first.results[0]["preemptions"]["swap"]


def test_a_worker_that_loads_another_version_says_so(hardware: str, tmp_path: Path, rule: Path) -> None:
    import_it = __import__("changing_rule")
    assert import_it.LIMIT == 300
    rule.write_text(SOURCE.replace("LIMIT = 300", "LIMIT = 30000"))
    report = simulate(hardware, tmp_path / "cache", ["python:changing_rule:Rule"], jobs=1)
    assert [one.error for one in report.failed] == [
        "its workload, hardware, policy or cost model changed while the grid ran; run it again"
    ]


def test_two_objects_of_one_name_are_told_apart(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path, [Threshold("mine", 1), Threshold("mine", 100_000)])
    labels = [one["inputs"]["policy"] for one in report.results]
    assert len(set(labels)) == 2 and all(label.startswith("mine@") for label in labels)
    assert report.results[0]["preemptions"]["swap"] > 0 == report.results[1]["preemptions"]["swap"]


def test_a_module_path_that_leads_nowhere_fails_alone(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path, ["python:no_such_module:Rule", "always-swap"])
    assert len(report.results) == 1
    (failed,) = report.failed
    assert "no module 'no_such_module'" in failed.error and "policy python:no_such_module:Rule" in failed.text()


class Local(Longer):
    """Of this module, which a worker finds."""

    name = "local"

    def __init__(self) -> None:
        self.made_of = (value for value in range(2))

    digest = "given, since no digest can be made of a generator"


def test_an_object_that_cannot_travel_is_a_clear_error(hardware: str, tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match=r"policy local: cannot be sent to worker processes \(.*generator") as told:
        simulate(hardware, tmp_path, [Local()], jobs=1)
    assert "python:MODULE:FACTORY" in str(told.value) and "jobs 0" in str(told.value)
    assert simulate(hardware, tmp_path, [Local()]).ok, "it runs here"


def test_an_object_of_a_class_that_workers_do_not_find_is_a_clear_error(
    hardware: str, tmp_path: Path, rule: Path
) -> None:
    policy = kvpolicy.load_policy("python:changing_rule:Rule")
    rule.unlink()
    report = simulate(hardware, tmp_path, [policy], jobs=1)
    (failed,) = report.failed
    assert "a worker process cannot rebuild it (No module named 'changing_rule')" in failed.error


def test_one_of_ones_own_is_recommended_by_what_starts_it(hardware: str, tmp_path: Path) -> None:
    class Best(Longer):
        """Swaps everything: over this link that is far better."""

        name = "best"

        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> list[float]:
            return [float(option.kind == options[-1].kind) for option in options]

    run = Run(jobs=0, cache=tmp_path, parts=4)
    advice = kvpolicy.recommend(WORKLOAD, hardware, TIGHT, [OWN, Best()], run=run)
    names = [one.policy for one in advice.compared]
    assert names[-2:] == [LABEL, next(name for name in names if name.startswith("best@"))]
    assert "always-swap" in names


def test_the_line_that_deploys_it() -> None:
    from kvpolicy.study.recommend import _config_line

    assert _config_line("always-swap", {}, 4.0) == "kvpolicy config --policy always-swap"
    assert _config_line(LABEL, {"module": OWN}, 8.0) == (
        f"kvpolicy config --policy {OWN} --allow-python-policies --host-gib 8"
    )
    assert _config_line(LABEL, {"policy_digest": "abc"}, 4.0) == ""
