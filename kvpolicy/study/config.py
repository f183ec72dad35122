"""Settings of a study: its servers, how it is run, and the criterion by which policies are compared.

Limits without a flag are those of vLLM 0.32 for the device: ``EngineArgs.get_batch_defaults``, API server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvpolicy.caching import spec as caching
from kvpolicy.code_digest import digest_label
from kvpolicy.fields import AMOUNT, COUNT, SHARE_OF_BLOCKS, Rule, WrongValue, one_of, option, refuse_class, validate
from kvpolicy.hardware.link import FORM as LINK_FORM
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.hardware.sheets import known_sheet
from kvpolicy.headroom import MIN_GAIN
from kvpolicy.latency import SLO_FORM, Slo
from kvpolicy.order import HELP as ORDERS
from kvpolicy.order import Order, is_stock, load_order
from kvpolicy.request_marks import FORM as CLASSES_FORM
from kvpolicy.request_marks import Classes
from kvpolicy.settings import DEFAULT_HOST_GIB, GIB
from kvpolicy.simulator import LowerTiers
from kvpolicy.study.figure import FORM, names_figure

HARDWARE_FORMS = (
    "a folder that `kvpolicy import-profile` wrote, a cost model (a folder, or the name of a shipped one), "
    "or DEVICE[@LINK]:CONFIG, as H100-SXM@pcie5:path/to/config.json"
)


FILE_LINK = SimulatedLink(3e9, 1e-4)
"""Rate and latency of files where none are given: an NVMe disk."""


LONGEST = 131072
"""Tokens of a request, where no other maximum is given."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The server that all cells of a grid share."""

    block_size: int = option("Tokens per KV block.", 16, COUNT)
    host_gib: float | None = option(
        f"Host memory for evicted KV of one rank, GiB. Default: {DEFAULT_HOST_GIB:g}.", None, AMOUNT
    )
    host_blocks: int | None = option(
        "Host memory for evicted KV as a number of blocks, instead of --host-gib.", None, AMOUNT
    )
    token_budget: int | None = option(
        "Maximum tokens of a step. Default: vLLM's for the device.", None, COUNT, aliases=("--max-num-batched-tokens",)
    )
    max_num_seqs: int | None = option(
        "Maximum requests that run at a time. Default: vLLM's for the device.", None, COUNT
    )
    prefix_caching: bool = option(
        "Switch vLLM's prefix caching off.", True, flag="--no-prefix-caching", aliases=("--no-enable-prefix-caching",)
    )
    scheduling: str = option("Scheduling policy: fcfs or priority.", "fcfs", one_of("fcfs", "priority"))
    asynchronous: bool | None = option(
        "Schedule one step ahead. Default: as vLLM does, on all devices but CPUs.", None, flag="--async/--no-async"
    )
    watermark: float = option(
        "Share of the blocks that stays free when a request is admitted while others run.",
        0.0,
        SHARE_OF_BLOCKS,
    )
    order: str | Order = option(f"Order of service. {ORDERS}.", "fcfs")
    """A name, or an object, in whose place its name and the beginning of its digest are stored."""
    classes: Classes | None = option(
        f"Classes that requests may claim, as for `kvpolicy serve`, {CLASSES_FORM}. A request is granted what a server "
        "would grant it. Default: what the workload says, without limits.",
        None,
    )
    host_cache: str = option(
        f"Caching policy by which host memory that no preempted request needs holds prompts. {caching.HELP}.",
        caching.OFF,
    )
    file_gib: float = option(
        "Files below that cache, of one rank, GiB. They take what leaves host memory.", 0.0, AMOUNT
    )
    file_link: SimulatedLink | None = option(
        f"Device of these files, in each direction: {LINK_FORM}. Default: {FILE_LINK.text}.", None, metavar="LINK"
    )
    max_model_len: int | None = option(
        f"Maximum tokens of a request, prompt and output; a longer one is refused. Default: {LONGEST}.", None, COUNT
    )

    order_object: Order | None = field(default=None, compare=False, repr=False)
    """The order, where it was given as an object; servers are compared by its digest."""

    def __post_init__(self) -> None:
        self._take_order()
        validate(self)
        if self.host_gib is not None and self.host_blocks is not None:
            raise WrongValue("host_blocks", "is given with host_gib, should be given without: both set the same memory")
        order = self.loaded_order()  # a wrong one is refused here, where its flag is known
        if self.scheduling != "fcfs" and not is_stock(order, self.scheduling):
            raise WrongValue(
                "order", f"is {self.order}, which ranks requests itself, should be given without scheduling"
            )
        self._refuse_wrong_cache()
        if self.scheduling == "priority" and self.classes is not None and self.classes.bounds_priority:
            raise WrongValue(
                "classes",
                f"is {self.classes.text!r}, which bounds priorities, and vLLM's priority scheduling goes by what "
                "clients give: give the order priority in place of scheduling",
            )

    def _take_order(self) -> None:
        """Store an order that is an object beside its label; forget it where another order took its place."""
        refuse_class("order", self.order)
        if isinstance(self.order, Order):
            object.__setattr__(self, "order_object", load_order(self.order))
            object.__setattr__(self, "order", digest_label(self.order))
        elif self.order_object is not None and self.order != digest_label(self.order_object):
            object.__setattr__(self, "order_object", None)

    def loaded_order(self) -> Order:
        """The order itself. Raises WrongValue for a wrong name."""
        return load_order(self.order if self.order_object is None else self.order_object)

    def _refuse_wrong_cache(self) -> None:
        try:
            caching.load(self.host_cache, 1, allow_python=True)
        except WrongValue as wrong:
            raise WrongValue("host_cache", wrong.message) from None
        if self.host_cache != caching.OFF and not self.prefix_caching:
            raise WrongValue("host_cache", "is given without prefix caching, which finds the contents: switch it on")
        if self.host_cache == caching.OFF and self.file_gib:
            raise WrongValue(
                "file_gib",
                "is given without a caching policy of host memory: give --host-cache, too, as --host-cache cost",
            )

    def on(self, device: str) -> Serving:
        """These settings with every None replaced by the plugin's or vLLM's default for the device."""
        gib = DEFAULT_HOST_GIB if self.host_blocks is None and self.host_gib is None else self.host_gib
        return replace(self, host_gib=gib, **asdict(self.limits(device)))

    def limits(self, device: str) -> Limits:
        """The limits that are set, and vLLM's defaults for the device for the others."""
        defaults = usual_limits(device)
        chosen = {name: getattr(self, name) for name in asdict(defaults)}
        return replace(defaults, **{name: value for name, value in chosen.items() if value is not None})

    def host_gib_of(self, block_bytes: int) -> float:
        """Host memory in GiB; ``block_bytes``: bytes of a block."""
        if self.host_blocks is not None:
            return self.host_blocks * block_bytes / GIB
        return DEFAULT_HOST_GIB if self.host_gib is None else self.host_gib

    def cache_inputs(self) -> dict[str, Any]:
        """The cache and its files as plain values; empty where there is none."""
        if self.host_cache == caching.OFF:
            return {}
        files = {"file_gib": self.file_gib, "file_link": (self.file_link or FILE_LINK).text} if self.file_gib else {}
        return {"host_cache": self.host_cache, **files}

    def prompt_cache(self, block_bytes: int) -> LowerTiers | None:
        """What host memory holds besides copies, and the files below it; None where that is nothing."""
        if self.host_cache == caching.OFF:
            return None
        files, link = int(self.file_gib * GIB // block_bytes), self.file_link or FILE_LINK
        return LowerTiers(self.host_cache, files, link.bytes_per_s, link.latency_s)

    def host_blocks_of(self, block_bytes: int) -> int:
        """Number of blocks of that size in the host memory."""
        return int(self.host_gib_of(block_bytes) * GIB // block_bytes) if self.host_blocks is None else self.host_blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """A server's limits per step."""

    token_budget: int
    max_num_seqs: int
    asynchronous: bool
    """Whether it schedules one step ahead."""


CPU = Limits(2048, 128, False)
LARGEST = Limits(16384, 1024, True)
LARGE = Limits(8192, 1024, True)
OTHER = Limits(2048, 256, True)
"""Also for an A100 of any size, and for a device of unknown memory."""


def usual_limits(device: str) -> Limits:
    """vLLM's default limits for a device, named as in a trace's header or a data sheet, which gives its memory."""
    if device == "cpu":
        return CPU
    sheet = known_sheet(device)
    if sheet is None:
        return OTHER
    if sheet.memory_bytes >= 160 * GIB:
        return LARGEST
    names = " ".join((sheet.name, *sheet.device_names)).casefold()
    return LARGE if sheet.memory_bytes >= 70 * GIB and "a100" not in names else OTHER


Progress = Callable[[int, int, str], None]
"""Called with the number of finished cells, the number of all cells, and the latest cell in words."""


def _silent(done: int, total: int, words: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Run:
    """How a study is run: simulator, repeats, processes, where results go, and what service is good enough."""

    engine: str = option("Simulator: builtin, or vllm, which is vLLM's own scheduler on a virtual clock.", "builtin")
    seeds: int = option("Number of runs of each cell, with seeds 0, 1, ...", 1, COUNT)
    parts: int = option("Number of successive parts into which every workload is cut, with a run for each.", 1, COUNT)
    jobs: int | None = option(
        "Number of worker processes; 0 runs all in this process. Default: one per core.",
        None,
        Rule("1 or more, or 0 to run in this process", lambda value: value >= 0),
    )
    ray: str | None = option("Ray cluster to run on, or auto.", None, metavar="ADDRESS")
    out: Path | None = option("Folder for traces, with a sub-folder for each run.", None)
    cache: Path | None = option(
        "Folder that keeps finished runs. Default: in the user's cache folder. --cache is its old name.",
        None,
        flag="--results",
        aliases=("--cache",),
    )
    fresh: bool = option("Repeat runs that were finished before.", False)
    progress: Progress = _silent
    slo: Slo | None = option(
        f"Deadlines by which requests that bring none are judged: {SLO_FORM}. They change nothing in the runs.",
        None,
        metavar="DEADLINES",
    )

    def __post_init__(self) -> None:
        validate(self)
        if not callable(self.progress):
            raise WrongValue("progress", f"is {self.progress!r}, should be a function of finished, all and words")


@dataclass(frozen=True, slots=True)
class Criterion:
    """The figure by which policies are compared, and the smallest gain that is worth a change."""

    judge_by: str = option(f"Figure to compare: {FORM}.", "e2e", Rule(f"one of {FORM}", names_figure))
    min_gain: float = option(
        "Smallest gain worth a change, as a share; its whole interval must lie above it.", MIN_GAIN, AMOUNT
    )

    def __post_init__(self) -> None:
        validate(self)
