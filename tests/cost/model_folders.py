"""Changes to a stored model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    card = json.loads((folder / "model.json").read_text())
    change(card)
    (folder / "model.json").write_text(json.dumps(card))
