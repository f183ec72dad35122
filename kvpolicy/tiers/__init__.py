"""Tiers of KV memory below the device's: what they do, and one of files."""

from kvpolicy.tiers.base import (
    HINT_COUNTS,
    MAX_HANG_S,
    MAX_QUEUED_BLOCKS,
    Chain,
    Finished,
    Key,
    LastingTier,
    Pieces,
    Tier,
    Took,
    Usage,
)
from kvpolicy.tiers.block_format import digest_of_key, file_bytes_of, require_checksums
from kvpolicy.tiers.file_tier import FileTier
from kvpolicy.tiers.identity import namespace_digest, weights_digest, weights_stamp
from kvpolicy.tiers.owned_folder import refuse_unsafe

__all__ = [
    "HINT_COUNTS",
    "MAX_HANG_S",
    "MAX_QUEUED_BLOCKS",
    "Chain",
    "FileTier",
    "Finished",
    "Key",
    "LastingTier",
    "Pieces",
    "Tier",
    "Took",
    "Usage",
    "digest_of_key",
    "file_bytes_of",
    "namespace_digest",
    "refuse_unsafe",
    "require_checksums",
    "weights_digest",
    "weights_stamp",
]
