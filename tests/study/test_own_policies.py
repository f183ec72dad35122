"""Policies of one's own in studies: by module path and as objects, in this process and in others; their results are
kept by what they are, not by what they are called."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import kvpolicy
from kvpolicy.events import Option, Preemption
from kvpolicy.policy.cheapest import Threshold
from kvpolicy.study.config import Run, Serving
from kvpolicy.trace import read
from tests.order.made import ByLevel
from tests.policy.by_length import ByLength
from tests.policy.ten_line_policy import Longer
from tests.study.conftest import SOURCE
from tests.study.policy_grids import TIGHT, WORKLOAD, simulate

OWN = "python:tests.policy.ten_line_policy:Longer"


LABEL = Longer().label


def test_a_module_path_and_an_object_come_to_the_same_in_any_process(hardware: str, tmp_path: Path) -> None:
    events = []
    for jobs in (0, 2):
        report = simulate(hardware, tmp_path / f"{jobs}", [OWN, "always-swap"], jobs=jobs, out=tmp_path / f"out{jobs}")
        assert report.ok, report.text()
        events.append(report.results[0])
        objects = simulate(hardware, tmp_path / f"objects {jobs}", [Longer(), "always-swap"], jobs=jobs)
        assert objects.ok, objects.text()
        events.append(objects.results[0])
    for one in events:
        assert one["inputs"]["policy"] == LABEL
        assert one["preemptions"] == events[0]["preemptions"] and one["makespan_s"] == events[0]["makespan_s"]
        json.dumps(one, allow_nan=False)
    assert min(events[0]["preemptions"].values()) > 0, "it swaps some and recomputes others"
    assert [one["inputs"].get("module") for one in events] == [OWN, None, OWN, None]
    assert [one["inputs"].get("policy_digest") for one in events] == [None, Longer().digest] * 2
    for folder in (tmp_path / "out2").iterdir():
        (header,) = read(folder).headers.values()
        assert header.policy in (LABEL, "always-swap")
    assert LABEL in simulate(hardware, tmp_path / "0", [OWN]).text()


def test_what_is_finished_is_taken_up(hardware: str, tmp_path: Path) -> None:
    for policy in (OWN, Longer(), Threshold("own", 512)):
        first, again = (simulate(hardware, tmp_path, [policy]) for _ in range(2))
        assert (first.taken_up, again.taken_up) == (0, 1)
        assert again.results == first.results


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
    assert [failure.error for failure in report.failed] == [
        "its workload, hardware, policy or cost model changed while the grid ran; run it again"
    ]


def test_a_module_path_that_leads_nowhere_fails_alone(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path, ["python:no_such_module:Rule", "always-swap"])
    assert len(report.results) == 1
    (failed,) = report.failed
    assert "no module 'no_such_module'" in failed.error and "policy python:no_such_module:Rule" in failed.text()


def test_a_custom_policy_is_recommended_by_its_module_path(hardware: str, tmp_path: Path) -> None:
    class Best(Longer):
        """Swaps everything: over this link that is far better."""

        name = "best"

        def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> list[float]:
            return [float(option.kind == options[-1].kind) for option in options]

    run = Run(jobs=0, cache=tmp_path, parts=4)
    advice = kvpolicy.recommend(WORKLOAD, hardware, TIGHT, [OWN, Best()], run=run)
    names = [row.policy for row in advice.compared]
    assert names[-2:] == [LABEL, next(name for name in names if name.startswith("best@"))]
    assert "always-swap" in names


def test_reports_say_which_arguments_a_digest_stands_for(hardware: str, tmp_path: Path) -> None:
    """Those of dataclasses, or the module path as given; also where results are cached."""
    module, objects = "python:tests.policy.by_length:ByLength,tokens=9", [ByLength(), ByLength(tokens=512)]
    specs = {ByLength(tokens="9").label: module} | {
        policy.label: f"ByLength(tokens={policy.tokens})" for policy in objects
    }
    order = ByLevel(quantum_tokens=64)
    specs |= {order.label: "ByLevel(quantum_tokens=64, promote_s=inf, max_victims=8, cool_down_s=0.0)"}
    for _ in range(2):
        report = kvpolicy.simulate(
            [WORKLOAD],
            [module, *objects, Longer(), "always-swap"],
            [TIGHT],
            hardware,
            serving=Serving(order=order),
            run=Run(jobs=0, cache=tmp_path),
        )
        assert report.ok and report.to_dict()["specs"] == specs
        lines = report.text().splitlines()
        assert [lines.count(f"{label} is {spec}") for label, spec in specs.items()] == [1] * 4


def test_the_line_that_deploys_it() -> None:
    from kvpolicy.study.server_flags import config_line

    assert config_line("always-swap", {"serving": {}}, 4.0) == "kvpolicy config --policy always-swap --host-gib 4"
    assert config_line(LABEL, {"module": OWN, "serving": {}}, 8.0) == (
        f"kvpolicy config --policy {OWN} --allow-python-policies --host-gib 8"
    )
    assert config_line(LABEL, {"policy_digest": "abc"}, 4.0) == ""
