"""gpu-profile: both options in the same states on models of known shapes with dummy weights, an engine a piece.

A piece is a shape, a block size, a kind of host memory and a pass; what is most telling comes first. Traces are in
`OUT/traces/DEVICE-SHAPE` and cost models in `OUT/models/DEVICE-SHAPE` after every piece, made anew from whatever is
there, with their errors on states that were held out.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.geometries import EIGHT_B, ONE_B, SEVEN_B_MHA, TINY, Geometry, write_model
from benchmarks.gpu.pieces import Done, Piece, exit_status_of, read_part, run_pieces, write_json
from benchmarks.gpu.place import Place, arguments, chosen, find_place
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.settings import GIB
from kvpolicy.training import train
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import Extent, Part, Rig
from kvpolicy_vllm.bench.profile_results import finish_profile
from kvpolicy_vllm.bench.run_profile import measure_part

EXTENT = Extent(
    block_sizes=(16,),
    states=20,
    passes=1,
    repeats=1,
    check_pairs=5,
    max_tokens=32768,
    max_others=63,
    max_batch_tokens=65536,
    model_tokens=66560,
    max_extra=1,
)
"""Of one piece. 20 states are assigned from the lowest numbers of other requests up, so that none has over 19;
docs/gpu.md says how far the lengths go."""
LONG = replace(
    EXTENT, states=8, check_pairs=0, max_tokens=65536, max_others=3, max_batch_tokens=131072, model_tokens=131072
)
TINY_EXTENT = replace(
    EXTENT, states=8, check_pairs=1, max_tokens=512, max_others=4, max_batch_tokens=1500, model_tokens=2048
)
FULL_CPU_EXTENT = replace(EXTENT, states=12, max_tokens=1500, max_others=7, max_batch_tokens=6000, model_tokens=4096)
START_S = 90.0
"""What an engine's start may take of a piece's time, compiling and capturing included."""
RESERVE_S = 20.0
PIECE_S = 200.0
"""Two of them, their checks and their models, within a call of 9 minutes."""
TRAINING_S = 60.0
"""Kept at the end of a call."""
MIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one piece measures."""

    geometry: Geometry
    part: Part
    extent: Extent

    @property
    def name(self) -> str:
        return f"{self.geometry.name}-{self.part.name}"


def shares_of(place: Place) -> tuple[Share, ...]:
    """In the order in which they are to be measured."""

    def share(geometry: Geometry, size: int, number: int = 0, pinned: bool = True, extent: Extent = EXTENT) -> Share:
        name = f"b{size}-pass{number}{'' if pinned else '-pageable'}{'-long' if extent is LONG else ''}"
        return Share(geometry, Part(name, number, size, pinned), replace(extent, block_sizes=(size,)))

    if place.on_cpu or place.tiny:
        extent = TINY_EXTENT if place.tiny else FULL_CPU_EXTENT
        return tuple(share(TINY, size, extent=extent) for size in (32, 64))
    return (
        share(EIGHT_B, 16),
        share(EIGHT_B, 64),
        share(EIGHT_B, 16, 1),
        share(EIGHT_B, 64, 1),
        share(EIGHT_B, 16, 0, pinned=False),
        *(share(SEVEN_B_MHA, size) for size in (16, 64)),
        *(share(ONE_B, size) for size in (16, 64)),
        *(share(EIGHT_B, size) for size in (32, 128, 256)),
        share(EIGHT_B, 16, 2, extent=LONG),
        *(share(SEVEN_B_MHA, size) for size in (32, 128, 256)),
        *(share(ONE_B, size) for size in (32, 128, 256)),
        *(share(geometry, 16, 0, pinned=False) for geometry in (SEVEN_B_MHA, ONE_B)),
        share(EIGHT_B, 64, 0, pinned=False),
    )


