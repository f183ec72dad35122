"""Write the tables of docs/orders.md from docs/orders.json: `python tools/order_tables.py [FILE ...]`.

FILE: what `benchmarks/orders_study.py` or `benchmarks/orders_classes.py` wrote with `--json`. Its places take those of
the same name in docs/orders.json, or are added. A table stands behind a comment that names its places, as
`<!-- places: machine=A100-SXM-80GB requests=800 kv_blocks=26000 seeds=5 -->`, and is redrawn as a whole. With
`table=promotion` it compares the promotions of `mlfq`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.json_values import rounded

ROOT = Path(__file__).resolve().parent.parent
PAGE, RAW = ROOT / "docs" / "orders.md", ROOT / "docs" / "orders.json"
SWAP = "swap"
COMMENT = "<!-- places:"
TABLE = re.compile(rf"{COMMENT} (?P<fields>[^>]*) -->\n\n(?:\|.*\n)*")
MEASURED = "rate_per_s"
"""Of a place: a result, not a part of its name."""
LEFT_OUT = ("p50", "prefix_hits", "deadline_requests", "slo_share", "goodput_req_s")
"""Of a result: what no table shows."""
Place = Mapping[str, Any]
Arm = Mapping[str, Any]
Result = Mapping[str, Any]
Table = tuple[Sequence[str], list[list[str]]]
"""Heads and rows."""
STUDY = (
    "load", "order, how", "e2e per token", "mean e2e", "mean TTFT", "p99 e2e", "tokens/s, steady (all)",
    "longest gap p99, s", "longest pause, s", "preempted", "recomputed K / moved GB",
)  # fmt: skip
PROMOTION = "promotion"
"""As `table` of a comment."""
PROMOTIONS = ("promote, s", "how", "mean e2e", "mean TTFT", "p99 e2e", "tokens/s", "longest pause, s", "preempted")
CLASSES = (
    "order, how", "urgent TTFT mean, s", "p99", "urgent e2e", "batch tokens/s", "batch e2e, s",
    "batch longest gap p99, s", "preempted", "moved GB",
)  # fmt: skip


# ---- raw numbers ----


def name_of(place: Place) -> dict[str, Any]:
    return {field: value for field, value in place.items() if field != MEASURED}


def merged(known: Sequence[Place], new: Sequence[Place]) -> list[Place]:
    """Places in the order in which they were first seen, each with the arms that were written last."""
    places = {json.dumps(name_of(one["place"]), sort_keys=True): one for one in known}
    for one in new:
        places[json.dumps(name_of(one["place"]), sort_keys=True)] = rounded(one, left_out=LEFT_OUT)
    return list(places.values())


def text_of(raw: Mapping[str, Any]) -> str:
    """The JSON, a line for every arm."""
    places = [
        f'{{"place": {json.dumps(one["place"])}, "arms": [\n' + ",\n".join(map(json.dumps, one["arms"])) + "]}"
        for one in raw["places"]
    ]
    rest = "".join(f',\n"{name}": {json.dumps(value)}' for name, value in raw.items() if name != "places")
    return '{"places": [\n' + ",\n".join(places) + "]" + rest + "}\n"


# ---- tables ----


def drawn(page: str, places: Sequence[Place]) -> str:
    """The page with all its tables anew. Raises SystemExit for a comment that names no place, or that no empty line
    follows."""

    def table(found: re.Match[str]) -> str:
        fields = dict(part.split("=", 1) for part in re.findall(r'\w+=(?:"[^"]*"|\S+)', found["fields"]))
        kind = fields.pop("table", "")
        if kind not in ("", PROMOTION):
            raise SystemExit(f"{PAGE.name}: table={kind} should be table={PROMOTION}, or left out")
        chosen = [one for one in places if all(shown(one["place"].get(n)) == v.strip('"') for n, v in fields.items())]
        if not chosen:
            raise SystemExit(f"{PAGE.name}: {RAW.name} has no places {found['fields']}")
        heads, rows = promotion_table(chosen) if kind else table_of(chosen)
        rows.insert(0, [*heads])
        rows.insert(1, ["--"] * len(rows[0]))
        return f"{COMMENT} {found['fields']} -->\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    if len(TABLE.findall(page)) != page.count(COMMENT):
        raise SystemExit(f"{PAGE.name}: every `{COMMENT} ... -->` should be followed by an empty line and its table")
    return TABLE.sub(table, page)


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def table_of(places: Sequence[Place]) -> Table:
    if "arrivals" in places[0]["place"]:
        return CLASSES, [classes_row(arm) for one in places for arm in one["arms"]]
    by_load = sorted(places, key=lambda one: float(one["place"]["load"]))
    return STUDY, [[shown(one["place"]["load"]), *row] for one in by_load for row in study_rows(one["arms"])]


def promotion_table(places: Sequence[Place]) -> Table:
    """Raises SystemExit for several places, whose rows could not be told apart."""
    if len(places) > 1:
        raise SystemExit(f"{PAGE.name}: table={PROMOTION} is of one place, and {len(places)} match")
    return PROMOTIONS, promotion_rows(places[0]["arms"])


def arm_of(arms: Sequence[Arm], order: str, how: str, watermark: float = 0.0) -> Arm:
    return next(arm for arm in arms if (arm["order"], arm["how"], arm["watermark"]) == (order, how, watermark))


def study_rows(arms: Sequence[Arm]) -> list[list[str]]:
    """Ratios over stock vLLM; of its watermarks the best one, where it preempted at all. The page says of always-swap
    how it compares with the learned policy, and has no rows of it."""
    stock = arm_of(arms, "fcfs", "recompute")
    marked = [arm for arm in arms if arm["watermark"]]
    best = min(marked, key=lambda arm: mean_of(arm, "e2e_s", "mean"), default=None)
    idle = not preempted(stock)
    shown_arms = [arm for arm in arms if arm["how"] != SWAP]
    chosen = [arm for arm in shown_arms if not arm["watermark"] or (arm is best and not idle)]
    return [[named(arm), *study_figures(arm, stock)] for arm in chosen]


def study_figures(arm: Arm, stock: Arm) -> list[str]:
    return [
        f"/{1 / over(arm, stock, 'e2e_per_token_s', 'mean'):.2f}",
        f"{over(arm, stock, 'e2e_s', 'mean'):.3f}",
        f"/{1 / over(arm, stock, 'ttft_s', 'mean'):.3g}",
        f"{over(arm, stock, 'e2e_s', 'p99'):.2f}",
        f"{over(arm, stock, 'steady_tok_s'):.2f} ({over(arm, stock, 'throughput_tok_s'):.2f})",
        f"{mean_of(arm, 'longest_gap_s', 'p99'):.2f}",
        f"{longest_pause(arm):.0f}",
        f"{preempted(arm):.0f}",
        f"{mean_of(arm, 'recomputed_tokens') / 1e3:.0f} / {mean_of(arm, 'moved_bytes') / 1e9:.0f}",
    ]


def promotion_rows(arms: Sequence[Arm]) -> list[list[str]]:
    stock = arm_of(arms, "fcfs", "recompute")
    found = []
    for arm in arms:
        order, _, promote = str(arm["order"]).partition(",promote=")
        if order.startswith("mlfq"):
            cells = study_figures(arm, stock)
            figures = [cells[1], cells[2], cells[3], f"{over(arm, stock, 'throughput_tok_s'):.3f}", *cells[6:8]]
            found.append((arm["how"], -float(promote or "inf"), [promote or "never", str(arm["how"]), *figures]))
    return [row for *_, row in sorted(found, key=lambda one: one[:2])]


def classes_row(arm: Arm) -> list[str]:
    def figure(name: str, *path: str) -> float:
        return mean_of(arm, "classes", name, *path)

    return [
        named(arm),
        f"{figure('urgent', 'ttft_s', 'mean'):.2f}",
        f"{figure('urgent', 'ttft_s', 'p99'):.2f}",
        f"{figure('urgent', 'e2e_s', 'mean'):.2f}",
        f"{figure('batch', 'steady_tok_s'):.0f}",
        f"{figure('batch', 'e2e_s', 'mean'):.0f}",
        f"{figure('batch', 'longest_gap_s', 'p99'):.0f}",
        f"{preempted(arm):.0f}",
        f"{mean_of(arm, 'moved_bytes') / 1e9:.0f}",
    ]


def named(arm: Arm) -> str:
    return f"`{arm['order']}`, {arm['how']}" + (f", watermark {arm['watermark']:g}" if arm["watermark"] else "")


def value_of(result: Result, *path: str) -> float:
    value: Any = result
    for name in path:
        value = value[name]
    return float(value)


def mean_of(arm: Arm, *path: str) -> float:
    return fmean(value_of(result, *path) for result in arm["results"])


def over(arm: Arm, stock: Arm, *path: str) -> float:
    """Geometric mean over seeds of the ratios."""
    pairs = zip(arm["results"], stock["results"], strict=True)
    return exp(fmean(log(value_of(one, *path) / value_of(other, *path)) for one, other in pairs))


def longest_pause(arm: Arm) -> float:
    return max(float(result["longest_pause_s"] or 0.0) for result in arm["results"])


def preempted(arm: Arm) -> float:
    return fmean(sum(result["preemptions"].values()) for result in arm["results"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="files of benchmarks/orders_study.py or orders_classes.py, written with --json",
    )
    files = parser.parse_args().files
    for file in files:
        if not file.is_file():
            parser.error(f"{file} is no file")
    raw = json.loads(RAW.read_text())
    for file in files:
        raw["places"] = merged(raw["places"], json.loads(file.read_text())["places"])
    page = drawn(PAGE.read_text(), raw["places"])
    RAW.write_text(text_of(raw))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
