"""Columns of a trace: records made out of them are those that the rows hold, and wrong rows are told by number."""

from __future__ import annotations

import random

import pytest

from kvpolicy.datasets.examples import option_of
from kvpolicy.datasets.tables import Situations, TransferRecord, TransferTable, key
from kvpolicy.events import KINDS, Kind, Preemption
from kvpolicy.features import FEATURES, features_of
from tests.synthetic import situation


def random_situation(rng: random.Random) -> Preemption:
    held = rng.randrange(1, 200)
    return situation(
        computed_tokens=rng.randrange(1, 200_000), block_size=rng.choice((16, 64)), held_blocks=held,
        shared_blocks=rng.choice((0, 3, held, held + 5)), hit_blocks=rng.choice((0.0, 0.75 * held, held + 2.5)),
        save_blocks=rng.choice((0.0, held / 3, float(held))), block_bytes=rng.randrange(1, 1 << 22),
        segment_bytes=rng.choice((0, 1, 4096, 1 << 23)), running_requests=rng.randrange(4),
        queued_save_bytes=rng.randrange(1 << 30), queued_load_bytes=rng.randrange(1 << 30),
        batch_tokens=rng.randrange(9999), free_blocks=rng.randrange(99), waiting_requests=rng.randrange(9),
        hit_tokens=rng.choice((None, 0.0, 2e3 * rng.random())),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_features_by_column_are_the_features_of_each_situation(kind: Kind) -> None:
    rng = random.Random(0)
    some = [random_situation(rng) for _ in range(500)]
    columns = Situations.of(some).features(kind)
    assert set(columns) == set(FEATURES)
    for at, one in enumerate(some):
        x = features_of(one, option_of(kind, one.computed_tokens))
        assert {name: column[at] for name, column in columns.items()} == x._asdict()


def test_situations_and_moves_are_sequences_of_the_records_they_were_made_of() -> None:
    rng = random.Random(1)
    some = [random_situation(rng) for _ in range(5)]
    result = Situations.of(some)
    assert (list(result), result[-1], result[1:3], len(result)) == (some, some[4], some[1:3], 5)
    assert [type(one.computed_tokens) for one in result] == [int] * 5
    with pytest.raises(IndexError):
        result[5]
    transfers = [TransferRecord("core", f"p{i}", ("save", "load")[i % 2], 100 * i, i, 0.5 * i) for i in range(6)]
    held = TransferTable.of(transfers)
    assert (list(held), held[1], held[-2:], len(held)) == (transfers, transfers[1], transfers[-2:], 6)
    assert [list(column) for column in held.columns("load")] == [[100, 300, 500], [1, 3, 5], [0.5, 1.5, 2.5]]
    expected = [key("core", "p4"), key("core", "p1"), key("other", "p2")]
    assert list(held.of_preemptions(expected)) == [transfers[1], transfers[4]]
    assert TransferTable.of(held) is held and Situations.of(result) is result
    assert list(TransferTable.of(())) == list(Situations.of(())) == []
