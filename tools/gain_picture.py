"""Draw `docs/gain.svg`, the picture of the README, from the tables of docs/orders.md: `python tools/gain_picture.py`.

The mean end-to-end time of requests over that of stock vLLM, by load, under an order of service: once with the learned
policy, once with every displaced request recomputed. At 0.7 nothing was preempted, and every order gave the same.
Plain SVG that follows the reader's light or dark mode.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "orders.md"
PICTURE = ROOT / "docs" / "gain.svg"
MACHINES = ("H100", "A100")
ORDER = "mlfq:base=256"
ARMS = {"learned": "kvpolicy: order and learned policy", "recompute": "the same order, always recomputing"}
ENOUGH = re.compile(r"at\s+0\.7,\s+nothing was preempted")
"""What the page says of the load that its tables leave out."""
ENOUGH_LOAD = 0.7

WIDTH, HEIGHT = 860, 380
LEFT, TOP, BOTTOM, PANEL, GAP = 64, 104, 290, 350, 64
LOADS = (0.7, 0.9, 1.2, 1.5)
LOW, HIGH = 0.7, 1.05
STYLE = """
  .paper { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e } .rule { stroke: #d1d9e0 }
  .stock { stroke: #59636e; stroke-dasharray: 5 4 } .learned { stroke: #0550ae; fill: #0550ae }
  .recompute { stroke: #bc4c00; fill: #bc4c00 } polyline { fill: none !important; stroke-width: 2.5 }
  text { font: 14px system-ui, sans-serif } .title { font-size: 17px; font-weight: 600 } .small { font-size: 12px }
  text.learned, text.recompute { stroke: none }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .rule { stroke: #3d444d }
    .stock { stroke: #9198a1 } .learned { stroke: #58a6ff; fill: #58a6ff } .recompute { stroke: #f0883e; fill: #f0883e }
  }"""


def figures(page: str, machine: str) -> dict[str, dict[float, float]]:
    """Mean end-to-end time over stock vLLM's, by arm and load, of a machine's first table."""
    if not ENOUGH.search(page):
        raise SystemExit(f"{PAGE}: says nothing of load {ENOUGH_LOAD} any more")
    table = page.split(f"\n{machine}:\n\n<!-- places:", 1)[1].split("\n\n", 2)[1]
    found = {arm: {ENOUGH_LOAD: 1.0} for arm in ARMS}
    for row in table.splitlines()[2:]:
        load, how, _, mean_e2e, *_ = [cell.strip() for cell in row.strip("|").split("|")]
        order, _, arm = how.rpartition(", ")
        if order == f"`{ORDER}`":
            found[arm][float(load)] = float(mean_e2e)
    if any(tuple(values) != LOADS for values in found.values()):
        raise SystemExit(f"{PAGE}: {machine} has {found}, should have the loads {LOADS}")
    return found


def picture(page: str) -> str:
    """The SVG of a page's tables."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        '<title id="t">Mean end-to-end time over stock vLLM\'s, by load, simulated</title>',
        f'<desc id="d">{_told(page)}</desc>',
        f"<style>{STYLE}\n</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        _text(24, 34, "Over capacity, requests finish sooner; with memory to spare, nothing changes", "title ink"),
        _text(24, 58, "Mean end-to-end time over stock vLLM's (lower is better), simulated, Llama-3.1-8B", "soft"),
    ]
    for number, machine in enumerate(MACHINES):
        parts += _panel(LEFT + number * (PANEL + GAP), machine, figures(page, machine))
    for number, (arm, words) in enumerate(ARMS.items()):
        x = LEFT + number * 300
        parts.append(f'<circle class="{arm}" cx="{x}" cy="{HEIGHT - 26}" r="4"/>')
        parts.append(_text(x + 10, HEIGHT - 21, words, "ink"))
    parts += [f'<line class="stock" x1="664" x2="700" y1="{HEIGHT - 26}" y2="{HEIGHT - 26}"/>']
    parts += [_text(708, HEIGHT - 21, "stock vLLM", "ink"), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(left: float, machine: str, arms: dict[str, dict[float, float]]) -> list[str]:
    right, middle = left + PANEL, left + PANEL / 2
    parts = [_text(left, TOP - 14, machine, "ink")]
    for value in (0.7, 0.8, 0.9, 1.0):
        kind = "stock" if value == 1.0 else "rule"
        parts.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{_y(value):.1f}" y2="{_y(value):.1f}"/>')
        parts.append(_text(left - 8, _y(value) + 5, f"{value:.1f}", "soft", "end"))
    for load in LOADS:
        parts.append(_text(_x(left, load), BOTTOM + 20, f"{load:g}", "soft", "middle"))
    parts.append(
        _text(middle, BOTTOM + 40, "requests offered, over what the server can finish", "small soft", "middle")
    )
    for arm, values in arms.items():
        points = " ".join(f"{_x(left, load):.1f},{_y(value):.1f}" for load, value in values.items())
        parts.append(f'<polyline class="{arm}" points="{points}"/>')
        parts += [
            f'<circle class="{arm}" cx="{_x(left, load):.1f}" cy="{_y(value):.1f}" r="4"/>'
            for load, value in values.items()
        ]
        last, above = values[LOADS[-1]], arm == "recompute"
        parts.append(_text(right - 6, _y(last) + (-10 if above else 20), f"{last:.2f}", arm, "end"))
    return parts


def _told(page: str) -> str:
    """The same in words, for those who cannot see it."""
    told = []
    for machine in MACHINES:
        values = figures(page, machine)["learned"]
        told.append(f"{machine}: " + ", ".join(f"{value:.2f} at load {load:g}" for load, value in values.items()))
    return f"Order {ORDER} with the learned policy. " + "; ".join(told) + "."


def _x(left: float, load: float) -> float:
    return left + 20 + (PANEL - 44) * (load - LOADS[0]) / (LOADS[-1] - LOADS[0])


def _y(value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (value - LOW) / (HIGH - LOW)


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(PAGE.read_text()))
