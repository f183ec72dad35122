"""What an engine that serves under several memories is told, and what is done with its trace. Loads no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine_run import Counted, run_to_its_end
from kvpolicy_vllm.bench.reach import Load, ServedRun

PRESSURE = "kvpolicy_vllm.bench.pressure"


@dataclass(frozen=True, slots=True)
class ServedJob:
    """What one engine is to serve."""

    engine: dict[str, Any]
    """Arguments of :class:`vllm.LLM`, the plugin's included."""
    load: Load
    policies: Mapping[str, str]
    """By arm, as ``--policy`` takes them."""
    runs: tuple[ServedRun, ...]
    seed: int

    def blocks_at(self, level: int) -> int:
        return self.load.all_blocks if level >= 100 else self.load.blocks_at(level)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServedJob:
        runs = tuple(ServedRun(**one) for one in values["runs"])
        return cls(**values | {"load": Load(**values["load"]), "runs": runs})


def serve_part(job: ServedJob, out: Path, folder: Path, name: str, tell: Counted) -> str:
    """Run one engine to its end; returns the name of the core that is now in the trace."""
    # The header has the engine's own; see pressure.py.
    blocks = {"device_blocks": {run.state_id: job.blocks_at(run.level) for run in job.runs}}
    return run_to_its_end(PRESSURE, job.to_dict(), out, folder, name, tell, lambda _: blocks, job.load.scaling())
