"""Engines to measure, each alive in a process of its own and asked over a pipe. Importing this loads no engine.

A child runs ``python -m MODULE``, reads one JSON job a line from file descriptor ``KVPOLICY_JOBS`` and answers on
``KVPOLICY_ANSWERS`` with lines ``{"news": ...}`` and at last ``{"result": ...}``. Between jobs it waits in a read and
takes no time. It ends when its jobs end, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpolicy.errors import EngineFailed
from kvpolicy.fields import written
from kvpolicy_vllm.plugin.settings import SCHEDULER, Settings, transfer_config

LAST_LINES = 40
PATIENCE_S = 20.0
"""How long an engine that has nothing left to do may take to end by itself."""
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def environment() -> dict[str, str]:
    """What an engine in a process of its own needs. What the user has set stays, but for how it is driven."""
    paths = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    ours = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The connector is named by module path, so no other plugin need be loaded, nor may it change what is measured.
        "VLLM_PLUGINS": "kvpolicy",
    }
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return ours | _without_accelerator() | os.environ | offline | {"PYTHONPATH": paths, **_in_process()}


def _in_process() -> dict[str, str]:
    # The bench steps the engine core itself, so that every token gets a time.
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _without_accelerator() -> dict[str, str]:
    """For vLLM's CPU build. Two spinning threads on two shared cores measure each other, one does not.

    From 0.32 on the thread binding is read only where workers are processes of their own; OpenMP's own variable counts
    where the engine is in the child itself. An accelerator's engine computes nothing on the CPU that would miss them.
    """
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def plugin_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of :class:`vllm.LLM` that switch the plugin on."""
    return {"scheduler_cls": SCHEDULER, "kv_transfer_config": transfer_config(written(settings))}


def device_arguments(on_cpu: bool) -> dict[str, Any]:
    """Arguments of :class:`vllm.LLM` that belong to the kind of device."""
    return {"dtype": "float32", "enforce_eager": True} if on_cpu else {}


class EngineProcess:
    """A child that holds one engine. A context manager; :meth:`ask` it as often as wanted.

    ``module`` is run as ``__main__``; what it prints goes to ``log`` (None: a temporary file).
    """

    def __init__(self, module: str, log: Path | None = None) -> None:
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self._log_folder = tempfile.TemporaryDirectory() if log is None else None
        self._log = Path(self._log_folder.name) / "engine.log" if self._log_folder else log
        assert self._log is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        pipes = {"KVPOLICY_JOBS": str(jobs_read), "KVPOLICY_ANSWERS": str(answers_write)}
        with self._log.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=environment() | pipes | {"KVPOLICY_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(jobs_read, answers_write),
            )
        os.close(jobs_read)
        os.close(answers_write)
        self._jobs = os.fdopen(jobs_write, "w", buffering=1)
        self._answers = os.fdopen(answers_read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: dict[str, Any], news: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Have a job done; ``news`` is called with what the child tells meanwhile.

        Raises :class:`EngineFailed` with the child's last lines where it ends instead of answering.
        """
        if self._jobs.closed:
            raise self._failure()
        try:
            print(json.dumps(job), file=self._jobs)
        except BrokenPipeError:
            raise self._failure() from None
        for line in self._answers:
            answer = json.loads(line)
            if "result" in answer:
                result: dict[str, Any] = answer["result"]
                return result
            if news is not None:
                news(answer["news"])
        raise self._failure()

    def _failure(self) -> EngineFailed:
        self._stop()
        assert self._log is not None
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        return EngineFailed(f"the engine's process ended with {self._process.returncode}; it said last:\n{last}")

    def close(self) -> None:
        """Let the engine end; kill it where it does not."""
        self._stop()
        self._answers.close()
        if self._log_folder is not None:
            self._log_folder.cleanup()

    def _stop(self) -> None:
        with suppress(BrokenPipeError):  # it is gone already
            self._jobs.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()  # whoever gives up in the middle of a job does not wait for its end
        self.close()


def jobs() -> Iterator[tuple[dict[str, Any], Callable[[str, dict[str, Any]], None]]]:
    """For the child: each job with the function that answers it, ``answer("news" or "result", values)``."""
    _die_with_parent(int(os.environ["KVPOLICY_PARENT"]))
    with (
        os.fdopen(int(os.environ["KVPOLICY_JOBS"])) as asked,
        os.fdopen(int(os.environ["KVPOLICY_ANSWERS"]), "w", buffering=1) as answers,
    ):

        def answer(kind: str, values: dict[str, Any]) -> None:
            print(json.dumps({kind: values}), file=answers)

        for line in asked:
            yield json.loads(line), answer


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, also where the parent was killed. Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it was gone before we asked
