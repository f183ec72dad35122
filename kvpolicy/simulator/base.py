"""Inputs and results of a simulation, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple, Protocol

from kvpolicy.arrays import Floats
from kvpolicy.attribution.ledger import Step
from kvpolicy.events import Cause, Decision, Direction, Kind
from kvpolicy.fields import AMOUNT, COUNT, POSITIVE, SHARE_OF_BLOCKS, Rule, WrongValue, refuse_non_integer
from kvpolicy.hardware import EngineSpec
from kvpolicy.headroom import Headroom
from kvpolicy.latency import NO_SLO, UNKNOWN, ClassSummary, LengthBin, Slo, Tail
from kvpolicy.order import Fcfs, Order, is_stock
from kvpolicy.policy import Policy
from kvpolicy.prefix_hits import NO_HITS, PrefixHits
from kvpolicy.request_marks import HintLimits
from kvpolicy.tiers import MAX_QUEUED_BLOCKS
from kvpolicy.trace import Header, Row, Trace
from kvpolicy.workload import Source

Scheduling = Literal["fcfs", "priority"]
DecisionObserver = Callable[[Decision], None]
"""Called with every decision of a run, which also says what is executed."""


class StepLoad(NamedTuple):
    """What an engine step computes: everything that its duration may depend on."""

    scheduled_tokens: int
    decode_requests: int
    """Requests that compute a single token."""
    kv_read_tokens: int
    """Context that the decode requests read, their new token included."""
    chunk_context: int
    """(query token, context token) pairs of the other requests' chunks, the diagonal included."""
    prefill_requests: int
    """Requests that compute more than one token: of their prompt, or of what a preemption took from them."""
    prefill_context_tokens: int
    """Tokens that the prefill requests had computed before the step."""


LOAD = StepLoad._fields
"""Columns of the array that :meth:`Times.steps_s` takes."""


def load_of(step: Step[Any]) -> StepLoad:
    """The load of a composed step."""
    return StepLoad(*step.parts, step.prefill_requests, step.prefill_context)


class Times(Protocol):
    """The hardware model: how long steps and copies take. Deterministic."""

    @property
    def source(self) -> str:
        """Where the constants come from, in words; names those that were not measured."""
        ...

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one engine step, from update to update."""
        ...

    def steps_s(self, loads: Floats) -> Floats:
        """Seconds of many steps: rows of :data:`LOAD` columns, shape (steps, 6)."""
        ...

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        """Seconds that the link is busy with one copy."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """How copies and steps delay each other."""

    overlapped: bool = True
    """Whether copies run beside the steps, one at a time per direction. Otherwise a step waits for the copies that it
    brings, as in vLLM's CPU engine. A load begins when the step that brings it has computed, as in vLLM 0.32."""
    slowdown: float = 0.0
    """Share by which a step is slower while a copy runs beside it: so many seconds more for each second of the copy."""
    saves_wait: bool = False
    """Whether a step waits for its saves even where loads overlap. The plugin's copiers do not: what the step
    overwrites is gathered in a buffer on the device first. The time that this takes, and steps that overwrite more than
    the buffer holds, are not simulated."""


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What host memory holds of prompts and answers that no copy of a preempted request needs, and files below it."""

    policy: str
    """Which contents host memory has, by name; see :mod:`kvpolicy.caching.spec`."""
    file_blocks: int = 0
    """Blocks that the files hold, by the same policy; 0 for none. They take what leaves host memory, and what would not
    come there by its policy."""
    file_bytes_per_s: float = 3e9
    """Rate of the files' device, in each direction."""
    file_latency_s: float = 1e-4
    """Seconds that every read and every write takes besides."""
    file_queue_blocks: int = MAX_QUEUED_BLOCKS
    """Blocks whose write is under way or waits, at most. What leaves host memory beyond them is lost."""
    hints: HintLimits = HintLimits()
    """How much of host memory the hints of requests may hold back."""

    def __post_init__(self) -> None:
        refuse_non_integer("cache.file_blocks", self.file_blocks, AMOUNT)
        refuse_non_integer("cache.file_queue_blocks", self.file_queue_blocks, COUNT)
        POSITIVE.refuse("cache.file_bytes_per_s", self.file_bytes_per_s)
        AMOUNT.refuse("cache.file_latency_s", self.file_latency_s)


WHOLE_NUMBERS: Mapping[str, Rule] = {
    **dict.fromkeys(("block_size", "block_bytes", "device_blocks", "token_budget", "max_running"), COUNT),
    **dict.fromkeys(("max_model_len", "segment_bytes"), COUNT),
    "host_blocks": AMOUNT,
}
"""Rules of the server's counts."""
NULL_BLOCK = 1
"""vLLM counts one block that it never allocates."""


