"""The loads of benches: what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.bench_settings import ChatLoad
from kvpolicy.cli import main
from kvpolicy.fields import WrongValue


def test_more_people_than_conversations_are_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WrongValue, match="chatters is 7, more than the 6 conversations of a run") as refused:
        ChatLoad(chatters=(2, 7), conversations=6)
    assert refused.value.field == "chatters"
    assert ChatLoad(chatters=(2, 6), conversations=6).chatters == (2, 6)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), "--chatters", "41"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--chatters is 41, more than the 40 conversations" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_warm_up_that_takes_all_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ChatLoad(seconds=60.0, warmup_s=59.0).warmup_s == 59.0
    with pytest.raises(WrongValue, match="warmup_s is 60, and the run has 60 s in which messages are sent"):
        ChatLoad(seconds=60.0, warmup_s=60.0)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "http://127.0.0.1:9", "--out", str(tmp_path), "--seconds", "5", "--warmup-s", "7"])
    assert ended.value.code == 2 and "--warmup-s is 7, and the run has 5 s" in capsys.readouterr().err
