"""Which weights a server has: their digest, for files of KV, and whether their files are still those that it loaded.

The digest can only be taken when the layers are made: a model's name at a hub stands for a folder from its download on,
and vLLM gives the connector its configuration after the weights are loaded. So the files' stamps are noted while vLLM
makes its configuration, where it looks the connector up by then, and travel with it to every process.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import snapshot_download

from kvpolicy.errors import InputError
from kvpolicy.tiers import weights_digest, weights_stamp
from kvpolicy_vllm.plugin.boot_ids import boot_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DUMMY = "dummy"
NOTED = "kvpolicy_weights"
"""Attribute of vLLM's ModelConfig."""


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


def identity_of_weights(config: VllmConfig, model: Any, folder: Path | None = None) -> str:
    """Digest of a model's weights. ``folder``: where they are, if not where vLLM's ModelConfig says.

    Raises InputError where they are not found on this machine.
    """
    if config.load_config.load_format == DUMMY:
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


def _stamps(config: VllmConfig) -> list[Stamp]:
    """Of the model and of what drafts tokens; none where weights are drawn."""
    if config.load_config.load_format == DUMMY:
        return []
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    return [_stamp(config, model) for model in (config.model_config, drafter) if model is not None]


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
    return path if path.exists() else _from_hub(str(model.model), model.revision, config.load_config.download_dir)


def _from_hub(name: str, revision: str | None, cache_dir: str | None) -> Path:
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
