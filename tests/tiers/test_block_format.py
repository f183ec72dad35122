"""What a block file says of itself, and that nothing is taken from one that says anything else."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.tiers.block_format import (
    FIELDS,
    NO_PARENT,
    PAGE,
    BlockLayout,
    BlockName,
    Damaged,
    aligned_memory,
    checksum,
    digest_of_key,
    is_aligned,
)
from tests.tiers.blocks import content

LAYOUT = BlockLayout(bytes(20), 100)
KEY = digest_of_key(b"key")


def header_of(layout: BlockLayout = LAYOUT, key: bytes = KEY, block: bytes = b"key") -> np.ndarray:
    header = aligned_memory(PAGE)
    layout.write_header(header, key, [content(block, 100)])
    return header


def test_what_was_written_is_verified_however_it_lies_in_memory() -> None:
    whole = content(b"key", 100)
    LAYOUT.verify(header_of(), KEY, [whole])
    LAYOUT.verify(header_of(), KEY, [whole[:7], whole[7:7], whole[7:]])
    assert checksum([whole[:7], whole[7:]]) == checksum([whole]) != checksum([whole[:-1]])


@pytest.mark.parametrize("bit", range(0, (FIELDS.size + 4) * 8, 5))
def test_every_bit_of_the_header_counts(bit: int) -> None:
    header = header_of()
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged, match="corrupt"):
        LAYOUT.verify(header, KEY, [content(b"key", 100)])


@pytest.mark.parametrize("bit", range(0, 800, 37))
def test_every_bit_of_the_block_counts(bit: int) -> None:
    block = content(b"key", 100)
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged, match="corrupt"):
        LAYOUT.verify(header_of(), KEY, [block])


@pytest.mark.parametrize(
    ("layout", "key"),
    [(BlockLayout(bytes([1] * 20), 100), KEY), (BlockLayout(bytes(20), 99), KEY), (LAYOUT, bytes(20))],
)
def test_a_file_of_another_namespace_size_or_key_is_foreign(layout: BlockLayout, key: bytes) -> None:
    with pytest.raises(Damaged, match="foreign"):
        LAYOUT.verify(header_of(layout, key), KEY, [content(b"key", 100)])


def test_names_of_files_are_read_back_and_others_are_none() -> None:
    name = BlockName(KEY, NO_PARENT)
    assert BlockName.of_file(name.file) == name
    assert name.folder == name.file[0] == KEY.hex()[0]
    for other in (
        "",
        "12",
        "lock",
        name.file.upper(),
        name.file[:-2],
        f"{name.file}-",
        f"{KEY.hex()}",
        f" {name.file}",
    ):
        assert BlockName.of_file(other) is None


def test_a_file_is_whole_pages() -> None:
    assert [BlockLayout(bytes(20), size).file_bytes for size in (1, PAGE, PAGE + 1)] == [2 * PAGE, 2 * PAGE, 3 * PAGE]


def test_memory_is_aligned_or_not() -> None:
    memory = aligned_memory(2 * PAGE)
    assert is_aligned([memory, memory[PAGE:]])
    assert (
        not is_aligned([memory[1:]])
        and not is_aligned([memory[:-1]])
        and not is_aligned([memory, memory[8 : PAGE + 8]])
    )
