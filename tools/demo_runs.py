"""Write the tables of docs/demo.md from docs/demo-runs.json: `python tools/demo_runs.py [--gather FOLDER ...]`.

FOLDER: where `kvpolicy demo --out FOLDER` wrote demo.json, or that file. Each is a run of the whole demo. `--gather`
replaces the runs in docs/demo-runs.json by these, in this order, and keeps what the tables need: the seed, every arm's
figures by round, seconds, load averages, what a preemption cost, and versions; no name and no path of the machine. What
stands between the comments `<!-- demo runs: TABLE -->` and `<!-- demo runs: end -->` is redrawn; TABLE is `repeats` or
`pooled`. With `--show FOLDER ...` the tables of these runs are printed, and nothing is written.

Runs of one seed serve the same requests in round k of a scenario: such a round of a seed is a load. Over several runs
the unit is the load, not the round of a run: rounds with the same requests are no independent measurements.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from kvpolicy.headroom import share_text
from kvpolicy.json_values import rounded
from kvpolicy.stats import Ratio, student_ratio
from kvpolicy.study.demo_report import DEMO_JSON, TITLES, WORDS

ROOT = Path(__file__).resolve().parent.parent
PAGE, RAW = ROOT / "docs" / "demo.md", ROOT / "docs" / "demo-runs.json"
END = "<!-- demo runs: end -->"
BLOCK = re.compile(rf"<!-- demo runs: (?P<table>\w+) -->\n.*?{END}", re.DOTALL)
STATE = "state.json"
"""Of a demo's folder: its arguments and versions, which the demo.json of earlier versions lacks."""
BOUND = ("tax", "recompute_token_s", "decode_token_s", "price_ratio", "bound")
ALIKE = ("cpus", "link")
"""What runs have to have in common, beside what :func:`shape_of` says of each scenario."""
WORKLOAD = ("requests", "device_blocks", "block_size")
Run = Mapping[str, Any]
"""A run as docs/demo-runs.json holds it."""
Load = tuple[int, int]
"""Seed and number of a round."""


# ---- raw numbers ----


