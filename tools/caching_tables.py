"""Write the tables of docs/caching.md and docs/caching-study.md: `python tools/caching_tables.py [NAME=FILE ...]`.

The raw numbers are docs/caching-policies.json, of the runs `judged` and `held-out` of `benchmarks/caching_policies.py`,
and docs/caching-study.json, of the run `study` of `benchmarks/caching_study.py`. FILE, written with `--json`, takes the
place of what there is under NAME. Of a served run what no table shows is left out.

A table stands behind a comment that names it, as `<!-- caching: judged -->`, and is redrawn as a whole. What the prose
should say is in `tools/caching_sentences.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.stats import Ratio, student_ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import caching_bars as bars
from caching_bars import Row

ROOT = Path(__file__).resolve().parent.parent
POLICIES_PAGE, STUDY_PAGE = ROOT / "docs" / "caching.md", ROOT / "docs" / "caching-study.md"
POLICIES_RAW, STUDY_RAW = ROOT / "docs" / "caching-policies.json", ROOT / "docs" / "caching-study.json"
JUDGED, HELD_OUT, STUDY = "judged", "held-out", "study"
COMMENT = "<!-- caching:"
TABLE = re.compile(rf"{COMMENT} (?P<name>[^>]*) -->\n\n(?:(?:\|.*\n)+(?:\n|\Z))?")
FIGURES = ("requests", "throughput_tok_s", "e2e_s", "ttft_s", "preemptions", "moved_bytes", "prefix_hits")
"""Of a served run."""
Found = Mapping[str, Any]
Table = tuple[Sequence[str], list[list[str]]]
"""Heads and rows."""

POLICIES = ("lru", "lfu", "arc", "s3fifo", "cost")
NONE, HINDSIGHT = "none", "hindsight"
CACHES = (NONE, *POLICIES, HINDSIGHT)
SESSIONS = "sessions"
MOONCAKE, AGENTIC, SHAREGPT = "Mooncake, conversations", "agentic sessions", "ShareGPT, conversations"
ARXIV = "Mooncake, arXiv"
TRACES = {"mooncake_arxiv": ARXIV, "mooncake_conv": MOONCAKE, "agentic_": AGENTIC, "sharegpt_": SHAREGPT}
"""What the traces are called whose names begin so, in the order of the tables."""
SHORT = {MOONCAKE: "Mooncake", AGENTIC: AGENTIC, SHAREGPT: "ShareGPT"}
RECORDED = {MOONCAKE: {"load": 0.0, "count": 1000}, AGENTIC: {"load": 0.0}, SHAREGPT: {"load": 0.0}}
"""The runs at the files' own rates."""
USUAL: Mapping[str, Any] = {
    "load": 1.2, "host_gib": 64.0, "file_gib": 0.0, "hints": NONE, "file_link": "", "policy": "cheapest:analytic",
    "link": "native", "load_share": 1.0,
}  # fmt: skip
COUNTS = {MOONCAKE: 500, AGENTIC: 400, SHAREGPT: 2000}
LARGE = {"host_gib": 1024.0} | RECORDED[MOONCAKE]
FILES = {"file_gib": 512.0, "file_link": "1.4e10,0.0001"}
LINKS = ("2e9", "1e9", "5e8")
DECIDING = ("always-swap", "cheapest:analytic")


# ---- raw numbers ----


@dataclass(frozen=True, slots=True)
class Study:
    """Served runs."""

    runs: Sequence[Mapping[str, Any]]

    def found(self, requests: str, cache: str, seed: int = 0, **other: Any) -> Found:
        """The figures of one run. ``other``: what is not as in :data:`USUAL`. Raises SystemExit where there is none."""
        arm = {**USUAL, "requests": requests, "count": COUNTS[requests], "cache": cache, **other}
        for run in self.runs:
            if run["arm"] == arm and run["seed"] == seed:
                return dict(run["found"])
        raise SystemExit(f"{STUDY_RAW.name}: has no run with seed {seed} of {arm}")

    def ttft_s(self, requests: str, cache: str, seed: int = 0, **other: Any) -> float:
        return float(self.found(requests, cache, seed, **other)["ttft_s"]["mean"])

    def over_none(self, requests: str, cache: str, seeds: int = 1, **other: Any) -> Ratio:
        """Of the mean times to first token to those without a cache."""
        bare = other | {"file_gib": 0.0, "file_link": "", "hints": NONE}
        return student_ratio(
            [self.ttft_s(requests, cache, seed, **other) for seed in range(seeds)],
            [self.ttft_s(requests, NONE, seed, **bare) for seed in range(seeds)],
        )


