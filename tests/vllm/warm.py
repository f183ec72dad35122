"""A process that has a module imported and runs its ``main`` for one job after the other, each in a child of its own.

``python -m tests.vllm.warm MODULE`` reads a job a line, ``{"arguments": [...], "environment": {...}, "output": PATH}``,
and answers with the job's exit status. Importing vLLM takes as long as most engines serve: here it is done once. A
child begins where the import ended, with the job's environment, and ends as any interpreter does.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print what it likes, also while it is imported
    module = importlib.import_module(name)
    assert threading.active_count() == 1, "what is forked has no other thread"
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _prepare(job)
            module.main(*job["arguments"])
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _prepare(job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)


class Warm:
    """The near side of one such process. It starts at the first job and ends with whoever uses it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str], environment: dict[str, str], output: Path, timeout_s: float) -> int:
        """Run one job, what it prints going to ``output``; returns its exit status.

        Raises :class:`subprocess.TimeoutExpired`, the job killed; RuntimeError where the module cannot be imported.
        """
        process = self._process = self._process or self._started(environment)
        assert process.stdin is not None and process.stdout is not None
        job = {"arguments": arguments, "environment": environment, "output": str(output)}
        with suppress(BrokenPipeError):
            print(json.dumps(job), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        status = process.stdout.readline() if ready else ""
        if status:
            return int(status)
        self.end()
        if not ready:
            raise subprocess.TimeoutExpired(arguments, timeout_s)
        raise RuntimeError(f"{self._module} cannot be imported, or its process was killed; see above")

    def _started(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        atexit.register(self.end)
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, self._module],
            env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        """With its job, where one runs."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
