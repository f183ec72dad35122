"""The text that names a workload, as in ``kvpolicy simulate --workload``.

    [FORMAT:]FILE[?OPTION=VALUE&...]        azure:conv.csv.gz?window=0-600&rate=2
    NAME?n=COUNT[&OPTION=VALUE&...]         azure-conversation-2023?n=500&rate=4
    sessions:NAME?n=COUNT&turns=..&think=.. conversations made from a seed
    A + B, or (A + B)?OPTION=VALUE&...      workloads joined by arrival, with options of the whole

Options of every workload, in the order in which they are applied: ``window=START-END`` (seconds), ``n`` (number of
requests from the start), ``rate`` (requests per second) or ``speed`` (a factor), ``scale`` or ``prompt`` and ``output``
(factors on lengths), ``context`` (tokens; longer requests lose prompt); ``class`` (a name), ``priority`` (lower goes
first), ``ttft`` and ``tpot`` (deadlines in seconds); ``hints`` (sessions, or hindsight: what requests say of their KV
by their sessions) with ``keep`` (seconds); ``concurrency`` (requests that are served at a time); ``seed``.
For names, ``rate`` is that of the arrivals, and ``scale=fit`` brings the longest 1% to the context. For sessions, it is
the rate at which they begin; ``users`` is a number of users with one session after the other instead (``pause``:
seconds between two). In a join every part may have a ``share`` of the whole's ``n`` and ``rate``.

Options of files: ``skip_damaged=true`` skips and counts damaged rows, ``sort=true`` (azure, burstgpt, arrivals,
mooncake) sorts by arrival. lengths: ``draw``, a number of rows drawn with replacement; or ``think``, by which rows
whose prompts grow are conversations, with the options of sharegpt but ``tokens_per_word``. agentic: ``sessions``, a
number of sessions from the start; ``closed=false`` for recorded times. sharegpt: ``think`` (mean seconds),
``think_variation``, ``tokens_per_word``, ``block`` (tokens), ``sessions``. Of these with sessions: ``min_window`` and
``max_window`` leave out turns whose prompts have fewer tokens, or with their answers more, and ``min_turns`` sessions
with fewer turns than that. servegen: ``lengths``, the file of its distributions of lengths. ``arrivals`` is at-once,
poisson, even, gamma (``variation``), weibull (``shape``), bursts (``on``, ``off`` seconds) or groups (``size``:
requests that arrive together); Poisson where only a rate is given. sessions: ``turns`` (mean), ``think``,
``think_variation``, ``block``, ``system`` (tokens of a common beginning).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.fields import like, refuse_other
from kvpolicy.workload.agentic import FIELDS as AGENTIC_FIELDS
from kvpolicy.workload.agentic import AgentSessions
from kvpolicy.workload.arrivals import Arrivals, AtOnce, Bursts, Even, Gamma, Groups, Poisson, Think, Weibull
from kvpolicy.workload.classes import Joined, Labelled, Looped
from kvpolicy.workload.continued_lengths import ContinuedLengths
from kvpolicy.workload.files import Care, DamagedRow, chunks, names_of, record
from kvpolicy.workload.join_text import SEED_STEP, JoinText, divided, join_of
from kvpolicy.workload.length_tables import COLUMNS, LengthTable
from kvpolicy.workload.lengths import SHIPPED, scale_to
from kvpolicy.workload.options import Options
from kvpolicy.workload.requests import Source, WorkloadError
from kvpolicy.workload.scaling import Faster, First, Resized, Window, at_rate
from kvpolicy.workload.servegen import COLUMNS as SERVEGEN_COLUMNS
from kvpolicy.workload.servegen import ServeGen
from kvpolicy.workload.session_hints import DEFAULT_KEEP_S, HINDSIGHT, Hinting
from kvpolicy.workload.sessions import Beginning, Conversations, Starting, Users, Windows
from kvpolicy.workload.sharegpt import TOKENS_PER_WORD, ShareGPT
from kvpolicy.workload.synthetic import SyntheticRequests
from kvpolicy.workload.timed_tables import ARRIVALS, AZURE, BURSTGPT, MOONCAKE, Layout, TimedFile

Read = Callable[[Path, Options], Source]
Known = Callable[[Path], bool]

BEGINNING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Format:
    """A file format."""

    about: str
    read: Read
    known: Known
    """Whether a file is of this format, by its beginning."""


def open_workload(text: str, more: Mapping[str, Format] | None = None, think_s: float | None = None) -> Source:
    """The workload that a text names; ``more``: formats beside :data:`FORMATS`, by name; ``think_s``: mean pause where
    one is needed and the text has no ``think``.

    Raises :class:`WorkloadError` for an unknown name, listing the known ones. Requests are read only when they are
    iterated over, but ``rate`` on a file reads all its arrivals at once.
    """
    refuse_other("workload", text, str, "a text, as in azure:FILE")
    formats = {**FORMATS, **(more or {})}
    joined = join_of(text)
    if joined is None:
        return _single(text, Options(text, text.partition("?")[2], think_s=think_s), formats)
    whole = Options(text, joined.tail, think_s=think_s)
    source = _finished(_joined(joined, whole, formats), whole)
    whole.refuse_rest()
    return source


def _joined(joined: JoinText, whole: Options, formats: Mapping[str, Format]) -> Joined:
    """The parts, each with a seed that follows from the whole's, and its share of the whole."""
    seed, count = whole.seed(), len(joined.parts)
    parts = [
        Options(part, part.partition("?")[2], seed + number * SEED_STEP, whole.think_s)
        for number, part in enumerate(joined.parts)
    ]
    sources = []
    for number, (part, options, values) in enumerate(zip(joined.parts, parts, divided(whole, parts), strict=True), 1):
        try:
            if not part:
                raise WorkloadError("it is empty; should be the text of a workload")
            if join_of(part) is not None:
                raise WorkloadError(f"{part}: joins workloads itself; should be one, with all others beside it")
            options.add(values)
            sources.append(_single(part, options, formats))
        except WorkloadError as error:
            raise WorkloadError(f"part {number} of {count}: {error}") from error
    return Joined(tuple(sources))


