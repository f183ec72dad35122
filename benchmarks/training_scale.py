"""Training on a million rows: seconds and peak memory, on two cores. Exits 1 where a bar is missed.

    python benchmarks/training_scale.py [--rows N] [--seconds S] [--gigabytes G] [--train | --draws]

Rows are made up under a known law, seeded: prefill of chunks beside decodes, with tiles, kinks and 3% noise.
Without ``--train`` it is the regressor for tables of operator times that is timed, on rows in memory; `kvpolicy train`
does not use that one. With ``--train`` it is ``kvpolicy.train`` itself, on a trace of N decision rows on disk: two
options, four repeats each; reading the trace and writing the model are timed too. With ``--draws`` nothing is timed:
it prints what cost models miss on held-out states by the number of states they were fitted to, for ``kvpolicy.train``
draws a bounded number of them; a law with a bend, which trees have to learn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kvpolicy
from kvpolicy.arrays import Floats, Ints
from kvpolicy.datasets.examples import sample_states
from kvpolicy.datasets.profiles import read_dataset
from kvpolicy.events import KINDS
from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.regression.estimator import BoostedRegressor
from kvpolicy.training import provenance_of, split
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.fit import fit, held_out_scores, misses_of
from kvpolicy.training.model_fit import MIN_EXAMPLES
from kvpolicy.training.pipeline import MAX_STATES

COLUMNS = ("tokens", "pairs", "kv_read", "running", "batch_tokens", "copied_bytes", "segments", "free_blocks")
PHYSICS = Ceilings(((LAUNCH,), ("tokens",), ("pairs",), ("kv_read",), ("copied_bytes",), ("segments",)))
REPEATS = 4
DRAWS = (500, 1000, 2000, 4000, 8000)
BEND = 0.4
"""Of the law that ``--draws`` makes costs up under: costs differ from the rooflines by up to exp(0.4)."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="the bar")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="the bar, of peak resident memory")
    parser.add_argument("--threads", type=int, default=1, help="two gain little, and lose much on a busy machine")
    parser.add_argument("--train", action="store_true", help="time kvpolicy.train on N rows of table decisions")
    parser.add_argument("--draws", action="store_true", help="held-out error by number of states, of N rows")
    options = parser.parse_args(arguments)
    if options.draws:
        return _draws(options.rows)
    if options.train:
        return _train(options.rows, options.seconds, options.gigabytes)
    x, seconds, _, groups = made_up(options.rows, np.random.default_rng(0))
    new, _, new_truth, _ = made_up(20_000, np.random.default_rng(1))
    began = time.perf_counter()
    regressor = BoostedRegressor(PHYSICS, COLUMNS, n_jobs=options.threads).fit(x, seconds, groups=groups)
    took_s = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    log_errors = np.abs(regressor.predict(new) / new_truth - 1)
    print(
        f"{options.rows} rows x {len(COLUMNS)} columns, threads {options.threads}: {took_s:.1f} s "
        f"(bar {options.seconds:g}), peak {peak_gb:.2f} GB (bar {options.gigabytes:g}, rows included), "
        f"{regressor.trees_} trees"
    )
    print(f"error on new rows against the law: mean {log_errors.mean():.1%}, p90 {np.quantile(log_errors, 0.9):.1%}")
    return int(took_s > options.seconds or peak_gb > options.gigabytes)


def _train(rows: int, max_s: float, max_gb: float) -> int:
    per_state = 2 * REPEATS
    if rows < MIN_EXAMPLES * per_state:
        print(f"--rows is {rows}, should be at least {MIN_EXAMPLES * per_state} with --train", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        trace, out = Path(folder) / "trace", Path(folder) / "model"
        # In a process of its own: what making the rows up takes is not what training takes.
        maker = multiprocessing.get_context("spawn").Process(target=_write_trace, args=(trace, rows // per_state))
        maker.start()
        maker.join()
        began = time.perf_counter()
        busy_s = time.process_time()
        report = kvpolicy.train([trace], out)
        took_s, busy_s = time.perf_counter() - began, time.process_time() - busy_s
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"kvpolicy.train, {rows // per_state * per_state} decision rows, {rows // per_state} states: {took_s:.1f} s "
        f"(bar {max_s:g}), processors busy for {busy_s:.1f} s, peak {peak_gb:.2f} GB (bar {max_gb:g}), "
        f"trees {dict(report.trees)}"
    )
    return int(took_s > max_s or peak_gb > max_gb)


def _write_trace(folder: Path, states: int, bend: float = 0.0) -> None:
    # The law of the tests is no part of the package.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.synthetic import CostLaw, make_trace

    make_trace(states=states, repeats=REPEATS, law=CostLaw(bend=bend)).write(folder)


def _draws(rows: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        _write_trace(Path(folder) / "trace", rows // (2 * REPEATS), BEND)
        dataset = read_dataset([Path(folder) / "trace"])
    every, held_out = split(dataset.states, 0)
    held_out = sample_states(held_out, MAX_STATES, random.Random(0))
    print(f"held-out error, |log(measured / predicted)|, +- 1 standard error; {len(held_out)} states held out")
    for count in [count for count in DRAWS if count < len(every)] + [len(every)]:
        training = sample_states(every, count, random.Random(count))
        sampled_dataset = replace(dataset, transfers=dataset.transfers_of(training))
        model = fit(
            FAMILIES["boosted"], training, sampled_dataset, provenance_of("boosted", sampled_dataset, training, None), 0
        ).model
        misses, scores = misses_of(model, held_out), held_out_scores(model, held_out)
        lines = []
        for kind in KINDS:
            sizes = np.abs([miss.model[kind] for miss in misses])
            lines.append(f"{kind} {sizes.mean():.3%} +- {sizes.std() / len(sizes) ** 0.5:.3%}")
        covered: Any = scores["coverage"]
        lines += [f"90% interval of {quantity} holds {covered[quantity]['holds']:.1%}" for quantity in covered]
        print(f"{count:>7} states: {', '.join(lines)}", flush=True)
    return 0


def made_up(rows: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats, Ints]:
    """(X, measured seconds, seconds by the law, groups): every point four times."""
    groups = np.arange(rows) // REPEATS
    points = int(groups[-1]) + 1
    tokens = np.exp(rng.uniform(np.log(16), np.log(65536), points)).round()
    running = rng.integers(0, 256, points).astype(np.float64)
    batch = running * rng.integers(50, 4000, points)
    pieces = 2.0 ** rng.integers(4, 8, points)
    copied = tokens * 131072.0
    columns = (tokens, tokens * (tokens + 1) / 2, batch, running, batch, copied, tokens / pieces * 32,
               rng.integers(0, 5000, points).astype(np.float64))  # fmt: skip
    x = np.column_stack(columns)
    kernel = np.where(tokens > 4096, 0.8, 1.0) * np.exp(0.3 * np.tanh(batch / 2e5))
    law = kernel * (
        2e-3 + 3e-5 * np.ceil(tokens / 128) * 128 + 2e-9 * x[:, 1] + 1e-8 * batch + copied / 2e10 + 2e-6 * x[:, 6]
    )
    measured = law[groups] * np.exp(rng.normal(0, 0.03, rows))
    return x[groups], measured, law[groups], groups


if __name__ == "__main__":
    sys.exit(main())
