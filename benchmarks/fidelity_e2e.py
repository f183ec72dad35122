"""Measured vLLM runs replayed through the built-in simulator, step times from tables of the same GPU and LLM.

    python benchmarks/fidelity_e2e.py --e2e DIR --profiles DIR [--calibrate-until S] [--json FILE] [--bars]

DIR of runs: LLMServingSim's ``*_meta.json`` with ``*_requests.csv.gz`` and ``*_timeseries.csv.gz`` beside it; DIR of
profiles: its tables ``lss_<gpu>_<LLM>_tp<n>_*``. Each run is replayed twice: with what the tables alone say; and with
three numbers that no table holds (:class:`kvpolicy.simulator.hardware.table_times.Engine`: the engine's own time per
step, more of it per step with a chunk, unevenness of contexts), calibrated on the requests that had their last token
by second S, and judged on those alone that were first scheduled after it. No request was preempted in these runs:
this judges step times and queueing, not preemptions. Inter-token times are means per request, as the runs hold no
others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

import kvpolicy
from kvpolicy.arrays import Flags, Floats
from kvpolicy.hardware.engine_time import EngineTime
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.table_times import HardwareModel, TableTimes
from kvpolicy.simulator.requests_csv import MeasuredRun, measured_run
from kvpolicy.simulator.sinks import MemorySink

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of the LLMs that runs are known of, as their config.json has them."""
BARS: Mapping[str, tuple[float, float]] = {"e2e_s": (0.03, 0.01), "ttft_s": (0.08, 0.03)}
"""Largest error of the mean: at least, aimed at."""
BLOCK_SIZE = 16
DEVICE_BLOCKS = 30_000
"""Not recorded with the runs. No request was preempted, and none is with that many blocks."""
LINK = "pcie5"
"""Never used: nothing is preempted."""
CALIBRATE_UNTIL_S = 30.0
FEWEST = 5
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

    @property
    def prefill_s(self) -> Floats:
        """From the first step that computed some of it to its first token."""
        return self.ttft_s - self.queue_s


def as_measured(run: MeasuredRun, at_s: Floats, running: Floats, waiting: Floats) -> Replay:
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
    )


def replay_run(run: MeasuredRun, times: TableTimes, server: Server) -> Replay:
    """The run's requests through the built-in simulator. Raises ValueError where it preempts."""
    done = Builtin().run(run.workload, load_policy("always-recompute"), server, times, sink=MemorySink())
    if sum(done.summary.preemptions.values()) or done.trace is None:
        raise ValueError(f"{run.workload.name}: preempted with {server.device_blocks} blocks: give it more")
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
    return replace(as_measured(simulated, at_s, running, waiting), beyond=beyond)


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
    """When each request was first scheduled: first come, first served, without preemptions."""
    admitted = np.searchsorted(arrival, when_s, side="right") - waiting
    step = np.searchsorted(np.maximum.accumulate(admitted), np.arange(1, len(arrival) + 1), side="left")
    return np.maximum(when_s[step], arrival)


# ---- what no table holds ----


def calibrate(
    run: MeasuredRun, model: HardwareModel, server: Server, until_s: float, tell: Callable[[str], None]
) -> TableTimes:
    """The three numbers under which prefills and inter-token times of requests done by then come out nearest."""
    chosen = run.last_token_s <= until_s
    measured_replay = as_measured(run, *(np.empty(0),) * 3)
    source = f"calibrated on {chosen.sum()} requests of {run.workload.source} done by {until_s:g} s"

    def times_of(numbers: Floats) -> TableTimes:
        step_s, chunk_step_s, uneven = numbers.tolist()
        return TableTimes(replace(model, engine=EngineTime(step_s, chunk_step_s, uneven, source)))

    def missed(numbers: Floats) -> Floats:
        simulated_replay = replay_run(run, times_of(numbers), server)
        itl = np.log(simulated_replay.itl_s[chosen] / measured_replay.itl_s[chosen]) / np.sqrt(chosen.sum())
        prefill = np.log(simulated_replay.prefill_s[chosen].mean() / measured_replay.prefill_s[chosen].mean())
        return np.append(itl, prefill)

    best = gauss_newton(missed, np.zeros(len(NUDGES)), np.array(NUDGES))
    tell(f"  {times_of(best).model.engine}")
    return times_of(best)


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
    lines: dict[str, Any] = {"requests": float(chosen.sum()), "steps beyond the tables": replay.beyond}
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


