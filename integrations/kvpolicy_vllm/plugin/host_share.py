"""Host memory for evicted KV where no amount is given: a share of what is available when the server starts.

It is taken while vLLM makes its configuration, before any process of the engine starts, and stands in the configuration
from then on: the scheduler and every rank have to agree on the number of slots.
"""

from __future__ import annotations

from math import floor
from typing import Any

from kvpolicy.hardware import available_memory_bytes
from kvpolicy.settings import GIB
from kvpolicy_vllm.plugin.connector_list import give_own

SHARE = 1 / 4
CPU_SHARE = 1 / 8
MAX_GIB = 64.0
"""Of available memory, for evicted KV, where no amount is given; help and documentation of ``host_gib`` say so."""


def share_of_memory(available: int, cores: int, on_cpu: bool) -> float:
    """GiB of host memory for one engine core where none is given, of ``available`` bytes. ``cores``: engine cores of
    this machine; ``on_cpu``: whether weights and KV cache will take host memory, too."""
    share = CPU_SHARE if on_cpu else SHARE
    return max(0.01, floor(100 * min(MAX_GIB, available * share / cores / GIB)) / 100)


def take_share(config: Any, on_cpu: bool) -> None:
    """Set the share in vLLM's configuration. Not where the processes of one engine core, or the data-parallel cores of
    one machine, make it each for themselves: there the settings' fixed default holds. ``on_cpu``: see
    :func:`share_of_memory`."""
    parallel = config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend == "external_launcher":
        return
    # Under a load balancer of the user's, and in a script per rank, which alone has its local rank by now.
    by_itself = parallel.data_parallel_external_lb or parallel.data_parallel_rank_local is not None
    if by_itself and parallel.data_parallel_size > 1:
        return
    cores = max(1, int(parallel.data_parallel_size_local))
    give_own(config.kv_transfer_config, "host_gib", share_of_memory(available_memory_bytes(), cores, on_cpu))
