"""The options of a workload's text: each is asked for once, and what nobody asks for is refused."""

from __future__ import annotations

import math

from kvpolicy.workload.requests import WorkloadError

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Options:
    """``a=1&b=x`` by name. Asking for an option takes it out, so that nothing is applied twice."""

    def __init__(self, text: str, tail: str) -> None:
        """``text``: the whole, for messages; ``tail``: what follows the question mark."""
        self._text = text
        self._left: dict[str, str] = {}
        self._asked: set[str] = set()
        for part in filter(None, tail.split("&")):
            name, equals, value = part.partition("=")
            if not equals or not name or not value:
                raise WorkloadError(f"{text}: {part!r}: options are written NAME=VALUE, with & between them")
            if name in self._left:
                raise WorkloadError(f"{text}: {name} is given twice")
            self._left[name] = value
        self._given = dict(self._left)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def wrong(self, name: str, should: str) -> WorkloadError:
        """The error for an option that is not as it should be, or missing."""
        given = f"{name}={self._given[name]}" if name in self._given else name
        return WorkloadError(f"{self._text}: {given}: should be {should}")

    def text(self, name: str) -> str | None:
        self._asked.add(name)
        return self._left.pop(name, None)

    def real(self, name: str, default: float | None = None) -> float | None:
        value = self.text(name)
        return default if value is None else self.number(name, value)

    def number(self, name: str, value: str) -> float:
        """An option's text as a number."""
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

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in YES + NO:
            raise self.wrong(name, "true or false")
        return value.lower() in YES

    def window(self, name: str) -> tuple[float, float] | None:
        """START-END in seconds; without END to the last request."""
        value = self.text(name)
        if value is None:
            return None
        start, dash, end = value.partition("-")
        try:
            found = float(start), float(end) if end else math.inf
        except ValueError:
            found = math.nan, math.nan
        if not dash or not 0 <= found[0] < found[1]:
            raise self.wrong(name, "START-END in seconds, 0 <= START < END, as 0-600 or 600-")
        return found

    def refuse_rest(self) -> None:
        """Raises :class:`WorkloadError` for options that nobody asked for."""
        if self._left:
            known = ", ".join(sorted(self._asked))
            raise WorkloadError(
                f"{self._text}: {next(iter(self._left))} is no option of this workload; those are {known}"
            )
