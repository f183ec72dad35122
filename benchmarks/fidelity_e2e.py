"""Measured vLLM runs replayed through the built-in simulator, step times from tables of the same GPU and LLM.

    python benchmarks/fidelity_e2e.py --e2e DIR --profiles DIR [--calibrate-on N] [--json FILE]

DIR of runs: LLMServingSim's ``*_meta.json`` with ``*_requests.csv.gz`` and ``*_timeseries.csv.gz`` beside it; DIR of
profiles: its tables ``lss_<gpu>_<LLM>_tp<n>_*``. Each run is replayed twice: with what the tables alone say; and with
three numbers that no table holds (:class:`kvpolicy.simulator.hardware.Engine`: the engine's own time per step, more
of it per step with a chunk, unevenness of contexts), calibrated on the first N requests and judged on the others alone.
The runs preempted nobody: this judges step times and queueing, not preemptions. Inter-token times are means per
request, as the runs hold no others.
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
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

import kvpolicy
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server, Times
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware import Engine, HardwareModel, TableTimes
from kvpolicy.simulator.requests_csv import MeasuredRun, measured_run
from kvpolicy.simulator.sinks import MemorySink

Floats = NDArray[np.float64]

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
"""The runs do not tell; nothing was preempted, and neither is anything with so many."""
LINK = "pcie5"
"""Never used: nothing is preempted."""
CALIBRATE_ON = 100
TRIES = 60


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


def replayed(run: MeasuredRun, times: Times, server: Server) -> Replay:
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
    return as_measured(
        replace(run, scheduled_s=scheduled_s, first_token_s=first, last_token_s=last), at_s, running, waiting
    )


def _when_scheduled(start_s: Floats, end_s: Floats) -> Floats:
    """While the step before ran, as the scheduler runs ahead of the device; at once where that had ended."""
    before_s = np.concatenate([start_s[:1], start_s[:-1]])
    idle = np.concatenate([[True], start_s[1:] > end_s[:-1]])
    return np.where(idle, start_s, before_s)


def _scheduled_s(arrival: Floats, when_s: Floats, waiting: Floats) -> Floats:
    """When each request was first scheduled: first come, first served, and nobody goes back to waiting."""
    admitted = np.searchsorted(arrival, when_s, side="right") - waiting
    step = np.searchsorted(np.maximum.accumulate(admitted), np.arange(1, len(arrival) + 1), side="left")
    return np.maximum(when_s[step], arrival)


# ---- what no table holds ----


def calibrated(
    run: MeasuredRun, model: HardwareModel, server: Server, count: int, tell: Callable[[str], None]
) -> TableTimes:
    """The three numbers under which the first ``count`` requests' prefills and inter-token times come out nearest."""
    wanted = as_measured(run, *(np.empty(0),) * 3)
    scale = np.array([1e-3, 5e-3, 0.1])

    def engine_of(x: Floats) -> Engine:
        source = f"calibrated on the first {count} requests of {run.workload.source}"
        return Engine(*(float(one) for one in np.abs(x) * scale), source)

    def missed(x: Floats) -> float:
        found = replayed(run, TableTimes(replace(model, engine=engine_of(x))), server)
        itl = np.log(found.itl_s[:count] / wanted.itl_s[:count])
        prefill = np.log(found.prefill_s()[:count].mean() / wanted.prefill_s()[:count].mean())
        return float(np.abs(itl).mean() + abs(itl.mean()) + abs(prefill))

    best = minimize(missed, np.ones(3) * 0.3, method="Nelder-Mead", options={"maxfev": TRIES, "xatol": 0.02})
    engine = engine_of(np.asarray(best.x))
    tell(f"  calibrated: {engine}")
    return TableTimes(replace(model, engine=engine))


# ---- judging ----


def judged(measured: Replay, found: Replay, chosen: slice) -> dict[str, Any]:
    """Per quantity measured, simulated and error; of requests those ``chosen``, of the whole run the rest."""
    lines: dict[str, Any] = {}
    for name in ("queue_s", "ttft_s", "itl_s", "e2e_s"):
        real, simulated = (getattr(one, name)[chosen] for one in (measured, found))
        for word, of in (("mean", np.mean), ("p50", np.median), ("p99", lambda x: np.quantile(x, 0.99))):
            lines[f"{name} {word}"] = _line(float(of(real)), float(of(simulated)))
    for name in ("makespan_s", "output_tok_s"):
        lines[name] = _line(getattr(measured, name), getattr(found, name))
    for name in ("running", "waiting"):
        real = getattr(measured, name)
        simulated = _sampled(found, name, measured.at_s)
        lines[f"{name}, mean over time"] = _line(float(real.mean()), float(simulated.mean()))
        lines[f"{name}, largest difference"] = float(np.abs(real - simulated).max())
    return lines


def _line(measured: float, simulated: float) -> dict[str, float]:
    return {"measured": measured, "simulated": simulated, "error": simulated / measured - 1}


