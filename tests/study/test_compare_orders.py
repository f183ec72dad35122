"""The documented comparison of two orders prints what the page says; what they displaced is counted by cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kvpolicy
from kvpolicy import Serving
from kvpolicy.study.config import Run
from kvpolicy.trace import read
from tests.order.made import ByLevel
from tests.study.conftest import hardware
from tests.study.policy_grids import TIGHT, WORKLOAD

__all__ = ["hardware"]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "simulating.md").read_text()
SCRIPT = ROOT / "tests" / "study" / "compare_orders.py"


def test_the_documented_comparison_prints_what_the_page_says(tmp_path: Path) -> None:
    assert SCRIPT.read_text() in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    surroundings = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": search}
    printed = subprocess.run(
        [sys.executable, SCRIPT], env=surroundings, capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()
    assert f"This prints `{printed}`" in PAGE


def test_preemptions_are_counted_by_cause_and_shown_where_somebody_was_displaced(hardware: str, tmp_path: Path) -> None:
    run = Run(jobs=0, cache=tmp_path / "cache", out=tmp_path / "out")
    for order, displaces in ((ByLevel(), True), ("fcfs", False)):
        report = kvpolicy.simulate(
            [WORKLOAD], ["always-swap"], [TIGHT], hardware, serving=Serving(order=order), run=run
        )
        (result,) = report.results
        causes = result["preemption_causes"]
        assert sum(causes.values()) == sum(result["preemptions"].values()) > 0
        (folder,) = [folder for folder in (tmp_path / "out").iterdir() if folder.name == result["digest"][:16]]
        recorded = read(folder).tables["decisions"].column("cause").to_pylist()
        assert causes == {cause: recorded.count(cause) for cause in set(recorded)}
        assert ("displaced" in causes, "preemptions by cause" in report.text()) == (displaces, displaces)
        if displaces:
            head, row = report.text().partition("preemptions by cause\n")[2].splitlines()[:2]
            shown = dict(zip(head.split(), row.split(), strict=True))
            assert shown == {"policy": "always-swap"} | {cause: str(count) for cause, count in causes.items()}
