"""Write the tables of docs/demo.md from docs/demo-runs.json: `python tools/demo_runs.py [--gather FOLDER ...]`.

FOLDER: where `kvpolicy demo --out FOLDER` wrote demo.json, or that file. Each is a run of the whole demo. `--gather`
replaces the runs in docs/demo-runs.json by these, in this order, and keeps what the tables need: every arm's figures by
round, seconds, load averages, what a preemption cost, and versions; no name and no path of the machine. What stands
between the comments `<!-- demo runs: TABLE -->` and `<!-- demo runs: end -->` is redrawn; TABLE is `repeats` or
`pooled`. With `--show FOLDER ...` the tables of these runs are printed, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.headroom import share_text
from kvpolicy.stats import Ratio, geometric_means, student_ratio
from kvpolicy.study.demo_report import DEMO_JSON, TITLES, WORDS

ROOT = Path(__file__).resolve().parent.parent
PAGE, RAW = ROOT / "docs" / "demo.md", ROOT / "docs" / "demo-runs.json"
END = "<!-- demo runs: end -->"
BLOCK = re.compile(rf"<!-- demo runs: (?P<table>\w+) -->\n.*?{END}", re.DOTALL)
MIN_RUNS = 5
"""From so many runs on, an interval is over runs; before, over the rounds of all runs."""
DIGITS = 6
BOUND = ("tax", "recompute_token_s", "decode_token_s", "price_ratio", "bound")
Run = Mapping[str, Any]
"""A run as docs/demo-runs.json holds it."""


# ---- raw numbers ----


def gathered(folder: Path) -> dict[str, Any]:
    """What the tables need of a demo's folder. Raises SystemExit, naming the file, for anything but a live demo."""
    file = folder / DEMO_JSON if folder.is_dir() else folder
    try:
        demo = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: should be the {DEMO_JSON} of a demo: {error}") from None
    if not isinstance(demo, dict) or demo.get("kind") != "live":
        raise SystemExit(f"{file}: kind should be live, as in the {DEMO_JSON} of a demo on an engine")
    headlines = {entry["name"].partition(":")[0]: entry["name"] for entry in demo["headline"]}
    machine = demo["machine"]
    return rounded(
        {
            "kvpolicy": version("kvpolicy"),
            "engine": engine_of(file.parent),
            "cpus": machine["cpus"],
            "load": [machine["load_before"], machine["load_after"]],
            "seconds": demo["seconds"],
            "capacity_per_s": demo["capacity_per_s"],
            "exact": demo["exact"],
            "tokens": demo["exactness"]["tokens"],
            "bound": {name: demo["bound"][name] for name in BOUND},
            "scenarios": {
                name: {
                    "served": one["served"],
                    "headline": headline_of(headlines[name], one["figures"]),
                    "figures": one["figures"],
                    "preemptions": {arm: values["preemptions"] for arm, values in one["policies"].items()},
                }
                for name, one in demo["scenarios"].items()
            },
        }
    )


