"""Measured vLLM runs replayed through the built-in simulator, step times from tables of the same GPU and LLM.

    python benchmarks/fidelity_e2e.py --e2e DIR --profiles DIR [--config LLM=FILE] [--calibrate-until S]
        [--json FILE]

DIR of runs: LLMServingSim's ``*_meta.json`` with ``*_requests.csv.gz`` and ``*_timeseries.csv.gz`` beside it; DIR of
profiles: its tables ``lss_<gpu>_<LLM>_tp<n>_*``. The server is as ``meta.json`` says (``recorded_engine.py``); a run
with anything in it that is not understood is not judged, and the reason is printed. Each run is replayed twice: with
what the tables alone say; and with three numbers that no table holds (``EngineTime``: the engine's own time per step,
more of it per step with a chunk, unevenness of contexts), calibrated on the requests
that had their last token by second S, and judged on those alone that were first scheduled after it. Whether that
helps is said beforehand: the same is done on the first half of the calibrating requests and judged on the rest
of them (``would calibration help``), and afterwards, by the judged requests.

Preemptions are counted in the replay; the runs hold no count of theirs. Where ``meta.kv_cache`` was not recorded, a
replay that preempts is refused. Inter-token times are means per request, as the runs hold no others.

Exits 1 where a mean of a judged run is further off than its bar, with or without calibration.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
from recorded_engine import NotReadError, RecordedEngine, configs_of
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

import kvpolicy
from kvpolicy.arrays import Flags, Floats
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.policy import load as load_policy
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.table_times import HardwareModel, TableTimes
from kvpolicy.simulator.requests_csv import MeasuredRun, measured_run
from kvpolicy.simulator.sinks import MemorySink

BARS: Mapping[str, tuple[float, float]] = {"e2e_s": (0.03, 0.01), "ttft_s": (0.08, 0.03)}
"""Largest error of the mean: at least, aimed at."""
LINK = "pcie5"
"""Never used: nothing is swapped."""
CALIBRATE_UNTIL_S = 30.0
FEWEST = 5
EARLY_SHARE = 0.5
"""Of the calibrating requests, those on whom a calibration is tried out."""
NONE: Floats = np.empty(0)
NUDGES = (5e-4, 3e-3, 0.1)
"""By which the three numbers are varied while they are calibrated."""
ROUNDS = 3


@dataclass(frozen=True)
class Replay:
    """Seconds per request, in the order of arrival, and (seconds, count) of steps."""

    queue_s: Floats
    ttft_s: Floats
    itl_s: Floats
    e2e_s: Floats
    makespan_s: float
    output_tok_s: float
    at_s: Floats
    running: Floats
    waiting: Floats
    beyond: float = 0.0
    """Share of steps beyond what the tables hold."""
    preemptions: int = 0
    """Of the replay; a measured run says nothing of them."""
    kv_pct: Floats = field(default_factory=lambda: np.empty(0))
    """Share of the KV blocks in use, in percent, at ``at_s``."""

    @property
    def prefill_s(self) -> Floats:
        """From the first step that computed some of it to its first token."""
        return self.ttft_s - self.queue_s


def as_measured(run: MeasuredRun, at_s: Floats, running: Floats, waiting: Floats, kv_pct: Floats = NONE) -> Replay:
    arrival = run.arrival_s
    makespan = float(run.last_token_s.max() - arrival[0])
    return Replay(
        queue_s=np.maximum(run.scheduled_s - arrival, 0.0),
        ttft_s=run.first_token_s - arrival,
        itl_s=(run.last_token_s - run.first_token_s) / np.maximum(run.output_tokens - 1, 1),
        e2e_s=run.last_token_s - arrival,
        makespan_s=makespan,
        output_tok_s=float(run.output_tokens.sum() / makespan),
        at_s=at_s,
        running=running,
        waiting=waiting,
        kv_pct=kv_pct,
    )


def replay_run(run: MeasuredRun, times: TableTimes, server: Server) -> Replay:
    """The run's requests through the built-in simulator."""
    done = Builtin().run(run.workload, load_policy("always-recompute"), server, times, sink=MemorySink())
    assert done.trace is not None
    rows = sorted(done.trace.table("requests").to_pylist(), key=lambda row: int(row["request"]))
    steps = sorted(done.trace.table("steps").to_pylist(), key=lambda row: int(row["step"]))
    arrival = run.arrival_s
    first, last = (np.array([row[name] for row in rows]) for name in ("first_token_s", "last_token_s"))
    columns = ("start_s", "duration_s", "running_requests", "waiting_requests")
    at_s, duration_s, running, waiting = (np.array([row[name] for row in steps], np.float64) for name in columns)
    when_s = _when_scheduled(at_s, at_s + duration_s) if server.asynchronous else at_s
    scheduled_s = _scheduled_s(arrival, when_s, waiting)
    simulated = replace(run, scheduled_s=scheduled_s, first_token_s=first, last_token_s=last)
    beyond = float(times.beyond(_loads(done.trace.table("steps").to_pylist())).mean())
    used = np.array([row["used_blocks"] for row in steps], np.float64)
    return replace(
        as_measured(simulated, at_s, running, waiting),
        beyond=beyond,
        preemptions=sum(done.summary.preemptions.values()),
        kv_pct=100.0 * used / server.device_blocks,
    )


