"""What vLLM's configuration says of the bytes of KV: all that decides them tells namespaces apart."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from huggingface_hub import snapshot_download
from vllm.config import LoadConfig
from vllm.model_executor import model_loader

from kvpolicy.errors import InputError
from kvpolicy.tiers import namespace_digest, weights_digest
from kvpolicy_vllm.plugin import file_namespace, served_weights
from kvpolicy_vllm.plugin.file_namespace import (
    computed_by,
    hash_seed,
    namespace_of,
    orders_in_memory,
    refuse_unnameable,
)
from kvpolicy_vllm.plugin.served_weights import (
    DUMMY,
    FROM_FOLDER,
    FROM_SHARDS,
    identity_of_weights,
    loaded_from_elsewhere,
    note_weights,
    weights_changed,
)
from tests.vllm.bare_configs import bare, bare_config, drafting, multimodal


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def config_of(model: Path, **more: Any) -> Any:
    """A configuration as :func:`bare_config` has it, whose weights were noted when it was made."""
    config = bare_config(model, **more)
    note_weights(config)
    return config


def cache_of(spec: type = FullAttentionSpec, layer_names: Any = ("layer.0", "layer.1"), **more: Any) -> Any:
    values = {"block_size": 32, "page_size_bytes": 4096, **more}
    group = SimpleNamespace(kv_cache_spec=spec(**values), layer_names=layer_names)
    return SimpleNamespace(kv_cache_groups=[group])


def digest_of(
    config: Any, rank: int = 0, segments: tuple[int, ...] = (4096, 4096), cache: Any = None, layers: Any = ()
) -> str:
    return namespace_digest(namespace_of(config, cache or cache_of(), rank, [*segments], [*layers]))


def test_all_that_decides_the_bytes_tells_namespaces_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what vLLM's settings decide, which is in tests/vllm/test_kv_settings.py."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = config_of(model)
    digests = [
        digest_of(config), digest_of(config, rank=1), digest_of(config, segments=(8192,)),
        digest_of(config, cache=cache_of(block_size=16)), digest_of(config, cache=cache_of(page_size_bytes=2048)),
        digest_of(config, cache=cache_of(layer_names=["layer.0"])), digest_of(config, layers=[[[-1, 0], [2, 1]]]),
        digest_of(config_of(model, max_model_len=8192)), digest_of(config_of(model, cache_dtype="fp8")),
        digest_of(config_of(model, prefix_caching_hash_algo="sha256_cbor")),
        digest_of(config_of(model, speculative_config=drafting(model))),
    ]  # fmt: skip
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    digests.append(digest_of(config))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    digests.append(digest_of(config))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(file_namespace.vllm, "__version__", "0.0")
    digests.append(digest_of(config))
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert digest_of(config_of(model)) == digests[0]
    monkeypatch.setattr(file_namespace, "device_name", lambda: "another")
    digests.append(digest_of(config))
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    digests.append(digest_of(config_of(model)))
    assert len({*digests}) == len(digests)


def test_a_drafters_weights_tell_namespaces_apart(
    model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    drafter = tmp_path_factory.mktemp("drafter")
    digests = []
    for weights in (b"one", b"two"):
        (drafter / "model.safetensors").write_bytes(weights)
        digests.append(digest_of(config_of(model, speculative_config=drafting(drafter))))
    assert digests[0] != digests[1]


def test_weights_that_change_while_a_server_starts_are_of_that_server_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have loaded the old ones, and its digest is of the new ones."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    stale = config_of(model)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert not caplog.records
    first = digest_of(stale)
    assert "start it again to find them later" in caplog.text
    assert len({first, digest_of(stale), digest_of(config_of(model))}) == 3
    caplog.clear()
    assert digest_of(config_of(model)) == digest_of(config_of(model)) and not caplog.records


@pytest.mark.parametrize("change", ["replaced", "touched", "added", "removed", "linked anew"])
def test_every_change_of_the_files_is_seen(tmp_path: Path, change: str) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.safetensors").write_bytes(b"weights")
        os.utime(tmp_path / version / "model.safetensors", (1, 1))
    (tmp_path / "now").symlink_to("1")
    config = config_of(tmp_path / "now")
    assert not weights_changed(config)
    weights = tmp_path / "1" / "model.safetensors"
    if change == "replaced":  # of the same size and time
        (tmp_path / "2" / "model.safetensors").replace(weights)
    elif change == "touched":
        weights.touch()
    elif change == "added":
        (tmp_path / "1" / "more.safetensors").write_bytes(b"weights")
    elif change == "removed":
        weights.unlink()
    else:
        (tmp_path / "now").unlink()
        (tmp_path / "now").symlink_to("2")
    assert weights_changed(config)


def test_a_drafter_that_changes_is_seen_and_weights_that_are_drawn_are_not(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    drafter = tmp_path_factory.mktemp("drafter")
    config = config_of(model, speculative_config=drafting(drafter))
    drawn = config_of(drafter, load_format="dummy")
    (drafter / "model.safetensors").write_bytes(b"weights")
    assert weights_changed(config) and not weights_changed(drawn)


def test_without_a_note_the_files_count_as_those_that_were_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM need not look the connector up while it makes its configuration."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert digest_of(bare_config(model)) == digest_of(bare_config(model)) == digest_of(config_of(model))
    assert not caplog.records


def test_a_worker_on_another_machine_compares_no_inodes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert weights_changed(config)
    monkeypatch.setattr(served_weights.platform, "node", lambda: "another")
    assert not weights_changed(config)


def write_snapshot(cache: Path, commit: str, **files: str) -> Path:
    """A revision of some/llm as huggingface_hub keeps it, which branch v1 is at from now on: of its files at the hub
    all but README.md may be here."""
    repository = cache / "models--some--llm"
    folder = repository / "snapshots" / commit
    listing = {name: {"size": 7, "blob_id": "0" * 40} for name in ("README.md", "config.json", "model.safetensors")}
    for path, text in {
        repository / "refs" / "v1": commit,
        repository / "trees" / f"{commit}.json": json.dumps({"format_version": 1, "files": listing}),
        **{folder / name.replace("_", "."): text for name, text in files.items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def config_at_hub(cache: Path) -> Any:
    return config_of(Path("some/llm"), revision="v1", download_dir=str(cache))


def test_what_is_downloaded_of_one_revision_is_no_change(tmp_path: Path) -> None:
    """vLLM has a model's configuration from a hub when it makes its own, and its weights later."""
    one, two = "1" * 40, "2" * 40
    absent = config_at_hub(tmp_path)
    folder = write_snapshot(tmp_path, one, config_json="{}")
    config = config_at_hub(tmp_path)
    write_snapshot(tmp_path, one, model_safetensors="weights")
    assert not weights_changed(config) and not weights_changed(absent)
    write_snapshot(tmp_path, two, config_json="{}", model_safetensors="weights")
    assert weights_changed(config)
    write_snapshot(tmp_path, one)
    assert not weights_changed(config)
    (folder / "config.json").write_text("{ }")
    assert weights_changed(config)


