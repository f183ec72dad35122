"""Which speculation, ranks, engines of encoders and types of keys and values are refused, over configurations that are
made up. The other refusals of configurations are in `tests/vllm/test_refusals.py`, as the scheduler's start-up has
them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm

from kvpolicy_vllm.plugin import config_refusals
from kvpolicy_vllm.plugin.versions import UnsupportedEngine


def speculating(**changed: Any) -> Any:
    """A configuration with drafts by n-grams, which is served; ``changed``: what is otherwise."""
    of = {"method": "ngram", "is_hybrid": False, "use_mla": False, "asynchronous": False, "order": "fcfs"} | changed
    transfer = {"kv_connector": "KVPolicyConnector", "kv_connector_extra_config": {"order": of["order"]}}
    if of.get("listed"):
        transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer]}}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=of["method"]),
        model_config=SimpleNamespace(is_hybrid=of["is_hybrid"], use_mla=of["use_mla"]),
        scheduler_config=SimpleNamespace(
            async_scheduling=of["asynchronous"], policy="fcfs",
        ),
        kv_transfer_config=SimpleNamespace(**transfer),
    )  # fmt: skip


def refused(feature: str) -> pytest.MarkDecorator:
    return pytest.mark.feature(feature, refused=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "medusa"}, "speculation by medusa, only by ngram, draft_model, eagle, eagle3, mtp"),
        pytest.param({"is_hybrid": True}, "layers keep states", marks=refused("speculation on states")),
        pytest.param(
            {"use_mla": True, "method": "eagle"},
            "speculation by eagle of an MLA model, only by mtp",
            marks=refused("speculation on MLA by another method than MTP"),
        ),
        pytest.param(
            {"asynchronous": True}, "--no-async-scheduling", marks=refused("speculation with asynchronous scheduling")
        ),
        # Both in the words of kvpolicy_vllm.plugin.order_limits.
        pytest.param({"order": "urgent"}, "beside order urgent", marks=refused("speculation with an order")),
        ({"order": "urgent", "listed": True}, "beside order urgent"),
    ],
)
def test_speculation_is_served_only_where_it_was_tested(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setattr(config_refusals, "platform", lambda: SimpleNamespace(is_cpu=lambda: False))
    config_refusals._refuse_speculation(speculating())
    with pytest.raises(UnsupportedEngine, match=f"does not serve .*{words}") as error:
        config_refusals._refuse_speculation(speculating(**changed))
    assert str(error.value).endswith(", or run this engine without the kvpolicy flags"), "besides what would be right"


def test_a_cpu_turns_asynchronous_scheduling_off_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    monkeypatch.setattr(config_refusals, "platform", lambda: SimpleNamespace(is_cpu=lambda: True))
    config_refusals._refuse_speculation(speculating(asynchronous=True))


def handing_on(role: str, connector: str | None = "ECExampleConnector") -> dict[str, Any]:
    """Embeddings of pictures, in that role."""
    return {"ec_transfer_config": SimpleNamespace(ec_connector=connector, ec_role=role)}


@pytest.mark.parametrize(
    ("pictures", "roles", "refuses"),
    [
        (None, {}, False),
        (SimpleNamespace(), {}, False),
        (SimpleNamespace(mm_encoder_only=False), {"ec_transfer_config": None}, False),
        (SimpleNamespace(), handing_on("ec_consumer"), False),
        (SimpleNamespace(), handing_on("ec_both"), False),
        (SimpleNamespace(), handing_on("ec_producer"), True),
        (SimpleNamespace(), handing_on("ec_producer", connector=None), False),
        (SimpleNamespace(mm_encoder_only=True), {}, True),
    ],
)
def test_an_engine_that_only_encodes_pictures_is_refused_before_weights_are_read(
    pictures: Any, roles: dict[str, Any], refuses: bool
) -> None:
    """It has no KV cache: once its layers were made, it was refused for blocks of no bytes."""
    model = SimpleNamespace(
        is_encoder_decoder=False, runner_type="generate", is_diffusion=False, is_attention_free=False, use_mla=False,
        is_hybrid=False, multimodal_config=pictures,
    )  # fmt: skip
    config: Any = SimpleNamespace(model_config=model, diffusion_config=None, **roles)
    if not refuses:
        config_refusals._refuse_model(config)
        return
    with pytest.raises(
        UnsupportedEngine, match=r"the encoder of a multimodal model alone \(--mm-encoder-only, or ec_rol"
    ):
        config_refusals._refuse_model(config)


def test_speculation_is_refused_before_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(UnsupportedEngine, match=r"older than 0\.32; leave --speculative-config out"):
        config_refusals._refuse_speculation(speculating())


def shaped(heads: int, size: int, ranks: int = 1, window: int | None = None) -> Any:
    """What is asked of a model whose layers have so many KV heads of that size, over these ranks."""
    return SimpleNamespace(
        get_num_kv_heads=lambda parallel: max(1, heads // ranks), get_head_size=lambda: size, use_mla=False,
        get_sliding_window=lambda: window, is_hybrid=False,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_a_drafter_of_another_shape_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Of all layers that attend to everything vLLM makes one group. MTP has the model's own layers, and beside windows
    the drafter's have a group of their own."""
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    config = speculating(method=method)
    config.parallel_config = SimpleNamespace()

    def refuse(model: Any, drafter: Any) -> None:
        config.model_config, config.speculative_config.draft_model_config = model, drafter
        config_refusals._refuse_speculation(config)

    refuse(shaped(4, 32), shaped(4, 32))
    refuse(shaped(4, 32, ranks=4), shaped(2, 32, ranks=4))
    refuse(shaped(4, 32, window=64), shaped(2, 32))
    for drafter in (shaped(2, 32), shaped(4, 64), shaped(2, 64)):
        if method == "mtp":
            refuse(shaped(4, 32), drafter)
            continue
        heads, size = drafter.get_num_kv_heads(None), drafter.get_head_size()
        words = f"with layers of {heads} KV heads of {size} values on a rank, beside the model's of 4 of 32"
        with pytest.raises(UnsupportedEngine, match=f"by {method} {words}: leave --speculative-config out, or"):
            refuse(shaped(4, 32), drafter)


