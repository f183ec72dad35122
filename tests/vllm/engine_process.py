"""One engine in a process of its own: read a job from a file, run it, write what happened.

Run as ``python -m tests.vllm.engine_process JOB RESULT``. The job names a scenario of :mod:`tests.vllm.scenarios`,
or one that has a module of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm import handed_over, scenarios
from tests.vllm.interruptions import interrupted
from tests.vllm.pressed import pressed
from tests.vllm.published import published
from tests.vllm.waves import waves

ELSEWHERE = {
    "interrupted": interrupted,
    "pressed": pressed,
    "published": published,
    "waves": waves,
    "prefills": handed_over.prefills,
    "decodes": handed_over.decodes,
}
"""Scenarios that have modules of their own."""


def main(job_path: str, result_path: str) -> None:
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    name = job["scenario"]
    scenario = ELSEWHERE[name] if name in ELSEWHERE else getattr(scenarios, name)
    result = scenario(job)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
