"""The text that joins workloads: ``A + B``, or ``(A + B)?OPTION=VALUE&...`` with options of the whole.

Read by :func:`kvpolicy.workload.open_workload`, and by studies, which give such a text a seed and digest its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.workload.options import Options

PLUS = " + "
SEED_STEP = 1_000_003
"""Between the seeds of successive parts that have none of their own, so that no two draw the same requests."""
MAX_ROUNDING = 1e-6
"""By how much the sum of all shares may differ from 1."""


@dataclass(frozen=True, slots=True)
class JoinText:
    """A text taken apart."""

    parts: tuple[str, ...]
    """Two or more, each the text of a workload."""
    tail: str
    """Options of the whole, without the question mark."""


def join_of(text: str) -> JoinText | None:
    """The parts and options of a text that joins workloads; None for one that does not, such as a file's name."""
    if PLUS in text.partition("?")[0] and file_of(text) is not None:
        return None
    if text.startswith("("):
        end = _closing(text)
        rest = text[end + 1 :]
        if end and (not rest or rest.startswith("?")):
            parts = _split(text[1:end])
            return JoinText(parts, rest[1:]) if len(parts) > 1 else None
    parts = _split(text)
    return JoinText(parts, "") if len(parts) > 1 else None


def files_of(text: str) -> tuple[Path, ...]:
    """The files, or folders of traces, that a workload is read from; none for a synthetic one."""
    joined = join_of(text)
    if joined is not None:
        return tuple(file for part in joined.parts for file in files_of(part))
    file = file_of(text)
    return () if file is None else (file,)


def file_of(text: str) -> Path | None:
    """The file, or folder of a trace, that a text without joins names; None where there is none."""
    place, _, _ = text.partition("?")
    paths = (Path(path_text) for path_text in (place, place.partition(":")[2]) if path_text)
    return next((path for path in paths if path.exists()), None)


def with_seed(text: str, seed: int) -> str:
    """The workload's text with a seed, unless it has one. Joined parts draw from seeds that follow from it."""
    joined = join_of(text)
    if joined is not None:
        text, options = f"({PLUS.join(joined.parts)})?{joined.tail}".removesuffix("?"), joined.tail
    else:
        _, _, options = text.partition("?")
    if any(option.startswith("seed=") for option in options.split("&")):
        return text
    return f"{text}{'&' if options else '?'}seed={seed}"


def divided(whole: Options, parts: Sequence[Options]) -> list[dict[str, str]]:
    """What each part has of the whole's ``n`` and ``rate``, by its ``share``; nothing where no part has one.

    Raises WorkloadError for shares of only some parts, or that do not add up to 1.
    """
    shares = [options.real("share") for options in parts]
    if all(share is None for share in shares):
        return [{} for _ in parts]
    for options, share in zip(parts, shares, strict=True):
        if share is None:
            raise options.wrong("share", "given for every part, or for none")
        if not 0 < share < 1:
            raise options.wrong("share", "above 0 and below 1")
    known = [share for share in shares if share is not None]
    if abs(sum(known) - 1) > MAX_ROUNDING:
        raise parts[-1].wrong("share", f"such that all shares add up to 1; they add up to {sum(known):g}")
    count, rate_per_s = whole.whole("n"), whole.real("rate")
    if count is None and rate_per_s is None:
        raise whole.wrong("n or rate", "given for the whole, as in (A + B)?n=1000&rate=5: parts with a share divide it")
    given: list[dict[str, str]] = [{} for _ in parts]
    if count is not None:
        for values, part_count in zip(given, _whole_shares(count, known), strict=True):
            values["n"] = str(part_count)
    if rate_per_s is not None:
        for values, share in zip(given, known, strict=True):
            values["rate"] = repr(rate_per_s * share)
    return given


def _whole_shares(count: int, shares: Sequence[float]) -> list[int]:
    """``count`` divided by shares into whole numbers that add up to it, by largest remainders."""
    quotas = [count * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_rest = sorted(range(len(shares)), key=lambda number: counts[number] - quotas[number])
    for number in by_rest[: count - sum(counts)]:
        counts[number] += 1
    return counts


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one; 0 where none does."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return index
    return 0


def _split(text: str) -> tuple[str, ...]:
    """The parts between plus signs that stand outside parentheses."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth and text.startswith(PLUS, index):
            parts.append(text[begin:index])
            begin = index + len(PLUS)
    return (*(part.strip() for part in (*parts, text[begin:])),)
