"""The bytes of a file that holds one KV block: a page that says what it is, then the block, filled up to whole pages.

    magic, version, payload bytes | digest of the key | digest of the namespace | checksum of the block | of all this

Nothing is taken from a file unless all of it is right.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpolicy.arrays import left_out_of_dumps
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.tiers.base import Key, Pieces

PAGE = 4096
"""Alignment of memory, offsets and lengths that direct reads and writes need, on any medium; bytes."""
MAGIC, VERSION = b"kvblock\0", 1
FIELDS = struct.Struct("<8sIQ20s20s16s")
DIGEST_BYTES = 20
NO_PARENT = bytes(DIGEST_BYTES)


class BlockName(NamedTuple):
    """Names the file of a block."""

    key: bytes
    """Digest of the block's key."""
    parent: bytes
    """That of the block before it in the prompt; :data:`NO_PARENT` for a first one."""

    @property
    def folder(self) -> str:
        """Name of the folder that the file is in, one of :data:`FOLDERS`."""
        return self.key.hex()[0]

    @property
    def file(self) -> str:
        return f"{self.key.hex()}-{self.parent.hex()}"

    @classmethod
    def of_file(cls, name: str) -> BlockName | None:
        """The block that a file of this name holds; None for a file of another kind."""
        key, _, parent = name.partition("-")
        try:
            found = cls(bytes.fromhex(key), bytes.fromhex(parent))
        except ValueError:
            return None
        return found if found.file == name and len(found.key) == len(found.parent) == DIGEST_BYTES else None


FOLDERS = "0123456789abcdef"


class Damaged(KVPolicyError):
    """A file that does not hold what it should. ``reason``: "foreign", "truncated" or "corrupt"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def digest_of_key(key: Key) -> bytes:
    """The digest under which a tier knows a key."""
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def file_bytes_of(block_bytes: int) -> int:
    """Size of the file of a block of so many bytes."""
    return PAGE + block_bytes + -block_bytes % PAGE


class BlockLayout:
    """The layout of the files of one namespace, whose blocks have ``block_bytes`` bytes each."""

    def __init__(self, namespace: bytes, block_bytes: int) -> None:
        self.namespace, self.block_bytes = namespace, block_bytes
        self.padding = -block_bytes % PAGE
        self.file_bytes = file_bytes_of(block_bytes)

    def write_header(self, header: NDArray[np.uint8], key: bytes, pieces: Pieces) -> None:
        """Fill the page that precedes the block. ``key``: the digest of the block's key."""
        fields = FIELDS.pack(MAGIC, VERSION, self.block_bytes, key, self.namespace, checksum(pieces))
        text = fields + zlib.crc32(fields).to_bytes(4, "little")
        header[: len(text)] = np.frombuffer(text, np.uint8)
        header[len(text) :] = 0

    def verify(self, header: NDArray[np.uint8], key: bytes, pieces: Pieces) -> None:
        """Raise Damaged unless the page and the block belong together and to the key."""
        fields = header[: FIELDS.size].tobytes()
        if zlib.crc32(fields).to_bytes(4, "little") != header[FIELDS.size : FIELDS.size + 4].tobytes():
            raise Damaged("corrupt")
        magic, version, block_bytes, its_key, namespace, expected = FIELDS.unpack(fields)
        if (magic, version, block_bytes, its_key, namespace) != (MAGIC, VERSION, self.block_bytes, key, self.namespace):
            raise Damaged("foreign")
        if checksum(pieces) != expected:
            raise Damaged("corrupt")


def require_checksums() -> None:
    """Raise InputError where what makes them is not installed."""
    if find_spec("blake3") is None:
        raise InputError("KV in files needs blake3, which is not installed: pip install 'kvpolicy[files]'")


def checksum(pieces: Pieces) -> bytes:
    """Of the bytes of all pieces, one after the other."""
    from blake3 import blake3  # optional, and needed by nothing that only writes a server's flags

    digest = blake3()
    for piece in pieces:
        digest.update(piece.data)
    return digest.digest(length=16)


def aligned_memory(size: int) -> NDArray[np.uint8]:
    """Zeros on memory pages of their own, which no core dump has."""
    return np.frombuffer(left_out_of_dumps(mmap.mmap(-1, max(size, 1))), np.uint8)[:size]


def is_aligned(pieces: Sequence[NDArray[np.uint8]]) -> bool:
    """Whether direct reads and writes take this memory as it is."""
    return all(piece.ctypes.data % PAGE == 0 and piece.nbytes % PAGE == 0 for piece in pieces)
