"""The progress bar of a measurement starts over with every part."""

from __future__ import annotations

from kvpolicy_vllm.bench.progress import Bar


def test_a_part_counts_its_windows_once_its_engine_has_started() -> None:
    bar = Bar("profile")
    (task,) = bar._progress.tasks
    bar.tell("b32-pass0", 0, 0)
    assert (task.description, task.total) == ("profile, b32-pass0: engine starts", None)
    bar.tell("b32-pass0", 3, 20)
    assert (task.description, task.completed, task.total) == ("profile, b32-pass0", 3, 20)
