"""The job of an engine that serves with several memory sizes, and how it is run. Importing this loads no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine_run import WindowProgress, run_engine
from kvpolicy_vllm.bench.reach import Load, ServedRun

PRESSURE = "kvpolicy_vllm.bench.pressure"


@dataclass(frozen=True, slots=True)
class ServedJob:
    """Runs that one engine serves."""

    engine: dict[str, Any]
    """Arguments of :class:`vllm.LLM`, the plugin's included."""
    load: Load
    policies: Mapping[str, str]
    """Policies by arm, as for ``--policy``."""
    runs: tuple[ServedRun, ...]
    seed: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServedJob:
        runs = tuple(ServedRun(**run) for run in values["runs"])
        return cls(**values | {"load": Load(**values["load"]), "runs": runs})


def serve_part(job: ServedJob, out: Path, folder: Path, name: str, tell: WindowProgress) -> str:
    """Run one engine to completion; return the name of the core that was added to the trace."""

    def blocks(result: Mapping[str, Any]) -> Mapping[str, Any]:
        # The header's device_blocks are the whole engine's, which the runs use only in part; see pressure.py.
        return {"device_blocks": result["device_blocks"]}

    return run_engine(PRESSURE, job.to_dict(), out, folder, name, tell, blocks)
