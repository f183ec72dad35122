"""Host memory for evicted KV where no amount is given: a share of what is available when the server starts.

It is taken while vLLM makes its configuration, before any process of the engine starts, and stands in the configuration
from then on: the scheduler and every rank have to agree on the number of slots.

Servers that start together see the same memory as available. A server's share is therefore bounded by its part of the
machine's GPUs, so that servers on GPUs of their own take half of that memory together, however many they are.
"""

from __future__ import annotations

from math import floor
from pathlib import Path
from typing import Any

from kvpolicy.hardware import available_memory_bytes, total_memory_bytes
from kvpolicy.settings import GIB
from kvpolicy_vllm.plugin.connector_list import give_own

SHARE = 1 / 4
CPU_SHARE = 1 / 8
MAX_GIB = 64.0
"""Of available memory, for evicted KV, where no amount is given; help and documentation of ``host_gib`` say so."""
SHARE_OF_ALL = 1 / 2
"""Of available memory, for all servers of a machine that start together, each on GPUs of its own."""
MIN_CPU_GIB = 0.25
"""Where the device is the CPU and vLLM leaves less than twice this."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that this machine, or this container, has; CUDA_VISIBLE_DEVICES hides none."""


def share_of_memory(available: int, cores: int, gpu_part: float = 1.0, left_by_vllm: float | None = None) -> float:
    """GiB of host memory for one engine core where none is given, of ``available`` bytes. ``cores``: engine cores of
    this machine; ``gpu_part``: this server's GPUs of the machine's. ``left_by_vllm``: where the device is the CPU, the
    bytes of host memory that remain beside weights and KV cache."""
    if left_by_vllm is None:
        total = available * min(SHARE, SHARE_OF_ALL * gpu_part)
    else:
        total = min(available * CPU_SHARE, max(MIN_CPU_GIB * GIB, left_by_vllm / 2))
    return max(0.01, floor(100 * min(MAX_GIB, total / cores / GIB)) / 100)


def part_of_gpus(used: int) -> float:
    """``used`` GPUs as a part of the machine's; 1 where their number is not known."""
    try:
        return min(1.0, used / max(1, len(list(GPUS.iterdir()))))
    except OSError:
        return 1.0


def left_on_cpu(cache_config: Any, available: int) -> float:
    """Bytes that vLLM leaves of host memory where the device is the CPU: what its share of the machine does not cover,
    or its KV cache of a given size. Weights count in the share, and are not known with a size."""
    if cache_config.kv_cache_memory_bytes is not None:
        return max(0.0, float(available - cache_config.kv_cache_memory_bytes))
    return max(0.0, available - total_memory_bytes() * float(cache_config.gpu_memory_utilization))


def take_share(config: Any, on_cpu: bool) -> None:
    """Set the share in vLLM's configuration. Not where the processes of one engine core, or the data-parallel cores of
    one machine, make it each for themselves: there the settings' fixed default holds. ``on_cpu``: whether weights and
    KV cache will take host memory, too."""
    parallel = config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend == "external_launcher":
        return
    # Under a load balancer of the user's, and in a script per rank, which alone has its local rank by now.
    by_itself = parallel.data_parallel_external_lb or parallel.data_parallel_rank_local is not None
    if by_itself and parallel.data_parallel_size > 1:
        return
    cores = max(1, int(parallel.data_parallel_size_local))
    available = available_memory_bytes()
    if on_cpu:
        share = share_of_memory(available, cores, left_by_vllm=left_on_cpu(config.cache_config, available))
    else:
        share = share_of_memory(available, cores, part_of_gpus(cores * int(parallel.world_size)))
    give_own(config.kv_transfer_config, "host_gib", share)
