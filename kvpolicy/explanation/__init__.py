"""Why a cost model prefers one option: both costs taken apart, the break-even point, the decision boundary."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from kvpolicy.cost import FittedModel, load
from kvpolicy.explanation.boundary import Grid, break_even, grid
from kvpolicy.explanation.breakdown import Account, account_of
from kvpolicy.explanation.choice import choice_of
from kvpolicy.explanation.question import Asked, Question, resolve
from kvpolicy.explanation.report import Explanation
from kvpolicy.fields import WrongValue, parsed
from kvpolicy.policy import Objective, Policy, load_policy
from kvpolicy.policy.objective import ENGINE

__all__ = ["Account", "Asked", "Explanation", "Grid", "Question", "account_of", "explain"]

PLOT_FORMATS = (".svg", ".png")


def explain(
    cost_model: str | Path | FittedModel,
    question: Question,
    objective: Objective | str = ENGINE,
    plot: str | Path | None = None,
    policy: str | Policy | None = None,
) -> Explanation:
    """What the model predicts for both options, and why; and what ``policy``, by its name or itself, makes of it.

    ``cost_model``: the model itself, or a folder or name, as in ``cheapest:COST_MODEL``. ``plot``: an SVG or PNG file
    to draw the decision boundary into, by its ending.

    Raises ValueError, naming the argument, for a wrong value; ModelError for a model that cannot be loaded. Without
    matplotlib nothing is drawn, and the explanation's ``not_drawn`` says so; its text has a grid of letters.
    """
    file = None if plot is None else _plot_file(Path(plot))
    weighing = parsed("objective", objective, Objective)
    model = cost_model if isinstance(cost_model, FittedModel) else load(cost_model)
    chooser = None if policy is None else load_policy(policy)
    _refuse_unknown_delay(model, weighing)
    asked = resolve(model, question)
    found = Explanation(
        cost_model=model.name,
        family=model.provenance.family,
        objective=weighing,
        asked=asked,
        accounts=account_of(model, asked.situation),
        break_even=break_even(model, asked.situation, weighing),
        grid=grid(model, asked.situation, weighing),
        notes=_notes(model, asked),
        choice=None if chooser is None else choice_of(chooser, model, asked.situation),
    )
    return found if file is None else replace(found, not_drawn=_draw(found, file))


def _refuse_unknown_delay(model: FittedModel, objective: Objective) -> None:
    if objective.victim and not model.predicts_victim_delay:
        what = f"minimises the victim's delay, which cost model {model.name} was not taught; train it again"
        raise WrongValue("objective", what)


def _plot_file(file: Path) -> Path:
    if file.suffix.lower() not in PLOT_FORMATS:
        raise WrongValue("plot", f"is {file}, should end in {' or '.join(PLOT_FORMATS)}")
    if not file.parent.is_dir():
        raise WrongValue("plot", f"is {file}: there is no folder {file.parent}")
    return file


def _draw(found: Explanation, file: Path) -> str:
    """Why nothing was drawn; empty where it was."""
    try:
        drawing = import_module("kvpolicy.explanation.plot")
    except ImportError as error:
        return f"{file} was not written: it needs matplotlib ({error}): pip install 'kvpolicy[plots]'"
    drawing.draw(found, file)
    return ""


def _notes(model: FittedModel, asked: Asked) -> tuple[str, ...]:
    notes = list(asked.assumed)
    if asked.situation.block_size not in model.provenance.block_sizes:
        sizes = ", ".join(map(str, model.provenance.block_sizes))
        notes.append(f"the model was measured on blocks of {sizes} tokens; these are extrapolated to")
    return (*notes, *model.provenance.notes)