@dataclass(frozen=True, slots=True)
class Server:
    """One engine core: memory, scheduling, link. Names and meanings are those of vLLM's flags where it has one.

    Raises WrongValue, naming the field, for an impossible value: a count that is no whole number, or too small.
    """

    block_size: int
    block_bytes: int
    """One KV block over all layers of one rank."""
    device_blocks: int
    """Usable KV blocks; vLLM's own count holds one more, its null block."""
    host_blocks: int
    token_budget: int = 8192
    """``max_num_batched_tokens``."""
    max_running: int = 256
    """``max_num_seqs``."""
    max_model_len: int = 131072
    prefix_caching: bool = True
    scheduling: Scheduling = "fcfs"
    watermark: float = 0.0
    """Share of the device's blocks that stays free when a request is admitted beside running ones; below 1."""
    asynchronous: bool = False
    """Whether the scheduler runs one step ahead of the device, as vLLM does on CUDA."""
    segment_bytes: int | None = None
    """Contiguous bytes of a block on the device; None: ``block_bytes``."""
    link: Link = field(default_factory=Link)
    rules: str = "0.32"
    """vLLM version whose scheduling rules apply; one that kvpolicy supports."""
    hardware: Mapping[str, Any] = field(default_factory=lambda: {"device": "simulated"})
    """For the trace's header."""
    geometry: Mapping[str, Any] = field(default_factory=dict)
    order: Order = field(default_factory=Fcfs)
    """The order of service, where it is other than vLLM's own, which ``scheduling`` names."""
    cache: LowerTiers | None = None
    """None: host memory holds copies of preempted requests only."""

    def __post_init__(self) -> None:
        for name, rule in WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if not (value is None and name == "segment_bytes"):
                refuse_non_integer(name, value, rule)
        SHARE_OF_BLOCKS.refuse("watermark", self.watermark)
        AMOUNT.refuse("link.slowdown", self.link.slowdown)
        if self.scheduling != "fcfs" and not is_stock(self.order, self.scheduling):
            raise WrongValue("order", f"is {self.order.name}, which ranks requests itself: scheduling should be fcfs")
        if self.cache is not None and not self.prefix_caching:
            raise WrongValue("cache", "is given without prefix caching, which finds the contents: switch it on")

    @property
    def engine_spec(self) -> EngineSpec:
        """For the trace's header."""
        return EngineSpec(
            self.block_size,
            self.token_budget,
            block_bytes=self.block_bytes,
            geometry=self.geometry,
            hardware=self.hardware,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run."""

    requests: int
    """Finished requests."""
    throughput_tok_s: float
    """Output tokens over makespan."""
    e2e_s: Tail
    ttft_s: Tail
    itl_s: Tail
    preemptions: Mapping[Kind, int]
    """By executed action."""
    recomputed_tokens: int
    """Scheduled positions below the request's highest computed position."""
    moved_bytes: int
    """Saved and loaded."""
    makespan_s: float
    """From the first arrival to the last token."""
    steps: int
    simulator_wall_s: float
    extrapolated_steps: int | None = None
    """Steps outside the range that the hardware model was measured in; None for a model without such a range."""
    headroom: Headroom | None = field(default=None, compare=False)
    """What there was to win by choosing better. Left out of comparisons: its sums depend on the order of additions."""
    steady_tok_s: float = nan
    """Output tokens per second between the times at which a quarter and three quarters of them were out: without the
    ramp at the beginning and the tail in which few requests are left."""
    longest_gap_s: Tail = UNKNOWN
    """Of each request with two or more output tokens, the longest time between two that follow each other."""
    e2e_per_token_s: Tail = UNKNOWN
    """End-to-end time of each request over its output tokens."""
    classes: Mapping[str, ClassSummary] = field(default_factory=dict)
    """The service that the requests of each class got, by the class's name; also where there is a single class."""
    fairness: float = nan
    """Jain's index over the rates of all requests; see :func:`kvpolicy.latency.fairness`."""
    deadline_requests: int = 0
    """Requests with a deadline, of their own or from the run's ``slo``."""
    slo_share: float | None = None
    """Of these, the share that met all of their deadlines; None where there are none."""
    goodput_req_s: float | None = None
    """Those that did, over the makespan; None where there are none."""
    longest_pause_s: float = nan
    """The longest of all the times of :attr:`longest_gap_s`."""
    prefix_hits: PrefixHits = NO_HITS
    """What was found of all prompts, by tier."""
    preemption_causes: Mapping[Cause, int] = field(default_factory=dict)
    """Preemptions by cause; causes that did not occur are left out."""
    by_prompt_length: tuple[LengthBin, ...] = ()
    """All requests in bins by prompt length."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's summary, and its trace where the sink returns one."""

    summary: Summary
    trace: Trace | None


class Sink(Protocol):
    """Takes a run's header, then rows of the trace's tables as they are finished. A sink serves one run."""

    def begin(self, core: str, header: Header) -> None:
        """``core``: the engine core's name in the trace."""
        ...

    def add(self, table: str, rows: list[Row]) -> None: ...

    def finish(self) -> Trace | None:
        """The trace, where the sink holds it in memory."""
        ...


class Simulator(Protocol):
    """An engine: ``builtin`` or ``vllm``."""

    @property
    def name(self) -> str: ...

    def run(
        self,
        requests: Source,
        policy: Policy,
        server: Server,
        times: Times,
        seed: int = 0,
        sink: Sink | None = None,
        on_decision: DecisionObserver | None = None,
        slo: Slo = NO_SLO,
    ) -> Run:
        """Serve all requests.

        ``seed`` seeds the policy's random numbers: one stream per run, one number per decision, so that two policies
        meet the same chance. Without a sink no rows are built, and memory use does not grow with the number of
        requests. ``slo``: deadlines by which requests that bring none are judged; they change nothing in the run.
        Raises InputError for a request that can never fit the server, naming it.
        """
        ...