def _loads(steps: Sequence[Mapping[str, Any]]) -> Floats:
    """As ``Times.steps_s`` takes them; the context before chunks has no column in a trace, and none here."""
    names = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context", "scheduled_requests")
    loads = np.array([[row[name] for name in names] + [0] for row in steps if row["scheduled_tokens"]], np.float64)
    loads[:, 4] -= loads[:, 1]
    return loads


def _when_scheduled(start_s: Floats, end_s: Floats) -> Floats:
    """While the step before ran, as the scheduler runs ahead of the device; at once where that had ended."""
    before_s = np.concatenate([start_s[:1], start_s[:-1]])
    idle = np.concatenate([[True], start_s[1:] > end_s[:-1]])
    return np.where(idle, start_s, before_s)


def _scheduled_s(arrival: Floats, when_s: Floats, waiting: Floats) -> Floats:
    """When each request was first scheduled, first come, first served.

    While a preempted request waits, no newer one is admitted, and more wait than are new: hence the maximum.
    """
    admitted = np.searchsorted(arrival, when_s, side="right") - waiting
    step = np.searchsorted(np.maximum.accumulate(admitted), np.arange(1, len(arrival) + 1), side="left")
    return np.maximum(when_s[step], arrival)


# ---- what no table holds ----


def calibrate(
    run: MeasuredRun,
    model: HardwareModel,
    server: Server,
    chosen: Flags,
    until_s: float,
    tell: Callable[[str], None],
) -> tuple[TableTimes, dict[str, str]]:
    """The three numbers under which prefills and inter-token times of the chosen requests come out nearest; and
    whether to expect better figures of later requests by them, in words."""
    source = f"calibrated on {chosen.sum()} requests of {run.workload.source} done by {until_s:g} s"
    best = _fitted(run, model, server, chosen, source)
    tell(f"  {best.model.engine}")
    return best, _would_help(run, model, server, chosen)


def _fitted(run: MeasuredRun, model: HardwareModel, server: Server, chosen: Flags, source: str) -> TableTimes:
    measured_replay = as_measured(run, NONE, NONE, NONE)

    def times_of(numbers: Floats) -> TableTimes:
        step_s, chunk_step_s, uneven = numbers.tolist()
        return TableTimes(replace(model, engine=EngineTime(step_s, chunk_step_s, uneven, source)))

    def missed(numbers: Floats) -> Floats:
        simulated_replay = replay_run(run, times_of(numbers), server)
        itl = np.log(simulated_replay.itl_s[chosen] / measured_replay.itl_s[chosen]) / np.sqrt(chosen.sum())
        prefill = np.log(simulated_replay.prefill_s[chosen].mean() / measured_replay.prefill_s[chosen].mean())
        return np.append(itl, prefill)

    return times_of(gauss_newton(missed, np.zeros(len(NUDGES)), np.array(NUDGES)))


def _would_help(run: MeasuredRun, model: HardwareModel, server: Server, chosen: Flags) -> dict[str, str]:
    """Calibrated on those of the chosen that were done first, and judged on the others, which ran beside them."""
    name = "would calibration help"
    cut_s = float(np.quantile(run.last_token_s[chosen], EARLY_SHARE))
    early, rest = chosen & (run.last_token_s <= cut_s), chosen & (run.last_token_s > cut_s)
    tables, fitted = TableTimes(model), _fitted(run, model, server, early, f"calibrated by {cut_s:g} s")
    real_s = as_measured(run, NONE, NONE, NONE).e2e_s[rest].mean()
    simulated_s = [replay_run(run, times, server).e2e_s[rest].mean() for times in (tables, fitted)]
    before, after = (abs(mean_s / real_s - 1) for mean_s in simulated_s)
    return {name: f"{name}: fitted on {early.sum()} of the calibrating requests, mean e2e_s of the other {rest.sum()} "
                  f"is off by {before:.1%} before and {after:.1%} after: {_verdict(before, after)}"}  # fmt: skip


def gauss_newton(misses: Callable[[Floats], Floats], numbers: Floats, nudges: Floats) -> Floats:
    """Numbers, 0 or above, with the least sum of squares of ``missed``; slopes over whole nudges, as scheduling
    comes in steps."""
    now = misses(numbers)
    for _ in range(ROUNDS):
        slopes = np.column_stack([(misses(numbers + nudge) - now) / nudge.sum() for nudge in np.diag(nudges)])
        step = nnls(slopes * nudges, slopes @ numbers - now)[0] * nudges
        then = misses(step)
        if np.sum(then**2) >= np.sum(now**2):
            break
        numbers, now = step, then
    return numbers