def _single(text: str, options: Options, formats: Mapping[str, Format]) -> Source:
    """A workload that joins no others."""
    place, _, _ = text.partition("?")
    kind, colon, rest = place.partition(":")
    if kind == "sessions" and colon:
        source = _conversations(rest, options)
    elif place in SHIPPED:
        source = _drawn(place, options)
    elif colon and kind in formats:
        source = formats[kind].read(Path(rest), options)
    else:
        source = _recognised(Path(place), formats).read(Path(place), options)
    source = _finished(source, options)
    options.refuse_rest()
    return source


def _finished(source: Source, options: Options) -> Source:
    """The source scaled, with what its requests say of themselves, and in a closed loop, as the options say."""
    labelled = Labelled(
        _scaled(source, options),
        options.text("class"),
        options.signed("priority"),
        options.real("ttft"),
        options.real("tpot"),
    )
    source = labelled if labelled.marks else labelled.inner
    kind = options.text("hints")
    if kind == HINDSIGHT and options.given("users"):
        raise options.wrong("hints", "sessions where there are users: all conversations of a user are one session")
    if kind is not None:
        source = Hinting(source, kind, options.real("keep", DEFAULT_KEEP_S) or 0.0)
    concurrency = options.whole("concurrency")
    return source if concurrency is None else Looped(source, concurrency)


def _recognised(path: Path, formats: Mapping[str, Format]) -> Format:
    if not path.exists():
        meant = _like(path, formats)
        raise WorkloadError(f"{path}: no such file, and no workload of that name{meant}; {_listed(formats)}")
    for known in formats.values():
        if known.known(path):
            return known
    raise WorkloadError(f"{path}: is of no known format; {_listed(formats)}")


def _like(path: Path, formats: Mapping[str, Format]) -> str:
    """The name that was probably meant; of a file in a folder none."""
    name = str(path)
    forms = [*SHIPPED, *(f"{known}:FILE" for known in formats), "sessions:NAME"]
    return "" if "/" in name.partition(":")[0] else like(name, forms)


def _listed(formats: Mapping[str, Format]) -> str:
    files = "; ".join(f"{name}:FILE ({known.about})" for name, known in formats.items())
    return f"known are {files}; {', '.join(SHIPPED)}; sessions:NAME"