class Profile:
    """What the pieces share."""

    def __init__(self, out: Path, place: Place, seed: int, synchronous: bool, say: Callable[[str], None]) -> None:
        self.out, self.place, self.seed, self.say = out, place, seed, say
        self.synchronous = synchronous

    def piece(self, share: Share) -> Piece:
        seconds = 40.0 if self.place.tiny else PIECE_S
        return Piece(share.name, seconds, lambda left_s: self.measure(share, left_s))

    def named(self, geometry: Geometry) -> str:
        return f"{self.place.short_name}-{geometry.name}"

    def traces(self, geometry: Geometry) -> Path:
        return self.out / "traces" / self.named(geometry)

    def measure(self, share: Share, left_s: float) -> dict[str, Any]:
        """One engine from start to end; its trace is moved to where it belongs when it is whole."""
        folder = self.out / "unfinished" / share.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        dtype = "float32" if self.place.on_cpu else "bfloat16"
        llm = write_model(self.out / "llm" / share.geometry.name, share.geometry, dtype)
        traces = self.traces(share.geometry)
        traces.mkdir(parents=True, exist_ok=True)
        told_s = [time.monotonic()]

        def tell(done: int, of: int) -> None:
            if time.monotonic() - told_s[0] > 20:
                told_s[0] = time.monotonic()
                self.say(f"    {share.name}: {done} of {of} windows")

        began = time.monotonic()
        max_s = max(MIN_S, min(PIECE_S, left_s) - START_S - RESERVE_S)
        core = measure_part(self.job(share, llm, folder, max_s), traces, folder, share.name, tell)
        keep_log(folder / "engine.log", self.out / "logs" / f"{share.name}.log")
        shutil.rmtree(folder)
        return {"core": core, "trace": traces.name, "took_s": time.monotonic() - began}

    def job(self, share: Share, llm: Path, folder: Path, max_s: float) -> Job:
        rig = Rig(llm, share.extent, None, self.seed, device=not self.place.on_cpu, is_made=True)
        job = rig.job(share.part, folder)
        engine = job.engine | {"load_format": "dummy", "max_num_seqs": share.extent.max_others + 9}
        if not self.place.on_cpu:
            engine |= {"dtype": "bfloat16"}
            engine |= {"async_scheduling": False} if self.synchronous else {}
        extra = engine["kv_transfer_config"]["kv_connector_extra_config"]
        longest = share.extent.max_tokens + 2 * share.part.block_size
        wanted_gib = 1.1 * longest * share.geometry.kv_token_bytes * (2 if self.place.on_cpu else 1) / GIB
        extra["host_gib"] = max(0.25, min(wanted_gib, 0.4 * available_memory_bytes() / GIB))
        return replace(job, engine=engine, max_s=max_s)

    def finish(self, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Check and train what there is; a trace that is too small to train on is reported."""
        models: dict[str, Any] = {}
        for name in sorted({result["trace"] for result in results.values()}):
            folder = self.out / "traces" / name
            cores = [result["core"] for result in results.values() if result["trace"] == name]
            try:
                report = finish_profile(folder, cores)
                self.say(report.text())
                trained = train([folder], self.out / "models" / name, force=True, seed=self.seed)
            except ValueError as error:  # a trace that is too little; the next piece may add what it lacks
                self.say(f"{name}: no model: {error}")
                models[name] = {"no_model": str(error)}
                continue
            self.say(trained.text())
            models[name] = {"profile": report.text(), "model": trained.to_dict()}
        return models


def keep_log(log: Path, destination: Path) -> None:
    if log.exists():
        destination.parent.mkdir(parents=True, exist_ok=True)
        log.replace(destination)


def main(say: Callable[[str], None] = lambda line: print(line, flush=True)) -> int:
    parser = arguments("profile", __doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--synchronous", action="store_true", help="asynchronous scheduling off")
    options = parser.parse_args()
    place = find_place(options.scale)
    say(place.text())
    work = Profile(options.out, place, options.seed, options.synchronous, say)
    pieces = [work.piece(share) for share in shares_of(place)]
    at = place.to_dict() | {"synchronous": options.synchronous}
    selected_pieces, state = chosen(pieces, options), LatestModels()

    def finish() -> None:
        """After every piece: whatever ends this call, a model of what was finished is there."""
        state.models = work.finish(run_results(options.out, pieces))
        state.made = True

    minutes = max(options.minutes - TRAINING_S / 60, options.minutes / 2)
    done = run_pieces(options.out, at, selected_pieces, minutes, say, then=finish)
    results = run_results(options.out, pieces)
    if results and not state.made:
        finish()
    summary = {"place": at, "pieces": results, "failed": done.failed, "left": list(done.left), "found": state.models}
    write_json(options.out / "profile.json", json.loads(json.dumps(summary, default=str)))
    return status_of(done, results, state.models)


@dataclass(slots=True)
class LatestModels:
    """Result of the last finish."""

    models: dict[str, Any] = field(default_factory=dict)
    made: bool = False


def status_of(done: Done, results: dict[str, Any], models: dict[str, Any]) -> int:
    """1 where something failed, also where there are pieces and no model could be trained of any shape; 3 where
    pieces are left; else 0."""
    untrained = bool(results) and not any("model" in model for model in models.values())
    return 1 if done.failed or untrained else 3 if done.left else 0


def run_results(out: Path, pieces: list[Piece]) -> dict[str, dict[str, Any]]:
    """Results of all pieces, also of those that were not selected this time."""
    return {piece.name: part for piece in pieces if (part := read_part(out, piece.name)) is not None}


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
