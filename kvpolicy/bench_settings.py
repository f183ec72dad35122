"""What `kvpolicy bench` measures: the servers that it compares and the loads that it puts on them. Fields are its
flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.fields import (
    AMOUNT,
    COUNT,
    POSITIVE,
    Rule,
    WrongValue,
    option,
    refuse_non_integer,
    refuse_other,
    refuse_single,
    validate,
)
from kvpolicy.latency import SLO_FORM, Slo
from kvpolicy.settings import SEED, ServerSettings, refuse_no_flags
from kvpolicy.workload import WorkloadError, arrivals_at

EACH_COUNT = Rule("1 or more each", lambda values: all(one >= 1 for one in values))
RATES = Rule("above 0 each", lambda values: all(0 < one < float("inf") for one in values))
COUNTS = Rule("at least one, each 1 or more", lambda values: bool(values) and min(values) >= 1)
SHARES = Rule(
    "at least one share, each from 0 to 1", lambda values: bool(values) and all(0 <= one <= 1 for one in values)
)
TURNS = Rule("a number, 1 or more", lambda value: 1 <= value < float("inf"))
FACTOR = Rule("a number above 1", lambda value: 1 < value < float("inf"))
PRICE_RATIO = (
    "Do not record one more run after the rounds, of vLLM's own decisions, for the price of a prompt's token beside a "
    "decoded one (p / d)."
)
ROUNDS = "Rounds. In each, every arm serves every setting once, in an order drawn anew."


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Conversations whose whole window is sent back every turn."""

    workload: str | None = option(
        "Conversations, as `kvpolicy simulate --workload` names them: a file in ShareGPT's format "
        "(sharegpt:FILE), agentic sessions, ... Only lengths and pauses are taken. Default: drawn with the lengths of "
        "ShareGPT.",
        None,
    )
    chatters: tuple[int, ...] = option(
        "Number of people who chat at the same time. May be given several times.", (8,), COUNTS
    )
    prefixed: tuple[float, ...] = option(
        "Share of the conversations that begin with one shared prefix. May be given several times.",
        (0.0, 0.25, 0.5, 0.75),
        SHARES,
    )
    prefix_tokens: int = option("Tokens of the shared prefix.", 256, COUNT)
    conversations: int = option("Number of conversations of a run.", 40, COUNT)
    seconds: float | None = option(
        "Seconds from the begin of a run after which nobody sends another message; conversations are left where they "
        "are. Default: all are chatted to their end.",
        None,
        POSITIVE,
    )
    warmup_s: float = option(
        "Seconds from the begin of a run whose messages are sent and not counted, while caches fill.", 0.0, AMOUNT
    )
    midway: bool = option(
        "Each person begins in the middle of a conversation: the first message, sent during the warm-up, brings what "
        "was said before. Otherwise windows grow for as long as conversations last, and with them the load.",
        False,
    )
    turns: float = option(
        "Mean number of turns of a drawn conversation, but for those that its window has no room for.", 5.0, TURNS
    )
    think_s: float = option(
        "Mean seconds before a message, exponentially distributed; think=SECONDS of --workload goes before it.",
        5.0,
        AMOUNT,
    )
    context_tokens: int | None = option(
        "Tokens that a window and its answer may have. Default: the server's.", None, COUNT
    )
    keep_s: float = option("Seconds for which the arm with hints asks to keep a window.", 60.0, POSITIVE)
    price_ratio: bool = option(PRICE_RATIO, True)
    rounds: int = option(ROUNDS, 3, COUNT)
    load_seed: int = option(SEED, 0, AMOUNT, flag="--seed")

    def __post_init__(self) -> None:
        validate(self)
        if (most := max(self.chatters)) > self.conversations:
            raise WrongValue(
                "chatters",
                f"is {most}, more than the {self.conversations} conversations of a run, so that some would have none: "
                "give more --conversations, or fewer people",
            )
        if self.seconds is not None and self.warmup_s >= self.seconds:
            raise WrongValue(
                "warmup_s",
                f"is {self.warmup_s:g}, and the run has {self.seconds:g} s in which messages are sent, so that none "
                "would count: give fewer, or more --seconds",
            )


@dataclass(frozen=True, slots=True)
class AnalyticsLoad:
    """Short texts behind one long prefix, with outputs of two tokens."""

    prefix_tokens: tuple[int, ...] = option(
        "Tokens of the prefix. May be given several times.", (256, 1024), COUNTS, flag="--prefix-tokens"
    )
    texts: int = option("Number of texts of a run.", 200, COUNT)
    output_tokens: int = option("Tokens of an answer.", 2, COUNT)
    concurrency: int = option("Requests that are sent at the same time.", 8, COUNT)
    price_ratio: bool = option(PRICE_RATIO, True)
    rounds: int = option(ROUNDS, 8, COUNT)
    load_seed: int = option(SEED, 0, AMOUNT, flag="--seed")

    def __post_init__(self) -> None:
        validate(self)


RECORDED = "recorded"
AT_A_RATE = ("poisson", "even", "gamma", "weibull", "bursts", "groups")
"""Arrivals that have a rate."""
"""Arrivals as the workload has them, faster or slower."""


