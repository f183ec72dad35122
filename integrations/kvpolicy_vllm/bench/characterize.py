"""`kvpolicy characterize`: what the overflow study's figures are drawn from, measured on a live engine.

States and windows are a profile's, named after the figure they are for (:mod:`kvpolicy.overflow`); so are passes,
noise and how an interrupted one is taken up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kvpolicy import trace as traces
from kvpolicy.overflow import BLOCK_SIZE, SEQUENCE_LENGTH, state_id
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.parts import PAGEABLE, Part, Rig, model_length
from kvpolicy_vllm.bench.profile import (
    Tell,
    measure_part,
    prepare,
    scratch_of,
    take_up,
    telling,
    write_plan,
)
from kvpolicy_vllm.bench.states import Span, State
from kvpolicy_vllm.plugin.settings import Link

DECODED = 4
"""Tokens that everybody has emitted, at least, before the overflow is brought about."""
LENGTH_BLOCK_SIZE = 32
"""Of the engine whose sequences grow; a CPU engine wants a multiple of 32."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How much of each figure is measured."""

    lengths: tuple[int, ...]
    length_requests: int
    block_sizes: tuple[int, ...]
    block_size_tokens: int
    """Length of both requests."""
    passes: int
    repeats: int
    """Of every arm and level, per pass."""


QUICK = Reach((64, 128, 256, 512), 16, (32, 64, 128), 384, 2, 2)
FULL_CPU = Reach((64, 128, 256, 512, 1024), 16, (32, 64, 128, 256), 768, 3, 4)
FULL_DEVICE = Reach((256, 512, 1024, 2048, 4096, 8192), 16, (16, 32, 64, 128), 4096, 3, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a finished study's measuring says of itself."""

    out: Path
    figures: tuple[str, ...]
    windows: Mapping[str, int]
    """That count, by state."""
    discarded: Mapping[str, int]
    """By reason."""

    def text(self) -> str:
        lines = [f"{self.out}: {sum(self.windows.values())} windows that count, for {', '.join(self.figures)}"]
        lines += [f"  {state}: {count}" for state, count in self.windows.items()]
        lines += [f"  discarded: {count} x {reason}" for reason, count in self.discarded.items()]
        return "\n".join([*lines, f"the figures: kvpolicy report {self.out} --out report.html --figures figures"])


def characterize(
    out: Path,
    figures: Sequence[str],
    quick: bool = False,
    llm: Path | None = None,
    link: str | None = None,
    seed: int = 0,
    progress: Tell | None = None,
    reach: Reach | None = None,
) -> Measured:
    """Measure ``figures`` (see :data:`kvpolicy.overflow.MEASURED`) and write a trace to ``out``.

    ``reach``: instead of what ``quick`` says. Raises ValueError as :func:`kvpolicy_vllm.bench.profile` does, and for a
    level the model is too short for; EngineFailed where an engine ends badly.
    """
    if link is not None:
        Link.parse(link)
    if llm is not None:
        model_length(llm)
    how_much = ("quick" if quick else "full") if reach is None else asdict(reach)
    asked = {"llm": None if llm is None else str(llm.resolve()), "link": link, "seed": seed, "study": how_much}
    # The figures may differ from one call to the next: what is there stays.
    done = take_up(out, json.loads(json.dumps(asked)))
    with scratch_of(out) as scratch, telling(progress, "characterize") as tell:
        rig = prepare(scratch, llm, link, seed, quick, None)
        reach = (QUICK if quick else FULL_DEVICE if rig.device else FULL_CPU) if reach is None else reach
        parts = study_parts(reach, figures, rig.device)
        for number, (figure, part) in enumerate(parts, start=1):
            name = f"{figure}-{part.name}"
            if name in done:
                continue
            folder = scratch / name
            folder.mkdir()
            job = study_job(rig, reach, figure, part, folder)
            done[name] = measure_part(job, out, folder, name, partial(tell, f"{name} ({number} of {len(parts)})"))
            write_plan(out, {"asked": asked, "done": done})
    return _told(out, tuple(figures))


def study_parts(reach: Reach, figures: Sequence[str], device: bool) -> list[tuple[str, Part]]:
    """An engine each: passes interleaved over figures and block sizes, every other one backwards."""
    kinds: list[tuple[str, int, bool]] = []
    if SEQUENCE_LENGTH in figures:
        kinds.append((SEQUENCE_LENGTH, LENGTH_BLOCK_SIZE, True))
    if BLOCK_SIZE in figures:
        kinds += [(BLOCK_SIZE, size, pinned) for size in reach.block_sizes for pinned in (True, False)[: 1 + device]]
    found = []
    for number in range(reach.passes):
        for figure, size, pinned in kinds if number % 2 == 0 else reversed(kinds):
            name = f"b{size}-pass{number}" + ("" if pinned else PAGEABLE)
            found.append((figure, Part(name, number, size, pinned)))
    return found


def study_states(reach: Reach, figure: str, block_size: int) -> tuple[State, ...]:
    """Real preemptions, for want of memory: everybody is as long as the victim, which is the last that was admitted."""
    if figure == SEQUENCE_LENGTH:
        levels = [(tokens, tokens, reach.length_requests) for tokens in reach.lengths]
    else:
        levels = [(block_size, reach.block_size_tokens, 2)]
    return tuple(
        State(
            state_id=state_id(figure, level),
            block_size=block_size,
            cause="memory",
            prompt_tokens=tokens - DECODED,
            decoded_tokens=DECODED,
            other_prompts=(tokens - DECODED,) * (requests - 1),
            waiting=0,
            spare_blocks=0,
        )
        for level, tokens, requests in levels
    )


def study_job(rig: Rig, reach: Reach, figure: str, part: Part, folder: Path) -> Job:
    """What the part's engine is to do; its trace goes into ``folder``. Raises ValueError for too short a model."""
    states = study_states(reach, figure, part.block_size)
    longest = max(state.prompt_tokens for state in states)
    wanted, has = 2 * longest + 4 * part.block_size, model_length(rig.llm)
    if has < wanted:
        raise ValueError(f"--llm holds {has} tokens, figure {figure} needs {wanted} for sequences of {longest}")
    span = Span(DECODED, longest, len(states[0].other_prompts), 0, wanted)
    blocks = max(max(state.device_blocks for state in states), -(-wanted // part.block_size) + 1)
    return Job(
        engine=rig.engine_arguments(part, folder / "trace", span, blocks),
        states=states,
        checks=(states[0], states[0]),
        check_pairs=0,
        repeats=reach.repeats,
        first_repeat=part.number * 100,
        seed=rig.seed,
        most_extra=1,
    )


def _told(out: Path, figures: tuple[str, ...]) -> Measured:
    windows = traces.read(out).rows("windows", ("state_id", "arm", "discarded"))
    count = Counter(row["state_id"] for row in windows if not row["discarded"])
    reasons = Counter(row["discarded"] for row in windows) - Counter(("", "warm-up", "noise") * len(windows))
    return Measured(out, figures, dict(count), dict(reasons))
