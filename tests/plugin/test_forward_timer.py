"""What a rank reports of its forward passes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvpolicy_vllm.plugin import forward_timer
from kvpolicy_vllm.plugin.forward_timer import MAX_FAILURES, MAX_PENDING, ForwardTimer
from kvpolicy_vllm.plugin.messages import Forward


class Watch:
    """A mark is the number of seconds that the test has let pass."""

    now_s = 0.0
    behind = False
    fails = False

    def mark(self) -> float:
        if Watch.fails:
            raise RuntimeError("the device is lost")
        return Watch.now_s

    def passed(self, mark: float) -> bool:
        return not Watch.behind

    def seconds(self, first: float, last: float) -> float:
        return last - first


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> ForwardTimer:
    monkeypatch.setattr(Watch, "now_s", 0.0)
    monkeypatch.setattr(Watch, "behind", False)
    monkeypatch.setattr(Watch, "fails", False)
    monkeypatch.setitem(forward_timer.WATCHES, "cpu", Watch)
    return ForwardTimer("cpu")


def run(timer: ForwardTimer, step: int | None, seconds: float) -> None:
    timer.begin(step)
    Watch.now_s += seconds
    timer.end()


class TestForwardTimer:
    def test_only_what_is_to_be_timed_is_timed_once(self, timer: ForwardTimer) -> None:
        run(timer, None, 1.0)
        run(timer, 4, 2.0)
        Watch.now_s += 8.0
        timer.end()  # vLLM may come by two hooks in a step
        assert timer.take() == [Forward(4, 2.0)]
        assert timer.take() == []

    def test_copies_that_are_begun_in_between_are_left_out(self, timer: ForwardTimer) -> None:
        timer.begin(1)
        for seconds, change in ((1.0, timer.interrupt), (4.0, timer.go_on), (2.0, timer.end)):
            Watch.now_s += seconds
            change()
        assert timer.take() == [Forward(1, 3.0)]

    def test_a_device_that_is_behind_is_asked_again_and_not_waited_for(self, timer: ForwardTimer) -> None:
        Watch.behind = True
        run(timer, 1, 1.0)
        run(timer, 2, 2.0)
        assert timer.take() == []
        Watch.behind = False
        assert timer.take() == [Forward(1, 1.0), Forward(2, 2.0)]

    def test_what_is_awaited_is_bounded(self, timer: ForwardTimer) -> None:
        Watch.behind = True
        for step in range(MAX_PENDING + 2):
            run(timer, step, 1.0)
        assert timer.take() == [Forward(0, None), Forward(1, None)]

    def test_failures_are_reported_and_after_some_nothing_is_timed(self, timer: ForwardTimer) -> None:
        Watch.fails = True
        for step in range(MAX_FAILURES + 3):
            run(timer, step, 1.0)
        Watch.fails = False
        run(timer, 99, 1.0)
        assert timer.take() == [Forward(step, None) for step in range(MAX_FAILURES)]

    def test_a_pass_that_never_ended_leaves_nothing(self, timer: ForwardTimer) -> None:
        timer.begin(1)
        run(timer, 2, 1.0)
        assert timer.take() == [Forward(2, 1.0)]

    @pytest.mark.parametrize("kind", [None, "xpu"])
    def test_nothing_is_timed_on_other_devices(self, kind: str | None) -> None:
        other = ForwardTimer(kind)
        run(other, 1, 1.0)
        assert other.take() == []
