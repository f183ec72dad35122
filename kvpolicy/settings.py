"""Settings of engines: those of a server, which are the flags of `kvpolicy serve` and the keys that its plugin reads,
those of a measurement, which are flags of `kvpolicy profile` and `kvpolicy characterize`, and the loads that
`kvpolicy bench` puts on a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.caching import spec as caching
from kvpolicy.extensions import FORM, PREFIX, names_module
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
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.latency import SLO_FORM, Slo
from kvpolicy.order import HELP as ORDERS
from kvpolicy.order import Order
from kvpolicy.order import spec as orders
from kvpolicy.order.by_class import unlisted_classes
from kvpolicy.order.kept_first import KeptFirst, may_read_hints
from kvpolicy.order.order_parts import parts
from kvpolicy.policy import HELP, Policy
from kvpolicy.request_marks import HELP as CLASSES
from kvpolicy.request_marks import HINT_HELP, Classes, HintLimits
from kvpolicy.workload import WorkloadError, arrivals_at

LINK = "Simulated link, BYTES_PER_S[,LATENCY_S]. Default: the native link."
SEED = "Seed of all random draws."
DEMO_ORDER = "mlfq:base=32"
"""The order of service that a demo shows, where no other is asked for."""
GIB = 1 << 30
DEFAULT_HOST_GIB = 4.0
"""Host memory for evicted KV, of a simulated server, and of one whose machines or ranks may not see the same memory."""
DEFAULT_CACHE_FILES_GIB = 100.0
NO_FILES = {"cache_files": None, "cache_files_gib": DEFAULT_CACHE_FILES_GIB, "cache_files_policy": "lru"}
"""Settings of a server without files of KV."""
DEFAULT_TRACE_GIB = 10.0
"""Of a server's trace: some weeks, see docs/operating.md."""
SHARE = Rule("above 0, and 1 at most", lambda value: 0 < value <= 1)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One field per flag and key. The command line, the checks and the plugin all derive from these fields."""

    policy: str = option(HELP)
    shadow: bool = option(
        "Decide and record, but execute vLLM's own recompute. --host-gib is then the memory that decisions assume, and "
        "none is taken.",
        False,
    )
    host_gib: float | None = option(
        "Total host memory for evicted KV over the ranks of one engine core, GiB. Default: a quarter of the memory "
        "available at the start, at most half of it times this server's part of the machine's GPUs; where the device "
        "is the CPU an eighth, at most half of what vLLM leaves; shared evenly by the engine cores of this machine, at "
        "most 64.",
        None,
        POSITIVE,
    )
    force_host_gib: bool = option("Let --host-gib take more than half of the available memory.", False)
    pin_memory: bool = option("Do not page-lock the host memory.", True)
    share_replicated_kv: bool = option(
        "Keep KV that is the same on all ranks, as MLA's is, once for all of them on a GPU, too, where it was never "
        "tested. On a CPU it is kept once.",
        False,
    )
    trace: Path | None = option("Folder to record a trace in.", None)
    trace_gib: float | None = option(
        "Size of the trace's folder, GiB, above which its oldest part files are removed.", DEFAULT_TRACE_GIB, POSITIVE
    )
    trace_days: float | None = option(
        "Age, days, from which its part files are removed. Default: no limit.", None, POSITIVE
    )
    trace_steps: float = option(
        "Share of the steps recorded that no preemption touched; those that one touched always are.", 1.0, SHARE
    )
    seed: int = option("Seed of a policy that chooses at random.", 0, flag="--policy-seed")
    link: SimulatedLink | None = option(LINK, None)
    online_state: Path | None = option(
        "File in which an online=on policy keeps what it learned across restarts.",
        None,
        Rule("a file, but is a folder", lambda path: not path.is_dir()),
    )
    allow_untested_version: bool = option("Allow a vLLM newer than the tested versions.", False)
    allow_untested_states_v2: bool = option(
        "Serve models whose layers keep states on vLLM's model runner v2, never tested on a GPU. The blocks of a "
        "preempted request are held until they are saved.",
        False,
    )
    allow_python_policies: bool = option(
        f"Let --policy, --order, --cache and --cache-files-policy name a module whose code the server runs, {FORM}.",
        False,
    )
    order: str = option(f"Order of service. {ORDERS}.", "fcfs")
    classes: Classes | None = option(CLASSES, None)
    cache: str = option(
        f"Caching policy by which host memory that no preempted request needs holds prompts. {caching.HELP}.",
        caching.OFF,
        aliases=("--host-cache",),
    )
    cache_files: Path | None = option(
        "Folder, on an NVMe drive, in which --cache also holds prompts, beyond restarts.",
        None,
        Rule("a folder, but is a file", lambda path: not path.is_file()),
    )
    cache_files_gib: float = option(
        "Total size of these files over the ranks of one engine core, GiB.", DEFAULT_CACHE_FILES_GIB, POSITIVE
    )
    hints: HintLimits | None = option(HINT_HELP, None)
    cache_files_policy: str = option(
        f"Caching policy by which these files are given up: lru, lfu, arc, s3fifo, cost, or {FORM}.", "lru"
    )
    control: Path | None = option(
        "File, of mode 600, by which policy, order and shadow are switched while the server runs: POLICY, "
        "order=ORDER and shadow=on joined by commas, or off. Without the file the flags hold.",
        None,
        Rule("a file, but is a folder", lambda path: not path.is_dir()),
    )

    def __post_init__(self) -> None:
        _refuse_object("policy", self.policy, Policy)
        _refuse_object("order", self.order, Order)
        validate(self)
        for name in ("policy", "order", "cache", "cache_files_policy"):
            value = getattr(self, name)
            if names_module(value.replace("/", ":") if name == "order" else value) and not self.allow_python_policies:
                raise WrongValue(
                    name,
                    f"is {value!r}, which names a module to run; a server runs one only with "
                    '--allow-python-policies, in its settings "allow_python_policies": true',
                )
        orders.load(self.order, self.allow_python_policies)
        if self.cache_files is not None and self.cache == caching.OFF:
            raise WrongValue("cache_files", "is given without a caching policy: give --cache, too, as --cache cost")
        if self.shadow and self.cache != caching.OFF:
            raise WrongValue(
                "cache", "is given with --shadow, which keeps nothing in host memory: leave one of them out"
            )
        caching.load(self.cache, 1, allow_python=self.allow_python_policies)
        caching.load_for_files(self.cache_files_policy, 1, self.allow_python_policies, "cache_files_policy")
        for name, default in NO_FILES.items():
            if self.cache_files is None and getattr(self, name) != default:
                raise WrongValue(name, "is given without --cache-files: give that, too, as --cache-files /nvme/kv")

    def warnings(self) -> list[str]:
        """What a server with these settings would do in vain."""
        order = orders.load(self.order, self.allow_python_policies)
        said = unlisted_classes(order, () if self.classes is None else self.classes.names)
        if self.hints is None:
            return said
        if self.hints.keep_s and not self.heeds_hints and self.control is None:  # which may name an order by hints yet
            said.append("--hints is given without --cache and without an order by hints: nothing comes of hints")
        if not self.hints.keep_s and any(isinstance(part, KeptFirst) for part in parts(order)):
            said.append(f"order {order.name} puts nobody first: --hints none, which is given, too, grants no keep_s")
        return said

    @property
    def heeds_hints(self) -> bool:
        """Whether anything may come of what requests say of their KV."""
        return self.cache != caching.OFF or may_read_hints(orders.load(self.order, self.allow_python_policies))


def _refuse_object(field: str, value: object, base: type[Any]) -> None:
    """Raise WrongValue for an object of the class ``base``, or its class, with the module path that is to be given in
    its place."""
    own_class = value if isinstance(value, type) else type(value)
    if not issubclass(own_class, base):
        return
    path = f"{PREFIX}{own_class.__module__}:{own_class.__qualname__}"
    if own_class.__module__ == "__main__" or "<" in path:
        path = f"{FORM} (of a module that can be imported)"
    raise WrongValue(
        field,
        f"is an object of the class {own_class.__name__}: a server is another process and takes a name, here "
        f"{path} with allow_python_policies=True; only an engine made in Python takes the object",
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings with which a live engine is measured."""

    llm: str | Path | None = option(
        "Folder of a model, or its id at a hub. Default: a small model is generated.", None, metavar="MODEL"
    )
    """As a text, ``./x`` is a folder; a path does not keep the ``./``."""
    quick: bool = option(
        "Fewer states, levels and repeats: takes minutes, or a quarter of an hour for a study on two cores.",
        False,
    )
    link: SimulatedLink | None = option(LINK, None)
    seed: int = option(SEED, 0, AMOUNT)
    vllm_flags: Sequence[str] = ()
    """vLLM's flags of the server that the costs are for, as on its command line: ``["--tensor-parallel-size", "2"]``.
    With any, or with a model's id at a hub, the engine is that server's: its data types and ranks, its block size
    alone, its token budget and requests, and its environment. Without, kvpolicy chooses, over several block sizes, and
    the data type is the one that vLLM takes for the model."""
    minutes: float | None = option(
        "Minutes that this call may take. What has not been measured by then is listed, and left to the next call.",
        None,
        POSITIVE,
    )

    def __post_init__(self) -> None:
        if isinstance(self.llm, Path):
            object.__setattr__(self, "llm", str(self.llm))
        validate(self)
        refuse_no_flags(self.vllm_flags)
        object.__setattr__(self, "vllm_flags", tuple(self.vllm_flags))

    @property
    def llm_folder(self) -> Path | None:
        """The model's folder; None where it has none here."""
        folder = None if self.llm is None else Path(self.llm).expanduser()
        return folder if folder is not None and folder.exists() else None


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
        "Begin a run in the middle of conversations, one a person: the first message of each brings what was said "
        "before. Without it windows grow for as long as a conversation lasts, and with them the load.",
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


def refuse_no_flags(vllm_flags: Sequence[str]) -> None:
    """Raise WrongValue for what is no list of texts."""
    refuse_single(vllm_flags=vllm_flags)
    for number, flag in enumerate(vllm_flags):
        refuse_other(f"vllm_flags[{number}]", flag, str, "a text")
