"""`make test-all` goes on where it was interrupted, and begins anew where the code is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume import Resume, digest

SUITE = """
import pytest

@pytest.fixture
def torn():
    yield
    assert False

def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("today")
def test_is_torn_down_badly(torn): pass
"""


class Seen:
    """Tests that a run of pytest began."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.names.append(nodeid.rsplit("::", 1)[1])


def begun(suite: Path, passed: Path) -> list[str]:
    seen = Seen()
    pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(suite.parent), str(suite)], [Resume(passed), seen])
    return seen.names


def test_only_what_passed_is_left_out(tmp_path: Path) -> None:
    suite, passed = tmp_path / "test_some.py", tmp_path / "kept" / "digest"
    suite.write_text(SUITE)
    everything = ["test_passes", "test_fails", "test_is_skipped", "test_is_torn_down_badly"]
    assert begun(suite, passed) == everything
    assert begun(suite, passed) == everything[1:]
    assert begun(suite, tmp_path / "kept" / "other") == everything


def test_other_code_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    code = tmp_path / "package" / "code.py"
    code.write_text("1")
    before = digest(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result").write_text("1")
    assert digest(tmp_path) == before
    code.write_text("2")
    assert digest(tmp_path) != before


def test_another_setting_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(tmp_path)
    monkeypatch.setenv("KVPOLICY_VLLM_SOURCES", "/elsewhere")
    assert digest(tmp_path) != before