# ---- judging ----


def judge(measured: Replay, replay: Replay, chosen: Flags) -> dict[str, Any]:
    """Per quantity measured, simulated and error; of requests those ``chosen``, of the whole run the rest."""
    lines: dict[str, Any] = {
        "requests": float(chosen.sum()), "steps beyond the tables": replay.beyond,
        "preemptions, simulated": float(replay.preemptions),
    }  # fmt: skip
    for name in ("queue_s", "prefill_s", "ttft_s", "itl_s", "e2e_s"):
        real, simulated = (getattr(compared_replay, name)[chosen] for compared_replay in (measured, replay))
        for word, statistic in (("mean", np.mean), ("p50", np.median), ("p99", lambda x: np.quantile(x, 0.99))):
            lines[f"{name} {word}"] = _line(float(statistic(real)), float(statistic(simulated)))
    for name in ("makespan_s", "output_tok_s"):
        lines[name] = _line(getattr(measured, name), getattr(replay, name))
    for name in ("running", "waiting"):
        real = getattr(measured, name)
        simulated = _sampled(replay, name, measured.at_s)
        lines[f"{name}, mean over time"] = _line(float(real.mean()), float(simulated.mean()))
        lines[f"{name}, largest difference"] = float(np.abs(real - simulated).max())
    if measured.kv_pct.any():
        simulated = _sampled(replay, "kv_pct", measured.at_s)
        lines["KV in use, %, mean over time"] = _line(float(measured.kv_pct.mean()), float(simulated.mean()))
    return lines


def _line(measured: float, simulated: float) -> dict[str, float]:
    return {"measured": measured, "simulated": simulated, "error": simulated / measured - 1}


def _sampled(replay: Replay, name: str, at_s: Floats) -> Floats:
    """Values of the last step before those times; 0 after the last token."""
    step = np.searchsorted(replay.at_s, at_s, side="right") - 1
    values = getattr(replay, name)[np.maximum(step, 0)]
    return np.where((step < 0) | (at_s > replay.makespan_s), 0.0, values)


def missed_bars(lines: Mapping[str, Any]) -> list[str]:
    missed_lines = []
    for name, (bar, _) in BARS.items():
        error = abs(lines[f"{name} mean"]["error"])
        if error > bar:
            missed_lines.append(f"mean {name}: {error:.1%}, at most {bar:.0%} is wanted")
    return missed_lines


