"""How many files a decision enters in a server, on vLLM's scheduler alone: what a reader has to open to follow it.

Counted is every file of the project of which a function runs, constructors of its records included, from the moment
that vLLM takes a request's blocks until the decision is a row of the trace: for a swap, until its save is confirmed.
With a cost model that ships, once compiled, as servers run it, and once in plain Python, which enters the files of the
formulas too; compiled, these are machine code.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy.cost import FittedModel
from tests.vllm import alone, harness
from tests.vllm.test_same_schedule import BASE

MAX_FILES = 20
PLAIN_FILES = {
    "kvpolicy.cost.kernel",
    "kvpolicy.cost.laws",
    "kvpolicy.cost.intervals",
    "kvpolicy.features",
    "kvpolicy.regression.conformal",
}
"""What is compiled into one function."""


class Files:
    """Modules of the project of which a function runs while it watches."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        # By name and not by file: what a dataclass writes for itself is in no file.
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.split(".")[0] in ("kvpolicy", "kvpolicy_vllm"):
            self.entered[module] += 1


def files_entered(model: str, trace: Path, policy: str) -> tuple[set[str], str]:
    """Of the second preemption, so that nothing is counted that happens only once; and what was executed."""
    job = BASE | {"model": model, "plugin": harness.plugin(policy, trace=str(trace)), "requests": 8, "blocks": 140}
    scheduler = alone.scheduler_for(job | {"budget": 512})
    worker, files = alone.Worker(late=0), Files()
    for request in alone.made_requests(job):
        scheduler.add_request(request)
    swaps = scheduler.kvpolicy.swaps
    take_blocks, settled = scheduler._preempt_request, swaps.settled

    def taken(*arguments: Any, **options: Any) -> Any:
        with files.watched():
            return take_blocks(*arguments, **options)

    def confirmed(copy: Any) -> None:
        with files.watched():
            settled(copy)

    def steps(count: int) -> None:
        for _ in range(count):
            output = scheduler.schedule()
            sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
            scheduler.update_from_output(output, worker.execute(output, sampled))

    steps(6)
    for watching in (False, True):
        scheduler.preempt_at_next_step(scheduler.running[0].request_id)
        if watching:
            scheduler._preempt_request, swaps.settled = taken, confirmed
        steps(1)
        if watching:
            del scheduler._preempt_request, swaps.settled
        steps(15)
    stats = scheduler.connector.stats()
    scheduler.kvpolicy.close()
    (executed,) = {kind for kind in ("recompute", "swap") if harness.total(stats, "preemptions", executed=kind) == 2}
    return set(files.entered), executed


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model fits this scheduler's made-up engine is not the question."""
    monkeypatch.setattr(FittedModel, "check_fit", lambda *arguments, **options: None)
    monkeypatch.setattr(FittedModel, "check_geometry", lambda *arguments: None)


@pytest.mark.parametrize("policy", ["cheapest:cpu-llama-native", "always-recompute"])
@pytest.mark.usefixtures("fits")
def test_a_live_decision_enters_few_files(policy: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    entered, executed = files_entered(model, tmp_path, policy)
    assert executed == ("recompute" if policy == "always-recompute" else "swap")
    assert {
        "kvpolicy_vllm.plugin.scheduler",
        "kvpolicy.policy.decision",
        "kvpolicy_vllm.plugin.trace_writer",
    } <= entered
    assert len(entered) <= MAX_FILES, "\n".join(sorted(entered))


@pytest.mark.usefixtures("fits")
def test_in_plain_python_it_enters_those_of_the_formulas_too(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FittedModel, "warm", lambda self: False)
    entered, executed = files_entered(model, tmp_path, "cheapest:cpu-llama-native")
    assert executed == "swap"
    assert entered >= PLAIN_FILES and len(entered - PLAIN_FILES) <= MAX_FILES - 1, "\n".join(sorted(entered))