@dataclass(frozen=True, slots=True)
class Raw:
    """All of it."""

    policies: Mapping[str, Any]
    study: Study

    @classmethod
    def read(cls) -> Raw:
        return cls(json.loads(POLICIES_RAW.read_text()), Study(json.loads(STUDY_RAW.read_text())["rows"]))

    def rows(self, name: str) -> list[Row]:
        """Of :data:`JUDGED` or :data:`HELD_OUT`, in the order of the table."""
        rows = [Row(**one) for one in self.policies[name]["rows"]]
        order = [*TRACES.values()]
        return sorted(rows, key=lambda one: (order.index(title(one.trace)), one.draw, one.share))


def title(trace: str) -> str:
    """Raises SystemExit for a trace that no table names."""
    for start, name in TRACES.items():
        if trace.startswith(start):
            return name
    raise SystemExit(f"{trace}: should be of {', '.join(TRACES)}")


def gathered(name: str, file: Path) -> dict[str, Any]:
    """What docs keep of a file. Raises SystemExit, naming it, for one that is not of that script."""
    try:
        held = json.loads(file.read_text())
        rows = held["rows"]
        if name == STUDY:
            rows = [run | {"found": {figure: run["found"][figure] for figure in FIGURES}} for run in rows]
        else:
            rows = [vars_of(Row(**one)) for one in rows]
        return {"settings": held["settings"], "rows": rows}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(f"{name}={file}: should be what a benchmark of caches wrote with --json: {error}") from None


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def text_of(raw: Mapping[str, Any]) -> str:
    """The JSON of a page, a line for every row."""
    if "rows" in raw:
        lines = ",\n".join(map(json.dumps, raw["rows"]))
        return f'{{"settings": {json.dumps(raw["settings"])}, "rows": [\n{lines}\n]}}\n'
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text_of(one).strip()}" for name, one in raw.items()) + "\n}\n"


def gather(given: Mapping[str, Path]) -> None:
    """Write what these files have."""
    policies = json.loads(POLICIES_RAW.read_text()) if POLICIES_RAW.exists() else {}
    for name, file in given.items():
        if name == STUDY:
            STUDY_RAW.write_text(text_of(gathered(name, file)))
        else:
            policies[name] = gathered(name, file)
    if policies:
        POLICIES_RAW.write_text(text_of({name: policies[name] for name in (JUDGED, HELD_OUT) if name in policies}))


# ---- tables ----


def drawn(page: str, raw: Raw) -> str:
    """The page with all its tables anew. Raises SystemExit for a comment of an unknown table, or without an empty line
    behind it."""

    def table(found: re.Match[str]) -> str:
        if found["name"] not in TABLES:
            raise SystemExit(f"{COMMENT} {found['name']} -->: should name one of {', '.join(TABLES)}")
        heads, rows = TABLES[found["name"]](raw)
        lines = "".join(f"| {' | '.join(row)} |\n" for row in ([*heads], ["--"] * len(heads), *rows))
        return f"{COMMENT} {found['name']} -->\n\n{lines}\n"

    if len(TABLE.findall(page)) != page.count(COMMENT):
        raise SystemExit(f"every `{COMMENT} ... -->` should be followed by an empty line and its table")
    return TABLE.sub(table, page)


def judged_table(raw: Raw) -> Table:
    names = [*(name for name in POLICIES if name != "lru"), HINDSIGHT]
    heads = ["prompts", "capacity, blocks", "`lru` saves", *map(label, names)]
    rows = [
        [title(one.trace), f"{one.capacity:,}", f"{one.saved['lru']:.3f}", *(f"{one.gain(name):.3f}" for name in names)]
        for one in raw.rows(JUDGED)
    ]
    return heads, rows