def fidelity_e2e(
    e2e: Path,
    profiles: Path,
    until_s: float,
    tell: Callable[[str], None],
    configs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Every run in ``e2e``, judged; those that cannot be are reported with the reason. ``configs``: config.json of
    further LLMs."""
    metas = sorted(e2e.glob("*_meta.json"))
    if not metas:
        raise ValueError(f"{e2e}: holds no *_meta.json")
    runs = []
    for meta in metas:
        name = meta.name.removesuffix("_meta.json")
        try:
            runs.append(_of_run(meta, name, profiles, until_s, tell, configs or {}))
        except NotReadError as error:
            tell(f"{name}: not judged: {error}")
            runs.append({"run": name, "judged": False, "reason": str(error)})
    return runs


def _of_run(
    meta: Path,
    name: str,
    profiles: Path,
    until_s: float,
    tell: Callable[[str], None],
    configs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    engine = RecordedEngine.read(meta)
    tables = sorted(profiles.glob(f"lss_{name}_tp{engine.ranks}_*"))
    if not tables:
        raise NotReadError(f"no tables lss_{name}_tp{engine.ranks}_* there")
    shape = engine.shape(configs)
    run = measured_run(meta.with_name(f"{name}_requests.csv.gz"))
    chosen, later = run.last_token_s <= until_s, run.scheduled_s > until_s
    if chosen.sum() < FEWEST or not later.any():
        raise ValueError(
            f"--calibrate-until {until_s:g}: {chosen.sum()} requests of {name} were done by then, {FEWEST} are needed, "
            f"and {later.sum()} first scheduled after it, 1 is needed"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = kvpolicy.import_profile(tables, Path(folder), shape, engine.ranks, name.partition("_")[0], LINK).model
    measured = as_measured(run, *_over_time(meta.with_name(f"{name}_timeseries.csv.gz")))
    server = engine.server(shape)
    tell(
        f"{name}: {len(run.workload)} requests, vLLM {engine.vllm_version}, {len(tables)} tables, "
        f"{server.device_blocks} blocks{'' if engine.kv_cache else ' (not recorded)'}, prefix caching "
        f"{'on' if server.prefix_caching else 'off'}"
    )
    plain = replay_run(run, TableTimes(model), server)
    if plain.preemptions and engine.kv_cache is None:
        raise NotReadError(f"kv_cache was not recorded, and the replay preempts with {server.device_blocks} blocks")
    fitted, helps = calibrate(run, model, server, chosen, until_s, tell)
    refitted_replay = replay_run(run, fitted, server)
    everyone = np.ones(len(run.workload), np.bool_)
    in_step = replay_run(run, TableTimes(model), replace(server, asynchronous=False))
    results = {
        "tables alone, all requests": judge(measured, plain, everyone),
        "tables alone, scheduler in step with the device, all requests": judge(measured, in_step, everyone),
        f"tables alone, requests scheduled after {until_s:g} s": judge(measured, plain, later),
        f"calibrated until {until_s:g} s, requests scheduled after": judge(measured, refitted_replay, later),
    }
    helps |= helped(*list(results.values())[2:])
    for text in helps.values():
        tell(f"  {text}")
    over_time = {
        "at_s": measured.at_s.tolist(),
        **{f"{word} {queue}": values.tolist() for queue in ("running", "waiting") for word, values in (
            ("measured", getattr(measured, queue)), ("tables alone", _sampled(plain, queue, measured.at_s)),
            ("calibrated", _sampled(refitted_replay, queue, measured.at_s)))},
    }  # fmt: skip
    return {"run": name, "judged": True, "engine": asdict(fitted.model.engine), "calibration": helps,
            "results": results, "over_time": over_time}  # fmt: skip


def helped(alone: Mapping[str, Any], calibrated: Mapping[str, Any]) -> dict[str, str]:
    """Whether calibration helped the judged requests, in words, by each mean that has a bar."""
    texts = []
    for name in BARS:
        before, after = (abs(lines[f"{name} mean"]["error"]) for lines in (alone, calibrated))
        texts.append(f"mean {name} off by {before:.1%} before and {after:.1%} after: {_verdict(before, after)}")
    return {"did calibration help": "did calibration help: " + "; ".join(texts)}


def _verdict(before: float, after: float) -> str:
    return "it helped" if after < before else "IT MADE IT WORSE"


def _over_time(file: Path) -> tuple[Floats, Floats, Floats, Floats]:
    """Seconds, running, waiting, and KV in use in percent: all 0 where it was not recorded."""
    table = pyarrow.csv.read_csv(file)
    columns = [np.asarray(table[name].to_numpy(), np.float64) for name in ("t", "running", "waiting")]
    recorded = "kv_cache_pct" in table.column_names
    kv_pct = table["kv_cache_pct"].to_numpy() if recorded else np.zeros(len(columns[0]))
    return columns[0], columns[1], columns[2], np.asarray(kv_pct, np.float64)


def show(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    for run in runs:
        for title, lines in run.get("results", {}).items():
            table = Table("", "measured", "simulated", "error", "bar", title=f"{run['run']}: {title}")
            for name, line in lines.items():
                bar = BARS.get(name.removesuffix(" mean"), None) if name.endswith(" mean") else None
                if isinstance(line, float):
                    table.add_row(name, "", f"{line:.3g}", "", "")
                    continue
                target = "" if bar is None else f"{bar[0]:.0%}, aimed {bar[1]:.0%}"
                table.add_row(
                    name, f"{line['measured']:.4g}", f"{line['simulated']:.4g}", f"{line['error']:+.1%}", target
                )
            console.print(table)
        over_time = run.get("over_time")
        if over_time:
            table = Table(*over_time, title=f"{run['run']}: over time")
            for row in list(zip(*over_time.values(), strict=True))[::5]:
                table.add_row(*(f"{value:.0f}" for value in row))
            console.print(table)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--e2e", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument(
        "--config", action="append", default=[], metavar="LLM=FILE", help="config.json of a further LLM; repeatable"
    )
    parser.add_argument("--calibrate-until", type=float, default=CALIBRATE_UNTIL_S, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        configs = configs_of(options.config)
        runs = fidelity_e2e(options.e2e, options.profiles, options.calibrate_until, _tell, configs)
    except (ValueError, OSError) as error:
        parser.exit(2, f"fidelity_e2e.py: error: {error}\n")
    if not any(run["judged"] for run in runs):
        parser.exit(2, f"fidelity_e2e.py: error: no run could be judged: {runs[0]['run']}: {runs[0]['reason']}\n")
    show(runs, Console(width=140))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(runs, indent=2, allow_nan=False) + "\n")
    missed_targets = [
        f"{run['run']}: {title}: {text}"
        for run in runs
        for title, lines in run.get("results", {}).items()
        for text in missed_bars(lines)
    ]
    for text in missed_targets:
        print(f"bar missed: {text}")
    return int(bool(missed_targets))


if __name__ == "__main__":
    sys.exit(main())
