"""Files that are given up by a caching policy of one's own, whose code may fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.request_marks import HintLimits
from tests.tiers.blocks import FILE_BYTES, bytes_of, descriptors, load, opened, store

FIRST_STORED = "python:tests.caching.own_policy:FirstStored"
RAISING = "python:tests.caching.raising:Raising"


def there_after_three(directory: Path, policy: str, **options: Any) -> list[int]:
    """Which of three blocks are in files for two, the first one of which is asked for again before the third one
    comes."""
    tier = opened(directory, blocks=2, policy=policy, allow_python=True, **options)
    for number, key in enumerate([b"a", b"b"], 1):
        tier.asked([key])
        store(tier, [key], number)
    tier.asked([b"a"])
    tier.asked([b"c"])
    assert store(tier, [b"c"], 3) == {} and load(tier, [b"c"]) == {}
    there = [tier.lookup([key]) for key in (b"a", b"b", b"c")]
    assert bytes_of(directory) == 2 * FILE_BYTES and len(tier.take_gone()) == 1
    tier.close()
    return there


@pytest.mark.parametrize("hints", [None, HintLimits()], ids=["plain", "heeding hints"])
def test_files_are_given_up_as_it_says(tmp_path: Path, hints: HintLimits | None) -> None:
    assert there_after_three(tmp_path / "own", FIRST_STORED, hints=hints) == [0, 1, 1]
    assert there_after_three(tmp_path / "lru", "lru", hints=hints) == [1, 0, 1]


@pytest.mark.parametrize("hints", [None, HintLimits()], ids=["plain", "heeding hints"])
def test_where_it_fails_lru_takes_its_place(
    tmp_path: Path, hints: HintLimits | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows what is there, and when that is used from then on."""
    failed: list[str] = []
    tier = opened(tmp_path, blocks=2, policy=RAISING, allow_python=True, hints=hints, failed=failed.append)
    for number, key in enumerate([b"a", b"b", b"c"], 1):
        assert store(tier, [key], number) == {}
    assert [tier.lookup([key]) for key in (b"a", b"b", b"c")] == [0, 1, 1] and failed == ["evict"]
    tier.asked([b"b"])
    tier.asked([b"d"])
    assert store(tier, [b"d"], 4) == {} and load(tier, [b"b", b"d"]) == {}
    assert tier.lookup([b"c"]) == 0 and bytes_of(tmp_path) == 2 * FILE_BYTES and failed == ["evict"]
    tier.close()
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "evict() of caching policy raising failed; lru takes its place" in told.getMessage()
    assert told.exc_info is not None and "made up" in str(told.exc_info[1])


def test_a_restart_finds_the_blocks_under_it(tmp_path: Path) -> None:
    first = opened(tmp_path, blocks=4)
    store(first, [b"a", b"b", b"c"])
    first.close()
    second = opened(tmp_path, blocks=4, policy=FIRST_STORED, allow_python=True)
    assert second.lookup([b"a", b"b", b"c"]) == 3 and load(second, [b"a", b"b", b"c"]) == {}
    second.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": FIRST_STORED}, "policy cannot be used: caching policy '.*FirstStored' names a module to run"),
        ({"policy": "python:no.such:Policy", "allow_python": True}, "policy cannot be used: .* no module 'no'"),
        ({"policy": "off"}, "policy is 'off', should be one of lru, lfu, arc, s3fifo, cost, python:MODULE:FACTORY"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_a_folder_is_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    before = descriptors()
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "kv", **options)
    assert not (tmp_path / "kv").exists() and descriptors() == before