def test_weights_at_a_hub_are_found_without_the_files_that_vllm_does_not_download(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path, "1" * 40, config_json="{}", model_safetensors="weights")
    if find_spec("huggingface_hub._tree_cache"):
        with pytest.raises(Exception, match=r"1 file\(s\) are missing \(README\.md\)"):
            snapshot_download("some/llm", revision="v1", cache_dir=tmp_path, local_files_only=True)
    config = config_at_hub(tmp_path)
    assert identity_of_weights(config, config.model_config) == weights_digest(folder)


def test_layers_that_lie_otherwise_are_told_apart_and_numbers_of_blocks_are_not() -> None:
    def orders(*strided: int, blocks: int = 7) -> Any:
        sizes = (blocks, 2, 4, 3, 5)  # blocks, keys and values, tokens, heads, elements
        return orders_in_memory({"layer": torch.zeros([sizes[dim] for dim in strided]).permute(_back(strided))}, blocks)

    by_token, by_head = orders(0, 1, 2, 3, 4), orders(0, 1, 3, 2, 4)
    assert by_token == orders(0, 1, 2, 3, 4, blocks=9)
    apart = [by_token, by_head, orders(1, 0, 2, 3, 4), orders_in_memory({"layer": torch.zeros(2, 7, 4, 3, 5)}, 7)]
    assert len({repr(order) for order in apart}) == len(apart)


