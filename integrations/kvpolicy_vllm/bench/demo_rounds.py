"""What an unfinished demo has measured so far, in files, so that it is resumed with the next round.

`bench.run_demo` calls it. A round is a workload that all arms of a scenario served; one that was interrupted is
repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.stored_values import read_sealed, sealed
from kvpolicy.workload import Workload
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.overload import Run

STATE = "state.json"
ROUNDS = "rounds"
MAX_ROUND_BYTES = 1 << 30
"""Of a round's file, which has the time of every token of its runs."""


@dataclass(slots=True)
class Measured:
    """The state of a demo in ``out``: values by name, seconds by phase, and rounds."""

    out: Path
    asked: Mapping[str, Any]
    """The demo's arguments."""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def opened(cls, out: Path, asked: Mapping[str, Any]) -> Measured:
        """What ``out`` holds. Raises InputError where its demo was begun with other arguments, and for a
        state that is not as it was written."""
        found = cls(out, dict(json.loads(json.dumps(dict(asked)))))
        if not (out / STATE).exists():
            found.write()
            return found
        stored = _stored(out, out / STATE)
        for name, value in found.asked.items():
            if stored["asked"].get(name) != value:
                raise InputError(
                    f"{out}: holds an unfinished demo that was begun with {name} {stored['asked'].get(name)!r}, now "
                    f"asked for with {value!r}; give a new folder, or the same arguments to resume it"
                )
        found.values, found.seconds = stored["values"], stored["seconds"]
        return found

    def write(self) -> None:
        stored = {"asked": self.asked, "values": self.values, "seconds": self.seconds}
        scratch = self.out / f".{STATE}"
        scratch.write_text(json.dumps(sealed(stored), indent=1) + "\n")
        scratch.replace(self.out / STATE)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds that it takes."""
        began_s = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began_s
            self.write()

    def keep(self, name: str, value: Any) -> None:
        self.values[name] = value
        self.write()

    def round(self, scenario: str, number: int, workload: Workload) -> dict[str, Run] | None:
        """The runs of a finished round, by arm; None where it is to be served."""
        path = self._path(scenario, number)
        if not path.exists():
            return None
        stored = _stored(self.out, path)["runs"]
        return {arm: _run(values, workload) for arm, values in stored.items()}

    def comparison(self, scenario: str, number: int) -> Comparison:
        """Of the tokens of a finished round."""
        stored = _stored(self.out, self._path(scenario, number))["comparison"]
        return Comparison(stored["tokens"], stored["ties"], tuple(stored["wrong"]))

    def keep_round(self, scenario: str, number: int, runs: Mapping[str, Run], comparison: Comparison) -> None:
        path = self._path(scenario, number)
        path.parent.mkdir(exist_ok=True)
        values = {arm: {k: v for k, v in asdict(run).items() if k != "requests"} for arm, run in runs.items()}
        stored = {"runs": values, "comparison": asdict(comparison)}
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(sealed(stored)))
        scratch.replace(path)

    def _path(self, scenario: str, number: int) -> Path:
        return self.out / ROUNDS / f"{scenario}-{number}.json"


def _stored(out: Path, path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path, MAX_ROUND_BYTES)
    except InputError as error:
        raise InputError(f"{error}; the demo in {out} cannot be resumed: give a new folder, or delete it") from None


def _run(values: Mapping[str, Any], workload: Workload) -> Run:
    return Run(**{name: _frozen(value) for name, value in values.items()}, requests=workload.requests)


def _frozen(value: Any) -> Any:
    """Lists as tuples, as a run holds them."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(map(_frozen, value)) if is_list else value