@dataclass(frozen=True, slots=True)
class RateLoad:
    """Requests that arrive at a rate, or that so many clients send one after the other."""

    workload: str | None = option(
        "Requests, as `kvpolicy simulate --workload` names them; A + B joins several, with classes and priorities. "
        "Default: drawn with the lengths of ShareGPT.",
        None,
    )
    rate: tuple[float, ...] = option(
        "Requests that arrive per second. May be given several times. Default: raised until latency explodes.",
        (),
        RATES,
    )
    concurrency: tuple[int, ...] = option(
        "Instead of a rate: number of clients, each of which sends its next request when it has its answer. May be "
        "given several times.",
        (),
        EACH_COUNT,
    )
    begin_rate: float = option("Requests per second with which a sweep without --rate begins.", 0.5, POSITIVE)
    explodes: float = option(
        "Latency has exploded where the median time to first token is so many times that at the lowest rate, or where "
        "requests are finished at less than 80% of the rate at which they arrive.",
        10.0,
        FACTOR,
    )
    arrivals: str = option(
        "How requests arrive: poisson, even, gamma&variation=2, weibull&shape=0.5, bursts&on=SECONDS&off=SECONDS, "
        "groups&size=4; or recorded, as the workload has them, faster or slower.",
        "poisson",
    )
    requests: int = option("Maximum number of requests of a run.", 1000, COUNT)
    seconds: float = option(
        "Seconds in which the requests of a run arrive; ignored with --concurrency.", 60.0, POSITIVE
    )
    slo: Slo | None = option(
        f"Deadlines by which requests that bring none are judged: {SLO_FORM}.", None, metavar="DEADLINES"
    )
    context_tokens: int | None = option(
        "Tokens that a prompt and its output may have; longer requests lose prompt. Default: the server's.", None, COUNT
    )
    rounds: int = option(ROUNDS, 3, COUNT)
    load_seed: int = option(SEED, 0, AMOUNT, flag="--seed")

    def __post_init__(self) -> None:
        validate(self)
        if self.rate and self.concurrency:
            raise WrongValue("concurrency", "is given with --rate: clients that wait have no rate; give one of them")
        if self.arrivals == RECORDED:
            if self.workload is None:
                raise WrongValue("arrivals", "is recorded: give --workload, whose times are to be taken")
            return
        if self.arrivals.partition("&")[0] not in AT_A_RATE:
            kinds = ", ".join((*AT_A_RATE, RECORDED))
            raise WrongValue("arrivals", f"is {self.arrivals!r}, should be one of {kinds}, and options after &")
        try:
            arrivals_at(self.arrivals, 1.0)
        except WorkloadError as error:
            raise WrongValue("arrivals", f"is {self.arrivals!r}: {error}") from None


ADDRESS = re.compile(r"((localhost|\d+(\.\d+){3})(:\d+)?|([\w.-]+|\[[\da-fA-F:.]+\]):\d+)(/.*)?")
"""A server's address without http://, which no model has as its name."""
Load = ChatLoad | AnalyticsLoad | RateLoad
"""What a bench puts on a server."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The servers that a bench compares."""

    target: str
    """URL of a server that runs, or a model that servers are started for: a folder, or an id at a hub."""
    arms: Sequence[str] = ()
    """See :data:`ARMS`. None: those that there are for the target."""
    settings: ServerSettings = ServerSettings("always-swap")
    """Of the servers with the plugin that are started."""
    vllm_flags: Sequence[str] = ()
    """vLLM's flags of all servers that are started."""
    rounds_per_start: int | None = None
    """See :data:`ROUNDS_PER_START`."""

    def __post_init__(self) -> None:
        refuse_other("target", self.target, str, "a URL or a model, as a text")
        scheme, is_address, _ = self.target.partition("://")
        if is_address and not self.is_url:
            raise WrongValue("target", f"is {self.target}: {scheme}:// is no server's, should be http:// or https://")
        if ADDRESS.fullmatch(self.target) and not Path(self.target).exists():
            raise WrongValue("target", f"is {self.target}, a server's address: did you mean http://{self.target}?")
        refuse_single(arms=self.arms)
        refuse_no_flags(self.vllm_flags)
        if self.rounds_per_start is not None:
            refuse_non_integer("rounds_per_start", self.rounds_per_start, COUNT)
            if self.is_url:
                raise WrongValue(
                    "rounds_per_start", f"is of servers to be started; {self.target} runs already, and is not ended"
                )
        object.__setattr__(self, "arms", tuple(self.arms))
        object.__setattr__(self, "vllm_flags", tuple(self.vllm_flags))

    @property
    def is_url(self) -> bool:
        return is_http(self.target)

    def start_of(self, round_: int) -> int:
        """Which start of the servers serves a round, both counted from 0."""
        return 0 if self.rounds_per_start is None else round_ // self.rounds_per_start


def is_http(url: str) -> bool:
    """Whether it is written as the URL of a server."""
    return url.startswith(("http://", "https://"))


ROUNDS_PER_START = (
    "Rounds after which all servers are ended and started anew, in the other order. Intervals are then over these "
    "starts, each of which counts once: two processes of one program can differ in speed for as long as they live. "
    "Default: one start for all rounds, as each takes the time in which a server loads its model."
)
ARMS = (
    "An arm to compare, NAME or NAME=JSON; may be given several times, and the first is what others are compared with. "
    "For a model: vllm (without the plugin), kvpolicy (with these flags), hints (the same, and requests carry hints, "
    "of `bench rate` those of the workload); "
    'JSON has the plugin\'s settings that differ, as in \'urgent={"order": "urgent"}\', "hints": true, "plugin": false '
    "for another vLLM without it, and \"vllm_flags\", a list of words, of vLLM's flags of this arm's server alone. "
    'For a URL: JSON has "url" of another server, "hints", and "control", the file by which it is switched to "policy" '
    'or "order" while the arm is measured. Of `bench rate`, "reserve": max, pow2 or oracle sends '
    "no more requests than whose reserved lengths fit into the KV cache, as do the arms orca-max, orca-pow2 and "
    "orca-oracle. Default: vllm and kvpolicy, or the URL alone."
)
