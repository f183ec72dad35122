"""What a few measurements are worth: a cost model carried to another link, GPU or LLM, error against their number.

    python benchmarks/transfer.py [--trace FROM --trace TO] [--profiles DIR] [--draws N] [--json FILE]

Traces: a model is trained on one trace and carried to the other, both ways (`kvpolicy calibrate`). Published tables
in DIR, recognised by their columns: seconds of a prefill's linear layers (LLMServingSim, Vidur) or of whole prefills
(Splitwise), a roofline fitted to one GPU's or LLM's table and carried to another's. Per number of measurements, mean
held-out |log(measured / predicted)| of the carried roofline (0: as it was, after what FLOPs tell), and of a roofline
fitted to the same few measurements alone. Draws spread over length; what is held out is never measured.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpolicy import training
from kvpolicy.cost.laws import Law
from kvpolicy.datasets.examples import Example, log_miss
from kvpolicy.features import FEATURES, Features
from kvpolicy.training.law_fits import fit_recompute
from kvpolicy.training.law_transfer import carry_law

SHIPPED = ("traces/cpu-llama-native", "traces/cpu-llama-simulated-link")
COUNTS = (1, 2, 4, 8, 16)
FLOOR_S = 1e-9
MIN_ROWS = 10
NOTHING = Features(*(0.0 for _ in FEATURES))


@dataclass(frozen=True)
class Place:
    """Measured prefills of one LLM on one GPU."""

    name: str
    examples: tuple[Example, ...]
    flops_per_token: float | None = None
    """Of what was timed, where the table names it; scales the roofline before anything is measured."""


@dataclass(frozen=True)
class Line:
    carry: str
    measured: int
    carried: Mapping[str, float]
    alone: Mapping[str, float] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", help="two traces; by default those that ship")
    parser.add_argument("--profiles", type=Path, help="a folder of published tables")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traces = options.trace or [Path(__file__).resolve().parents[1] / name for name in SHIPPED]
    if len(traces) != 2:
        parser.error("--trace: two traces are needed, or none")
    lines = [line for pair in permutations(traces) for line in between_traces(*pair, options.seed)]
    if options.profiles:
        pairs = list(table_pairs(options.profiles))
        for title, old, new in track(pairs, "published tables", console=Console(stderr=True)):
            lines += between_tables(title, old, new, options.draws, options.seed)
    Console(width=200).print(table_of(lines))
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


# ---- traces ----


def between_traces(old: Path, new: Path, seed: int) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as scratch:
        training.train([old], Path(scratch) / "old", seed=seed)
        report = training.calibrate(Path(scratch) / "old", [new], Path(scratch) / "new", seed=seed)
    for error_row in report.errors:
        yield Line(f"trace {old.name} -> {new.name}", error_row.states, dict(error_row.mean_error), None)


# ---- published tables ----


def between_tables(title: str, old: Place, new: Place, draws: int, seed: int) -> Iterator[Line]:
    rng = random.Random(f"{title} {seed}")
    law = fit_recompute(old.examples, FLOOR_S)
    if old.flops_per_token and new.flops_per_token:
        by = new.flops_per_token / old.flops_per_token
        law = replace(law, s_per_token=law.s_per_token * by, weight_s=law.weight_s * by)
    yield Line(title, 0, {"prefill": error(law, new.examples)}, None)
    ordered = sorted(new.examples, key=lambda one: one.x.recomputed_tokens)
    measurable, halves = ordered[::2], ordered[1::2]
    for count in (count for count in COUNTS if count <= len(measurable)):
        carried, alone = [], []
        for _ in range(draws):
            few = sample_examples(measurable, count, rng)
            carried.append(error(carry_law(law, few, FLOOR_S), halves))
            alone.append(error(fit_recompute(few, FLOOR_S), halves))
        yield Line(title, count, {"prefill": fmean(carried)}, {"prefill": fmean(alone)})


def error(law: Law, examples: Sequence[Example]) -> float:
    return fmean(abs(log_miss(example.engine_s, sum(law.parts(example.x)), FLOOR_S)) for example in examples)


def sample_examples(ordered: Sequence[Example], count: int, rng: random.Random) -> list[Example]:
    edges = [round(i * len(ordered) / count) for i in range(count + 1)]
    return [rng.choice(ordered[low:high]) for low, high in pairwise(edges)]


def prefill(tokens: float, seconds: float, pairs: float = 0.0) -> Example:
    """Nobody else runs: the whole time is the prefill's."""
    return Example(NOTHING._replace(computed_tokens=tokens, recomputed_tokens=tokens, recomputed_pairs=pairs), seconds)


def table_pairs(folder: Path) -> Iterator[tuple[str, Place, Place]]:
    """Every ordered pair of comparable places, tables of one layout together."""
    examples_by_place: dict[str, list[Place]] = defaultdict(list)
    for file in sorted(folder.glob("*.csv*")):
        table = pa_csv.read_csv(file)
        for columns, layout, read in LAYOUTS:
            if columns <= set(table.column_names):
                examples_by_place[layout] += read(table, file.name.removesuffix(".gz").removesuffix(".csv"))
    for layout, places in examples_by_place.items():
        large_places = [place for place in places if len(place.examples) >= MIN_ROWS]
        for old, new in permutations(large_places, 2):
            yield f"{layout}: {old.name} -> {new.name}", old, new