def configured(cache_dtype: str = "auto", dtype: Any = torch.float32, **parallel: Any) -> Any:
    """A configuration of an engine of one rank, which is served; ``parallel``: what is otherwise."""
    alone = {
        "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1, "use_ray": False,
        "distributed_executor_backend": "uni",
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**alone | parallel),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype=dtype),
    )


def with_devices(count: int, cuda: bool = True) -> Any:
    return lambda: SimpleNamespace(is_cuda=lambda: cuda, device_count=lambda: count)


def by_ray(ranks: int, cores_by: str = "mp") -> dict[str, Any]:
    return {
        "tensor_parallel_size": ranks, "world_size": ranks, "use_ray": True, "distributed_executor_backend": "ray",
        "data_parallel_backend": cores_by,
    }  # fmt: skip


def test_more_ranks_by_ray_than_this_process_sees_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_refusals, "platform", with_devices(8))
    config_refusals._refuse_engine_settings(configured(**by_ray(8)))
    words = (
        "several nodes, .*--distributed-executor-backend ray, --tensor-parallel-size should be at most 8, the number "
        r"of devices that this process sees \(CUDA_VISIBLE_DEVICES\), not 16"
    )
    with pytest.raises(UnsupportedEngine, match=words):
        config_refusals._refuse_engine_settings(configured(**by_ray(16)))


@pytest.mark.parametrize(
    ("devices", "cuda", "cores_by"),
    [(0, True, "mp"), (1, False, "mp"), (1, True, "ray")],
    ids=["hidden", "no CUDA", "cores by Ray"],
)
def test_where_ranks_by_ray_are_is_left_to_the_workers(
    monkeypatch: pytest.MonkeyPatch, devices: int, cuda: bool, cores_by: str
) -> None:
    """Where the configuration cannot tell, as in a process from which Ray hides the node's devices, or on another node
    than Ray places the engine core on."""
    monkeypatch.setattr(config_refusals, "platform", with_devices(devices, cuda))
    config_refusals._refuse_engine_settings(configured(**by_ray(2, cores_by)))


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_ranks_that_schedule_by_themselves_are_refused(tensor_parallel_size: int) -> None:
    """On one node, too. The world is that of all ranks: with a single one of tensor parallelism, those of data
    parallelism, which an engine core would take for its own and wait for."""
    launched = {"distributed_executor_backend": "external_launcher"}
    config_refusals._refuse_engine_settings(configured(**launched))
    words = "hears of its own copies alone: leave --distributed-executor-backend external_launcher out, or give --"
    several = configured(**launched, tensor_parallel_size=tensor_parallel_size, world_size=2)
    with pytest.raises(UnsupportedEngine, match=words):
        config_refusals._refuse_engine_settings(several)


def test_an_engine_that_goes_on_after_a_failed_step_is_refused() -> None:
    """What its workers have reported in that step is lost, so that copies would never end."""
    config_refusals._refuse_engine_settings(configured(enable_fault_tolerance=False))
    words = "does not serve engines that go on after a step has failed.*: leave --enable-fault-tolerance out"
    with pytest.raises(UnsupportedEngine, match=words):
        config_refusals._refuse_engine_settings(configured(enable_fault_tolerance=True))


OWN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("named", ["auto", *OWN, "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"])
def test_keys_and_values_are_of_the_models_own_type_or_fp8(named: str, own: str) -> None:
    """vLLM's CPU build takes the own type as ``auto`` alone, so that no engine here is started with its name."""
    config = configured(cache_dtype=named, dtype=OWN[own])
    if named in ("auto", own) or named in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        config_refusals._refuse_engine_settings(config)
        return
    words = rf"--kv-cache-dtype {named}, only auto, fp8, fp8_e4m3, fp8_e5m2 \(auto is the model's own type, {own}\)"
    with pytest.raises(UnsupportedEngine, match=rf"{words}; run this engine without the kvpolicy flags$"):
        config_refusals._refuse_engine_settings(config)