def _scaled(source: Source, options: Options) -> Source:
    window = options.window("window")
    if window:
        source = Window(source, *window)
    count = options.whole("n")
    if count is not None:
        source = First(source, count)
    speed, rate_per_s = options.real("speed"), options.real("rate")
    if speed is not None and rate_per_s is not None:
        raise options.wrong("rate", "or speed, not both")
    if speed is not None:
        source = Faster(source, speed)
    if rate_per_s is not None:
        source = at_rate(source, rate_per_s)
    scale = options.real("scale")
    prompt, output = options.real("prompt", scale), options.real("output", scale)
    context = options.whole("context")
    if prompt is None and output is None and context is None:
        return source
    return Resized(source, 1.0 if prompt is None else prompt, 1.0 if output is None else output, context)


def _arrivals(options: Options) -> Arrivals:
    """The process that ``arrivals`` names. Without a name: Poisson with a rate, all at once without."""
    rate_per_s = options.real("rate")
    kind = options.text("arrivals") or ("at-once" if rate_per_s is None else "poisson")
    if kind == "at-once":
        if rate_per_s is not None:
            raise options.wrong("rate", "left out where everything arrives at once")
        return AtOnce()
    if rate_per_s is None:
        raise options.wrong("rate", f"given, above 0, for arrivals={kind}")
    match kind:
        case "poisson":
            return Poisson(rate_per_s)
        case "even":
            return Even(rate_per_s)
        case "gamma":
            return Gamma(rate_per_s, options.needed("variation"))
        case "weibull":
            return Weibull(rate_per_s, options.needed("shape"))
        case "bursts":
            return Bursts(rate_per_s, options.needed("on"), options.needed("off"))
        case "groups":
            size = options.whole("size")
            if size is None:
                raise options.wrong("size", "given: how many requests arrive together")
            return Groups(rate_per_s, size)
    raise options.wrong("arrivals", "at-once, poisson, even, gamma, weibull, bursts or groups")


def arrivals_at(text: str, rate_per_s: float) -> Arrivals:
    """The process that a text names as the options of a workload do, at a rate: ``poisson``, ``bursts&on=5&off=20``.

    Raises :class:`WorkloadError` for an unknown one, and for missing or unknown options.
    """
    options = Options(text, f"arrivals={text}&rate={rate_per_s!r}")
    process = _arrivals(options)
    options.refuse_rest()
    return process


def _beginning(options: Options) -> Beginning:
    users = options.whole("users")
    if users is None:
        return Starting(_arrivals(options))
    if "rate" in options or "arrivals" in options:
        raise options.wrong(
            "users", "or rate and arrivals, not both: users begin their next session when they are free"
        )
    return Users(users, Think(options.real("pause", 0.0) or 0.0))


def _think(options: Options) -> Think:
    variation = options.real("think_variation", 1.0)
    mean_s = options.real("think", options.think_s)
    if mean_s is None:
        raise options.wrong("think", "given: the mean pause before a turn, in seconds")
    return Think(mean_s, 1.0 if variation is None else variation)


def _windows(options: Options) -> Windows:
    lowest, highest, turns = options.whole("min_window", 0), options.whole("max_window"), options.whole("min_turns", 1)
    if highest is not None and highest < (lowest or 0):
        raise options.wrong("max_window", f"at least min_window, {lowest}")
    if not turns:
        raise options.wrong("min_turns", "1 or more")
    return Windows(lowest or 0, highest, turns)


def _care(options: Options) -> Care:
    return Care(options.flag("skip_damaged"), options.flag("sort"))


def _drawn(name: str, options: Options) -> Source:
    count = options.whole("n")
    if count is None:
        raise options.wrong("n", "given: how many requests to draw")
    lengths, context, scale = SHIPPED[name], options.whole("context"), options.text("scale")
    if scale == "fit":
        if context is None:
            raise options.wrong("context", "given for scale=fit")
        factor = scale_to(lengths, context)
    else:
        factor = options.number("scale", scale or "1")
    return SyntheticRequests(lengths, count, options.seed(), _arrivals(options), factor, context)


