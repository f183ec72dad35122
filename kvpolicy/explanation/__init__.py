"""Why a cost model prefers one option: the parts of both costs, the break-even point, the decision boundary."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from kvpolicy.cost import CostModel, FittedModel, load
from kvpolicy.cost.model import with_laws
from kvpolicy.explanation.boundary import Grid, break_even, grid
from kvpolicy.explanation.breakdown import Breakdown, breakdowns_of
from kvpolicy.explanation.choice import choice_of
from kvpolicy.explanation.question import Question, ResolvedQuestion, resolve
from kvpolicy.explanation.report import Explanation
from kvpolicy.fields import WrongValue, refuse_no_path, refuse_other
from kvpolicy.policy import Objective, Policy, load_policy
from kvpolicy.policy.objective import ENGINE, objective_of

__all__ = ["Breakdown", "Explanation", "Grid", "Question", "ResolvedQuestion", "breakdowns_of", "explain"]

PLOT_FORMATS = (".svg", ".png")


def explain(
    cost_model: str | Path | CostModel,
    question: Question,
    objective: Objective | str = ENGINE,
    plot: str | Path | None = None,
    policy: str | Policy | None = None,
) -> Explanation:
    """Explain the predicted costs of both options in one situation.

    ``cost_model``: the model itself, which has to have laws, or a folder or name, as in ``cheapest:COST_MODEL``. A cost
    model without laws decides in the question's situation as that of ``policy``. ``plot``: an SVG or PNG file
    to draw the decision boundary into; the ending says which. ``policy``: a policy or its name, whose probabilities are
    added.

    Raises WrongValue, naming the argument; ModelError for a model that cannot be loaded or has no laws. Without
    matplotlib nothing is drawn and the explanation's ``not_drawn`` says so; its text shows the boundary in letters.
    """
    if plot is not None:
        refuse_no_path("plot", plot)
    file = None if plot is None else _plot_file(Path(plot))
    parsed_objective = objective_of(objective)
    refuse_other("question", question, Question, "a Question")
    if isinstance(cost_model, str | Path):
        model = load(cost_model, pinned=not question.pageable)
    else:
        model = with_laws(cost_model, "explained")
    _refuse_other_memory(model, question)
    chooser = None if policy is None else load_policy(policy)
    _refuse_unknown_delay(model, parsed_objective)
    resolved = resolve(model, question)
    explanation = Explanation(
        cost_model=model.name,
        family=model.provenance.family,
        objective=parsed_objective,
        question=resolved,
        breakdowns=breakdowns_of(model, resolved.situation),
        break_even=break_even(model, resolved.situation, parsed_objective),
        grid=grid(model, resolved.situation, parsed_objective),
        notes=_notes(model, resolved, question.pageable),
        choice=None if chooser is None else choice_of(chooser, model, resolved.situation),
    )
    return explanation if file is None else replace(explanation, not_drawn=_draw(explanation, file))


def _refuse_other_memory(model: FittedModel, question: Question) -> None:
    if question.pageable and model.provenance.pinned is not False:
        unknown = model.provenance.pinned is None
        measured = "does not say over which host memory it was measured" if unknown else "is of page-locked host memory"
        should = "should be left out, or asked of analytic:DEVICE:CONFIG"
        raise WrongValue("pageable", f"is given, and cost model {model.name} {measured}: {should}")


def _refuse_unknown_delay(model: FittedModel, objective: Objective) -> None:
    if objective.victim and not model.predicts_victim_delay:
        what = f"minimises the victim's delay, which cost model {model.name} does not predict; train it again"
        raise WrongValue("objective", what)


def _plot_file(file: Path) -> Path:
    if file.suffix.lower() not in PLOT_FORMATS:
        raise WrongValue("plot", f"is {file}, should end in {' or '.join(PLOT_FORMATS)}")
    if not file.parent.is_dir():
        raise WrongValue("plot", f"is {file}: there is no folder {file.parent}")
    return file


def _draw(explanation: Explanation, file: Path) -> str:
    """Draw the decision boundary into ``file``. Return why it was not drawn, or an empty text."""
    try:
        drawing = import_module("kvpolicy.explanation.plot")
    except ImportError as error:
        return f"{file} was not written: it needs matplotlib ({error}): pip install 'kvpolicy[plots]'"
    drawing.draw(explanation, file)
    return ""


def _notes(model: FittedModel, resolved: ResolvedQuestion, pageable: bool) -> tuple[str, ...]:
    notes = list(resolved.assumed)
    if resolved.situation.block_size not in model.provenance.block_sizes:
        sizes = ", ".join(map(str, model.provenance.block_sizes))
        notes.append(f"the model was measured on blocks of {sizes} tokens; another size is extrapolated")
    if pageable:
        notes.append("copies are priced over pageable host memory, which is not page-locked")
    return (*notes, *model.provenance.notes)
