"""Gather the raw numbers of live benches that documents name, in docs/bench-rounds.json.

    python tools/bench_rounds.py NAME=FILE ...

FILE: a `bench.json` of `kvpolicy bench chat`, `analytics` or `rate`. It replaces what docs/bench-rounds.json has under
NAME. Of every run of an arm its figures are kept, to six digits, and neither its single requests nor its counters; of
the bench its model, its load and the flags of its servers, without folders, its versions, how many tokens were compared
and where conversations differed, and p / d where it was measured. Runs of a chat have messages per second without
their first minute, in which a chat with pauses begins slowly and one without begins with all at once, or without their
warm-up where that is longer, and the mean time to first token by when a message was sent, in steps of 50 s.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.json_values import rounded
from kvpolicy.stats import Ratio, ratio_over_starts

RAW = Path(__file__).resolve().parent.parent / "docs" / "bench-rounds.json"
LEFT_OUT = ("rows", "lookups", "counters", "classes", "by_prompt_length")
"""Of a run: what it has of single requests, of seconds, and of parts of its requests."""
OF_PRICES = ("cell", "price_ratio", "prompt_token_s", "decoded_token_s", "batch", "lost_price_ratio")
Bench = Mapping[str, Any]
"""A bench as docs/bench-rounds.json holds it."""


def gathered(file: Path) -> dict[str, Any]:
    """Raises SystemExit, naming the file, for anything but a bench."""
    try:
        bench = json.loads(file.read_text())
        load = {name: value for name, value in bench["load"].items() if name != "workload"}
        workload = bench["load"].get("workload")
        return rounded(
            {
                "kind": bench["kind"],
                "versions": bench["versions"],
                "target": without_path(bench["target"]),
                "arms": [
                    {"name": arm["name"], "hints": arm["hints"], "flags": [*map(without_path, arm["command"][3:])]}
                    for arm in bench["arms"]
                ],
                "compared": compared(bench["comparisons"]),
                "workload": None if workload is None else without_folder(workload),
                "load": load,
                "prices": {name: value for name, value in (bench.get("prices") or {}).items() if name in OF_PRICES},
                "runs": [
                    {name: value for name, value in run.items() if name not in LEFT_OUT}
                    | later_rate(run)
                    | by_time(run)
                    for run in sorted(bench["runs"], key=lambda run: (run["round"], json.dumps(run["cell"])))
                ],
            }
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(f"{file}: should be the bench.json of a bench: {error}") from None


FIRST_S = 60.0
"""Of a run of a chat: its first minute."""


def later_rate(run: Mapping[str, Any]) -> dict[str, float]:
    """Messages per second of a run of a chat after its first minute, or after a longer warm-up; nothing of another
    run, or a shorter one."""
    from_s, until_s = max(FIRST_S, run.get("warmup_s", 0.0)), _until_s(run)
    if until_s <= from_s:
        return {}
    ends_s = [row["sent_s"] + row["e2e_s"] for row in run["rows"] if not row["error"]]
    return {"later_messages_s": sum(from_s < end_s <= until_s for end_s in ends_s) / (until_s - from_s)}


def _until_s(run: Mapping[str, Any]) -> float:
    """Seconds of a run of a chat until somebody was idle; 0 of another run. A run of an earlier version has no
    warm-up."""
    return float(run.get("until_s", run.get("steady_s", 0.0)))


STEP_S = 50.0
"""Of a run of a chat: how long messages are taken together."""


def by_time(run: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Mean time to first token of a chat's messages by when they were sent, None where none was; nothing of another
    run. The last step is up to 25 s longer or shorter, and has what was sent after it."""
    answered = [row for row in run["rows"] if not row["error"]] if "steady_s" in run else []
    if not answered:
        return {}
    steps: list[list[float]] = [[] for _ in range(max(1, round(_until_s(run) / STEP_S)))]
    for row in answered:
        steps[min(int(row["sent_s"] // STEP_S), len(steps) - 1)].append(row["ttft_s"])
    return {"ttft_s_by_50_s": [fmean(step) if step else None for step in steps]}


def without_path(word: str) -> str:
    """A word of a command, without the folders of the machine."""
    return word if "://" in word else re.sub(r"(?<![\w.])/[\w./-]*/", "", word)


def compared(comparisons: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens that arms were compared by, conversations that differ from some token on, and where they do. What follows
    there is not compared."""
    found = [(one, arm, tokens) for one in comparisons for arm, tokens in one["tokens"].items()]
    places = [{"arm": arm, "round": one["round"], **at} for one, arm, tokens in found for at in tokens["different"]]
    total = {"tokens": sum(tokens["tokens"] for _, _, tokens in found), "different": len(places)}
    return total | ({"places": places} if places else {})


def without_folder(workload: str) -> str:
    """A workload as text, its file without the folders of the machine."""
    source, options = workload.partition("?")[::2]
    kind, _, file = source.partition(":")
    return f"{kind}:{Path(file).name}?{options}" if file else workload


def ratio(bench: Bench, figure: str, arm: str, over: str = "vllm", **cell: Any) -> Ratio:
    """One arm over another in the runs of a cell, by round, or by start of the servers where there are several, as the
    bench prints it. ``figure``: such as ``ttft_s``, whose mean is meant, or ``messages_s``. Raises ValueError as
    :func:`by_round`, and where one arm has a round that the other has not: it would be a ratio of the rounds that both
    came through."""
    above, below = by_round(bench, figure, arm, **cell), by_round(bench, figure, over, **cell)
    if above.keys() != below.keys():
        raise ValueError(f"{figure}: {arm} was run in rounds {[*above]}, {over} in {[*below]}")
    starts = {run["round"]: run.get("start", 0) for run in bench["runs"] if run["arm"] == arm}
    return ratio_over_starts([*above.values()], [*below.values()], [starts[number] for number in above])


def by_round(bench: Bench, figure: str, arm: str, **cell: Any) -> dict[int, float]:
    """A figure of one arm in the runs of a cell, by round. ``figure``: as for :func:`ratio`, or ``longest_gap_s.p99``.
    ``cell``: as much of it as no other cell has. Raises ValueError for several cells or none, where the arm was run
    twice in a round, and where the figure is not known."""
    runs = [run for run in bench["runs"] if run["arm"] == arm and run["cell"].items() >= cell.items()]
    cells = [json.loads(text) for text in sorted({json.dumps(run["cell"], sort_keys=True) for run in runs})]
    if len(cells) != 1:
        raise ValueError(f"{arm}, {cell}: should be of one cell, and is of {cells}")
    name, _, part = figure.partition(".")
    values: dict[int, float] = {}
    for run in sorted(runs, key=lambda run: run["round"]):
        value = run[name][part or "mean"] if isinstance(run[name], dict) else run[name]
        if run["round"] in values or value is None:
            raise ValueError(f"{arm}, {cells[0]}, round {run['round']}: {figure} should be there once")
        values[run["round"]] = value
    return values


def mean(bench: Bench, figure: str, arm: str, **cell: Any) -> float:
    """Over rounds, as the bench prints it. Raises ValueError as :func:`by_round`."""
    return fmean(by_round(bench, figure, arm, **cell).values())


def together(*benches: Bench) -> Bench:
    """The runs of several chats with one workload and load by different seeds, their rounds numbered on: what
    :func:`ratio`, :func:`by_round` and :func:`mean` read. Rounds of one number have the same conversations of the
    workload, whatever the seed, so that :func:`ratio` counts them once, like rounds of one start. Not all benches need
    to have all arms. Raises ValueError for other loads, for one seed twice, and without a workload, where the seed
    draws the conversations."""
    seeds = [bench["load"]["load_seed"] for bench in benches]
    loads = [(bench["workload"], bench["load"] | {"load_seed": 0}) for bench in benches]
    if len({*seeds}) < len(seeds) or any(load != loads[0] for load in loads):
        raise ValueError(f"should be of one load by different seeds, and are by {seeds}")
    if loads[0][0] is None:
        raise ValueError("should be of a workload, whose conversations are the same by every seed")
    runs: list[dict[str, Any]] = []
    for bench in benches:
        before = 1 + max((run["round"] for run in runs), default=-1)
        runs += [{**run, "round": before + run["round"], "start": run["round"]} for run in bench["runs"]]
    return {"runs": runs}


def text_of(raw: Mapping[str, Bench]) -> str:
    """The JSON, a line for every run."""
    parts = []
    for name, bench in raw.items():
        head = json.dumps({key: value for key, value in bench.items() if key != "runs"})[:-1]
        runs = ",\n".join(json.dumps(run) for run in bench["runs"])
        parts.append(f'{json.dumps(name)}: {head}, "runs": [\n{runs}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="NAME=FILE")
    raw: dict[str, Any] = json.loads(RAW.read_text()) if RAW.exists() else {}
    for one in parser.parse_args().given:
        name, found, file = one.partition("=")
        if not found:
            parser.error(f"{one}: should be NAME=FILE")
        raw[name] = gathered(Path(file))
    RAW.write_text(text_of(raw))


if __name__ == "__main__":
    main()
