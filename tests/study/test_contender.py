"""Policies of a grid by name, by module path and as objects."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.errors import KVPolicyError
from kvpolicy.policy.cheapest import Threshold
from kvpolicy.study.contender import contender_of, contenders
from tests.policy.ten_line_policy import Longer
from tests.study.policy_grids import simulate


def test_two_objects_of_one_name_are_distinguished(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path, [Threshold("mine", 1), Threshold("mine", 100_000)])
    labels = [result["inputs"]["policy"] for result in report.results]
    assert len(set(labels)) == 2 and all(label.startswith("mine@") for label in labels)
    assert report.results[0]["preemptions"]["swap"] > 0 == report.results[1]["preemptions"]["swap"]


class Local(Longer):
    """Of this module, which a worker finds."""

    name = "local"

    def __init__(self) -> None:
        self.made_of = (value for value in range(2))

    digest = "given, since no digest can be made of a generator"


def test_an_object_that_cannot_travel_is_a_clear_error(hardware: str, tmp_path: Path) -> None:
    with pytest.raises(
        KVPolicyError, match=r"policy local: cannot be sent to worker processes \(.*generator"
    ) as result:
        simulate(hardware, tmp_path, [Local()], jobs=1)
    assert "python:MODULE:FACTORY" in str(result.value) and "jobs 0" in str(result.value)
    assert simulate(hardware, tmp_path, [Local()]).ok, "it runs here"


def test_an_object_of_a_class_that_workers_do_not_find_is_a_clear_error(
    hardware: str, tmp_path: Path, rule: Path
) -> None:
    policy = kvpolicy.load_policy("python:changing_rule:Rule")
    rule.unlink()
    report = simulate(hardware, tmp_path, [policy], jobs=1)
    (failed,) = report.failed
    assert "a worker process cannot rebuild it (No module named 'changing_rule')" in failed.error


def test_a_policy_that_is_given_twice_contends_once() -> None:
    contestants = contenders(["always-swap", Longer(), "always-swap", Longer()])
    assert [contender.label for contender in contestants] == ["always-swap", Longer().label]
    assert (contestants[0].policy_object, contestants[0].digest) == (None, "")
    assert contestants[1].digest == Longer().digest and isinstance(contestants[1].policy_object, Longer)


def test_a_module_path_that_cannot_be_loaded_is_left_to_its_cells() -> None:
    contender = contender_of("python:no_such_module:make")
    assert (contender.label, contender.module) == ("python:no_such_module:make", "python:no_such_module:make")