def bars_table(name: str) -> Callable[[Raw], Table]:
    """What the rows of each trace come to, those of the target's together, and all."""

    def table(raw: Raw) -> Table:
        heads = (
            "prompts", "rows", f"hindsight saves {bars.ROOM} times", "`cost` saves there, geometric mean", "of the gap",
            f"`cost` over the best of {', '.join(map(label, bars.RIVALS))}, least", f"below {bars.MIN_OF_BEST}",
        )  # fmt: skip
        rows = raw.rows(name)
        groups = {trace: [one for one in rows if title(one.trace) == trace] for trace in TRACES.values()}
        groups |= {f"{bars.TARGET_NAME}, of which the target is": bars.of_target(rows), "all": rows}
        return heads, [bars_row(group, some) for group, some in groups.items()]

    return table


def bars_row(group: str, rows: Sequence[Row]) -> list[str]:
    room, least = bars.with_room(rows), min(one.of_best for one in rows)
    gains = [gain_text(room), f"{bars.gap_share(room):.0%}"] if room else ["", ""]
    return [group, str(len(rows)), str(len(room)), *gains, f"{least:.3f}", str(len(bars.below_best(rows)))]


def gain_text(rows: Sequence[Row]) -> str:
    interval = bars.gain_interval(rows)
    return f"{bars.mean_gain(rows):.3f}" + ("" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})")


def served_table(raw: Raw) -> Table:
    heads = (
        "requests of", "cache", "mean TTFT, s", "of `none`", "p99 TTFT, s", "mean e2e, s", "tokens/s", "device", "host",
        "moved, GB",
    )  # fmt: skip

    def rows() -> Iterator[list[str]]:
        for requests, other in RECORDED.items():
            for cache in CACHES:
                found = raw.study.found(requests, cache, **other)
                rate, shares = f"{found['throughput_tok_s']:.1f}", [share(found, "device"), share(found, "host")]
                yield [requests, label(cache), *times(raw, requests, cache, **other), rate, *shares, moved(found)]

    return heads, [*rows()]


def large_table(raw: Raw) -> Table:
    heads = ("cache", "mean TTFT, s", "of `none`", "p99 TTFT, s", "mean e2e, s", "host", "moved, GB")
    rows = []
    for cache in CACHES:
        found = raw.study.found(MOONCAKE, cache, **LARGE)
        rows.append([label(cache), *times(raw, MOONCAKE, cache, **LARGE), share(found, "host"), moved(found)])
    return heads, rows


def hints_table(raw: Raw) -> Table:
    heads = (
        "requests of", "load", "files, GiB", "cache", "no hints", "`sessions`", "`hindsight` hints",
        "tokens/s, no hints", "with `hindsight` hints", "below the device, no hints", "with `hindsight` hints",
    )  # fmt: skip
    return heads, [
        [SHORT[requests], "1.2", f"{files.get('file_gib', 0):g}", *hints_cells(raw.study, requests, cache, files)]
        for requests in COUNTS
        for files in ({}, FILES)
        for cache in hinted_caches(requests, bool(files))
    ]


def hinted_caches(requests: str, files: bool) -> tuple[str, ...]:
    """The run without a cache has no files; agentic sessions were not served with files in hindsight."""
    caches = CACHES[1:] if files else CACHES
    return caches[:-1] if files and requests == AGENTIC else caches


def hints_cells(study: Study, requests: str, cache: str, files: Mapping[str, Any]) -> list[str]:
    kinds = (NONE, SESSIONS, HINDSIGHT) if cache in POLICIES else (NONE,)
    found = [study.found(requests, cache, hints=hints, **files) for hints in kinds]
    ratios = [f"{study.over_none(requests, cache, hints=hints, **files).value:.3f}" for hints in kinds]
    ends = found[::2]
    rates, below = ([f"{one['throughput_tok_s']:.0f}" for one in ends], [share(one, "host", "file") for one in ends])
    return [label(cache), *padded(ratios, 3), *padded(rates, 2), *padded(below, 2)]


