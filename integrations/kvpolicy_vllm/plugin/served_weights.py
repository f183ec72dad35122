"""Which weights a server has: their digest, for files of KV, and whether their files are still those that it loaded.

The digest can only be taken when the layers are made: a model's name at a hub stands for a folder from its download on,
and vLLM gives the connector its configuration after the weights are loaded. So the files' stamps are noted while vLLM
makes its configuration, where it looks the connector up by then, and travel with it to every process.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm.envs
from huggingface_hub import snapshot_download

from kvpolicy.errors import InputError
from kvpolicy.tiers import weights_digest, weights_stamp
from kvpolicy_vllm.plugin.boot_ids import boot_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DUMMY = "dummy"
NOTED = "kvpolicy_weights"
"""Attribute of vLLM's ModelConfig."""

FROM_FOLDER = (
    "auto", "hf", "safetensors", "mistral", "pt", "bitsandbytes", "fastsafetensors", "instanttensor", "runai_streamer",
)  # fmt: skip
"""Load formats of vLLM by which a server has the weights that lie in the model's folder, which the digest covers."""
FROM_SHARDS = ("sharded_state", "runai_streamer_sharded")
"""Those, too, unless their ``pattern`` names files that it does not cover."""
SHARDS = ".safetensors"
LOADERS = "vllm.model_executor.model_loader"
"""vLLM's module with its table of loaders by load format, which plugins change by ``register_model_loader``."""


class Stamp(NamedTuple):
    """One model's files at one time. Of a model at a hub, files may be missing that are yet to be downloaded; the
    folder is that of one revision."""

    machine: str
    folder: str
    """Empty where it was not found."""
    is_hub: bool
    files: dict[str, list[int]]

    def was_changed(self, later: Stamp) -> bool:
        """Whether what was loaded in between may be others than the files of ``later``. False where that is not known:
        where one of the two was not found, or on another machine, whose inodes and times are its own."""
        if self.machine != later.machine or not self.folder or not later.folder:
            return False
        if self.folder != later.folder:
            return True
        return not self.files.items() <= later.files.items() if self.is_hub else self.files != later.files


def note_weights(config: VllmConfig) -> None:
    """Keep the stamps in vLLM's configuration, before any process reads the weights."""
    setattr(config.model_config, NOTED, _stamps(config))


def weights_changed(config: VllmConfig) -> bool:
    """Whether the files are others than were noted. False where nothing was noted, as in a server for which vLLM does
    not look the connector up while it makes its configuration."""
    noted = getattr(config.model_config, NOTED, None)
    return noted is not None and any(
        then.was_changed(later) for then, later in zip(noted, _stamps(config), strict=True)
    )


def loaded_from_elsewhere(config: VllmConfig) -> str:
    """Why the weights of the model, or of what drafts tokens, may be others than those in its folder, and what would do
    instead; empty where they are those. A load format that is not known is taken for one that reads elsewhere."""
    return next(filter(None, (_elsewhere(_load_config(config, model), model) for model in _models(config))), "")


def _elsewhere(load: Any, model: Any) -> str:
    name = str(load.load_format)
    if name != DUMMY and name not in FROM_FOLDER + FROM_SHARDS:
        reason = f"--load-format {name} may take other weights than those in the model's folder"
    elif not _is_vllms_own(name):
        reason = f"a plugin has replaced vLLM's loader for --load-format {name}"
    elif getattr(model, "model_weights", ""):
        reason = f"--load-format {name} reads the weights from {model.model_weights}, and not from a folder"
    elif name in FROM_SHARDS and not _is_covered(load.model_loader_extra_config):
        reason = f"the pattern of --load-format {name} names other files than {SHARDS} in the model's folder"
    else:
        return ""
    formats = ", ".join(FROM_FOLDER + FROM_SHARDS)
    return f"{reason}, so that files cannot be told from those of other weights: load a folder by one of {formats}"


