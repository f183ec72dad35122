"""What the scheduler knows of a store or a load of files under way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpolicy.host_store import HostCopy
from kvpolicy.tiers import Took
from kvpolicy_vllm.plugin.file_jobs import Under
from kvpolicy_vllm.plugin.messages import FileReport

CHAIN = (b"a", b"b", b"c", b"d")


def loading(last: int = 3) -> Under:
    """The load of the second block of a prompt up to so many, for all who go on there."""
    return Under(HostCopy(0, loading=True), CHAIN[1:last], [], 0.0, CHAIN[:last])


@pytest.mark.parametrize(
    ("said", "slowest"),
    [
        ([], None),
        ([Took(3.0, 1.0), Took(2.0, 1.5)], Took(3.0, 1.5)),
        ([Took(3.0, 1.0), None], None),
    ],
)
def test_the_slowest_rank_counts_where_all_say_how_long_they_took(
    said: Sequence[Took | None], slowest: Took | None
) -> None:
    under = loading()
    for number, took in enumerate(said):
        under.reported(FileReport(1, failed=(b"%d" % number,), took=took))
    assert under.slowest() == slowest and under.reports == len(said) == len(under.failed)


class Files:
    """What files have behind the load."""

    def __init__(self, *there: bytes) -> None:
        self.there, self.asked = there, list[tuple[bytes, ...]]()

    def lookup(self, keys: Sequence[bytes]) -> int:
        self.asked.append(tuple(keys))
        return next((place for place, key in enumerate(keys) if key not in self.there), len(keys))


def test_what_one_has_asked_of_files_behind_a_load_no_other_asks_again() -> None:
    under, files = loading(), Files(b"d", b"e", b"g")
    assert under.ahead([b"b", b"c", b"d", b"x"], files.lookup) == (2, 1)
    assert under.ahead([b"c", b"d", b"x", b"y"], files.lookup) == (1, 1)
    assert files.asked == [(b"d", b"x")], "where the first one ends, so does the second one"
    assert under.ahead([b"b", b"c", b"d"], files.lookup) == (2, 1)
    assert under.ahead([b"b", b"c", b"d", b"e", b"f"], files.lookup) == (2, 2)
    assert files.asked[1:] == [(), (b"e", b"f")]


def test_who_leaves_a_load_before_its_end_goes_on_by_itself() -> None:
    under, files = loading(), Files(b"d", b"x")
    assert under.ahead([b"b", b"x", b"y"], files.lookup) == (1, 1)
    assert under.ahead([b"b"], files.lookup) == (1, 0)
    assert under.ahead([b"b", b"c", b"d"], files.lookup) == (2, 1)