def _conversations(name: str, options: Options) -> Source:
    if name not in SHIPPED:
        raise WorkloadError(f"sessions:{name}{like(name, SHIPPED)}: known lengths of messages are {', '.join(SHIPPED)}")
    count = options.whole("n")
    if count is None:
        raise options.wrong("n", "given: how many conversations")
    block, system = options.whole("block", 16), options.whole("system", 0)
    return Conversations(
        SHIPPED[name],
        count,
        options.seed(),
        options.needed("turns"),
        _think(options),
        _beginning(options),
        block or 0,
        system or 0,
        options.whole("context"),
    )


def _timed(layout: Layout) -> Read:
    return lambda path, options: TimedFile(path, layout, _care(options), options.seed())


def _agentic(path: Path, options: Options) -> Source:
    return AgentSessions(
        path,
        _beginning(options),
        Care(options.flag("skip_damaged")),
        options.seed(),
        options.flag("closed", True),
        options.whole("sessions"),
        _windows(options),
    )


def _sharegpt(path: Path, options: Options) -> Source:
    tokens_per_word = options.real("tokens_per_word", TOKENS_PER_WORD)
    block = options.whole("block", 16)
    care, count = Care(options.flag("skip_damaged")), options.whole("sessions")
    return ShareGPT(
        path,
        _think(options),
        _beginning(options),
        care,
        options.seed(),
        tokens_per_word or 0.0,
        None,
        block or 0,
        count,
        _windows(options),
    )


def _lengths(path: Path, options: Options) -> Source:
    care = Care(options.flag("skip_damaged"))
    if "think" in options:
        beginning, block = _beginning(options), options.whole("block", 16) or 0
        count = options.whole("sessions")
        return ContinuedLengths(path, _think(options), beginning, care, options.seed(), block, count, _windows(options))
    return LengthTable(path, _arrivals(options), care, options.seed(), options.whole("draw"))


def _servegen(path: Path, options: Options) -> Source:
    lengths = options.text("lengths")
    if lengths is None:
        raise options.wrong("lengths", "given: the Parquet file of the clients' lengths")
    return ServeGen(path, lengths, Care(options.flag("skip_damaged")), options.seed())


def _has_columns(*columns: str) -> Known:
    def known(path: Path) -> bool:
        return set(columns) <= set(names_of(_first_line(path)))

    return known


def _has_fields(*fields: str) -> Known:
    def known(path: Path) -> bool:
        try:
            row = record(_first_line(path))
        except DamagedRow:
            return False
        return set(fields) <= row.keys()

    return known


def _first_line(path: Path) -> str:
    """The first line, at most :data:`BEGINNING_BYTES` of it: a file may be one line too long for memory."""
    begin = b"" if path.is_dir() else next(chunks(path, BEGINNING_BYTES), b"")
    return begin.decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0].strip()


def _begins_a_list(path: Path) -> bool:
    return _first_line(path).startswith("[")


FORMATS: Mapping[str, Format] = {
    "azure": Format(f"CSV: {', '.join(AZURE.fields)}", _timed(AZURE), _has_columns(*AZURE.fields)),
    "burstgpt": Format(f"CSV: {', '.join(BURSTGPT.fields)}", _timed(BURSTGPT), _has_columns(*BURSTGPT.fields)),
    "arrivals": Format(f"CSV: {', '.join(ARRIVALS.fields)}", _timed(ARRIVALS), _has_columns(*ARRIVALS.fields)),
    "lengths": Format(f"CSV: {', '.join(COLUMNS)}", _lengths, _has_columns(*COLUMNS)),
    "servegen": Format(f"CSV: {', '.join(SERVEGEN_COLUMNS)}", _servegen, _has_columns(*SERVEGEN_COLUMNS)),
    "mooncake": Format(f"JSONL: {', '.join(MOONCAKE.fields)}", _timed(MOONCAKE), _has_fields(*MOONCAKE.fields)),
    "agentic": Format(f"JSONL: {', '.join(AGENTIC_FIELDS)}", _agentic, _has_fields(*AGENTIC_FIELDS)),
    "sharegpt": Format("JSON: a list of id, conversations", _sharegpt, _begins_a_list),
}
"""File formats by the name before the colon. A file named without one has the first format that recognises it."""