def _is_vllms_own(load_format: str) -> bool:
    """Whether no plugin has registered another loader under this name, in this process. Where vLLM's table has not been
    imported yet, none has."""
    loaders = getattr(sys.modules.get(LOADERS), "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    return load_format not in loaders or loaders[load_format].__module__.partition(".")[0] == "vllm"


def _is_covered(more: Any) -> bool:
    """Whether the shards are files that the digest of the folder covers. ``more``: --model-loader-extra-config."""
    pattern = str((more or {}).get("pattern") or SHARDS)
    return pattern.endswith(SHARDS) and "/" not in pattern


def identity_of_weights(config: VllmConfig, model: Any, folder: Path | None = None) -> str:
    """Digest of a model's weights. ``folder``: where they are, if not where vLLM's ModelConfig says.

    Raises InputError where they are not found on this machine.
    """
    if _is_drawn(config, model):
        return f"{DUMMY} {model.seed}"
    return weights_digest(folder or _folder(config, model))


def identity_of_drafter(config: VllmConfig, folder: Path | None = None) -> str:
    """Method and weights of what drafts tokens; empty where nothing does. ``folder``: as :func:`identity_of_weights`
    has it, of the model itself, which may draft its own tokens. Raises InputError as that does."""
    speculative = config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    if drafter is None:
        return "" if speculative is None else str(speculative.method)
    its_own = drafter.model == config.model_config.model
    return f"{speculative.method} {identity_of_weights(config, drafter, folder if its_own else None)}"


def _models(config: VllmConfig) -> list[Any]:
    """vLLM's ModelConfig of the model, and of what drafts tokens where that has weights."""
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    return [model for model in (config.model_config, drafter) if model is not None]


def _load_config(config: VllmConfig, model: Any) -> Any:
    """By which the model is loaded: what drafts tokens may have a configuration of its own."""
    its_own = getattr(config.speculative_config, "draft_load_config", None)
    return config.load_config if its_own is None or model is config.model_config else its_own


def _is_drawn(config: VllmConfig, model: Any) -> bool:
    return bool(_load_config(config, model).load_format == DUMMY)


def _stamps(config: VllmConfig) -> list[Stamp]:
    """Of the model and of what drafts tokens, but for weights that are drawn."""
    return [_stamp(config, model) for model in _models(config) if not _is_drawn(config, model)]


def _stamp(config: VllmConfig, model: Any) -> Stamp:
    is_hub = not Path(str(model.model)).exists()
    try:
        folder = _folder(config, model)
        return Stamp(_machine(), str(folder.resolve()), is_hub, weights_stamp(folder))
    except (InputError, OSError):
        return Stamp(_machine(), "", is_hub, {})


def _machine() -> str:
    return f"{platform.node()} {boot_id()}"


def _folder(config: VllmConfig, model: Any) -> Path:
    path = Path(str(model.model))
    if path.exists():
        return path
    return _from_hub(str(model.model), model.revision, _load_config(config, model).download_dir)


def _from_hub(name: str, revision: str | None, cache_dir: str | None) -> Path:
    if vllm.envs.VLLM_USE_MODELSCOPE:  # Hugging Face's cache may have other weights of this name
        raise InputError(
            f"files of KV: VLLM_USE_MODELSCOPE downloads {name} to a folder that is not known here; give vLLM the "
            "folder of the model"
        )
    try:
        # vLLM downloads weights and configurations alone. Without patterns, huggingface_hub refuses a folder that lacks
        # others, such as README.md; 2.4 does.
        folder = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True, ignore_patterns=["*"]
        )
        return Path(folder)
    # Whatever a hub's client raises, the weights are not where they can be told apart.
    except Exception as error:
        raise InputError(
            f"files of KV: the weights of {name} are not found on this machine, so that files cannot be told from "
            f"those of other weights ({error}); give vLLM the folder of the model"
        ) from error
