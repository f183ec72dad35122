"""An error raised in the code of a user's own order names the order, the method and the line, in every process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.order import Order, OrderError, load
from kvpolicy.order.rules import Urgent
from kvpolicy.policy.failures import raise_order_failure
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.study.config import Run
from tests.order import failing
from tests.order.failing import FAILS, METHODS, Failing, predicted, unfit
from tests.study.conftest import hardware
from tests.study.policy_grids import TIGHT
from tests.study.test_own_orders import MIXED

__all__ = ["hardware"]
SOURCE = Path(failing.__file__)
LINE, PREDICTOR_LINE = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith(FAILS)]


def sentence(order: Order, said: str, line: int = LINE) -> str:
    return rf"^order {re.escape(order.label)}: {said} \({re.escape(str(SOURCE))}, line {line}\)$"


def simulated(order: Any, hardware: str, cache: Path, jobs: int = 0) -> str:
    """The error of a study."""
    run, serving = Run(jobs=jobs, cache=cache), kvpolicy.Serving(order=order)
    (failed,) = kvpolicy.simulate([MIXED], ["always-swap"], [TIGHT], hardware, serving=serving, run=run).failed
    return failed.error


@pytest.mark.parametrize("method", METHODS)
def test_it_names_method_and_line(hardware: str, tmp_path: Path, method: str) -> None:
    order = Failing(method)
    assert re.search(
        sentence(order, f"{method} failed with Unpicklable: made up"), simulated(order, hardware, tmp_path)
    )


def test_worker_processes_say_so(hardware: str, tmp_path: Path) -> None:
    order = Failing("worth")
    said = simulated(order, hardware, tmp_path, jobs=1)
    assert re.search(sentence(order, "worth failed with Unpicklable: made up"), said)


def test_a_call_that_does_not_fit_and_a_predictor_and_a_part(hardware: str, tmp_path: Path) -> None:
    said = simulated(unfit(), hardware, tmp_path)
    assert re.search(
        r"^order unfit@\w+: rank failed with TypeError: .*takes 2 positional arguments but 3 were given$", said
    )
    said = simulated(predicted(), hardware, tmp_path)
    assert re.search(sentence(predicted(), "rank failed with ZeroDivisionError: .*", PREDICTOR_LINE), said)
    layered = "classes:chat+batch/python:tests.order.failing:Failing"
    said = simulated(layered, hardware, tmp_path)
    assert re.search(sentence(load(layered, allow_python=True), "rank failed with Unpicklable: made up"), said)


def test_what_is_no_fault_of_an_order_is_raised_as_it_is() -> None:
    """The same file's workload, and this package's own code, under an order of the file."""

    def requests() -> Any:
        yield 1 // 0

    class Source:
        name, seed = "made up", 0

        def __iter__(self) -> Any:
            return requests()

    server = Server(block_size=16, block_bytes=1, device_blocks=64, host_blocks=64, order=Failing("none"))
    with pytest.raises(ZeroDivisionError):
        Builtin().run(Source(), kvpolicy.load_policy("always-swap"), server, ConstantTimes(0.01, (0.0,) * 6))
    for order in (Urgent("urgent"), Failing("none")):
        with pytest.raises(TypeError, match=r"^other$"):
            raise_order_failure(order, TypeError("other"))
        with pytest.raises(OrderError, match=r"^said$"):
            raise_order_failure(order, OrderError("said"))


def test_the_command_line_prints_one_line(hardware: str, tmp_path: Path, capfd: pytest.CaptureFixture[Any]) -> None:
    command = ["--kv-blocks", str(TIGHT), "--hardware", hardware, "--workload", MIXED, "--cache", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *command, "--policy", "always-swap", "--order", "python:tests.order.failing:Failing"])
    assert ended.value.code
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out
    assert "rank failed with Unpicklable: made up" in shown.err + shown.out
