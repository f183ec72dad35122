"""What decides the bytes of a KV block beside its key, as digests: contents are shared only where all of it is equal.

The key of a block is the engine's hash of tokens, adapter and cache salt. It does not say what model computed the
block, nor how its bytes are laid out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Of each file of weights so many pieces of so many bytes are read, evenly spaced, from the first to the last."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
DESCRIPTIONS = (".json", ".py")
"""Endings of the small files that are read whole: configurations, indices of weights, code that comes with a model."""


def namespace_digest(namespace: Mapping[str, Any]) -> str:
    """40 hexadecimal digits for what decides the bytes of blocks. ``namespace``: JSON, whatever the order of its keys.

    Raises InputError for a value that JSON does not have.
    """
    try:
        text = json.dumps(namespace, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"namespace: {error}; give texts, numbers, lists and mappings of them") from error
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def weights_digest(model: Path) -> str:
    """Digest of a model's weights and configurations, without reading all of them: names, sizes, and of files of
    weights the time of the last change and evenly spaced samples.

    ``model``: its folder, or one file of weights. Raises InputError where there are no weights.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())
    if not any(path.suffix in WEIGHTS for path in files):
        raise InputError(
            f"{model}: no file of weights ({', '.join(WEIGHTS)}), so that this model cannot be told from another one; "
            "give a folder that holds the weights"
        )
    digest = hashlib.blake2b(digest_size=20)
    for path in files:
        for part in _parts(path):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def weights_stamp(model: Path) -> dict[str, list[int]]:
    """Size, time of the last change and inode of each file that :func:`weights_digest` covers, by name: two stamps are
    equal where none was written or replaced meanwhile. Reads no file, and leaves out links to nothing, as that does.

    ``model``: its folder, or one file of weights. Raises OSError where it is not there.
    """
    files = [model] if model.is_file() else sorted(model.iterdir())
    found = {path.name: path.stat() for path in files if path.suffix in WEIGHTS + DESCRIPTIONS and path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in found.items()}


def _parts(path: Path) -> Iterator[bytes]:
    """What the digest of a model covers of one of its files."""
    size = path.stat().st_size
    if path.suffix in DESCRIPTIONS:
        yield from (path.name.encode(), path.read_bytes())
    elif path.suffix in WEIGHTS:
        yield f"{path.name} {size} {path.stat().st_mtime_ns}".encode()
        with path.open("rb") as file:
            last = max(0, size - SAMPLE_BYTES)
            for offset in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                file.seek(offset)
                yield file.read(SAMPLE_BYTES)
