"""OpenAI servers that a bench starts itself, one process each, on free ports of this machine. Loads no engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kvpolicy.errors import EngineFailed, InputError
from kvpolicy_vllm.bench.engine_process import LAST_LINES, SET_PARENT_DEATH_SIGNAL, environment
from kvpolicy_vllm.bench.root_cause import is_short_of_memory, root_cause
from kvpolicy_vllm.launch import core_variables

HOST = "127.0.0.1"
READY_S = 1800.0
"""Seconds that a server may take to load its model and answer."""
END_S = 60.0
"""Seconds that it may take to end before it is killed."""
STATE, SESSION, USER_TICKS, SYSTEM_TICKS, THREADS = 0, 3, 11, 12, 17
"""Places of fields in /proc/PID/stat, counted from the one after the name: proc(5)."""
NUMBERS = (USER_TICKS, SYSTEM_TICKS, THREADS)
CORES = "Cpus_allowed_list:"
"""In /proc/PID/task/*/status, before the cores that a thread may run on, as 0-1,4."""
ENDED = "ZX"
"""States of a process whose first thread has ended: zombies, and dead ones."""
END_WITH_PARENT = f"""
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl({SET_PARENT_DEATH_SIGNAL}, signal.SIGTERM)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""
"""Becomes the command behind it, and is told to end when the process with the id before it ends, even if killed."""
OWN_FLAGS = {"--host": "the bench chooses it", "--port": "the bench chooses it", "--api-key": "the bench sends no key"}


class LiveServer:
    """A server from a command of `vllm serve`, without host and port. A context manager, up and answering inside. It
    ends with the process that started it, and on Linux with the thread.

    ``log``: where its output goes. ``say``: called with a line when it is waited for. Raises EngineFailed, with
    the error that was the cause and the last lines of its output, where it ends instead of answering; without these
    lines where memory was short, which vLLM's error says.
    """

    def __init__(self, command: Sequence[str], log: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._command = list(command)
        self._log = log
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> LiveServer:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ending_with_parent([*self._command, "--host", HOST, "--port", str(port)]),
                env=environment_of(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def _wait(self) -> None:
        assert self._process is not None
        self._say(f"starting {' '.join(self._command[:4])} ...")
        last_s = time.monotonic() + READY_S
        while not _answers(f"{self.url}/health"):
            if self._process.poll() is not None:
                raise self._failure(f"ended with {self._process.returncode} before it answered")
            if time.monotonic() > last_s:
                raise self._failure(f"did not answer within {READY_S:g} s")
            time.sleep(0.2)

    def _failure(self, what: str) -> EngineFailed:
        lines = self._log.read_text(errors="replace").splitlines()
        cause = root_cause(lines)
        if is_short_of_memory(cause):
            return EngineFailed(f"the server {what}: {cause}; its output is in {self._log}")
        return EngineFailed(
            f"the server {what}{': ' if cause else ''}{cause}; its last output ({self._log}):\n"
            + "\n".join(lines[-LAST_LINES:])
        )

    def refuse_ended(self) -> None:
        """Raise EngineFailed where the server has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise self._failure(f"ended with {self._process.returncode}")

    @property
    def cpu_s(self) -> float:
        """Seconds on processors that its processes took so far, those that have ended left out."""
        return session_cpu_s(self._process.pid) if self._process is not None else 0.0

    @property
    def cores(self) -> list[str]:
        """As :func:`session_cores`, of its processes."""
        return session_cores(self._process.pid) if self._process is not None else []

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
        finally:  # where a second signal does not wait for that, too
            with suppress(ProcessLookupError):  # whoever of its processes outlived it
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Whoever is started next needs the memory that they have.
        last_s = time.monotonic() + END_S
        while session_runs(process.pid) and time.monotonic() < last_s:
            time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()


def environment_of(command: Sequence[str]) -> dict[str, str]:
    """The environment that the server of a command is started in."""
    return environment(measures=False) | core_variables(command, os.environ)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command of a process that ends with this one, which may be killed. On Linux alone: elsewhere as it is."""
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def session_cpu_s(session: int, processes: Path = Path("/proc")) -> float:
    """Seconds on processors, of the user and the system, of all processes of a session, by its id; 0 where the system
    keeps no such files."""
    found = _session(session, processes)
    return sum(int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]) for _, fields in found) / os.sysconf("SC_CLK_TCK")


def session_cores(session: int, processes: Path = Path("/proc")) -> list[str]:
    """What cores threads of a session may run on, each list of cores once: those of the whole machine, and those that
    vLLM's CPU engine binds threads to. Empty where the system keeps no such files."""
    found: set[str] = set()
    for folder, _ in _session(session, processes):
        with suppress(OSError):  # a process that ended meanwhile
            for status in list(folder.glob("task/*/status")):
                with suppress(OSError):  # a thread that did
                    lines = status.read_text().splitlines()
                    found.update(line.split()[1] for line in lines if line.startswith(CORES))
    return sorted(found)


def session_runs(session: int, processes: Path = Path("/proc")) -> bool:
    """Whether any process of a session is there that has not ended; False where the system keeps no such files.

    The state is that of a process's first thread. Others may take longer to end, and hold the memory until then.
    """
    return any(fields[STATE] not in ENDED or int(fields[THREADS]) > 1 for _, fields in _session(session, processes))


def _session(session: int, processes: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every process of a session: its folder, and its fields after the name, which may hold anything."""
    for stat in processes.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # a process that ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[SESSION]) == session and all(fields[place].isdigit() for place in NUMBERS):
                yield stat.parent, fields


def refuse_own_flags(vllm_flags: Sequence[str]) -> None:
    """Raise InputError for a flag that a server started by a bench may not have."""
    for flag in vllm_flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in OWN_FLAGS:
            raise InputError(f"{name} cannot be given to a server that a bench starts: {OWN_FLAGS[name]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False
