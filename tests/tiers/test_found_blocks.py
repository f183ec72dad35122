"""What a tier takes up of an earlier process; more of it in test_file_tier.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpolicy.caching import KINDS
from kvpolicy.tiers.block_files import OUTDATED_NS
from kvpolicy.tiers.found_blocks import NS
from tests.tiers.blocks import files_of, load, opened, store

KEPT, SALTED = [b"a", b"b"], [b"salted c", b"salted d"]


@pytest.mark.parametrize("policy", sorted(KINDS))
def test_what_only_the_process_that_stored_it_could_ask_for_goes_first_after_a_restart(
    tmp_path: Path, policy: str
) -> None:
    """However often and how lately it was used."""
    first = opened(tmp_path, blocks=4)
    store(first, KEPT)
    first.forget_hints()
    store(first, SALTED, 2)
    assert load(first, SALTED) == {}
    first.close()
    second = opened(tmp_path, blocks=4, policy=policy)
    for _ in range(2):
        second.asked(SALTED)
    assert second.lookup(KEPT) == second.lookup(SALTED) == 2
    for number, key in enumerate([b"e", b"f"], 3):
        assert store(second, [key], number) == {}
    assert second.lookup(KEPT) == 2 and not any(second.lookup([key]) for key in SALTED)
    second.close()


def test_it_is_not_found_where_there_is_less_room(tmp_path: Path) -> None:
    first = opened(tmp_path, blocks=4)
    store(first, KEPT)
    first.forget_hints()
    store(first, SALTED, 2)
    first.close()
    second = opened(tmp_path, blocks=2)
    assert second.lookup(KEPT) == 2 and len(files_of(tmp_path)) == 2
    second.close()


@pytest.mark.parametrize("used_ns", [OUTDATED_NS, NS // 2, NS])
def test_the_policy_knows_all_that_is_there_whatever_its_time(tmp_path: Path, used_ns: int) -> None:
    first = opened(tmp_path)
    store(first, KEPT)
    first.close()
    for path in files_of(tmp_path):
        os.utime(path, ns=(used_ns, used_ns))
    second = opened(tmp_path, blocks=2)
    assert second.lookup(KEPT) == 2 and store(second, [b"e", b"f"]) == {} and second.lookup(KEPT[:1]) == 0
    second.close()
