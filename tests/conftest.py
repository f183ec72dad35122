"""Tests under tests/vllm need vLLM: skipped without it, unless KVPOLICY_REQUIRE_VLLM=1, as `make test` sets it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from tests.examples import FACTOR
from tests.feature_record import note_marks

ENGINE_TESTS = Path(__file__).parent / "vllm"


def pytest_itemcollected(item: pytest.Item) -> None:
    note_marks(item)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_engines = [item for item in items if item.path.is_relative_to(ENGINE_TESTS)]
    for item in of_engines:
        item.add_marker(pytest.mark.engine)
    if not of_engines or find_spec("vllm"):
        return
    if os.environ.get("KVPOLICY_REQUIRE_VLLM") == "1":
        raise pytest.UsageError(
            "KVPOLICY_REQUIRE_VLLM=1, and vllm is not installed here; `make environment` installs it"
        )
    for item in of_engines:
        item.add_marker(pytest.mark.skip(reason="vllm is not installed here; `make test` installs it"))


# Machines that share their cores are slow at times; that is no fault of an example. What passes once passes again:
# new examples are for `make fuzz`.
hypothesis.settings.register_profile("no_deadline", deadline=None, derandomize=FACTOR == 1, max_examples=100 * FACTOR)
hypothesis.settings.load_profile("no_deadline")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Takes what goes to vLLM's loggers, too: once vLLM is imported, they pass nothing on to the root."""
    tree = logging.getLogger("vllm")
    if tree.propagate:
        yield caplog
        return
    tree.addHandler(caplog.handler)
    yield caplog
    tree.removeHandler(caplog.handler)
