"""Whether host memory can be page-locked at all, by the plugin's own way: ``python -m benchmarks.gpu.pagelock``.

One mebibyte, in a process that holds no engine, so that a refusal is known before engines are started.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from kvpolicy_vllm.bench.engine_process import environment
from kvpolicy_vllm.plugin.copiers.arena import host_arena

LOCKED_BYTES = 1 << 20


class Owner:
    """Whose memory it is."""


def try_lock(lock: Callable[[object, object], None]) -> str | None:
    """What ``lock`` (owner, memory) objects to; None where it works."""
    try:
        lock(Owner(), host_arena(256, LOCKED_BYTES // 256))
    except (RuntimeError, AssertionError, OSError) as error:  # torch without CUDA asserts
        return f"{type(error).__name__}: {error}"
    return None


def asked() -> str | None:
    """The same, of another process: this one needs no memory on the device."""
    command = [sys.executable, "-m", "benchmarks.gpu.pagelock"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode == 0:
        return None
    output_lines = (done.stdout + done.stderr).strip().splitlines()
    return output_lines[-1] if output_lines else f"it ended with {done.returncode}"


def main() -> int:
    from kvpolicy_vllm.plugin.copiers.cuda import _page_lock  # the very function that the engine's host pool takes

    why = try_lock(_page_lock)
    if why is not None:
        print(why)
    return 0 if why is None else 1


if __name__ == "__main__":
    sys.exit(main())
