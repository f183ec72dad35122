"""Settings of a study: its servers, how it is run, and the criterion by which policies are compared.

Limits without a flag are those of vLLM 0.32 for the device: ``EngineArgs.get_batch_defaults``, API server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvpolicy.fields import AMOUNT, COUNT, Rule, WrongValue, one_of, option, validate
from kvpolicy.hardware.sheets import known_sheet

HARDWARE_FORMS = (
    "a folder that `kvpolicy import-profile` wrote, a cost model (a folder, or the name of one that ships), "
    "or DEVICE[@LINK]:CONFIG, as H100-SXM@pcie5:path/to/config.json"
)
GIB = 2**30
DEFAULT_HOST_GIB = 4.0
"""The plugin's default."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The server that all cells of a grid share."""

    block_size: int = option("Tokens per KV block.", 16, COUNT)
    host_gib: float | None = option(
        f"Host memory for evicted KV of one rank, GiB; {DEFAULT_HOST_GIB:g} without it.", None, AMOUNT
    )
    host_blocks: int | None = option("The same as a number of blocks.", None, AMOUNT)
    token_budget: int | None = option(
        "Most tokens of a step (max_num_batched_tokens); vLLM's own for the device.", None, COUNT
    )
    max_num_seqs: int | None = option("Most requests running at a time; vLLM's own for the device.", None, COUNT)
    prefix_caching: bool = option("Without vLLM's prefix caching.", True)
    scheduling: str = option("fcfs or priority", "fcfs", one_of("fcfs", "priority"))
    asynchronous: bool | None = option(
        "Schedule one step ahead; as vLLM does, on all but CPUs.", None, flag="--async/--no-async"
    )
    watermark: float = option(
        "Share of the blocks that stays free when a request is admitted beside others.",
        0.0,
        Rule("a share of the blocks, from 0, below 1", lambda value: 0 <= value < 1),
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.host_gib is not None and self.host_blocks is not None:
            raise WrongValue("host_blocks", "is given beside host_gib, should be alone: both say the same")

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
    """How a study is run: simulator, repeats, processes, and where results go."""

    engine: str = option("builtin, or vllm: vLLM's own scheduler on a virtual clock.", "builtin")
    seeds: int = option("Runs of each, drawn by seeds 0, 1, ...", 1, COUNT)
    parts: int = option("Cut every workload into so many successive parts, a run each.", 1, COUNT)
    jobs: int | None = option(
        "Processes; one per core without it, 0 for none but this one.",
        None,
        Rule("1 or more, or 0 for none but this process", lambda value: value >= 0),
    )
    ray: str | None = option("Run on that Ray cluster, or auto.", None, metavar="ADDRESS")
    out: Path | None = option("Folder for traces, a sub-folder for each run.", None)
    cache: Path | None = option("Folder of finished runs; the user's cache folder without it.", None)
    fresh: bool = option("Simulate also what was finished before.", False)
    progress: Progress = _silent

    def __post_init__(self) -> None:
        validate(self)


JUDGED: Mapping[str, tuple[str, str | None]] = {
    "e2e": ("e2e_s", "mean"),
    "ttft": ("ttft_s", "mean"),
    "itl": ("itl_s", "mean"),
    "throughput": ("throughput_tok_s", None),
}
"""Figures that policies can be judged by: field of a result, and its statistic."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The figure by which policies are compared, and the smallest gain that is worth a change."""

    judge_by: str = option("e2e, ttft, itl (mean seconds) or throughput", "e2e", one_of(*JUDGED))
    min_gain: float = option("Share by which a policy has to be better, with all of its interval.", 0.01, AMOUNT)

    def __post_init__(self) -> None:
        validate(self)
