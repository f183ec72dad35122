"""What an engine that serves under several memories is told, and what is done with its trace. Loads no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy_vllm.bench.engine import EngineProcess
from kvpolicy_vllm.bench.finishing import finish_core
from kvpolicy_vllm.bench.job import NOISE_LIMIT
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


def serve_part(job: ServedJob, out: Path, folder: Path, name: str, tell: Callable[[int, int], None]) -> str:
    """Run one engine to its end; returns the name of the core that is now in the trace."""
    counted = {"windows": 0, "done": 0}

    def news(values: dict[str, int]) -> None:
        for key, value in values.items():
            counted[key] += value
        tell(counted["done"], counted["windows"])

    tell(0, 0)
    with EngineProcess(PRESSURE, folder / "engine.log") as engine:
        result = engine.ask(job.to_dict(), news)
    core = str(result["core"])
    noise = result["noise"] | {
        "limit": NOISE_LIMIT,
        "above_limit": result["noise"]["variation"] > NOISE_LIMIT,
        "records_dropped": result["records_dropped"],
        # The header has the engine's own; see pressure.py.
        "device_blocks": {run.state_id: job.blocks_at(run.level) for run in job.runs},
        "part": name,
    }
    finish_core(folder / "trace" / core, job.seed, noise, job.load.scaling())
    (folder / "trace" / core).replace(out / core)
    return core
