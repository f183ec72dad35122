"""Which weights a server has: their digest, for files of KV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from kvpolicy.errors import InputError
from kvpolicy.tiers import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DUMMY = "dummy"


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


def _folder(config: VllmConfig, model: Any) -> Path:
    path = Path(str(model.model))
    return path if path.exists() else _from_hub(str(model.model), model.revision, config.load_config.download_dir)


def _from_hub(name: str, revision: str | None, cache_dir: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    # Whatever a hub's client raises, the weights are not where they can be told apart.
    except Exception as error:
        raise InputError(
            f"files of KV: the weights of {name} are not found on this machine, so that files cannot be told from "
            f"those of other weights ({error}); give vLLM the folder of the model"
        ) from error