def _sampled(found: Replay, name: str, at_s: Floats) -> Floats:
    """At those times, the last step's; nobody after the last token."""
    step = np.searchsorted(found.at_s, at_s, side="right") - 1
    values = getattr(found, name)[np.maximum(step, 0)]
    return np.where((step < 0) | (at_s > found.makespan_s), 0.0, values)


def missed_bars(lines: Mapping[str, Any]) -> list[str]:
    found = []
    for name, (bar, _) in BARS.items():
        error = abs(lines[f"{name} mean"]["error"])
        if error > bar:
            found.append(f"mean {name}: {error:.1%}, at most {bar:.0%} is wanted")
    return found


def fidelity_e2e(e2e: Path, profiles: Path, calibrate_on: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every run in ``e2e``, judged; those without tables of their GPU and LLM are told as such."""
    metas = sorted(e2e.glob("*_meta.json"))
    if not metas:
        raise ValueError(f"{e2e}: holds no *_meta.json")
    return [_of_run(meta, profiles, calibrate_on, tell) for meta in metas]


def _of_run(meta: Path, profiles: Path, calibrate_on: int, tell: Callable[[str], None]) -> dict[str, Any]:
    name = meta.name.removesuffix("_meta.json")
    told = json.loads(meta.read_text(encoding="utf-8"))
    settings = told["engine_kwargs"]
    ranks = int(settings["tensor_parallel_size"])
    tables = sorted(profiles.glob(f"lss_{name}_tp{ranks}_*"))
    if not tables or told["model"] not in CONFIGS or int(settings.get("data_parallel_size", 1)) != 1:
        reason = f"no tables lss_{name}_tp{ranks}_* there" if not tables else "no known shape, or several engines"
        tell(f"{name}: not judged: {reason}")
        return {"run": name, "judged": False, "reason": reason}
    run = measured_run(meta.with_name(f"{name}_requests.csv.gz"))
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.from_config(CONFIGS[told["model"]])
        model = kvpolicy.import_profile(tables, Path(folder), shape, ranks, name.partition("_")[0], LINK).model
    measured = as_measured(run, *_over_time(meta.with_name(f"{name}_timeseries.csv.gz")))
    server = server_of(settings, shape)
    tell(f"{name}: {len(run.workload)} requests, vLLM {told['vllm_version']}, {len(tables)} tables")
    plain = replayed(run, TableTimes(model), server)
    fitted = calibrated(run, model, server, calibrate_on, tell)
    later = slice(calibrate_on, None)
    again = replayed(run, fitted, server)
    results = {
        "tables alone, all requests": judged(measured, plain, slice(None)),
        f"tables alone, requests from {calibrate_on} on": judged(measured, plain, later),
        f"calibrated on the {calibrate_on} before, requests from {calibrate_on} on": judged(measured, again, later),
    }
    over_time = {
        "at_s": measured.at_s.tolist(),
        **{f"{word} {one}": values.tolist() for one in ("running", "waiting") for word, values in (
            ("measured", getattr(measured, one)), ("tables alone", _sampled(plain, one, measured.at_s)),
            ("calibrated", _sampled(again, one, measured.at_s)))},
    }  # fmt: skip
    return {"run": name, "judged": True, "engine": asdict(fitted.model.engine), "results": results,
            "over_time": over_time}  # fmt: skip


def server_of(settings: Mapping[str, Any], shape: ModelShape) -> Server:
    """As the run's engine; its scheduler ran ahead of the device, which is vLLM's default since 0.14."""
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


def show(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    for one in found:
        for title, lines in one.get("results", {}).items():
            table = Table("", "measured", "simulated", "error", "bar", title=f"{one['run']}: {title}")
            for name, line in lines.items():
                bar = BARS.get(name.removesuffix(" mean"), None) if name.endswith(" mean") else None
                if isinstance(line, float):
                    table.add_row(name, "", f"{line:.0f}", "", "")
                    continue
                wanted = "" if bar is None else f"{bar[0]:.0%}, aimed {bar[1]:.0%}"
                table.add_row(
                    name, f"{line['measured']:.4g}", f"{line['simulated']:.4g}", f"{line['error']:+.1%}", wanted
                )
            console.print(table)
        over = one.get("over_time")
        if over:
            table = Table(*over, title=f"{one['run']}: over time")
            for row in list(zip(*over.values(), strict=True))[::5]:
                table.add_row(*(f"{value:.0f}" for value in row))
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--e2e", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, required=True)
    parser.add_argument("--calibrate-on", type=int, default=CALIBRATE_ON, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--bars", action="store_true", help="end with status 1 where a bar is missed")
    given = parser.parse_args()
    try:
        found = fidelity_e2e(given.e2e, given.profiles, given.calibrate_on, lambda text: print(text, file=sys.stderr))
    except (ValueError, OSError) as error:
        parser.exit(2, f"fidelity_e2e.py: error: {error}\n")
    show(found, Console(width=140))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    missed = [f"{one['run']}: {title}: {text}" for one in found for title, lines in one.get("results", {}).items()
              for text in missed_bars(lines)]  # fmt: skip
    for text in missed:
        print(f"bar missed: {text}")
    sys.exit(1 if missed and given.bars else 0)


if __name__ == "__main__":
    main()
