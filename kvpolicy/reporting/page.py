"""Renders the report's page from the template in this folder. A module of its own: matplotlib and Jinja are optional.

Called by :mod:`kvpolicy.reporting.pipeline`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from kvpolicy.datasets.threshold import BEST_THRESHOLD
from kvpolicy.evaluation.log_headroom import served_lines
from kvpolicy.evaluation.replay import EvaluationReport
from kvpolicy.events import KINDS
from kvpolicy.overflow import FIGURES, SERVED
from kvpolicy.reporting import figures as colours
from kvpolicy.reporting.charts import library, with_chart
from kvpolicy.reporting.figures import draw, svg, write
from kvpolicy.reporting.findings import PAPER
from kvpolicy.reporting.group import Group, link_name
from kvpolicy.reporting.measurements import Material
from kvpolicy.reporting.model_figures import draw_boundary, draw_calibration, draw_regret
from kvpolicy.reporting.model_section import FIXED, LEARNED_NAME, Learned, coverage
from kvpolicy.trace import Header
from kvpolicy.trace.window import Window
from kvpolicy.version import __version__

TITLES = {
    "block-size": "Block size",
    "evicted-tokens": "Evicted tokens",
    "sequence-length": "Sequence length",
    "memory": "KV memory",
    "timeline": "Over time",
}
CLASSES = {"yes": "yes", "no": "no", "cannot tell": "open"}
WORDS = {"yes": "holds", "no": "does not hold", "cannot tell": "undecided"}
INKS = {
    colours.INK: "var(--ink)",
    colours.MUTED: "var(--muted)",
    colours.GRID: "var(--grid)",
    colours.COLOURS["recompute"]: "var(--recompute)",
    colours.COLOURS["swap"]: "var(--swap)",
    colours.LEARNED: "var(--learned)",
}
"""Colours of the figures -> colours of the page, which depend on its light or dark theme."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One drawn figure of one group."""

    group: int
    name: str
    figure: Figure

    def file_name(self, groups: int) -> str:
        return self.name if groups == 1 else f"{self.name}-{self.group + 1}"


def draw_all(groups: Sequence[Group]) -> tuple[Drawing, ...]:
    """Draw every figure that the groups can fill."""
    return tuple(
        Drawing(number, *named_figure) for number, group in enumerate(groups) for named_figure in _drawings_of(group)
    )


def _drawings_of(group: Group) -> Iterator[tuple[str, Figure]]:
    missing = dict(group.missing)
    for figure in FIGURES:
        if figure not in missing:
            yield figure, draw(group.material, figure)
    learned = group.learned
    if learned.boundary is not None:
        yield "boundary", draw_boundary(learned.boundary)
    if learned.calibration:
        yield "calibration", draw_calibration(learned.calibration)
    if learned.scores is not None:
        yield "regret", draw_regret(learned.scores, [*FIXED, LEARNED_NAME])


def write_figures(drawings: Sequence[Drawing], folder: Path) -> tuple[Path, ...]:
    groups = 1 + max((drawing.group for drawing in drawings), default=0)
    return tuple(path for drawing in drawings for path in write(drawing.figure, folder, drawing.file_name(groups)))


def render(groups: Sequence[Group], drawings: Sequence[Drawing], seed: int, window: Window | None) -> str:
    """The whole page. ``window``: the one that it is of; None for whole traces."""
    inlined = {
        (drawing.group, drawing.name): inline(drawing.figure, f"{drawing.group}-{drawing.name}", drawing.name)
        for drawing in drawings
    }
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            groups=[_section(group, number, inlined) for number, group in enumerate(groups)],
            figures=[{"name": name, "title": TITLES[name], "paper": PAPER[name]} for name in FIGURES],
            version=__version__,
            seed=seed,
            window="" if window is None else window.text(),
            simulated=any(group.material.header.link["kind"] == "simulated" for group in groups),
            on_cpu=any(group.material.header.hardware["device"] == "cpu" for group in groups),
        )
    )


def templates() -> Environment:
    """The templates of this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    environment.globals["charts"] = library
    return environment


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as SVG inside a page: without prologue, in the page's colours, its ids made distinct by ``name``.
    With it, what the interactive chart is drawn from (:mod:`kvpolicy.reporting.charts`).

    ``label``: what it is called where it is read aloud.
    """
    text = svg(figure, name, transparent=True)
    text = text[text.index("<svg") :]
    for colour, ink in INKS.items():
        text = text.replace(colour, ink)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    drawn = Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))
    return with_chart(drawn, figure, label, INKS)


