"""Time to first token and throughput by caching policy of host memory, in simulation: recorded prompts on an H100.

    python benchmarks/caching_study.py --data DIR [--host-gib G,G,...] [--file-gib G] [--file-link LINK]
        [--link LINK] [--hints KIND,...] [--keep S] [--load X,...] [--seeds N] [--policies NAME,...]
        [--policy NAME ...] [--load-share S] [--only NAME] [--requests N] [--json FILE]

Llama-3.1-8B on an H100 by its data sheet, blocks of 64 tokens, 7,000 of them on the device. Requests are those of
Mooncake's conversations, of agentic sessions and of ShareGPT's conversations (``benchmarks/caching_policies.py`` says
what of them is drawn). Preemptions and hits are decided by ``cheapest:analytic``, whose prices ``cost`` goes by, too,
or by each ``--policy``; ``--link`` is that of host memory, by default the data sheet's.
``none``: host memory is for preempted requests only. ``hindsight``: Belady's rule over the trees of blocks, or the same
by price, whichever comes to the shorter mean time to first token, told the prompts in the order of their earliest
arrivals; a reference, which no server has. The same at every run. ``--file-gib`` is the size of files below the cache,
``--file-link`` their drive.

``--hints`` none, sessions or hindsight: what requests say of their KV (:class:`kvpolicy.workload.Hinting`), which ask
to keep their windows for ``--keep`` seconds. Hints in hindsight know which turn is the last, which no client does: a
reference, too.

``--load-share``: of what a prompt finds in host memory only this share is loaded, in blocks from the front, and the
rest computed.

``--load``: requests arrive, and users pause, so many times as fast that the output tokens over the time of arrivals
are this share of the capacity: the output tokens per second in the middle of a run without a cache where all requests
are there at once. Without it they come at the rates of the files below.

``--seeds``: starts and pauses of sessions are drawn so often; of Mooncake's trace, which has one order, it is as many
stretches. Ratios are geometric means over seeds, with Student's interval from two seeds on.

With ``--json`` every run is written when it is done, and those that the file has are not made again.
docs/caching-study.json has the runs of docs/caching-study.md, gathered by ``tools/caching_tables.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from matrix_places import LLAMA_3_1_8B
from row_file import RowFile, versions

from kvpolicy.caching import Foreseen
from kvpolicy.caching import spec as caching
from kvpolicy.fields import WrongValue
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.order import Order
from kvpolicy.policy import Policy
from kvpolicy.simulator import Builtin, DecisionObserver, Summary, Victims
from kvpolicy.simulator.builtin.blocks import shared_keys
from kvpolicy.simulator.builtin.lower_tiers import MakeCaching
from kvpolicy.stats import student_ratio
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, times_of
from kvpolicy.workload import Faster, Hinting, Workload, at_rate, open_workload
from kvpolicy.workload.session_hints import DEFAULT_KEEP_S, KINDS

DEVICE, BLOCK, KV_BLOCKS = "H100-SXM", 64, 7000
POLICY, NATIVE, FCFS = "cheapest:analytic", "native", "fcfs"
POLICIES = ("lru", "lfu", "arc", "s3fifo", "cost")
NONE, HINDSIGHT, NO_HINTS = "none", "hindsight", "none"
CONTEXT = 131072
FILES: Mapping[str, tuple[str, str]] = {
    "Mooncake, conversations": ("traces/mooncake_conversation*.jsonl.gz", "mooncake:{file}"),
    "agentic sessions": (
        "traces/agentic_*.jsonl.gz", "agentic:{file}?closed=false&arrivals=poisson&rate=0.005&seed={seed}"
    ),
    "ShareGPT, conversations": (
        "lengths/sharegpt_*.csv.gz", f"lengths:{{file}}?think=60&arrivals=poisson&rate=2&seed={{seed}}&block={BLOCK}"
    ),
}  # fmt: skip
"""Files below the folder of data and the workload made of one, by name."""
REQUESTS = {"Mooncake, conversations": 1000, "agentic sessions": 400, "ShareGPT, conversations": 2000}
RECORDED = {"Mooncake, conversations": 0.5}
"""Workloads that are recorded, whatever the seed, and their requests a second."""


def requests_of(
    data: Path, name: str, seed: int, count: int, hints: str = NO_HINTS, keep_s: float = DEFAULT_KEEP_S
) -> Workload | None:
    """``count`` requests of that draw; None where there is no file of them. Hints are those of the whole file, which
    goes on where the run ends: no conversation is over because of that."""
    pattern, text = FILES[name]
    files = sorted(data.glob(pattern))
    if not files:
        return None
    first = seed * count if name in RECORDED else 0
    source = open_workload(text.format(file=files[0], seed=seed))
    if hints != NO_HINTS:
        source = Hinting(source, hints, keep_s)
    requests = tuple(islice(source, first, first + count))
    if len(requests) < count and first:
        raise SystemExit(
            f"{files[0]}: has no {count} requests after the first {first}; give fewer --seeds or --requests"
        )
    since_s = requests[0].arrival_s
    work = Workload(name, tuple(replace(one, arrival_s=one.arrival_s - since_s) for one in requests), seed)
    rate = RECORDED.get(name)
    return work if rate is None else Workload(name, tuple(at_rate(work, rate)), seed)


@dataclass(frozen=True)
class Setting:
    """A server with tiers below the device; ``config``: a file with the model's configuration."""

    config: Path
    host_gib: float
    file_gib: float = 0.0
    file_link: SimulatedLink | None = None
    policy: str = POLICY
    link: str = NATIVE
    load_share: float = 1.0
    order: str | Order = FCFS
    kv_blocks: int = KV_BLOCKS
    """Of the device."""

    def summary(
        self,
        work: Workload,
        cache: str,
        deciding: Callable[[Policy], Policy] = lambda policy: policy,
        victims: Victims | None = None,
        on_decision: DecisionObserver | None = None,
    ) -> Summary:
        """The run with that cache, which is a caching policy, :data:`NONE` or :data:`HINDSIGHT`. ``deciding``: what
        decides in place of the policy; ``victims``, ``on_decision``: as of the simulator."""
        named = {NONE: caching.OFF, HINDSIGHT: "lru"}.get(cache, cache)
        file_gib = 0.0 if cache == NONE else self.file_gib
        serving = Serving(
            block_size=BLOCK, host_gib=self.host_gib, host_cache=named, file_gib=file_gib, file_link=self.file_link,
            order=self.order,
        ).on(DEVICE)  # fmt: skip
        cell = Cell(work.name, self.policy, self.kv_blocks, self.link, 0, f"{DEVICE}:{self.config}", serving=serving)
        machine = machine_of(cell)
        policy, _ = policy_of(cell)
        server, times = server_of(cell, machine), times_of(cell, machine)
        simulator, policy = Builtin(load_share=self.load_share, victims=victims), deciding(policy)
        if cache != HINDSIGHT:
            return simulator.run(work, policy, server, times, on_decision=on_decision).summary
        chains = [
            shared_keys(request, BLOCK)[: request.prompt_tokens // BLOCK]
            for request in sorted(work, key=lambda request: request.arrival_s)
        ]
        makers: Sequence[MakeCaching] = (
            lambda capacity, price: Foreseen(capacity, chains),
            lambda capacity, price: Foreseen(capacity, chains, price),
        )
        found = [replace(simulator, caching=make).run(work, policy, server, times) for make in makers]
        return min((one.summary for one in found), key=lambda summary: summary.ttft_s.mean)

    def at_load(self, work: Workload, load: float) -> Workload:
        """The requests at that share of the capacity, which is the same whatever decides and whatever the link."""
        together = tuple(replace(one, arrival_s=0.0, think_s=None) for one in work)
        usual = replace(self, policy=POLICY, link=NATIVE, load_share=1.0, order=FCFS)
        capacity = usual.summary(replace(work, requests=together), NONE).steady_tok_s
        offered = work.output_tokens / work.requests[-1].arrival_s
        return Workload(work.name, tuple(Faster(work, load * capacity / offered)), work.seed)


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """What a run is of, beside its seed."""

    requests: str
    count: int
    """Of them."""
    load: float
    """0: at the rates of the files."""
    host_gib: float
    file_gib: float
    cache: str
    hints: str
    file_link: str = ""
    """Of the files, as text; empty without files, and for the default."""
    policy: str = POLICY
    link: str = NATIVE
    load_share: float = 1.0


Found = Mapping[str, Any]
"""What a run came to: figures of its summary."""


class Results:
    """Runs by arm and seed."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._runs: dict[tuple[Arm, int], Found] = {(Arm(**run["arm"]), run["seed"]): run["found"] for run in file.rows}

    def __contains__(self, run: tuple[Arm, int]) -> bool:
        return run in self._runs

    def add(self, arm: Arm, seed: int, one: Summary) -> None:
        found = asdict(one)
        del found["simulator_wall_s"]
        self._runs[arm, seed] = self._file.add({"arm": asdict(arm), "seed": seed, "found": found})["found"]

    def of(self, arm: Arm, seeds: Sequence[int]) -> list[Found]:
        return [self._runs[arm, seed] for seed in seeds]


HEADS = (
    "requests of", "load", "host GiB", "file GiB", "cache", "hints", "ttft s", "of none", "of no hints", "ttft p99",
    "e2e s", "tok/s", "device", "host", "files", "loaded", "moved GB", "policy", "link", "share",
)  # fmt: skip


def row(arm: Arm, results: Results, seeds: Sequence[int]) -> list[str]:
    """Means over seeds, and ratios of the times to first token to those without a cache, and without hints."""
    runs = results.of(arm, seeds)

    bare = replace(arm, cache=NONE, file_gib=0.0, file_link="", hints=NO_HINTS)

    def ratio(other: Arm) -> str:
        pairs = [[run["ttft_s"]["mean"] for run in of] for of in (runs, results.of(other, seeds))]
        one = student_ratio(*pairs)
        return f"{one.value:.3f}" + ("" if one.low is None else f" ({one.low:.3f}-{one.high:.3f})")

    def mean(*names: str) -> float:
        return fmean(run[names[0]][names[1]] if names[1:] else run[names[0]] for run in runs)

    shares = [
        fmean(run["prefix_hits"][f"{tier}_tokens"] / run["prefix_hits"]["prompt_tokens"] for run in runs)
        for tier in ("device", "host", "file", "loaded")
    ]
    return [
        arm.requests, f"{arm.load:g}" if arm.load else "-", f"{arm.host_gib:g}", f"{arm.file_gib:g}", arm.cache,
        arm.hints, f"{mean('ttft_s', 'mean'):.3g}", ratio(bare),
        "" if arm.hints == NO_HINTS else ratio(replace(arm, hints=NO_HINTS)), f"{mean('ttft_s', 'p99'):.3g}",
        f"{mean('e2e_s', 'mean'):.3g}", f"{mean('throughput_tok_s'):.1f}", *(f"{share:.1%}" for share in shares),
        f"{mean('moved_bytes') / 1e9:.0f}", arm.policy, arm.link, f"{arm.load_share:g}",
    ]  # fmt: skip


class Draw:
    """The requests of one seed at one load, made when they are first asked for."""

    def __init__(self, work: Workload, load: float, setting: Setting, hinted: Callable[[str], Workload]) -> None:
        """``hinted``: the same requests with hints of that kind, before they are made to come faster."""
        self._work, self._load, self.setting, self._hinted = work, load, setting, hinted

    @functools.cached_property
    def _arriving(self) -> Workload:
        return self.setting.at_load(self._work, self._load) if self._load else self._work

    def hinting(self, kind: str) -> Workload:
        work = self._arriving
        if kind == NO_HINTS:
            return work
        pairs = zip(work, self._hinted(kind), strict=True)
        return replace(work, requests=tuple(replace(one, hints=hinted.hints) for one, hinted in pairs))


def arms(options: argparse.Namespace, name: str, load: float, host_gib: float, policy: str) -> Iterator[Arm]:
    """What hints nobody, or has the prompts themselves, is served without hints alone."""
    count = options.requests or REQUESTS[name]
    file_link = options.file_link.text if options.file_gib and options.file_link else ""
    decided: dict[str, Any] = {
        "policy": policy, "link": options.link.text if options.link else NATIVE, "load_share": options.load_share
    }  # fmt: skip
    yield Arm(name, count, load, host_gib, 0.0, NONE, NO_HINTS, **decided)
    for cache in options.policies:
        for hints in [NO_HINTS] if cache == HINDSIGHT else dict.fromkeys((NO_HINTS, *options.hints)):
            yield Arm(name, count, load, host_gib, options.file_gib, cache, hints, file_link, **decided)


def names(allowed: Sequence[str]) -> Any:
    """A reader of names between commas."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}: should be of {', '.join(allowed)}, with commas between")
        return found

    return read


