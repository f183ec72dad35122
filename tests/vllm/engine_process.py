"""One engine in a process of its own: read a job from a file, run it, write what happened.

Run as ``python -m tests.vllm.engine_process JOB RESULT``. The job names a scenario of :mod:`tests.vllm.scenarios`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm import scenarios
from tests.vllm.interruptions import interrupted


def main(job_path: str, result_path: str) -> None:
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    scenario = interrupted if job["scenario"] == "interrupted" else getattr(scenarios, job["scenario"])
    result = scenario(job)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
