"""Draw `docs/chat-hit-rates.svg` from docs/chat-hit-rates.json: `python tools/hit_rate_picture.py [BENCH]`.

BENCH: a `bench.json` of `kvpolicy bench chat`, whose hit rates take the place of those in the JSON file first. A panel
for each share of prefixed conversations: tokens found in a cache, by fifth of a run's time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gain_picture import ROOT, STYLE, _text

RAW, PICTURE = ROOT / "docs" / "chat-hit-rates.json", ROOT / "docs" / "chat-hit-rates.svg"
ARMS = {"cost": ("learned", "with host memory, --cache cost"), "vllm": ("recompute", "stock vLLM")}
"""The class of a line, and what it is called."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, PANEL, GAP = 860, 330, 64, 104, 240, 166, 30
Row = Mapping[str, Any]


def rows_of(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By share of prefixed conversations and arm: hit rates of every round and of all, and what goes with them."""
    from kvpolicy_vllm.bench.load_report import FIFTHS, hit_rates  # not needed to draw again

    def of(run: Mapping[str, Any]) -> tuple[float, str]:
        return run["cell"]["prefixed"], run["arm"]

    rows = []
    for prefixed, arm in sorted({*map(of, bench["runs"])}, key=lambda one: (one[0], one[1] != "vllm")):
        runs = sorted((run for run in bench["runs"] if of(run) == (prefixed, arm)), key=lambda run: run["round"])
        rates = [run["hit_rate"] for run in runs]
        by_fifth = hit_rates([run["lookups"] for run in runs], FIFTHS)
        rows.append({
            "prefixed": prefixed, "arm": arm, "messages": [run["messages"] for run in runs],
            "hit_rate": round(fmean(rates), 4), "rounds": [round(rate, 4) for rate in rates],
            "by_fifth": [round(one or 0.0, 4) for one in by_fifth],
            "messages_s": round(fmean(run["messages_s"] for run in runs), 3),
            "ttft_s": round(fmean(run["ttft_s"]["mean"] for run in runs), 3),
        })  # fmt: skip
    return rows


def picture(rows: Sequence[Row]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        '<title id="t">Tokens of prompts found in a cache over a run, by share of prefixed conversations</title>',
        f'<desc id="d">{_in_words(rows)}</desc>',
        f"<style>{STYLE}\n</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        _text(
            24, 34, "Windows of a chat that take three times the device's memory are found in the host's", "title ink"
        ),
        _text(
            24, 58, f"Share of looked-up tokens that were found, by fifth of a run; CPU engine, {_rounds(rows)}", "soft"
        ),
    ]
    for number, share in enumerate(sorted({row["prefixed"] for row in rows})):
        parts += _panel(LEFT + number * (PANEL + GAP), share, [row for row in rows if row["prefixed"] == share])
    for number, (kind, words) in enumerate(ARMS.values()):
        parts.append(f'<circle class="{kind}" cx="{LEFT + number * 300}" cy="{HEIGHT - 26}" r="4"/>')
        parts.append(_text(LEFT + number * 300 + 10, HEIGHT - 21, words, "ink"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, share: float, rows: Sequence[Row]) -> list[str]:
    parts = [_text(left, TOP - 14, f"{share:.0%} prefixed", "ink")]
    for value in (0.0, 0.5, 1.0):
        parts.append(f'<line class="rule" x1="{left}" x2="{left + PANEL}" y1="{_y(value):.1f}" y2="{_y(value):.1f}"/>')
        if left == LEFT:
            parts.append(_text(left - 8, _y(value) + 5, f"{value:.0%}", "soft", "end"))
    parts.append(_text(left + PANEL / 2, BOTTOM + 24, "begin to end of the run", "small soft", "middle"))
    for row in rows:
        kind = ARMS[row["arm"]][0]
        places = [(left + PANEL * (n + 0.5) / len(row["by_fifth"]), _y(one)) for n, one in enumerate(row["by_fifth"])]
        parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    return parts


def _rounds(rows: Sequence[Row]) -> str:
    (rounds,) = {len(row["rounds"]) for row in rows}
    return "one run each" if rounds == 1 else f"{rounds} rounds"


def _in_words(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['prefixed']:.0%} prefixed, {row['arm']}: {row['hit_rate']:.1%} found" for row in rows) + "."


def _y(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bench", nargs="?", type=Path)
    bench = parser.parse_args(arguments).bench
    if bench is not None:
        from bench_rounds import gathered  # not needed to draw again

        rows = rows_of(json.loads(bench.read_text()))
        about = {name: value for name, value in gathered(bench).items() if name != "runs"}
        RAW.write_text(json.dumps(about)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")
    PICTURE.write_text(picture(json.loads(RAW.read_text())["rows"]))


if __name__ == "__main__":
    main()
