"""What hints would gain at preemptions, in simulation: the save of a window that will be kept is shared by two uses.

    python benchmarks/preemption_hints.py --data DIR [--only NAME] [--link LINK ...] [--hints KIND,...]
        [--blocks N ...] [--cache POLICY] [--policy NAME] [--load X] [--seeds N] [--requests N] [--json FILE]

Server, requests and hints are those of ``caching_study.py``, with 64 GiB of host memory. A preempted request that asks
to keep its window is said to need its save twice: when it comes back, and for the next turn. Rules for such victims:

- ``as-today``: hints reach host memory alone; a victim is swapped where save and load cost less than computing
- ``half``: the policy is told of half of the blocks that are to be saved
- ``free``: it is told of none
- ``swap``: it is not asked, and the victim is swapped wherever that is possible. A rule that leaves out of the price
  what it will, can only turn a recompute into a swap, so that this is the last of them

Whether a swapped request loads what it lacks when it comes back is decided by price, whatever the rule. ``--link``:
``native`` is the data sheet's, others are as of ``kvpolicy simulate``. ``--blocks``: KV blocks of the device, of 64
tokens. ``--load``: share of the capacity, as there, of a device with so many blocks.

Ratios are to ``as-today`` on the same requests, geometric means over seeds with Student's interval.

With ``--json`` every run is written when it is done, and those that the file has are not made again.
docs/preemption-hints.json has those of docs/requests.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from caching_study import (
    FILES,
    KV_BLOCKS,
    NATIVE,
    POLICIES,
    POLICY,
    REQUESTS,
    Draw,
    Setting,
    link,
    names,
    requests_of,
)
from matrix_places import LLAMA_3_1_8B
from row_file import RowFile, versions

from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy import Policy
from kvpolicy.policy.base import Assessment, certain_choice, first_option_of
from kvpolicy.simulator.builtin import VllmVictims
from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.stats import student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.workload import Workload
from kvpolicy.workload.session_hints import KINDS, SESSIONS

HOST_GIB = 64.0
LINKS = (NATIVE, "5e8", "2.5e8")
AS_TODAY, ALWAYS = "as-today", "swap"
SAVED: Mapping[str, float] = {AS_TODAY: 1.0, "half": 0.5, "free": 0.0}
"""By rule, the share of the blocks to be saved that the policy is told of."""
RULES = (*SAVED, ALWAYS)
COUNTS = {**REQUESTS, "Mooncake, conversations": 500}
"""Requests of a run, as in the rows of docs/caching-study.md with hints."""
STOCK = VllmVictims("fcfs")
COUNTED = ("victims", "recomputed", "changed", "save_s", "load_s", "recompute_s")
"""Victims whose windows will be kept and that may be swapped, those of them that the rule recomputes, and those about
which it decides otherwise than today's; and sums of what today's predicts for them, engine seconds."""
FIGURES = ("ttft_s", "e2e_s", "throughput_tok_s", "preemptions", "recomputed_tokens", "moved_bytes")


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """What a run is of, beside its seed."""

    requests: str
    count: int
    load: float
    blocks: int
    cache: str
    policy: str
    link: str
    hints: str
    rule: str


@dataclass
class Kept:
    """Victims whose windows will be kept, as vLLM chooses them, and what is decided about those that may be swapped."""

    is_next: bool = False
    """Whether the victim that was chosen last, and about which nothing is decided yet, is one."""
    other: bool = False
    """Whether the rule decides about it otherwise than today's."""
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    def choose(self, running: Sequence[LiveRequest]) -> int:
        at = STOCK.choose(running)
        hints = running[at].request.hints
        self.is_next = hints.keep_s is not None and not (hints.once or hints.ended)
        return at

    def decided(self, decision: Decision) -> None:
        if self.is_next and len(decision.options) > 1:
            recompute, swap = decision.costs
            seconds = {"save_s": swap.save_s, "load_s": swap.load_s, "recompute_s": recompute.recompute_s}
            is_recompute = decision.intended == "recompute"
            for name, value in {"victims": 1, "recomputed": is_recompute, "changed": self.other, **seconds}.items():
                self.counts[name] += value
        self.is_next = self.other = False


@dataclass(frozen=True)
class Ruled(Policy[Any]):
    """Decides by another policy, which does not learn, save for victims whose windows will be kept."""

    inner: Policy[Any]
    rule: str
    kept: Kept

    @property
    def name(self) -> str:  # type: ignore[override]  # a name that follows from the fields
        return f"{self.inner.name}, {self.rule}"

    @property
    def label(self) -> str:
        return self.name

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: Any) -> Sequence[float]:
        return self.assess(situation, options, state)[0]

    def assess(self, situation: Preemption, options: Sequence[Option], state: Any) -> Assessment:
        """Costs are those of today, by which host memory ranks copies."""
        today, costs = self.inner.assess(situation, options, state)
        swap = first_option_of("swap", options)
        if not self.kept.is_next or swap is None:
            return today, costs
        if self.rule == ALWAYS:
            shares = certain_choice(swap, len(options))
        else:
            saved = SAVED[self.rule] * situation.save_blocks
            shares = tuple(self.inner.assess(replace(situation, save_blocks=saved), options, state)[0])
        self.kept.other = shares != today
        return shares, costs

    def loads(self, situation: Preemption, options: Sequence[Option], state: Any) -> bool:
        return self.inner.loads(situation, options, state)


