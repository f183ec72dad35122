"""Tiers of KV memory below the device's: what they do, and one of files."""

from kvpolicy.tiers.base import MAX_QUEUED_BLOCKS, Chain, Finished, Key, LastingTier, Pieces, Tier, Usage
from kvpolicy.tiers.block_format import digest_of_key
from kvpolicy.tiers.file_tier import FileTier
from kvpolicy.tiers.identity import namespace_digest, weights_digest, weights_stamp
from kvpolicy.tiers.owned_folder import refuse_unsafe

__all__ = [
    "MAX_QUEUED_BLOCKS",
    "Chain",
    "FileTier",
    "Finished",
    "Key",
    "LastingTier",
    "Pieces",
    "Tier",
    "Usage",
    "digest_of_key",
    "namespace_digest",
    "refuse_unsafe",
    "weights_digest",
    "weights_stamp",
]
