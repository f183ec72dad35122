"""What a block saves by being loaded, from a cost model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpolicy import cost
from kvpolicy.cost import CostModel
from kvpolicy.cost.block_price import Beside, block_price, interpolated, read_first, sampled
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.hardware.sheets import device_sheet
from kvpolicy.shape import ModelShape
from tests.shape.configs import LLAMA_31_8B

BLOCK, BYTES = 16, 2 << 20
"""Tokens and bytes of a block of Llama-3.1-8B in 16 bits."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_31_8B))
    return path


def test_the_price_is_about_the_flops_of_the_block_and_rises_with_the_tokens_before_it(config: Path) -> None:
    shape, flops = ModelShape.from_config(LLAMA_31_8B), device_sheet("H100-SXM").bf16_flops
    price = block_price(cost.load(f"analytic:H100-SXM@pcie5:{config}").predict, BLOCK, BYTES)
    for index in (200, 1000, 4000):
        pairs = shape.attention_flops_per_pair * BLOCK**2 * (index + 0.5)
        ideal_s = (shape.linear_flops_per_token * BLOCK + pairs) / flops
        assert ideal_s < price(index) < 4 * ideal_s, index
    prices = [price(index) for index in range(0, 20_000, 50)]
    assert prices == sorted(prices) and prices[-1] > 2 * prices[0]


class Rates(CostModel):
    """Tokens and pairs of tokens at given rates, and a load at so many bytes a second after a millisecond."""

    name = "rates"

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        costs = []
        for option in options:
            x = features_of(situation, option)
            swap = option.kind == "swap"
            load_s = swap * (1e-3 + x.load_bytes / self._bytes_per_s)
            recompute_s = (not swap) * (5e-3 + 1e-5 * x.recomputed_tokens + 1e-9 * x.recomputed_pairs)
            seconds = load_s + recompute_s
            costs.append(Cost(seconds, 0.0, load_s, recompute_s, 0.0, seconds, seconds))
        return tuple(costs)


def test_constants_are_no_blocks_and_loads_count_against() -> None:
    """A block of 16 tokens behind n of them: 16 tokens, 16 x (16 n + 8.5) pairs, 1 MB to load."""
    price = block_price(Rates(10e9).predict, BLOCK, 1_000_000)
    for index in (0, 100, 3000, 10**5):
        assert price(index) == pytest.approx(16e-5 + 16e-9 * (16 * index + 8.5) - 1e-4, rel=1e-6), index


def test_a_slow_link_leaves_nothing_to_save_unless_the_block_is_far_behind() -> None:
    price = block_price(Rates(1e9).predict, BLOCK, 1_000_000)
    assert price(0) == price(3000) == 0.0 and price(4000) > 0.0


def test_a_model_measured_on_states_prices_blocks_too() -> None:
    model = cost.load("cpu-llama-native")
    price = block_price(model.predict, BLOCK, round(model.provenance.kv_bytes_per_token * BLOCK))
    assert all(price(index) >= 0.0 for index in (0, 10, 1000, 10**5))


def test_blocks_are_priced_beside_the_most_requests_that_ran_lately() -> None:
    beside = Beside()
    assert beside.most == 1
    for running in (3, 9, 0):
        beside.add(running)
    assert beside.most == 9
    beside.renew()
    beside.add(2)
    assert beside.most == 9, "of the time before as well"
    beside.renew()
    assert beside.most == 2


def test_without_predictions_all_blocks_save_the_same() -> None:
    price = block_price(lambda situation, options: (), BLOCK, BYTES)
    assert price(0) == price(10**5) == 1.0


def test_prices_that_are_handed_on_are_the_same_where_they_are_linear() -> None:
    price = interpolated(sampled(lambda index: 2.0 + 0.5 * index))
    assert [price(index) for index in (0, 2, 100, 5000, 200_000)] == [2.0, 3.0, 52.0, 2502.0, 100_002.0]
    assert interpolated(sampled(lambda index: max(0.0, 10.0 - index)))(300_000) == 0.0, "never below"


def test_what_has_to_be_read_first_saves_that_much_less() -> None:
    price = read_first(lambda index: 0.5 * index, 2.0)
    assert [price(index) for index in (0, 4, 6)] == [0.0, 0.0, 1.0]
