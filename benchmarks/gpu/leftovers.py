"""Files in shared memory that engines of ours left behind when they were killed: noted while they live, removed later.

vLLM's offloading can keep its host memory in ``/dev/shm/vllm_offload_*``, which a killed engine does not remove and
which fills the memory of the whole machine. Only files that an engine of this folder was seen to use are ever removed,
and only once no process uses them any more.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.pieces import write_json

SHARED = Path("/dev/shm")
PROCESSES = Path("/proc")
PATTERN = "vllm_offload_*"
NOTED = "shared-memory.json"


def mapped_by(process: Path, shared: Path = SHARED) -> set[str]:
    """Names of the offloading files that a process has mapped; none where it has ended or belongs to another user."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if str(shared) in line]
    return {path.name for path in paths if path.parent == shared and path.match(PATTERN)}


def noted_files(out: Path) -> set[str]:
    try:
        return set(json.loads((out / NOTED).read_text())["files"])
    except (OSError, ValueError):
        return set()


def note(out: Path, pid: int, shared: Path = SHARED, processes: Path = PROCESSES) -> None:
    """Remember what an engine of ours uses."""
    files = mapped_by(processes / str(pid), shared)
    if files:
        write_json(out / NOTED, {"files": sorted(noted_files(out) | files)})


def remove(out: Path, shared: Path = SHARED, processes: Path = PROCESSES) -> list[str]:
    """Remove noted files that no process uses any more. Returns the names."""
    engine_files = {name for name in noted_files(out) if Path(name).name == name and (shared / name).exists()}
    used: set[str] = set()
    for process in processes.iterdir() if engine_files else ():
        if process.name.isdigit():
            used |= mapped_by(process, shared)
    unused = sorted(engine_files - used)
    for name in unused:
        (shared / name).unlink(missing_ok=True)
    return unused