def _back(order: tuple[int, ...]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def test_weights_that_are_drawn_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    one, two = (
        identity_of_weights(config, config.model_config)
        for config in (config_of(tmp_path, load_format="dummy", seed=seed) for seed in (0, 1))
    )
    assert one != two


def test_weights_that_are_not_found_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = config_of(Path("nobody/nothing"))
    with pytest.raises(InputError, match="weights of nobody/nothing are not found on this machine"):
        identity_of_weights(config, config.model_config)


def test_seeds_that_differ_from_server_to_server_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_seed(config_of(model, prefix_caching_hash_algo="xxhash")) == "7"
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(InputError, match=r"at random.* set the environment variable PYTHONHASHSEED to 0"):
        hash_seed(config_of(model, prefix_caching_hash_algo="xxhash_cbor"))
    monkeypatch.setattr(file_namespace.kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "fixed", raising=False)
    assert hash_seed(config_of(model)) == "fixed"
    monkeypatch.delattr(file_namespace.kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    with pytest.raises(InputError, match="PYTHONHASHSEED"):
        hash_seed(config_of(model))


@pytest.mark.parametrize(
    ("more", "spec", "shared", "message"),
    [
        ({"lora_config": object()}, FullAttentionSpec, False, "leave out --enable-lora"),
        ({"multimodal_config": multimodal()}, FullAttentionSpec, False, "images"),
        ({"weight_transfer_config": object()}, FullAttentionSpec, False, "leave out --weight-transfer-config; or"),
        ({}, MambaSpec, False, "windows or states"),
        ({}, FullAttentionSpec, True, "keep it once"),
    ],
)
def test_what_keys_do_not_tell_apart_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], spec: type, shared: bool, message: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    refuse_unnameable(config_of(model), cache_of())
    with pytest.raises(InputError, match=message):
        refuse_unnameable(config_of(model, **more), cache_of(spec), shared)


def test_files_of_vllms_own_connector_are_refused_where_weights_come_later(model: Path) -> None:
    with pytest.raises(InputError, match=r"files of KV: .* --weight-transfer-config, or serve without files"):
        computed_by(config_of(model, weight_transfer_config=object()), model)


def test_files_of_vllms_own_connector_are_refused_for_images_that_clients_name(model: Path) -> None:
    with pytest.raises(InputError, match=r"files of KV: clients may name their images .*; serve without files"):
        computed_by(config_of(model, multimodal_config=multimodal()), model)


ELSEWHERE = {"ipc_cache", "tensorizer", "modelexpress", "npcache", "gguf"}
"""Load formats of vLLM by which a server may have other weights than those that the digest of the folder covers: of a
daemon, of an address, of another server, of a folder of numpy files that stays when the weights change, and of several
files of which one is named."""


def test_every_load_format_was_looked_at() -> None:
    """Of a new one find out what it reads: it is refused until it is known to read the model's folder."""
    assert {*model_loader._LOAD_FORMAT_TO_MODEL_LOADER} <= {*FROM_FOLDER, *FROM_SHARDS, DUMMY, *ELSEWHERE}


@pytest.mark.parametrize("load_format", [*FROM_FOLDER, *FROM_SHARDS, DUMMY])
def test_weights_in_the_models_folder_are_told_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = config_of(model, load_format=load_format)
    refuse_unnameable(config, None)
    assert computed_by(config, model)["weights"]


@pytest.mark.parametrize("load_format", [*sorted(ELSEWHERE), "of_a_plugin"])
@pytest.mark.parametrize("drafts", [False, True])
def test_weights_from_elsewhere_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, drafts: bool
) -> None:
    """The folder says nothing of them. What drafts tokens may be loaded in another way than the model."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    more = {"load_format": load_format}
    if drafts:
        more = {"speculative_config": drafting(model, draft_load_config=bare(LoadConfig, load_format=load_format))}
    config = config_of(model, **more)
    refused = f"--load-format {load_format} may take other weights .* load a folder by one of auto, .*"
    with pytest.raises(InputError, match=f"cache_files: {refused}; or leave cache_files out"):
        refuse_unnameable(config, None)
    with pytest.raises(InputError, match=f"files of KV: {refused}, or serve without files"):
        computed_by(config, model)


def test_a_loader_that_a_plugin_has_replaced_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM lets plugins register one under a name of its own."""
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Overriding)
    assert "a plugin has replaced vLLM's loader for --load-format auto" in loaded_from_elsewhere(config_of(model))
    assert not loaded_from_elsewhere(config_of(model, load_format="hf"))


