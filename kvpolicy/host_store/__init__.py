"""Host memory for KV: blocks by content, each content once, saved only when the device loses it.

With prefix caching the full blocks of a preempted request stay on the device until other requests take them. A copy of
a request therefore begins as a list of blocks most of which are still there. Those without a key (a partial last block,
and every block without prefix caching) are saved at once. The others are watched: a block is saved when its place on
the device is given away, and one that survives until the request is back is never copied.

With a caching policy, slots that no copy needs are a cache of all requests' contents. The blocks that any request gives
back are watched as well, and saved where the device loses them. A cached content leaves its slot to a copy that needs
one, or to another content, by that policy.

Pure bookkeeping, the same for the plugin and for the built-in simulator: it moves nothing and reads no clock.
"""

from kvpolicy.host_store.cache_admission import CacheAdmission
from kvpolicy.host_store.contents import CacheCounts, HostBlock, HostCopy, by_owner
from kvpolicy.host_store.copy_queues import CopyQueues, RecentRate
from kvpolicy.host_store.slots import HostStore

__all__ = [
    "CacheAdmission",
    "CacheCounts",
    "CopyQueues",
    "HostBlock",
    "HostCopy",
    "HostStore",
    "RecentRate",
    "by_owner",
]
