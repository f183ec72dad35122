"""The error that ended a server, found in logs as vLLM writes them."""

from __future__ import annotations

import pytest

from kvpolicy_vllm.bench.root_cause import is_short_of_memory, root_cause

WORKER, CORE = (
    "(VllmWorker-0 pid=21) ERROR 01-31 06:19:17 [executor.py:9] ",
    "(EngineCore pid=20) ERROR 01-31 06:19:23 ",
)
POINTING = f"""\
{CORE}[core.py:15] EngineCore failed to start.
{CORE}[core.py:15] Exception: WorkerProc initialization failed due to an exception in a background process. See stack \
trace for root cause.
Process EngineCore:
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
ConnectionError: a process that came to its end after that
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
DEVICE = (
    "Free memory on device cuda:0 (30.19/79.18 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def failed_with(message: str) -> str:
    """A log of a worker whose start failed with these lines."""
    own = "\n".join(f"{WORKER}{line}" for line in ("    raise ValueError(", *message.splitlines()))
    return f"Triton is installed.\nKeyError: one that was handled\n{own}\n{POINTING}"


def test_the_cause_is_the_last_error_before_one_that_points_above() -> None:
    assert root_cause(failed_with("ValueError: no such layer").splitlines()) == "ValueError: no such layer"
    assert root_cause(failed_with("torch.OutOfMemoryError: of CUDA").splitlines()) == "torch.OutOfMemoryError: of CUDA"
    assert root_cause(failed_with("AssertionError").splitlines()) == "AssertionError"


def test_a_device_without_enough_memory_names_the_flag_and_what_it_can_be() -> None:
    said = root_cause(failed_with(f"ValueError: {DEVICE}").splitlines())
    assert said == f"ValueError: {DEVICE} (Give --gpu-memory-utilization 0.38 or less.)"


def test_so_does_a_cpu_whose_memory_another_server_has() -> None:
    """The message of vLLM 0.32."""
    node = (
        "Available memory on node 0 (17.97/23.54 GiB) on startup is less than desired CPU memory utilization (0.92, "
        "21.66 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory "
        "reserved (despite its name). To resolve: decrease `--gpu-memory-utilization` (e.g. "
        "`--gpu-memory-utilization 0.5`) or reduce CPU memory used by other processes."
    )
    said = root_cause(failed_with(f"ValueError: {node}").splitlines())
    assert said == f"ValueError: {node} (Give --gpu-memory-utilization 0.76 or less.)"
    assert is_short_of_memory(said) and not is_short_of_memory("ValueError: no such layer")


def test_a_message_of_several_lines_is_one_line() -> None:
    lines = ["ValidationError: 1 error", "  Value error, too long", "    For more see there", "    and there", "end"]
    assert root_cause(lines) == "ValidationError: 1 error Value error, too long For more see there"


@pytest.mark.parametrize("log", ["", "killed", "WARNING 01-31 06:00:00 [a.py:1] errors like `OSError: [Errno 24]`"])
def test_a_log_without_an_error_has_no_cause(log: str) -> None:
    assert root_cause(log.splitlines()) == ""
    assert root_cause([*log.splitlines(), *POINTING.splitlines()]) == ""