def headline_of(name: str, figures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The figure that a headline is about: the one with the longest words in its name."""
    own = next(iter(figures.values()))
    return max((figure for figure in own if WORDS[figure] in name), key=lambda figure: len(WORDS[figure]))


def engine_of(folder: Path) -> str | None:
    """Engine and version, by the header of a trace that the demo recorded; None where it left none."""
    headers = sorted(folder.glob("traces/*/core-*/header.json"))
    return json.loads(headers[0].read_text())["engine"] if headers else None


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [*map(rounded, value)] if isinstance(value, list) else value


def text_of(runs: Sequence[Run]) -> str:
    """The JSON, a line for every load of a run."""
    lines = []
    for run in runs:
        loads = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in run["scenarios"].items())
        rest = json.dumps({name: value for name, value in run.items() if name != "scenarios"})
        lines.append(f'{rest[:-1]}, "scenarios": {{\n{loads}}}}}')
    return '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"


def refuse_unlike(runs: Sequence[Run]) -> None:
    """Raises SystemExit where a run has other loads, arms, figures or numbers of requests than the first one, or its
    tokens were not exact."""
    for number, run in enumerate(runs, 1):
        if not run["exact"]:
            raise SystemExit(f"run {number}: tokens were not those of unmodified vLLM, so that no figure of it counts")
        for load, shape in shape_of(runs[0]).items():
            if shape_of(run).get(load) != shape:
                raise SystemExit(f"run {number}: {load} should have the requests, arms and figures of run 1's: {shape}")


def shape_of(run: Run) -> dict[str, Any]:
    return {
        name: (one["served"].partition(",")[0], {arm: [*figures] for arm, figures in one["figures"].items()})
        for name, one in run["scenarios"].items()
    }


# ---- ratios ----


def ratio_of(run: Run, load: str, figure: str, arm: str) -> Ratio:
    """An arm over stock vLLM, the first arm, over the rounds of one run."""
    return pooled([run], load, figure, arm)


def pooled(runs: Sequence[Run], load: str, figure: str, arm: str) -> Ratio:
    """Over all runs: of a run its geometric mean over rounds counts once, or, where there are fewer than
    :data:`MIN_RUNS`, every round does."""
    values, stock, groups = [], [], []
    for number, run in enumerate(runs):
        figures = run["scenarios"][load]["figures"]
        own, other = figures[arm][figure], figures[next(iter(figures))][figure]
        values, stock, groups = [*values, *own], [*stock, *other], [*groups, *[number] * len(own)]
    if len(runs) >= MIN_RUNS:
        return student_ratio(geometric_means(values, groups), geometric_means(stock, groups))
    return student_ratio(values, stock)


def shown(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


# ---- tables ----


def repeats(runs: Sequence[Run]) -> list[str]:
    """A row a run: its headlines, what preemptions cost, its seconds and the load of the machine."""
    judged = [(name, one["headline"], [*one["figures"]][-1]) for name, one in runs[0]["scenarios"].items()]
    heads = ["run", *(f"{WORDS[figure]}, {arm} over vllm" for _, figure, arm in judged)]
    heads += ["capacity, requests/s", "p / d; bound", "seconds", "load average, before and after"]
    rows = []
    for number, run in enumerate(runs, 1):
        bound = run["bound"]
        known = None not in (bound["price_ratio"], bound["bound"])
        rows.append(
            [
                str(number),
                *(shown(ratio_of(run, *one)) for one in judged),
                f"{run['capacity_per_s']:.2f}",
                f"{bound['price_ratio']:.2f}; {share_text(bound['bound'])}" if known else "-",
                f"{run['seconds']['in all']:,.0f}",
                ", ".join(f"{load:.1f}" for load in run["load"]),
            ]
        )
    return [*table(heads, rows), "", f"Raw numbers are in [{RAW.name}]({RAW.name}):", f"{versions_of(runs)}."]


def versions_of(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(f"kvpolicy {run['kvpolicy']} on {run['engine'] or 'vLLM'}" for run in runs)
    tokens = sum(run["tokens"] for run in runs)
    return f"{' and '.join(names)}, {tokens:,} tokens in all, which were those of unmodified vLLM"


def pooled_tables(runs: Sequence[Run]) -> list[str]:
    """One table a load: stock vLLM's means, and the ratios of the other arms over all runs."""
    lines: list[str] = []
    for load, first in runs[0]["scenarios"].items():
        stock, *others = first["figures"]
        figures = sorted(first["figures"][stock], key=lambda figure: figure != first["headline"])
        rows = [[stock, *(number_text(fmean(all_rounds(runs, load, stock, figure))) for figure in figures)]]
        rows += [[arm, *(shown(pooled(runs, load, figure, arm)) for figure in figures)] for arm in others]
        lines += [f"{load[0].upper()}{load[1:]}:", "", *table(["arm", *(TITLES[f] for f in figures)], rows), ""]
    return [*lines, how(runs)]


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def how(runs: Sequence[Run]) -> str:
    rounds = sum(len(all_rounds([run], *first_of(run))) for run in runs)
    unit = (
        f"the {len(runs)} runs, of which each counts once, by its geometric mean over rounds"
        if len(runs) >= MIN_RUNS
        else f"all {rounds} rounds of the runs above"
    )
    return (
        "First row: means. Below: ratios over it, geometric means with Student's 95% interval over\n"
        f"{unit}. Each interval is by itself."
    )


def first_of(run: Run) -> tuple[str, str, str]:
    load, one = next(iter(run["scenarios"].items()))
    return load, next(iter(one["figures"])), one["headline"]


def all_rounds(runs: Iterable[Run], load: str, arm: str, figure: str) -> list[float]:
    return [value for run in runs for value in run["scenarios"][load]["figures"][arm][figure]]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["--"] * len(heads), *rows]]


TABLES: Mapping[str, Callable[[Sequence[Run]], list[str]]] = {"repeats": repeats, "pooled": pooled_tables}


def drawn(page: str, runs: Sequence[Run]) -> str:
    """The page with its tables anew; without runs they are empty. Raises SystemExit for a comment that names none of
    :data:`TABLES` or has no end."""

    def block(found: re.Match[str]) -> str:
        name = found["table"]
        if name not in TABLES:
            raise SystemExit(f"{PAGE.name}: `demo runs: {name}` should be one of {', '.join(TABLES)}")
        lines = ["", *TABLES[name](runs), ""] if runs else []
        return "\n".join([f"<!-- demo runs: {name} -->", *lines, END])

    if len(BLOCK.findall(page)) != page.count(END) or 2 * page.count(END) != page.count("<!-- demo runs:"):
        raise SystemExit(f"{PAGE.name}: every `<!-- demo runs: TABLE -->` should be followed by `{END}`")
    return BLOCK.sub(block, page)


def stored() -> list[Run]:
    """Runs of docs/demo-runs.json; none where there is no such file yet."""
    return list(json.loads(RAW.read_text())["runs"]) if RAW.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    for flag, what in (
        ("--gather", "store these runs in place of those that are there"),
        ("--show", "print them only"),
    ):
        parser.add_argument(flag, nargs="+", type=Path, metavar="FOLDER", default=[], help=f"folders of demos: {what}")
    given = parser.parse_args()
    runs = [gathered(folder) for folder in given.gather or given.show] or stored()
    if runs:
        refuse_unlike(runs)
    if given.show:
        print("\n".join(line for draw in TABLES.values() for line in [*draw(runs), ""]))
        return
    page = drawn(PAGE.read_text(), runs)
    if given.gather:
        RAW.write_text(text_of(runs))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