def links_table(raw: Raw) -> Table:
    heads = (
        "link, GB/s", "decides", "cache", "mean TTFT, s", "of `none`", "p99 TTFT, s", "mean e2e, s", "tokens/s", "host",
        "of it loaded", "moved, GB",
    )  # fmt: skip
    rows = []
    for link in LINKS:
        for cache in (NONE, "lru"):
            cells = {policy: link_cells(raw, cache, link=link, policy=policy) for policy in DECIDING}
            same = len({tuple(one) for one in cells.values()}) == 1 and cache == NONE
            deciding = {"either": cells[DECIDING[0]]} if same else {f"`{name}`": one for name, one in cells.items()}
            rows += [[gigabytes(link), name, label(cache), *one] for name, one in deciding.items()]
    return heads, rows


def link_cells(raw: Raw, cache: str, **other: Any) -> list[str]:
    found = raw.study.found(SHAREGPT, cache, **other)
    hits = found["prefix_hits"]
    loaded = f"{hits['loaded_tokens'] / hits['host_tokens']:.0%}" if hits["host_tokens"] else ""
    rate = f"{found['throughput_tok_s']:.0f}"
    return [*times(raw, SHAREGPT, cache, **other), rate, share(found, "host"), loaded, moved(found)]


def all_links_table(raw: Raw) -> Table:
    arms = [(policy, cache) for policy in DECIDING for cache in ("lru", "cost")]
    heads = ["requests of", "link, GB/s", *(f"`{policy}`, `{cache}`" for policy, cache in arms)]
    rows = []
    for requests in (SHAREGPT, AGENTIC, MOONCAKE):
        for link in LINKS:
            over = [raw.study.over_none(requests, cache, policy=policy, link=link).value for policy, cache in arms]
            rows.append([SHORT[requests], gigabytes(link), *(f"{one:.3f}" for one in over)])
    return heads, rows


TABLES: Mapping[str, Callable[[Raw], Table]] = {
    JUDGED: judged_table, f"{JUDGED}, bars": bars_table(JUDGED), f"{HELD_OUT}, bars": bars_table(HELD_OUT),
    "served": served_table, "served, 1024 GiB": large_table, "hints": hints_table, "links": links_table,
    "links, all requests": all_links_table,
}  # fmt: skip


# ---- cells ----


def label(cache: str) -> str:
    return cache if cache == HINDSIGHT else f"`{cache}`"


def padded(cells: Sequence[str], count: int) -> list[str]:
    return [*cells, *[""] * (count - len(cells))]


def three(value: float) -> str:
    """Three digits, with their zeros."""
    return f"{value:#.3g}".rstrip(".")


def times(raw: Raw, requests: str, cache: str, **other: Any) -> list[str]:
    found = raw.study.found(requests, cache, **other)
    over = f"{raw.study.over_none(requests, cache, **other).value:.3f}"
    return [three(found["ttft_s"]["mean"]), over, three(found["ttft_s"]["p99"]), three(found["e2e_s"]["mean"])]


def share_of(found: Found, *tiers: str) -> float:
    """Of the tokens of all prompts, what was found in these tiers."""
    hits = found["prefix_hits"]
    return float(sum(hits[f"{tier}_tokens"] for tier in tiers) / hits["prompt_tokens"])


def share(found: Found, *tiers: str) -> str:
    return f"{share_of(found, *tiers):.1%}"


def moved(found: Found) -> str:
    return f"{found['moved_bytes'] / 1e9:.0f}"


def gigabytes(link: str) -> str:
    return f"{float(link) / 1e9:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    names = (JUDGED, HELD_OUT, STUDY)
    parser.add_argument("given", nargs="*", metavar="NAME=FILE", help=f"NAME: {', '.join(names)}")
    given = {}
    for text in parser.parse_args().given:
        name, _, file = text.partition("=")
        if name not in names or not Path(file).is_file():
            parser.error(f"{text}: should be NAME=FILE, with a file and NAME one of {', '.join(names)}")
        given[name] = Path(file)
    gather(given)
    raw = Raw.read()
    for page in (POLICIES_PAGE, STUDY_PAGE):
        page.write_text(drawn(page.read_text(), raw))


if __name__ == "__main__":
    main()