def gathered(folder: Path) -> dict[str, Any]:
    """What the tables need of a demo's folder. Raises SystemExit, naming the file, for anything but a live demo whose
    seed is known."""
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
            **begun(file, demo),
            "cpus": machine["cpus"],
            "link": demo["link"],
            "load": [machine["load_before"], machine["load_after"]],
            "seconds": demo["seconds"],
            "capacity_per_s": demo["capacity_per_s"],
            "exact": demo["exact"],
            "tokens": demo["exactness"]["tokens"],
            "bound": {name: demo["bound"][name] for name in BOUND},
            "scenarios": {
                name: {
                    "served": one["served"],
                    "workload": {key: one["workload"][key] for key in WORKLOAD},
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


def begun(file: Path, demo: Mapping[str, Any]) -> dict[str, Any]:
    """The seed and the versions that a demo ran with; where it is of a version that did not write them, as its folder
    has them."""
    state = file.parent / STATE
    asked = demo
    if not {"seed", "versions"} <= demo.keys():
        try:
            asked = json.loads(state.read_text())["asked"]
        except (OSError, ValueError, LookupError, TypeError):
            asked = {}
    found = {name: asked.get(name) for name in ("seed", "versions")}
    if not isinstance(found["seed"], int) or not isinstance(found["versions"], dict):
        raise SystemExit(
            f"{file}: should have seed and versions, or {STATE} beside it: by the seed it is known which rounds of "
            "several runs had the same requests"
        )
    return found


def text_of(runs: Sequence[Run]) -> str:
    """The JSON, a line for every load of a run."""
    lines = []
    for run in runs:
        loads = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in run["scenarios"].items())
        rest = json.dumps({name: value for name, value in run.items() if name != "scenarios"})
        lines.append(f'{rest[:-1]}, "scenarios": {{\n{loads}}}}}')
    return '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"


def refuse_unlike(runs: Sequence[Run]) -> None:
    """Raises SystemExit where a run has another machine, other scenarios, memory, arms, figures or numbers of requests
    than the first one, or its tokens were not exact."""
    for number, run in enumerate(runs, 1):
        if not run["exact"]:
            raise SystemExit(f"run {number}: tokens were not those of unmodified vLLM, so that no figure of it counts")
        own, first = shape_of(run), shape_of(runs[0])
        for name in (*first, *own):
            if own.get(name) != first.get(name):
                raise SystemExit(f"run {number}: {name} is {own.get(name)}, should be {first.get(name)}, as in run 1")


def shape_of(run: Run) -> dict[str, Any]:
    """What makes runs comparable, by name."""
    shape = {name: run[name] for name in ALIKE}
    for scenario, one in run["scenarios"].items():
        shape |= {f"{name} of {scenario}": value for name, value in one["workload"].items()}
        shape[f"arms and figures of {scenario}"] = {arm: [*figures] for arm, figures in one["figures"].items()}
    return shape


# ---- ratios ----


def by_load(runs: Iterable[Run], scenario: str, arm: str, figure: str) -> dict[Load, list[float]]:
    """A figure of an arm by load, one value for every run that served it."""
    found: dict[Load, list[float]] = {}
    for run in runs:
        for round_, value in enumerate(run["scenarios"][scenario]["figures"][arm][figure]):
            found.setdefault((run["seed"], round_), []).append(value)
    return found


def pooled(runs: Sequence[Run], scenario: str, figure: str, arm: str) -> Ratio:
    """An arm over stock vLLM, the first arm: of each load the geometric mean over the runs that served it, with
    Student's interval over loads."""
    stock = next(iter(runs[0]["scenarios"][scenario]["figures"]))
    above, below = (by_load(runs, scenario, one, figure) for one in (arm, stock))
    return student_ratio([*map(geometric_mean, above.values())], [*map(geometric_mean, below.values())])


def shown(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


# ---- tables ----


def repeats(runs: Sequence[Run]) -> list[str]:
    """A row a run: its headlines over its rounds, what preemptions cost, its seconds and the load of the machine."""
    judged = [(name, one["headline"], [*one["figures"]][-1]) for name, one in runs[0]["scenarios"].items()]
    heads = ["run", "seed", *(f"{WORDS[figure]}, {arm} over vllm" for _, figure, arm in judged)]
    heads += ["capacity, requests/s", "p / d; bound", "seconds", "load average, before and after"]
    rows = []
    for number, run in enumerate(runs, 1):
        bound = run["bound"]
        known = None not in (bound["price_ratio"], bound["bound"])
        rows.append(
            [
                str(number),
                str(run["seed"]),
                *(shown(pooled([run], *one)) for one in judged),
                f"{run['capacity_per_s']:.2f}",
                f"{bound['price_ratio']:.2f}; {share_text(bound['bound'])}" if known else "-",
                f"{run['seconds']['in all']:,.0f}",
                ", ".join(f"{load:.1f}" for load in run["load"]),
            ]
        )
    return [*table(heads, rows), "", f"Raw numbers are in [{RAW.name}]({RAW.name}):", f"{versions_of(runs)}."]


def versions_of(runs: Sequence[Run]) -> str:
    names = dict.fromkeys("kvpolicy {kvpolicy} on vLLM {vllm}".format(**run["versions"]) for run in runs)
    tokens = sum(run["tokens"] for run in runs)
    return f"{' and '.join(names)}, {tokens:,} tokens in all, which were those of unmodified vLLM"


def pooled_tables(runs: Sequence[Run]) -> list[str]:
    """One table a scenario: stock vLLM's means, and the ratios of the other arms over all loads."""
    lines: list[str] = []
    for scenario, first in runs[0]["scenarios"].items():
        stock, *others = first["figures"]
        figures = sorted(first["figures"][stock], key=lambda figure: figure != first["headline"])
        means = (fmean(map(fmean, by_load(runs, scenario, stock, figure).values())) for figure in figures)
        rows = [[stock, *map(number_text, means)]]
        rows += [[arm, *(shown(pooled(runs, scenario, figure, arm)) for figure in figures)] for arm in others]
        lines += [f"{scenario[0].upper()}{scenario[1:]}:", "", *table(["arm", *(TITLES[f] for f in figures)], rows), ""]
    return [*lines, *how(runs)]


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def how(runs: Sequence[Run]) -> list[str]:
    """What the intervals are over."""
    scenario, one = next(iter(runs[0]["scenarios"].items()))
    served = [*map(len, by_load(runs, scenario, next(iter(one["figures"])), one["headline"]).values())]
    seeds = len({run["seed"] for run in runs})
    low, high = min(served), max(served)
    times = f"{low} to {high} times" if low < high else f"{low} time{'s' * (low > 1)}"
    return [
        "First row: means. Below: ratios over it, geometric means with Student's 95% interval over "
        f"{len(served)} loads,",
        f"each served {times}, over which its ratios are averaged first. The loads are of {seeds} "
        f"seed{'s' * (seeds > 1)}.",
        "Each interval is by itself.",
    ]


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
