"""Why a cost model prefers one option: both costs taken apart, the break-even point, the decision boundary."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from kvpolicy.cost import FittedModel, load
from kvpolicy.errors import InputError
from kvpolicy.explaining.account import Account, account_of
from kvpolicy.explaining.asked import Asked, asked
from kvpolicy.explaining.boundary import Grid, break_even, grid
from kvpolicy.explaining.report import Explanation
from kvpolicy.policy import Objective
from kvpolicy.policy.objective import parse

__all__ = ["Account", "Asked", "Explanation", "Grid", "account_of", "explain"]

PLOT_FORMATS = (".svg", ".png")


def explain(
    cost_model: str | Path,
    tokens: int,
    running: int = 0,
    free: int = 0,
    waiting: int = 0,
    block_size: int | None = None,
    shared: int = 0,
    batch_tokens: int | None = None,
    segment_bytes: int | None = None,
    queued_save: int = 0,
    queued_load: int = 0,
    objective: str = "engine",
    plot: str | Path | None = None,
) -> Explanation:
    """What the model predicts for a victim of ``tokens`` computed tokens beside ``running`` others, and why.

    ``cost_model``: folder or name, as in ``cheapest:COST_MODEL``. ``free``: free KV blocks of the device. ``shared``:
    blocks of the victim that other requests hold too. ``queued_save``, ``queued_load``: bytes that wait to be copied
    out and back before the victim's. Without ``block_size`` the first one the model was measured on;
    without ``batch_tokens`` the others are as long as the victim, as far as the model was trained; without
    ``segment_bytes`` as in the model's traces, or one layer's part of a block. ``plot``: an SVG or PNG file to draw
    the decision boundary into, by its ending.

    Raises ValueError, naming the command's flag, for a wrong value; ModelError for a model that cannot be loaded.
    Without matplotlib nothing is drawn, and the explanation's ``not_drawn`` says so; its text has a grid of letters.
    """
    file = None if plot is None else _plot_file(Path(plot))
    weighing = parse(objective)
    model = load(cost_model)
    _refuse_unknown_delay(model, weighing)
    question = asked(
        model, tokens, running, free, waiting, block_size, shared, batch_tokens, segment_bytes, queued_save, queued_load
    )
    found = Explanation(
        cost_model=str(cost_model),
        family=model.provenance.family,
        objective=weighing,
        asked=question,
        accounts=account_of(model, question.situation),
        break_even=break_even(model, question.situation, weighing),
        grid=grid(model, question.situation, weighing),
        notes=_notes(model, question),
    )
    return found if file is None else replace(found, not_drawn=_draw(found, file))


def _refuse_unknown_delay(model: FittedModel, objective: Objective) -> None:
    if objective.victim and not model.predicts_victim_delay:
        raise InputError(
            f"--objective minimises the victim's delay, which cost model {model.name} was not taught; train it again"
        )


def _plot_file(file: Path) -> Path:
    if file.suffix.lower() not in PLOT_FORMATS:
        raise InputError(f"--plot is {file}, should end in {' or '.join(PLOT_FORMATS)}")
    if not file.parent.is_dir():
        raise InputError(f"--plot is {file}: there is no folder {file.parent}")
    return file


def _draw(found: Explanation, file: Path) -> str:
    """Why nothing was drawn; empty where it was."""
    try:
        drawing = import_module("kvpolicy.explaining.drawing")
    except ImportError as error:
        return f"--plot {file} was not written: it needs matplotlib ({error}): pip install 'kvpolicy[plots]'"
    drawing.draw(found, file)
    return ""


def _notes(model: FittedModel, question: Asked) -> tuple[str, ...]:
    notes = list(question.assumed)
    if question.situation.block_size not in model.provenance.block_sizes:
        sizes = ", ".join(map(str, model.provenance.block_sizes))
        notes.append(f"the model was measured on blocks of {sizes} tokens; these are extrapolated to")
    return (*notes, *model.provenance.notes)
