"""The options of a workload's text: each is read once, and options that were not read are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvpolicy.workload.requests import WorkloadError

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Options:
    """``a=1&b=x`` by name. Reading an option removes it, so that none is applied twice."""

    def __init__(self, text: str, tail: str, seed: int = 0, think_s: float | None = None) -> None:
        """``text``: the whole text, for messages; ``tail``: the part after the question mark; ``seed`` and ``think_s``:
        the seed, and the mean pause, of a text that has none."""
        self._text = text
        self._seed = seed
        self.think_s = think_s
        self._unread: dict[str, str] = {}
        self._known: set[str] = set()
        for part in filter(None, tail.split("&")):
            name, equals, value = part.partition("=")
            if not equals or not name or not value:
                raise WorkloadError(f"{text}: {part!r}: options are written NAME=VALUE, with & between them")
            if name in self._unread:
                raise WorkloadError(f"{text}: {name} is given twice")
            self._unread[name] = value
        self._values = dict(self._unread)

    def __contains__(self, name: str) -> bool:
        return name in self._unread

    def given(self, name: str) -> bool:
        """Whether the option is there, read or not."""
        return name in self._values

    def add(self, values: Mapping[str, str]) -> None:
        """Add options that are set for the whole that this is a part of. Raises :class:`WorkloadError` for those that
        the part has itself."""
        for name in values:
            if name in self._values:
                raise self.wrong(name, "left out of a part with a share: it is set for the whole")
        self._unread |= values
        self._values |= values

    def wrong(self, name: str, should: str) -> WorkloadError:
        """The error for an invalid or missing option."""
        option = f"{name}={self._values[name]}" if name in self._values else name
        return WorkloadError(f"{self._text}: {option}: should be {should}")

    def text(self, name: str) -> str | None:
        self._known.add(name)
        return self._unread.pop(name, None)

    def real(self, name: str, default: float | None = None) -> float | None:
        value = self.text(name)
        return default if value is None else self.number(name, value)

    def number(self, name: str, value: str) -> float:
        """The text of an option as a number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or "_" in value:
            raise self.wrong(name, "a number")
        return number

    def needed(self, name: str) -> float:
        """A number that has no default."""
        number = self.real(name)
        if number is None:
            raise self.wrong(name, "given")
        return number

    def whole(self, name: str, default: int | None = None) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 16):
            raise self.wrong(name, "a whole number, 0 or more")
        return int(value)

    def signed(self, name: str) -> int | None:
        """A whole number of either sign; None where there is none."""
        value = self.text(name)
        if value is None:
            return None
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
            raise self.wrong(name, "a whole number")
        return int(value)

    def seed(self) -> int:
        """The seed of random numbers."""
        return self.whole("seed", self._seed) or 0

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in YES + NO:
            raise self.wrong(name, "true or false")
        return value.lower() in YES

    def window(self, name: str) -> tuple[float, float] | None:
        """START-END in seconds; without END up to the last request."""
        value = self.text(name)
        if value is None:
            return None
        start, dash, end = value.partition("-")
        try:
            window_s = float(start), float(end) if end else math.inf
        except ValueError:
            window_s = math.nan, math.nan
        if not dash or not 0 <= window_s[0] < window_s[1]:
            raise self.wrong(name, "START-END in seconds, 0 <= START < END, as 0-600 or 600-")
        return window_s

    def refuse_rest(self) -> None:
        """Raise :class:`WorkloadError` for options that were not read."""
        if self._unread:
            known = ", ".join(sorted(self._known))
            raise WorkloadError(
                f"{self._text}: {next(iter(self._unread))} is no option of this workload; those are {known}"
            )
