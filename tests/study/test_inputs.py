"""Workloads and hardware given as objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import cost
from kvpolicy.cost import CostModel
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.fields import WrongValue
from kvpolicy.workload import WorkloadError, open_workload
from tests.study.object_grids import MODEL, NAME, simulate, workload


class Guess(CostModel):
    name = "guess"

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (open_workload(NAME), "workloads hold 'azure-conversation-2023', a SyntheticRequests, should be texts or"),
        (iter(workload()), "a tuple_iterator, should be texts or Workload objects, which have a digest"),
        (replace(workload(), requests=list(workload().requests)), "workload azure-conversation-2023: requests should"),
        (None, "workloads hold None, a NoneType, should be texts"),
    ],
)
def test_a_workload_that_may_change_is_refused_by_name(given: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises((WrongValue, WorkloadError), match=told):
        simulate(given, MODEL, tmp_path)


def test_an_object_that_is_no_hardware_is_refused_by_name(hardware: str, tmp_path: Path) -> None:
    untrained = cost.load(f"analytic:{hardware}")
    for given, said in (
        (Guess(), "hardware is 'guess', a Guess, should be a text"),
        (untrained, f"hardware 'analytic:{hardware}': is untrained, should be named as DEVICE"),
        (80, "hardware is 80, a int, should be a text"),
    ):
        with pytest.raises(WrongValue) as error:
            simulate(NAME, given, tmp_path)
        assert str(error.value).startswith(said)
