"""Which blocks of several tables a copy needs: worked by hand for a window and a state beside full attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin.block_tables import BlockTables, MissingBlock
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.situation import restorable_tokens, why_not_loadable

FULL, WINDOW, STATE = 0, 1, 2
SIZES = (16, 16, 32)
NULL = SimpleNamespace(block_id=0, is_null=True)


def manager(skipped: Any) -> Any:
    return SimpleNamespace(get_num_skipped_tokens=skipped)


def blocks(*block_ids: int) -> list[Any]:
    """With null blocks for 0."""
    return [SimpleNamespace(block_id=one, is_null=False) if one else NULL for one in block_ids]


def scheduler(*tables: list[Any]) -> Any:
    """A window of 20 tokens: the next token attends to the last 19."""
    managers = [manager(lambda n: 0), manager(lambda n: n - 19), manager(lambda n: n - 1)]
    return SimpleNamespace(
        kv_cache_manager=SimpleNamespace(
            get_blocks=lambda request_id: SimpleNamespace(blocks=tables),
            coordinator=SimpleNamespace(single_type_managers=managers),
        )
    )


TABLES = blocks(1, 2, 3, 4), blocks(0, 0, 5, 6), blocks(0, 7)
"""Of a request with 56 computed tokens: the window begins at token 37, in block 2."""


def ids(found: dict[Any, Any]) -> dict[Any, int]:
    return {position: block.block_id for position, block in found.items()}


def test_what_is_needed_of_each_group() -> None:
    found = BlockTables(SIZES).needed(scheduler(*TABLES), "r", 56)
    full = {(FULL, 0): 1, (FULL, 1): 2, (FULL, 2): 3, (FULL, 3): 4}
    assert ids(found) == full | {(WINDOW, 2): 5, (WINDOW, 3): 6, (STATE, 1): 7}


@pytest.mark.parametrize(("tokens", "state_block"), [(1, 0), (32, 0), (33, 1), (64, 1)])
def test_a_state_is_in_the_block_of_its_last_token(tokens: int, state_block: int) -> None:
    tables = blocks(1, 2, 3, 4), blocks(5, 6, 7, 8), blocks(9, 10)
    found = BlockTables(SIZES).needed(scheduler(*tables), "r", tokens)
    assert [index for group, index in found if group == STATE] == [state_block]


def test_nothing_computed_needs_nothing() -> None:
    assert BlockTables(SIZES).needed(scheduler([], [], []), "r", 0) == {}


@pytest.mark.parametrize("tables", [(TABLES[0], blocks(0, 0, 0, 6), TABLES[2]), (TABLES[0][:3], *TABLES[1:])])
def test_a_needed_block_that_is_missing(tables: Any) -> None:
    with pytest.raises(MissingBlock, match=r"block 2 of group 1|block 3 of group 0"):
        BlockTables(SIZES).needed(scheduler(*tables), "r", 56)


def test_what_is_loaded_beside_what_the_device_has() -> None:
    """32 tokens are there: two blocks of the full group, none of the window's and the whole state."""
    into = BlockTables(SIZES).to_load(scheduler(), [[1, 2, 13, 14], [0, 0, 15, 16], [0, 17]], 32, 56)
    assert into == {(FULL, 2): 13, (FULL, 3): 14, (WINDOW, 2): 15, (WINDOW, 3): 16, (STATE, 1): 17}


def test_what_a_request_lacks() -> None:
    """64 tokens fit; 65 take a block of each group."""
    lacking = [BlockTables(SIZES).lacking_blocks(scheduler(*TABLES), "r", tokens) for tokens in (64, 65, 81)]
    assert lacking == [0, 3, 5]


@pytest.mark.parametrize(("known_tokens", "restorable"), [(57, 56), (70, 56), (56, 0), (40, 0)])
def test_a_copy_of_several_tables_is_loaded_whole_or_not_at_all(known_tokens: int, restorable: int) -> None:
    """The last known token is computed. Where that leaves fewer tokens than were saved, there is no state for them."""
    book = CopyBook(8, 1, 100)
    copy = book.keep("r", "p", 56, [(None, 7)])
    request = SimpleNamespace(request_id="r", num_tokens=known_tokens)
    assert restorable_tokens(request, SimpleNamespace(), book) == min(56, known_tokens - 1), "of a single table"
    copy.positions = ((STATE, 1),)
    assert restorable_tokens(request, SimpleNamespace(), book) == restorable


def test_growth_is_that_of_the_groups_that_give_no_block_back() -> None:
    """Past its window and with one state, a request grows by the blocks of full attention alone."""
    assert BlockTables(SIZES).growth_tokens(scheduler()) == pytest.approx(16)


def test_growth_where_all_groups_give_blocks_back_is_that_of_a_short_request() -> None:
    """In 16 tokens it takes two blocks of the one group, and one of the other."""
    made = scheduler()
    made.kv_cache_manager.coordinator.single_type_managers = [manager(lambda n: n - 19), manager(lambda n: n - 99)]
    assert BlockTables((8, 16)).growth_tokens(made) == pytest.approx(16 / 3)


@pytest.mark.parametrize(
    ("captures", "tables", "computed_tokens", "why"),
    [
        (True, BlockTables(SIZES), 40, "not_loadable"),
        (True, BlockTables(SIZES), 48, ""),
        (True, None, 40, ""),
        (False, BlockTables(SIZES), 40, ""),
    ],
)
def test_what_could_not_be_loaded_whole_is_not_saved(
    captures: bool, tables: BlockTables | None, computed_tokens: int, why: str
) -> None:
    """vLLM loads whole blocks alone where it returns routed experts; of one table, then, all but the last part."""
    engine = SimpleNamespace(block_size=16, aux_output_connector=object() if captures else None)
    request = SimpleNamespace(skip_reading_prefix_cache=False, num_computed_tokens=computed_tokens)
    assert why_not_loadable(request, engine, CopyBook(8, 1, 100), 0.0, tables) == why


@pytest.mark.parametrize(
    ("delivers", "tables", "known_tokens", "why"),
    [
        (True, BlockTables(SIZES), 48, "not_loadable"),
        (True, BlockTables(SIZES), 49, ""),
        (True, None, 48, ""),
        (False, BlockTables(SIZES), 48, ""),
    ],
)
def test_what_loses_its_token_in_flight_is_not_saved(
    delivers: bool, tables: BlockTables | None, known_tokens: int, why: str
) -> None:
    """vLLM drops the token of a step under way where another connector has to hand KV on. The copy would be of one
    token more than can be loaded; of one table, all but that one are."""
    engine = SimpleNamespace(block_size=16, requires_kv_delivery=delivers)
    request = SimpleNamespace(
        request_id="r", skip_reading_prefix_cache=False, num_computed_tokens=48, num_tokens=known_tokens
    )
    book = CopyBook(8, 1, 100)
    assert why_not_loadable(request, engine, book, 0.0, tables) == why
    book.keep("r", "p", 48, [(None, 7)]).positions = None if tables is None else ((STATE, 1),)
    request.num_tokens += not delivers  # it comes while the request waits
    assert (restorable_tokens(request, engine, book) == 0) == bool(why), "nothing is refused that could be loaded"