def lss_dense(table: pa.Table, name: str) -> list[Place]:
    """LLMServingSim: one layer's matrices by tokens, microseconds."""
    operators = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    return [
        Place(
            name,
            _summed(zip(*(table[c].to_pylist() for c in ("layer", "tokens", "time_us")), strict=True), operators, 1e-6),
        )
    ]


def lss_layers(table: pa.Table, name: str) -> list[Place]:
    """The older layout: nanoseconds, matrices one by one."""
    operators = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    rows = zip(*(table[c].to_pylist() for c in ("layer_name", "input", "latency(ns)")), strict=True)
    # Every 16th length: 2048 neighbours add no information.
    return [Place(name, _summed((row for row in rows if row[1] % 16 == 0), operators, 1e-9))]


def _summed(rows: Any, operators: set[str], unit_s: float) -> tuple[Example, ...]:
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    for layer, tokens, took in rows:
        if layer in operators:
            seconds[tokens][layer] = took * unit_s
    return tuple(
        prefill(tokens, sum(layer_key.values()))
        for tokens, layer_key in sorted(seconds.items())
        if len(layer_key) == len(operators)
    )


VIDUR = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")


def vidur(table: pa.Table, name: str) -> list[Place]:
    """One layer's matrices by tokens, milliseconds; one GPU's share of a tensor-parallel model."""
    examples_by_place: dict[tuple[str, int], dict[int, Example]] = defaultdict(dict)
    flops: dict[tuple[str, int], float] = {}
    for row in table.to_pylist():
        ranks, times = row["num_tensor_parallel_workers"], [row[column] for column in VIDUR]
        if ranks not in (1, 4) or row["num_tokens"] > 4096 or any(not time or time != time for time in times):
            continue
        key = row["model"].split("/")[-1], ranks
        head = row["n_embd"] // row["n_head"]
        attention = row["n_embd"] * head * 2 * (row["n_head"] + row["n_kv_head"])
        flops[key] = 2.0 * (attention + 3 * row["n_embd"] * row["n_expanded_embd"]) / ranks
        examples_by_place[key][row["num_tokens"]] = prefill(row["num_tokens"], sum(times) / 1e3)
    return [
        Place(f"{model} tp{ranks}", tuple(examples.values()), flops[model, ranks])
        for (model, ranks), examples in sorted(examples_by_place.items())
        if model in ("Llama-2-7b-hf", "Meta-Llama-3-70B", "Qwen-72B")
    ]


SPLITWISE_PARAMETERS = {"llama2-70b": 69.0e9, "bloom-176b": 176.2e9}
"""Published sizes; what is not in the table decides nothing but where the roofline starts."""


def splitwise(table: pa.Table, name: str) -> list[Place]:
    """Whole prefills by prompt and batch, milliseconds."""
    seconds_by_place: dict[tuple[str, str, int], dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in table.to_pylist():
        where = row["model"], row["hardware"], row["tensor_parallel"]
        seconds_by_place[where][row["prompt_size"], row["batch_size"]].append(row["prompt_time"] / 1e3)
    return [
        Place(
            f"{model} {hardware} tp{ranks}",
            tuple(
                prefill(prompt * batch, median(seconds), batch * prompt * (prompt + 1) / 2)
                for (prompt, batch), seconds in sorted(sizes.items())
            ),
            2 * SPLITWISE_PARAMETERS[model] / ranks if model in SPLITWISE_PARAMETERS else None,
        )
        for (model, hardware, ranks), sizes in sorted(seconds_by_place.items())
    ]


LAYOUTS: tuple[tuple[set[str], str, Callable[[pa.Table, str], list[Place]]], ...] = (
    ({"layer", "tokens", "time_us"}, "LLMServingSim", lss_dense),
    ({"layer_name", "input", "latency(ns)"}, "LLMServingSim", lss_layers),
    ({"model", "num_tokens", "num_tensor_parallel_workers", *VIDUR}, "Vidur", vidur),
    ({"model", "hardware", "prompt_size", "batch_size", "tensor_parallel", "prompt_time"}, "Splitwise", splitwise),
)


# ---- showing ----


def table_of(lines: Sequence[Line]) -> Table:
    """A row per pair and option; a column per number of measurements, in brackets the roofline fitted to them alone."""
    counts = sorted({line.measured for line in lines})
    table = Table(title="held-out error of the carried model (of one fitted to these measurements alone)")
    table.add_column("carried", overflow="fold")
    for count in counts:
        table.add_column(f"{count} measured", justify="right")
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for line in lines:
        for name, value in line.carried.items():
            beside = f" ({line.alone[name]:.0%})" if line.alone else ""
            rows[line.carry, name][line.measured] = f"{value:.1%}{beside}"
    for (carry, name), cells in rows.items():
        table.add_row(f"{carry}, {name}", *(cells.get(count, "") for count in counts))
    return table


if __name__ == "__main__":
    main()