def _section(group: Group, number: int, inlined: dict[tuple[int, str], Markup]) -> dict[str, Any]:
    learned = group.learned
    return {
        "name": group.name,
        "verdict": group.verdict(),
        "answers": [(_counted(answer, count), CLASSES[answer]) for answer, count in group.answers.items() if count],
        "missing": dict(group.missing),
        "to_win": served_lines(group.headrooms),
        "displaced": [] if group.displacements is None else group.displacements.lines(),
        "findings": {
            figure: [
                {
                    "claim": f"{finding.claim[0].upper()}{finding.claim[1:]}.",
                    "details": finding.details(),
                    "kind": CLASSES[finding.evidence.answer],
                    "word": WORDS[finding.evidence.answer],
                }
                for finding in group.findings_of(figure)
            ]
            for figure in FIGURES
        },
        "drawn": {name: svg_text for (group_number, name), svg_text in inlined.items() if group_number == number},
        "model": learned.model,
        "lacking": learned.lacking,
        "boundary": None if learned.boundary is None else _boundary_lines(learned),
        "coverage": [_coverage_line(learned, kind) for kind in KINDS] if learned.calibration else [],
        "scores": None if learned.scores is None else _scores(learned.scores),
        "facts": _facts(group.material, group),
    }


def _counted(answer: str, count: int) -> str:
    if count == 1:
        return f"1 {WORDS[answer]}"
    return f"{count} {({'yes': 'hold', 'no': 'do not hold'}).get(answer, WORDS[answer])}"


def _code(text: str) -> Markup:
    """Escaped text with parts between backticks marked up as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _boundary_lines(learned: Learned) -> list[str]:
    assert learned.boundary is not None
    situation = learned.boundary.question.situation
    return [
        f"Circle, in the middle of the measured range: {situation.computed_tokens} tokens beside "
        f"{situation.running_requests} running requests. There the model chooses {learned.boundary.chosen}. "
        "Dots: outside its trained range. Line: where both options cost the same.",
        *learned.boundary.drivers,
    ]


def _coverage_line(learned: Learned, kind: str) -> str:
    predictions = [prediction for prediction in learned.calibration if prediction.kind == kind]
    share, low, high = coverage(predictions)
    return (
        f"{kind}: the 90% interval holds the measured median in {share:.0%} of {len(predictions)} unseen states "
        f"(95% interval of that share: {low:.0%} to {high:.0%})."
    )


def _scores(scores: EvaluationReport) -> dict[str, Any]:
    rows = []
    judged = [*scores.policies, scores.threshold.score]
    for name, score in zip([*FIXED, LEARNED_NAME, BEST_THRESHOLD], judged, strict=True):
        accuracy, regret, over = score.accuracy, score.mean_regret_s, score.over_oracle
        rows.append(
            {
                "name": name,
                "accuracy": "all ties" if accuracy is None else f"{accuracy.value:.0%}",
                "regret": f"{1e3 * regret.value:.2f} ms",
                "interval": f"{1e3 * regret.low:.2f} to {1e3 * regret.high:.2f}",
                "over": "-" if over is None else f"{over.value:+.1%}",
            }
        )
    constant = scores.always_wins
    return {
        "rows": rows,
        "states": scores.states,
        "ties": scores.ties,
        "threshold": [
            scores.threshold.choice(),
            *(replace(compared, policy=LEARNED_NAME).text() for compared in scores.threshold.against),
        ],
        "constant": f"{constant} costs less in every one of these states: always choosing it is optimal here."
        if constant
        else "",
    }


def _facts(material: Material, group: Group) -> list[tuple[str, str]]:
    """Settings and provenance, as (name, value)."""
    headers = list(material.trace.headers.values())
    first, geometry = headers[0], headers[0].geometry
    natural = sum(overflow.cause == "memory" for overflow in material.overflows)
    step_error_s = list(material.step_error_s.values())
    variation = [header.noise["variation"] for header in headers if "variation" in header.noise]
    facts = [
        ("link", link_name(first)),
        ("engine", ", ".join(sorted({header.engine for header in headers}))),
        ("hardware", ", ".join(f"{name} {value}" for name, value in first.hardware.items())),
        ("model", ", ".join(f"{name} {value}" for name, value in geometry.items())),
        ("KV blocks", _blocks(headers)),
        ("maximum tokens of a step", "not recorded" if first.token_budget is None else str(first.token_budget)),
        ("overflows measured", f"{len(material.overflows)}, of them {natural} for lack of memory"),
        ("runs served", str(len(material.runs))),
        ("left out", ", ".join(f"{count} {why}" for why, count in material.left_out.items()) or "nothing"),
        ("identical windows vary by", ", ".join(f"{share:.1%}" for share in variation) or "not measured"),
        ("mean error of predicted step times", ", ".join(f"{1e3 * s:.2f} ms" for s in step_error_s) or "not recorded"),
        ("measured", ", ".join(sorted({header.created for header in headers}))),
        ("seed of the measurement", ", ".join(sorted({str(header.seed) for header in headers}))),
        ("trace", f"{', '.join(folder.name for folder in group.folders)}, {len(headers)} engine cores"),
        ("digest", material.trace.digest()[:16]),
    ]
    notes = sorted({header.notes for header in headers if header.notes})
    runs = [run for figure in SERVED for run in material.served(figure)]
    return (
        facts
        + ([("scaled", "; ".join(notes))] if notes else [])
        + ([("requests", str(runs[0].requests))] if runs else [])
    )


def _blocks(headers: Sequence[Header]) -> str:
    sizes = sorted({(header.block_size, header.block_bytes) for header in headers})
    return ", ".join(f"{size} tokens in {size_bytes / 1024:g} KiB" for size, size_bytes in sizes)