def link(text: str) -> SimulatedLink:
    try:
        return SimulatedLink.parse(text)
    except WrongValue as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--host-gib", type=numbers, default=[64.0, 256.0], help="host memory, GiB")
    parser.add_argument("--file-gib", type=float, default=0.0, help="files below the cache, GiB")
    parser.add_argument("--file-link", type=link, help="of the files, as of kvpolicy simulate")
    parser.add_argument("--link", type=link, help="of host memory, as of kvpolicy simulate")
    parser.add_argument("--hints", type=names((NO_HINTS, *KINDS)), default=[NO_HINTS], help="what requests say")
    parser.add_argument("--keep", type=float, default=DEFAULT_KEEP_S, help="seconds for which windows are to be kept")
    parser.add_argument("--load", type=numbers, default=[0.0], help="shares of the capacity; 0: the files' own rates")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policies", type=names((*POLICIES, HINDSIGHT)), default=[*POLICIES, HINDSIGHT])
    parser.add_argument("--policy", nargs="+", default=[POLICY], help=f"decides; default: {POLICY}")
    parser.add_argument("--load-share", type=float, default=1.0, help="of what a prompt finds in host memory")
    parser.add_argument("--only", choices=FILES, help="only that workload")
    parser.add_argument("--requests", type=int, help=f"of each run; default: {REQUESTS}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: should be 1 or more")
    if not 0 <= options.load_share <= 1:
        parser.error(f"--load-share {options.load_share:g}: should be from 0 to 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = options_of(parser, arguments)
    seeds = range(options.seeds)
    try:
        results = Results(RowFile.read(options.json, {"keep": options.keep, "versions": versions()}))
    except ValueError as error:
        parser.error(str(error))
    done: list[Arm] = []
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        for name in FILES if options.only is None else [options.only]:
            works = [requests_of(options.data, name, seed, options.requests or REQUESTS[name]) for seed in seeds]
            for load in options.load:
                for host_gib, policy in product(options.host_gib, options.policy):
                    served = list(arms(options, name, load, host_gib, policy))
                    link = served[0].link
                    setting = Setting(
                        config, host_gib, options.file_gib, options.file_link, policy, link, options.load_share
                    )
                    for seed, work in enumerate(works):
                        if work is not None:
                            serve(results, served, seed, Draw(work, load, setting, hinting(options, name, seed)))
                    done += served if None not in works else []
                    for arm in served if None not in works else []:
                        print("  ".join(row(arm, results, seeds)), file=sys.stderr)
    if not done:
        parser.error(f"{options.data}: holds none of {', '.join(pattern for pattern, _ in FILES.values())}")
    print("\n".join(aligned([list(HEADS), *(row(arm, results, seeds) for arm in done)])))
    return 0


def hinting(options: argparse.Namespace, name: str, seed: int) -> Callable[[str], Workload]:
    """What gives the requests of that draw with hints of a kind."""

    @functools.cache
    def hinted(kind: str) -> Workload:
        work = requests_of(options.data, name, seed, options.requests or REQUESTS[name], kind, options.keep)
        assert work is not None, "the file was found before"
        return work

    return hinted


def serve(results: Results, served: Sequence[Arm], seed: int, draw: Draw) -> None:
    """Make the runs of one seed that there are not yet."""
    for arm in served:
        if (arm, seed) not in results:
            results.add(arm, seed, draw.setting.summary(draw.hinting(arm.hints), arm.cache))


if __name__ == "__main__":
    sys.exit(main())