def fidelity_e2e(e2e: Path, profiles: Path, until_s: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every run in ``e2e``, judged; those without tables of their GPU and LLM are reported as such."""
    metas = sorted(e2e.glob("*_meta.json"))
    if not metas:
        raise ValueError(f"{e2e}: holds no *_meta.json")
    return [_of_run(meta, profiles, until_s, tell) for meta in metas]


def _of_run(meta: Path, profiles: Path, until_s: float, tell: Callable[[str], None]) -> dict[str, Any]:
    name = meta.name.removesuffix("_meta.json")
    meta_values = json.loads(meta.read_text(encoding="utf-8"))
    settings = meta_values["engine_kwargs"]
    ranks = int(settings["tensor_parallel_size"])
    tables = sorted(profiles.glob(f"lss_{name}_tp{ranks}_*"))
    if not tables or meta_values["model"] not in CONFIGS or int(settings.get("data_parallel_size", 1)) != 1:
        reason = f"no tables lss_{name}_tp{ranks}_* there" if not tables else "no known shape, or several engines"
        tell(f"{name}: not judged: {reason}")
        return {"run": name, "judged": False, "reason": reason}
    run = measured_run(meta.with_name(f"{name}_requests.csv.gz"))
    done, later = int((run.last_token_s <= until_s).sum()), run.scheduled_s > until_s
    if done < FEWEST or not later.any():
        raise ValueError(
            f"--calibrate-until {until_s:g}: {done} requests of {name} were done by then, {FEWEST} are needed, and "
            f"{later.sum()} first scheduled after it, 1 is needed"
        )
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.from_config(CONFIGS[meta_values["model"]])
        model = kvpolicy.import_profile(tables, Path(folder), shape, ranks, name.partition("_")[0], LINK).model
    measured = as_measured(run, *_over_time(meta.with_name(f"{name}_timeseries.csv.gz")))
    server = server_of(settings, shape)
    tell(f"{name}: {len(run.workload)} requests, vLLM {meta_values['vllm_version']}, {len(tables)} tables")
    plain = replay_run(run, TableTimes(model), server)
    fitted = calibrate(run, model, server, until_s, tell)
    everyone = np.ones(len(run.workload), np.bool_)
    refitted_replay = replay_run(run, fitted, server)
    results = {
        "tables alone, all requests": judge(measured, plain, everyone),
        "tables alone, scheduler in step with the device, all requests": judge(
            measured, replay_run(run, TableTimes(model), replace(server, asynchronous=False)), everyone
        ),
        f"tables alone, requests scheduled after {until_s:g} s": judge(measured, plain, later),
        f"calibrated until {until_s:g} s, requests scheduled after": judge(measured, refitted_replay, later),
    }
    over_time = {
        "at_s": measured.at_s.tolist(),
        **{f"{word} {queue}": values.tolist() for queue in ("running", "waiting") for word, values in (
            ("measured", getattr(measured, queue)), ("tables alone", _sampled(plain, queue, measured.at_s)),
            ("calibrated", _sampled(refitted_replay, queue, measured.at_s)))},
    }  # fmt: skip
    return {"run": name, "judged": True, "engine": asdict(fitted.model.engine), "results": results,
            "over_time": over_time}  # fmt: skip


def server_of(settings: Mapping[str, Any], shape: ModelShape) -> Server:
    """As the run's engine. Its scheduler ran ahead of the device: see what comes out where it does not."""
    return Server(
        block_size=BLOCK_SIZE,
        block_bytes=int(shape.kv_bytes_per_token * BLOCK_SIZE),
        device_blocks=DEVICE_BLOCKS,
        host_blocks=0,
        token_budget=int(settings["max_num_batched_tokens"]),
        max_running=int(settings["max_num_seqs"]),
        prefix_caching=False,
        asynchronous=True,
    )


def _over_time(file: Path) -> tuple[Floats, Floats, Floats]:
    table = pyarrow.csv.read_csv(file)
    at_s, running, waiting = (np.asarray(table[name].to_numpy(), np.float64) for name in ("t", "running", "waiting"))
    return at_s, running, waiting


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--e2e", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--calibrate-until", type=float, default=CALIBRATE_UNTIL_S, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--bars", action="store_true", help="end with status 1 where a bar is missed")
    options = parser.parse_args(arguments)
    try:
        runs = fidelity_e2e(options.e2e, options.profiles, options.calibrate_until, _tell)
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
    sys.exit(1 if missed_targets and options.bars else 0)


if __name__ == "__main__":
    main()
