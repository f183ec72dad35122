"""Write the tables of docs/when-to-switch-on.md from its raw numbers: `python tools/regime_tables.py [FILE ...]`.

FILE: what `benchmarks/matrix_regimes.py` wrote with `--json`. Its regimes take the places of the same ones in that JSON
file, or are added. A table stands behind `<!-- regimes: KIND -->` and is redrawn as a whole.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RAW = ROOT / "docs" / "when-to-switch-on.md", ROOT / "docs" / "when-to-switch-on.json"
COMMENT = "<!-- regimes:"
TABLE = re.compile(rf"{COMMENT} (?P<kind>[^>]*) -->\n\n(?:\|.*\n)*")
MACHINES = {"H100-SXM": "H100", "A100-SXM-80GB": "A100", "L40S": "L40S", "H20": "H20", "cpu": "CPU"}
KINDS = {"one class": ("one class", "short requests"), "two classes": ("two classes",)}
"""What a table holds, where that is not one kind by its own name."""
RIVALS = {
    "swap": "always-swap", "order, recompute": "order with recompute", "order, swap": "order with always-swap",
}  # fmt: skip
USUAL_BLOCKS = {"one class": 6000, "short requests": 6000, "two classes": 4000, "decodes alone": 3200, "rollouts": 6000}
ORDER = "order, learned"
Row = Mapping[str, Any]


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Regimes in the order in which they were first seen."""
    rows = {json.dumps(row["regime"], sort_keys=True): row for row in [*known, *new]}
    return list(rows.values())


def text_of(rows: Sequence[Row]) -> str:
    """The JSON, a line for every regime."""
    return '{"rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def drawn(page: str, rows: Sequence[Row]) -> str:
    """The page with all its tables anew. Raises SystemExit for a comment that names a kind that no regime is of, or
    that no empty line follows."""

    def table(found: re.Match[str]) -> str:
        kind = found["kind"]
        chosen = [row for row in rows if row["regime"]["kind"] in KINDS.get(kind, (kind,))]
        if not chosen:
            raise SystemExit(f"{PAGE.name}: {RAW.name} has no regimes of {kind}")
        of_order = "batch e2e, order" if kind == "two classes" else "TTFT, order"
        lines = [heads(of_order), *(cells(row, of_order) for row in sorted(chosen, key=place_of))]
        lines.insert(1, ["--"] * len(lines[0]))
        return f"{COMMENT} {kind} -->\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    if len(TABLE.findall(page)) != page.count(COMMENT):
        raise SystemExit(f"{PAGE.name}: every `{COMMENT} ... -->` should be followed by an empty line and its table")
    return TABLE.sub(table, page)


def heads(of_order: str) -> list[str]:
    return [
        "regime", "preempted", "tax", "p / d", "bound", "taken", "best watermark", "best threshold", "always-swap",
        "learned", "order, recompute", "order, learned", of_order, "longest pause, s", "verdict", "as good",
    ]  # fmt: skip


def place_of(row: Row) -> tuple[Any, ...]:
    regime = row["regime"]
    return (
        [*MACHINES].index(regime["machine"]), ("plain", "MLA", "hybrid").index(regime["shape"]), regime["kind"],
        regime["kv_blocks"], not regime["caching"], regime["load"] or float("inf"),
    )  # fmt: skip


def named(regime: Mapping[str, Any]) -> str:
    parts = [MACHINES[regime["machine"]]]
    parts += [regime["shape"]] if regime["shape"] != "plain" else []
    parts += ["short requests"] if regime["kind"] == "short requests" else []
    parts.append(f"{regime['load']:g}" if regime["load"] else "at once")
    parts += [] if regime["caching"] else ["caching off"]
    if regime["machine"] != "cpu" and regime["kv_blocks"] != USUAL_BLOCKS[regime["kind"]]:
        parts.append(f"{regime['kv_blocks']:,} blocks")
    parts += ["up to 1,024 running"] if regime["kind"] == "short requests" else []
    return ", ".join(parts)


def cells(row: Row, of_order: str) -> list[str]:
    arms, share = row["arms"], row["share_of_bound"]
    figure = "batch e2e" if of_order.startswith("batch") else "TTFT"
    return [
        named(row["regime"]),
        f"{row['preemptions']:.0f}",
        f"{row['tax']:.2f}",
        f"{row['price_ratio']:.3f}",
        f"{row['bound']:.2%}",
        "" if share is None else f"{share:.0%}",
        *(means(arms.get(name)) for name in ("watermark", "threshold", "swap")),
        with_intervals(arms["learned"]),
        means(arms.get("order, recompute")),
        with_intervals(arms[ORDER]),
        interval(arms[ORDER]["more"][figure]),
        f"{arms[ORDER]['longest_pause_s']:.0f}",
        row["verdict"],
        ", ".join(RIVALS.get(name, name) for name in row["as_good"]) or ("" if row["verdict"] == "do not" else "none"),
    ]


def means(arm: Mapping[str, Any] | None) -> str:
    return f"{arm['headline']['value']:.3f}; {arm['rate']['value']:.3f}" if arm else ""


def with_intervals(arm: Mapping[str, Any]) -> str:
    return f"{interval(arm['headline'])}; {interval(arm['rate'])}"


def interval(figure: Mapping[str, Any]) -> str:
    if figure.get("low") is None:
        return f"{figure['value']:.3f}"
    low, high = (f"{figure[end]:.0f}" if figure[end] >= 10 else f"{figure[end]:.3f}" for end in ("low", "high"))
    return f"{figure['value']:.3f} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="files of benchmarks/matrix_regimes.py, written with --json"
    )
    files = parser.parse_args().files
    for file in files:
        if not file.is_file():
            parser.error(f"{file} is no file")
    rows = json.loads(RAW.read_text())["rows"]
    for file in files:
        rows = merged(rows, json.loads(file.read_text())["rows"])
    page = drawn(PAGE.read_text(), rows)
    RAW.write_text(text_of(rows))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
