"""Who holds KV of before a reset, over a scheduler that is made up; over vLLM's, `tests/vllm/test_prompt_cache.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.plugin.stale_requests import StaleRequests


class Device:
    """Blocks of one table, and the requests that have them."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, block_hash=None, ref_cnt=0) for number in range(8)]
        self.requests: dict[str, Any] = {}
        self.held: dict[str, list[int]] = {}
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=self.blocks), get_blocks=self._table)

    def _table(self, name: str) -> Any:
        return SimpleNamespace(blocks=([self.blocks[number] for number in self.held.get(name, [])],))

    def fill(self, *numbers: int) -> None:
        """As whenever the same tokens are computed: the hash is equal, and another object."""
        for number in numbers:
            self.blocks[number].block_hash = bytes([1, 2, 3])

    def made(self, name: str, computed_tokens: int, *numbers: int) -> Any:
        self.held[name] = [*numbers]
        for block in self.blocks:
            block.ref_cnt = sum(block.block_id in held for held in self.held.values())
        self.requests[name] = SimpleNamespace(request_id=name, num_computed_tokens=computed_tokens)
        return self.requests[name]


@pytest.fixture
def device() -> Device:
    return Device()


def reset(device: Device, refused: bool = True) -> StaleRequests:
    stale = StaleRequests()
    stale.reset_begins(device)
    if not refused:
        for block in device.blocks:
            block.block_hash = None
    stale.reset_ends(device)
    return stale


def test_who_had_computed_tokens_is_stale_until_it_begins_anew(device: Device) -> None:
    running, waiting = device.made("running", 40, 0, 1, 2), device.made("waiting", 0)
    device.fill(0, 1)
    stale = reset(device)
    assert running in stale and waiting not in stale
    device.fill(0, 1)
    stale.admitted(running, device)
    assert running in stale, "a load that was under way has ended, and vLLM has hashed what it brought"
    stale.loses_blocks(running, device)
    running.num_computed_tokens, device.held["running"] = 0, [3, 4]
    device.fill(3)
    stale.admitted(running, device)
    assert running not in stale


def test_who_goes_on_in_what_the_device_still_finds_is_stale(device: Device) -> None:
    device.made("running", 40, 0, 1, 2)
    device.fill(0, 1, 5)  # block 5 is of a request that has ended
    stale = reset(device)
    for number, block in enumerate((1, 5)):
        found = device.made(f"found {number}", 0, block, 6)
        stale.admitted(found, device)
        assert found in stale
    stale.ended(found, device)
    device.held.pop(found.request_id)
    device.fill(5)
    anew = device.made("anew", 0, 5, 6)
    stale.admitted(anew, device)
    assert anew not in stale, "the block was given away, and the same was computed into it again"


def test_what_is_computed_behind_it_is_stale_too(device: Device) -> None:
    """Its first block was not full when the reset came."""
    running = device.made("running", 10, 0)
    stale = reset(device)
    device.fill(0)
    beside = device.made("beside", 0, 0, 1)
    stale.admitted(beside, device)
    assert beside in stale and running in stale


def test_what_is_found_behind_an_equal_block_of_others_is_stale_too(device: Device) -> None:
    """Another request has computed the first block again, and vLLM finds that one before the stale one."""
    device.made("running", 10, 0, 1)
    stale = reset(device)
    device.fill(0, 1, 3)
    beside = device.made("beside", 0, 3, 1, 2)
    stale.admitted(beside, device)
    assert beside in stale
    goes_on = device.made("goes on", 0, 3, 4)
    stale.admitted(goes_on, device)
    assert goes_on not in stale, "the block before the stale one is not"


@pytest.mark.parametrize("ends", [False, True], ids=["preempted", "ended"])
def test_what_it_leaves_on_the_device_is_stale(device: Device, ends: bool) -> None:
    running = device.made("running", 10, 0, 1)
    stale = reset(device)
    device.fill(0, 1)
    (stale.ended if ends else stale.loses_blocks)(running, device)
    assert (running in stale) != ends
    running.num_computed_tokens, device.held["running"] = 0, []
    other = device.made("other", 0, 0, 2)
    stale.admitted(other, device)
    stale.admitted(running, device)
    assert stale.names == {"other"}


def test_after_a_reset_that_vllm_carries_out_nobody_is(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.fill(0, 1)
    stale = reset(device, refused=False)
    assert stale.names == set() and not caplog.records
    request = device.made("request", 0, 0, 1)
    device.fill(0, 1)
    stale.admitted(request, device)
    assert request not in stale


def test_a_reset_that_vllm_refuses_is_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.made("running", 40, 0, 1, 2)
    device.fill(0, 1)
    reset(device)
    assert "goes on finding 2 blocks" in caplog.text and "reset it again" in caplog.text
