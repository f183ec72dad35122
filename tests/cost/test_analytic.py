"""Costs without any measurement: facts with sources, a sensible choice, and no promise."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cost import ModelError, engine_loader, load, untrained
from kvpolicy.cost.analytic import ASSUMED, Constant, constants_of, implausible
from kvpolicy.events import KINDS, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.hardware import EngineSpec, Geometry
from kvpolicy.hardware.sheets import device_sheet, devices, link_sheet
from kvpolicy.policy import load as load_policy
from kvpolicy.policy import needs_engine
from kvpolicy.shape import ModelShape
from tests.shape.configs import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GPT_OSS_20B,
    GRANITE_4_SMALL,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
)
from tests.synthetic import GEOMETRY, fitted_model, situation

LLAMA = ModelShape.from_config(LLAMA_31_8B)
H100 = device_sheet("H100-SXM")


def victim(tokens: int, running: int = 8, **more: Any) -> Preemption:
    return situation(
        tokens, 16, running, block_bytes=16 * 131072, segment_bytes=65536, free_host_blocks=10**6, **more
    )  # fmt: skip


def costs(one: Preemption, **more: Any) -> tuple[float, float]:
    model = untrained(LLAMA, more.pop("sheet", H100), **more)
    recompute, swap = model.predict(one, [Option("recompute"), Option("swap", one.computed_tokens, "host")])
    return recompute.engine_s, swap.engine_s


def test_recompute_of_a_long_request_takes_its_flops() -> None:
    recompute, _ = costs(victim(8192), engine=EngineSpec(token_budget=8192))
    linear = 8192 * LLAMA.linear_flops_per_token / (ASSUMED.linear_share.value * 989.5e12)
    attention = LLAMA.attention_flops_per_pair * (8192 * 8193 / 2) / (ASSUMED.attention_share.value * 989.5e12)
    assert recompute == pytest.approx(linear + attention, rel=0.06)


def test_a_copy_takes_its_bytes_over_the_link() -> None:
    """Beside others the engine feels what memory bandwidth it takes, and the memory that is held while it loads."""
    one = victim(8192)
    _, swap = costs(one)
    copy_s = ASSUMED.copy_s.value + 8192 * 131072 / (0.8 * 63.015e9) + 512 * 32 * ASSUMED.segment_s.value
    beside_s = 0.8 * 63.015e9 / H100.memory_bytes_per_s * copy_s
    held_s = copy_s * 8192 / (8192 + one.batch_tokens)
    assert swap == pytest.approx(ASSUMED.swap_s.value + 2 * beside_s + held_s)
    _, alone = costs(victim(8192, running=0))
    assert alone == pytest.approx(ASSUMED.swap_s.value + beside_s + copy_s)


def test_choices_are_sensible() -> None:
    """Long victims are swapped; a slow link, pageable memory and loads before its own favour recompute."""
    for sheet in devices().values():
        recompute, swap = costs(victim(8192), sheet=sheet)
        assert swap < recompute
    ratios = [
        swap / recompute
        for recompute, swap in (
            costs(victim(4096), link=link_sheet(name)) for name in ("nvlink-c2c", "pcie5", "pcie4", "pcie3")
        )
    ]
    assert ratios == sorted(ratios)
    assert costs(victim(4096), engine=EngineSpec(pinned=False))[1] > 2 * costs(victim(4096))[1]
    assert costs(victim(4096, queued_save_bytes=10**9))[1] == costs(victim(4096))[1], "no step waits for saves"
    waiting_s = 10**9 / (0.8 * 63.015e9) * 4096 / (4096 + victim(4096).batch_tokens)
    assert costs(victim(4096, queued_load_bytes=10**9))[1] - costs(victim(4096))[1] == pytest.approx(waiting_s)
    slow = EngineSpec(link={"kind": "simulated", "bytes_per_s": 2e7, "latency_s": 1e-3})
    recompute, swap = costs(victim(4096), engine=slow)
    assert recompute < swap
    small, large = (replace(victim(4096), segment_bytes=size) for size in (4096, 65536))
    assert costs(small)[1] > costs(large)[1]


def test_tensor_parallel_ranks_share_the_work_and_the_kv() -> None:
    one, two = (untrained(LLAMA, H100, engine=EngineSpec(ranks=ranks)) for ranks in (1, 2))
    assert two.provenance.kv_bytes_per_token == one.provenance.kv_bytes_per_token / 2
    assert two.laws["recompute"].coefficients[2] == one.laws["recompute"].coefficients[2] / 2


@pytest.mark.parametrize("config", [DEEPSEEK_V3, QWEN3_30B_A3B, GEMMA_2_9B])
def test_other_kinds_of_models_have_costs_too(config: dict[str, Any]) -> None:
    model = untrained(ModelShape.from_config(config), H100)
    line = [
        model.predict(victim(tokens), [Option("recompute"), Option("swap", tokens, "host")])
        for tokens in (100, 1000, 10_000, 100_000)
    ]
    for which in (0, 1):
        seconds = [pair[which].engine_s for pair in line]
        assert seconds == sorted(seconds)
        assert 0 < seconds[0] < seconds[-1] < inf


def test_nothing_is_promised() -> None:
    for one in (victim(1), victim(5000), victim(64, running=0)):
        for cost in untrained(LLAMA, H100).predict(one, [Option("recompute"), Option("swap", 64, "host")]):
            assert cost.extrapolated
            assert (cost.low_s, cost.high_s) == (0.0, inf)
    text = " ".join(untrained(LLAMA, H100).provenance.notes)
    for said in ("nothing was measured", "NVIDIA H100", "PCI Express", "assumed"):
        assert said in text


def test_the_digest_depends_on_the_assumptions() -> None:
    slower = replace(ASSUMED, linear_share=replace(ASSUMED.linear_share, value=0.4))
    digests = {untrained(LLAMA, H100).digest, untrained(LLAMA, H100, assumed=slower).digest}
    assert len(digests | {untrained(LLAMA, H100).digest}) == 2


def test_offline_by_device_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    policy = load_policy(f"cheapest:analytic:H100-SXM@pcie4:{tmp_path}")
    assert policy.cost_model is not None
    assert policy.name.startswith("cheapest:analytic:")
    assert policy.cost_model.predict(victim(900), [Option("recompute")])[0].engine_s > 0
    assert any("pcie4" in note for note in load(f"analytic:H100-SXM@pcie4:{tmp_path}").provenance.notes)


@pytest.mark.parametrize("name", ["analytic", "analytic:H100-SXM", "analytic::here", "analytic:H100-SXM:"])
def test_an_incomplete_name_shows_the_complete_form(name: str) -> None:
    with pytest.raises(ModelError, match=r"analytic:DEVICE\[@LINK\]:CONFIG"):
        load(name)


def test_a_wrong_configuration_is_named() -> None:
    with pytest.raises(ModelError, match=r"^nowhere: no such file; should be a model's config\.json, or its folder"):
        load("analytic:H100-SXM:nowhere")
    with pytest.raises(ModelError, match="there is no hardware sheet for device 'H100-SX'"):
        load("analytic:H100-SX:nowhere")


def test_inside_a_server_the_engine_says_the_rest() -> None:
    hardware = {"device": "NVIDIA H100 80GB HBM3", "processor": "a host", "cores": 16}
    geometry = Geometry.from_config(LLAMA_31_8B).to_dict()
    engine = EngineSpec(
        32, 8192, block_bytes=32 * 131072, geometry=geometry, hardware=hardware, link={"kind": "native"}
    )
    policy = load_policy("cheapest:analytic", engine_loader(LLAMA_31_8B, engine))
    assert policy.cost_model is not None
    policy.cost_model.check_fit(engine)
    assert policy.cost_model.digest


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, QWEN3_30B_A3B, LLAMA_31_8B])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_untrained_model_by_name_fits_the_server_of_its_shape(
    tmp_path: Path, config: dict[str, Any], ranks: int
) -> None:
    """A server records what one rank holds, and has a token budget and a type of its own."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    hardware = {"device": "NVIDIA H100 80GB HBM3", "processor": "a host", "cores": 16}
    whole = Geometry.from_config(config)
    geometry = replace(
        whole, heads=whole.heads // ranks, kv_heads=whole.kv_heads // ranks, dtype="float16",
        intermediate=whole.intermediate // ranks,
    )  # fmt: skip
    size = 32 * geometry.kv_bytes_per_token
    engine = EngineSpec(32, 8192, ranks, block_bytes=size, geometry=geometry.to_dict(), hardware=hardware)
    find = engine_loader(config, engine)
    named = find(f"analytic:H100-SXM:{tmp_path}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named.check_fit(engine)
    assert named.laws == find("analytic").laws
    with pytest.raises(ModelError, match="device is"):
        find(f"analytic:A100-SXM-80GB:{tmp_path}").check_fit(engine)
    with pytest.raises(ModelError, match=r"geometry\.layers is"):
        named.check_fit(replace(engine, geometry=replace(geometry, layers=3).to_dict()))


@pytest.mark.parametrize(
    ("config", "block_layers"), [(GPT_OSS_20B, 12), (GRANITE_4_SMALL, 4), (QWEN3_NEXT_80B, 12), (DEEPSEEK_V3, 61)]
)
def test_an_untrained_model_by_name_fits_a_server_whose_layers_differ(
    tmp_path: Path, config: dict[str, Any], block_layers: int
) -> None:
    """How many layers share a block only the server knows."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    geometry = Geometry.from_config(config)
    engine = EngineSpec(
        32, 8192, block_bytes=32 * block_layers * geometry.layer_kv_bytes_per_token, geometry=geometry.to_dict(),
        hardware={"device": "NVIDIA H100 80GB HBM3", "processor": "a host", "cores": 16},
    )  # fmt: skip
    find = engine_loader(config, engine)
    for name in ("analytic", f"analytic:H100-SXM:{tmp_path}"):
        model = find(name)
        model.check_fit(engine)
        assert model.provenance.block_layers == block_layers
    plain = Geometry.from_config(LLAMA_31_8B)
    with pytest.raises(ModelError, match=r"geometry\.layers is"):
        model.check_fit(replace(engine, geometry=plain.to_dict()))


def test_only_full_attention_pays_for_pairs_that_are_far_apart() -> None:
    """Beyond the window a further token costs a layer with a window the same, and one with a state always does."""

    def growth(config: dict[str, Any]) -> float:
        """What the third four steps cost over what the second four do; three decodes leave 2,045 tokens of a step."""
        law = untrained(ModelShape.from_config(config), H100).laws["recompute"]
        victims = (victim(4 * steps * 2045, running=3) for steps in (1, 2, 3))
        one, two, three = (sum(law.parts(features_of(each, Option("recompute")))) for each in victims)
        return (three - two) / (two - one)

    llama = LLAMA_31_8B | {"layer_types": ["full_attention"] * 32, "sliding_window": 4096}
    windows = llama | {"layer_types": ["sliding_attention"] * 32}
    granite_with_states = GRANITE_4_SMALL | {"layer_types": ["mamba"] * 39 + ["attention"]}
    assert growth(llama) > 1.05
    assert growth(windows) == pytest.approx(1.0, abs=1e-6)
    assert 1.0 < growth(granite_with_states) < 1.03


def test_a_cpu_server_is_asked_to_measure() -> None:
    loader = engine_loader(LLAMA_31_8B, EngineSpec(hardware={"device": "cpu"}))
    with pytest.raises(ModelError, match=r"no hardware sheet for device 'cpu'.*kvpolicy profile"):
        load_policy("cheapest:analytic", loader)
    with pytest.raises(ModelError, match="named no device"):
        load_policy("cheapest:analytic", engine_loader(LLAMA_31_8B, EngineSpec()))
    with pytest.raises(ModelError, match=r"hidden_size.* is missing"):
        load_policy(
            "cheapest:analytic", engine_loader({"num_hidden_layers": 2}, EngineSpec(hardware={"device": "H200"}))
        )


def test_other_names_are_loaded_in_a_server_as_ever() -> None:
    with pytest.raises(ModelError, match="nowhere/at/all"):
        engine_loader(LLAMA_31_8B, EngineSpec())("nowhere/at/all")


def test_which_policies_only_a_server_can_load() -> None:
    assert needs_engine("cheapest:analytic")
    assert needs_engine("explore:analytic,online=off")
    assert not needs_engine("cheapest:analytic:H100-SXM:config.json")
    assert not needs_engine("always-swap")


@pytest.mark.parametrize(
    ("option", "message"), [("online=on", "step times"), ("objective=engine+0.5*victim", "victim's delay")]
)
def test_options_that_need_training_are_refused_before_a_server_starts(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needs_engine(f"cheapest:analytic,{option}")


def test_implausible_constants_are_noted() -> None:
    model = fitted_model("analytic")
    assert not implausible(model.laws, GEOMETRY)
    recompute = replace(model.laws["recompute"], s_per_token=1e-13)  # type: ignore[type-var]  # a roofline
    (note,) = implausible({"recompute": recompute}, GEOMETRY)
    assert "recompute: linear layers is fitted as" in note
    assert "operations/s" in note


def test_every_assumption_is_plausible_itself() -> None:
    for name in ASSUMED.__dataclass_fields__:
        constant: Constant = getattr(ASSUMED, name)
        assert constant.plausible
        assert constant.unit


def test_no_calibrated_rate_can_beat_its_data_sheet() -> None:
    law = untrained(LLAMA, H100).laws["recompute"]
    geometry = Geometry.from_config(LLAMA_31_8B)
    assert constants_of(law, geometry, H100)["linear layers"].plausible
    fast = replace(law, s_per_token=1e-9)  # type: ignore[type-var]  # a roofline
    assert not constants_of(fast, geometry, H100)["linear layers"].plausible
    assert set(KINDS) == set(untrained(LLAMA, H100).laws)
