"""Engines in processes of their own, driven over pipes. Importing this loads no engine.

A child runs ``python -m MODULE``, reads one JSON job per line from file descriptor ``KVPOLICY_JOBS`` and answers on
``KVPOLICY_ANSWERS`` with lines ``{"news": ...}`` and finally ``{"result": ...}``. Between jobs it blocks in a read and
uses no CPU time. It exits when there are no more jobs, and when its parent exits. It is in a session of its own:
control-C at a terminal reaches the parent alone, which then ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from kvpolicy.errors import EngineFailed
from kvpolicy.fields import changed_values
from kvpolicy_vllm.plugin.settings import SCHEDULER, Settings, transfer_config

FLAGS = "server_flags"
"""Among an engine's arguments: ``[LLM, FLAG, ...]`` of the server whose engine it is measured as."""
LAST_LINES = 40
PATIENCE_S = 20.0
"""Seconds that an engine without further jobs may take to exit before it is killed."""
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2), which outlives exec(2)


def environment(measures: bool = True, as_server: bool = False) -> dict[str, str]:
    """Environment of an engine process. Variables that the user has set win, except those that drive the process.

    ``measures``: whether it steps an engine. ``as_server``: whether that engine finds what a server would, as one that
    measures nothing does: a model at a hub, vLLM's other plugins, all threads. Otherwise nothing but the engine may
    take part.
    """
    paths = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    own = {name: value for name, value in os.environ.items() if name != "KVPOLICY"}  # this engine is given flags
    if as_server or not measures:
        return defaults | own | {"PYTHONPATH": paths} | (_in_process() if measures else {})
    alone = {
        # The connector is named by module path, so no other plugin is needed; none may affect the measurement.
        "VLLM_PLUGINS": "kvpolicy",
    }
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return defaults | alone | _without_accelerator() | own | offline | {"PYTHONPATH": paths, **_in_process()}


def _in_process() -> dict[str, str]:
    # The bench steps the engine core itself, so that it can time every token.
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _without_accelerator() -> dict[str, str]:
    """Variables for vLLM's CPU build: one thread, since two spinning threads on two shared cores disturb each other.

    From 0.32 on vLLM reads the thread binding only in worker processes; for an engine inside the child OpenMP's own
    variable applies. Engines on an accelerator do no work on the CPU that needs more threads.
    """
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def plugin_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of :class:`vllm.LLM` that switch the plugin on."""
    return {"scheduler_cls": SCHEDULER, "kv_transfer_config": transfer_config(changed_values(settings))}


def device_arguments(on_cpu: bool, is_made: bool = True) -> dict[str, Any]:
    """Arguments of :class:`vllm.LLM` that depend on the kind of device. ``is_made``: whether kvpolicy made the model,
    in float32; vLLM would compute it in bfloat16 on a CPU. Any other has the type that vLLM takes for it."""
    if not on_cpu:
        return {}
    return {"enforce_eager": True} | ({"dtype": "float32"} if is_made else {})


class EngineProcess:
    """A child process with one engine. A context manager; :meth:`ask` runs a job and may be called repeatedly.

    ``module`` is run as ``__main__``; its output goes to ``log`` (None: a temporary file). ``measures`` and
    ``as_server``: as for :func:`environment`. ``variables``: further ones of its environment.
    """

    def __init__(
        self,
        module: str,
        log: Path | None = None,
        measures: bool = True,
        as_server: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self._log_folder = tempfile.TemporaryDirectory() if log is None else None
        self._log = Path(self._log_folder.name) / "engine.log" if self._log_folder else log
        assert self._log is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        pipes = {"KVPOLICY_JOBS": str(jobs_read), "KVPOLICY_ANSWERS": str(answers_write)}
        with self._log.open("w") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=environment(measures, as_server) | dict(variables) | pipes | {"KVPOLICY_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=(jobs_read, answers_write),
                start_new_session=True,  # so that what it starts can be killed with it
            )
        os.close(jobs_read)
        os.close(answers_write)
        self._jobs = os.fdopen(jobs_write, "w", buffering=1)
        self._answers = os.fdopen(answers_read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_in_time(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """As :meth:`ask`; kills the child, with what it has started, and raises :class:`EngineFailed` where the answer
        takes over ``limit_s``."""
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            self._kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            return self.ask(job)
        except EngineFailed as error:
            if killed.is_set():
                raise EngineFailed(f"{error}\nno answer within {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()

    def ask(self, job: dict[str, Any], news: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Run a job and return its result; ``news`` is called with the child's reports of progress.

        Raises :class:`EngineFailed` with the child's last lines of output where it exits instead of answering.
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
        last_lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        status = self._process.returncode
        return EngineFailed(f"the engine's process ended with {status}; its last output:\n{last_lines}")

    def close(self) -> None:
        """Let the process exit; kill it if it does not within :data:`PATIENCE_S`."""
        self._stop()
        self._answers.close()
        if self._log_folder is not None:
            self._log_folder.cleanup()

    def _stop(self) -> None:
        with suppress(BrokenPipeError):  # the process has exited already
            self._jobs.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """End the child, unless it has been waited for, and what it has started: a fork has the pipe for answers, too,
        of which no end would be seen while it lives."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._kill()  # after an exception there is no point in waiting for the job
        self.close()


def jobs() -> Iterator[tuple[dict[str, Any], Callable[[str, dict[str, Any]], None]]]:
    """For the child: iterate over (job, answer). ``answer("news" or "result", values)`` writes to the parent."""
    _die_with_parent(int(os.environ["KVPOLICY_PARENT"]))
    with (
        os.fdopen(int(os.environ["KVPOLICY_JOBS"])) as job_lines,
        os.fdopen(int(os.environ["KVPOLICY_ANSWERS"]), "w", buffering=1) as answers,
    ):

        def answer(kind: str, values: dict[str, Any]) -> None:
            print(json.dumps({kind: values}), file=answers)

        for line in job_lines:
            yield json.loads(line), answer


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits, even if the parent was killed. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent exited before prctl was called
