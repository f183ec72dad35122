"""Run a notebook and store what its cells print and plot: `python tools/notebook.py examples/train_judge_plot.ipynb`.

Cells run in this process, one after the other, without Jupyter; figures come from matplotlib. tests/test_examples.py
compares what is stored with what comes of the cells.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib as mpl

DPI = 80


def run(notebook: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with the outputs of its cells, and the names that they define."""
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"execution_count": count, "outputs": _outputs("".join(cell["source"]), names)}
        cells.append(cell)
    return notebook | {"cells": cells}, names


def printed(notebook: dict[str, Any]) -> list[str]:
    """What the cells print, of those that print anything."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    """The PNG files that the cells plot."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return [
        base64.b64decode(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", {})
    ]


def _outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """In Jupyter's form: one stream of text, then each figure that is open."""
    from matplotlib import pyplot

    text = io.StringIO()
    with redirect_stdout(text):
        exec(compile(source, "a cell", "exec"), names)
    found: list[dict[str, Any]] = []
    if text.getvalue():
        lines = text.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return found


def main() -> None:
    for name in sys.argv[1:]:
        notebook, _ = run(json.loads(Path(name).read_text()))
        Path(name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
