"""A job travels to the engine as JSON."""

from __future__ import annotations

from kvpolicy.overflow import TIMELINE
from kvpolicy_vllm.bench.reach import (
    ARMS,
    QUICK,
    runs_of,
)
from kvpolicy_vllm.bench.serve_job import ServedJob


def test_a_job_travels_as_json() -> None:
    runs = tuple(runs_of(QUICK, TIMELINE, 0, seed=0))
    job = ServedJob({"model": "m"}, QUICK.load, {arm: arm for arm in ARMS}, runs, 3)
    assert ServedJob.from_dict(job.to_dict()) == job