def test_weights_in_object_storage_are_refused(model: Path) -> None:
    """Of which vLLM downloads the small files to a folder."""
    config = config_of(model, load_format="runai_streamer", model_weights="s3://bucket/llm")
    assert "reads the weights from s3://bucket/llm, and not from a folder" in loaded_from_elsewhere(config)


@pytest.mark.parametrize("load_format", FROM_SHARDS)
@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        (None, True), ("rank-{rank}-{part}.safetensors", True), ("../rank-{rank}-{part}.safetensors", False),
        ("rank-{rank}-{part}.weights", False),
    ],
)  # fmt: skip
def test_shards_that_the_digest_does_not_cover_are_refused(
    model: Path, load_format: str, pattern: str | None, covered: bool
) -> None:
    config = config_of(model, load_format=load_format, model_loader_extra_config={"pattern": pattern})
    assert bool(loaded_from_elsewhere(config)) != covered


def test_a_drafter_with_weights_of_its_own_kind_is_told_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may be drawn where the model's are read."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    drawn = drafting(model, draft_load_config=bare(LoadConfig, load_format=DUMMY))
    drawing, reading = (config_of(model, speculative_config=one) for one in (drawn, drafting(model)))
    assert file_namespace.identity_of_drafter(drawing) == "draft_model dummy None"
    assert file_namespace.identity_of_drafter(reading) == f"draft_model {weights_digest(model)}"


def test_a_name_at_another_hub_stands_for_no_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's cache may have other weights under the same name."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    monkeypatch.setattr(served_weights, "snapshot_download", lambda *_, **__: str(model))
    config = bare_config("some/llm")
    with pytest.raises(InputError, match=r"VLLM_USE_MODELSCOPE .* give vLLM the folder of the model"):
        identity_of_weights(config, config.model_config)


class Overriding:
    def __call__(self, config: Any) -> Any:
        return config


def test_a_setting_that_cannot_be_read_is_refused_early(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only once the weights are loaded and the namespace is made."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(InputError, match=r"model_config\.hf_overrides of vLLM's configuration is of Overriding"):
        refuse_unnameable(config_of(model, hf_overrides=Overriding()), None)


@pytest.mark.parametrize("flag", [False, True])
def test_scales_of_a_servers_own_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch, flag: bool) -> None:
    """vLLM before 0.28 takes them from the first step: fp8 of another server has others."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = config_of(model, cache_dtype="fp8")
    config.cache_config.calculate_kv_scales = flag
    if not flag:
        refuse_unnameable(config, None)
        return
    with pytest.raises(InputError, match=r"--calculate-kv-scales .*leave that out; or leave cache_files out"):
        refuse_unnameable(config, None)
