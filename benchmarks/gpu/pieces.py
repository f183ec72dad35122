"""Work cut into pieces: each writes its part at once, what is done is not done again, none is begun too late."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kvpolicy.errors import EngineFailed

PARTS = "parts"
PLACE = "place.json"
HARMLESS = ("memory_bytes", "capability", "driver", "cuda", "python")
"""In which two machines of one kind may differ: parts are put together all the same, and say so."""

Say = Callable[[str], None]


class Begun(ValueError):
    """A folder that was begun somewhere else, or with something else."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing to do; its result is what JSON can hold."""

    name: str
    seconds: float
    """What it is thought to take. One is begun only where so much is left; the first always."""
    do: Callable[[float], dict[str, Any]]
    """Called with the seconds that are left."""
    grace_s: float = 60.0
    """What it may take beyond that, as where engines start with whichever piece comes first."""
    learned_s: Callable[[], float | None] | None = None
    """Estimate from earlier pieces, asked when its turn comes; None: ``seconds`` stands."""

    @property
    def expected_s(self) -> float:
        learned_s = self.learned_s() if self.learned_s is not None else None
        return self.seconds if learned_s is None else learned_s

    @property
    def max_s(self) -> float:
        """What takes so much longer than it is thought to is taken to hang."""
        return 3 * self.expected_s + self.grace_s


@dataclass(frozen=True, slots=True)
class Done:
    """What has come of some pieces, this time and earlier."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """Not begun for lack of time."""

    @property
    def whole(self) -> bool:
        return not self.failed and not self.left


def run_pieces(
    out: Path,
    place: dict[str, Any],
    pieces: Sequence[Piece],
    minutes: float,
    say: Say = print,
    clock: Callable[[], float] = time.monotonic,
    then: Callable[[], None] = lambda: None,
) -> Done:
    """Do what is not done yet, in order. A piece that fails is reported, and tried again next time; the others go on.

    ``then`` is called after every piece whose part was just written. A part made where the machine differs from the one
    that the folder was begun on, in what does not forbid it, says so under ``elsewhere``.

    Raises :class:`Begun` where ``out`` was begun at another ``place``, ValueError where two pieces share a name.
    """
    names = [piece.name for piece in pieces]
    if len(set(names)) < len(names):
        raise ValueError(f"pieces share a name: {sorted(name for name in names if names.count(name) > 1)[0]}")
    elsewhere = open_folder(out, place)
    if elsewhere:
        say(f"{out} was begun on a machine that differs; new parts say so: {elsewhere}")
    end_s = clock() + 60 * minutes
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    left: list[str] = []
    begun = False
    for number, piece in enumerate(pieces, start=1):
        head = f"[{number}/{len(pieces)}] {piece.name}"
        there = read_part(out, piece.name)
        if there is not None:
            results[piece.name] = there
            say(f"{head}: there already")
            continue
        left_s = end_s - clock()
        if left_s <= 0 or (begun and left_s < piece.expected_s):
            left.append(piece.name)
            say(f"{head}: left for the next time, it takes about {piece.expected_s:.0f} s")
            continue
        begun, start_s = True, clock()
        say(f"{head} ...")
        try:
            with ended_after(min(left_s, piece.max_s)):
                results[piece.name] = piece.do(left_s) | ({"elsewhere": elsewhere} if elsewhere else {})
        except (EngineFailed, RuntimeError, ValueError, OSError) as error:
            failed[piece.name] = f"{type(error).__name__}: {error}"
            say(f"{head}: FAILED after {clock() - start_s:.0f} s\n{failed[piece.name]}")
            write_json(failure_of(out, piece.name), {"error": failed[piece.name]})
            continue
        failure_of(out, piece.name).unlink(missing_ok=True)
        write_json(part_of(out, piece.name), results[piece.name])
        say(f"{head}: done in {clock() - start_s:.0f} s")
        then()
    return Done(results, failed, tuple(left))


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the middle of whatever goes on for longer. Main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it was ended after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def open_folder(out: Path, place: dict[str, Any]) -> dict[str, Any]:
    """Begin, or take up what was begun at the same place. Returns what is another one here but does no harm."""
    path, current = out / PLACE, json.loads(json.dumps(place))
    if not path.exists():
        write_json(path, place)
        return {}
    begun = json.loads(path.read_text())
    other = {name: value for name, value in current.items() if begun.get(name) != value}
    for name, value in other.items():
        if name not in HARMLESS:
            raise Begun(f"{out}: was begun with {name} {begun.get(name)!r}, here it is {value!r}; give a new --out")
    return other


def exit_status_of(main: Callable[[], int]) -> int:
    """A program's exit status; 2 with a sentence where its folder was begun with something else."""
    try:
        return main()
    except Begun as error:
        print(error, flush=True)
        return 2


def part_of(out: Path, name: str) -> Path:
    return out / PARTS / f"{name}.json"


def failure_of(out: Path, name: str) -> Path:
    return out / PARTS / f"{name}.failed.json"


def read_part(out: Path, name: str) -> dict[str, Any] | None:
    """None where there is none, or where what is there was damaged: then the piece is done again."""
    try:
        part = json.loads(part_of(out, name).read_text())
    except (OSError, ValueError):
        return None
    return part if isinstance(part, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Atomically: a reader finds the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(values, indent=1) + "\n")
    scratch.replace(path)