class Results:
    """Runs by arm and seed."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._runs = {(Arm(**run["arm"]), run["seed"]): run["found"] for run in file.rows}

    def serve(self, arms: Sequence[Arm], seed: int, draw: Draw) -> None:
        """Make the runs of one draw that there are not yet."""
        for arm in arms:
            if (arm, seed) not in self._runs:
                found = run_of(arm, draw)
                self._runs[arm, seed] = self._file.add({"arm": asdict(arm), "seed": seed, "found": found})["found"]

    def of(self, arm: Arm, seeds: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self._runs[arm, seed] for seed in seeds]


def run_of(arm: Arm, draw: Draw) -> dict[str, Any]:
    """Figures of a run, and what was decided about victims whose windows will be kept."""
    kept, setting = Kept(), replace(draw.setting, link=arm.link)
    ruled: Callable[[Policy], Policy] = partial(Ruled, rule=arm.rule, kept=kept)
    found = asdict(setting.summary(draw.hinting(arm.hints), arm.cache, ruled, kept, kept.decided))
    return {name: found[name] for name in FIGURES} | {"kept": kept.counts}


HEADS = (
    "requests of", "blocks", "cache", "policy", "link", "hints", "rule", "preempted", "with a choice", "recomputed",
    "changed", "save's share", "e2e s", "of today's", "ttft s", "of today's", "tok/s", "of today's",
)  # fmt: skip


def mean_of(run: Mapping[str, Any], name: str) -> float:
    """A figure of a run; of a time per request the mean, seconds."""
    found = run[name]
    return float(found["mean"] if isinstance(found, Mapping) else found)


def row(arm: Arm, results: Results, seeds: Sequence[int]) -> list[str]:
    """Preemptions of all seeds together, means over seeds, and ratios to today's rule.

    Of the victims whose windows will be kept: those with a choice, those recomputed, and those about which the rule
    decides otherwise than today's; and what share of the price of a swap the save is, as of today, over all of these.
    """
    runs, today = results.of(arm, seeds), results.of(replace(arm, rule=AS_TODAY), seeds)
    kept = {name: sum(run["kept"][name] for run in runs) for name in runs[0]["kept"]}
    swaps_s = kept["save_s"] + kept["load_s"]

    def figure(name: str) -> list[str]:
        """The mean over seeds, and the ratio."""
        ours, theirs = ([mean_of(run, name) for run in of] for of in (runs, today))
        one = student_ratio(ours, theirs)
        interval = "" if one.low is None else f" ({one.low:.3f}-{one.high:.3f})"
        return [f"{fmean(ours):.3g}", f"{one.value:.3f}{interval}"]

    return [
        arm.requests, str(arm.blocks), arm.cache, arm.policy, arm.link, arm.hints, arm.rule,
        f"{sum(sum(run['preemptions'].values()) for run in runs)}",
        *(f"{kept[name]:.0f}" for name in ("victims", "recomputed", "changed")),
        f"{kept['save_s'] / swaps_s:.2%}" if swaps_s else "",
        *figure("e2e_s"), *figure("ttft_s"), *figure("throughput_tok_s"),
    ]  # fmt: skip


def link_name(text: str) -> str:
    return text if text == NATIVE else link(text).text


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=FILES, help="only that workload")
    parser.add_argument("--link", type=link_name, nargs="+", default=LINKS, help=f"default: {' '.join(LINKS)}")
    parser.add_argument("--hints", type=names(KINDS), default=[SESSIONS], help="what requests say")
    parser.add_argument("--blocks", type=int, nargs="+", default=[KV_BLOCKS], help="KV blocks of the device")
    parser.add_argument("--cache", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--policy", default=POLICY, help=f"decides; default: {POLICY}")
    parser.add_argument("--load", type=float, default=1.2, help="share of the capacity")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, help=f"of each run; default: {COUNTS}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: should be 1 or more")
    return options


def hinted(data: Path, name: str, seed: int, count: int, hints: str) -> Workload:
    work = requests_of(data, name, seed, count, hints)
    assert work is not None, "the file was found before"
    return work


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = options_of(parser, arguments)
    try:
        results = Results(RowFile.read(options.json, {"versions": versions()}))
    except ValueError as error:
        parser.error(str(error))
    seeds, lines = range(options.seeds), [list(HEADS)]
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        for name in FILES if options.only is None else [options.only]:
            count = options.requests or COUNTS[name]
            works = [requests_of(options.data, name, seed, count) for seed in seeds]
            for blocks in options.blocks if None not in works else []:
                setting = Setting(config, HOST_GIB, policy=options.policy, kv_blocks=blocks)
                asked = product(options.link, options.hints, RULES)
                arms = [Arm(name, count, options.load, blocks, options.cache, options.policy, *one) for one in asked]
                for seed, work in enumerate(works):
                    draw = Draw(work, options.load, setting, partial(hinted, options.data, name, seed, count))
                    results.serve(arms, seed, draw)
                lines += [row(arm, results, seeds) for arm in arms]
    if len(lines) == 1:
        parser.error(f"{options.data}: holds none of {', '.join(pattern for pattern, _ in FILES.values())}")
    print("\n".join(aligned(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
