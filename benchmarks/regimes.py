"""The regimes of the matrix: a machine, a model's shape, what is served, at which load, with prefix caching or without.

Machines are by their data sheets, but for ``cpu``, which is the measured cost model that ships. What is served:

- one class: the lengths of deepseek-r1 (requests above 16,384 tokens lose prompt);
- two classes: these as a batch, and four urgent requests of priority -1 for each of them, with the lengths of Azure's
  conversations. At once, the batch is there from the beginning and the urgent ones come at their share of capacity;
- decodes alone: one class on a server whose step has no more tokens than requests may run (64 of each). Prompts, of 91
  tokens in the median, are computed there too: the built-in simulator has nothing that brings computed ones;
- short requests: the lengths of deepseek-r1 times 0.05 (180 tokens of prompt and output in the mean), ten times as
  many, on a server that runs up to 1,024 of them. So large a batch is bound by compute, which brings p / d near 1;
- rollouts: groups of 16 samples of one prompt, all there at once. Prompts have 200 to 2,000 tokens, outputs are
  lognormal around a median of their group's (1,500 tokens in the median group), at most 16,384 tokens.

Capacity is the output rate of the steady part, over the mean output, of a run of stock vLLM in which all requests are
there at once (two classes: shuffled, first come, first served). A load is a share of it, by a Poisson process.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matrix_places import HOST_GIB, LLAMA_3_1_8B
from order_places import HOW, PRIORITY, WATERMARKS, Arm, serving_of
from order_places import cell as cell_of

from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.workload import Request, Workload, open_workload
from kvpolicy.workload.near_capacity import arriving, shuffled
from kvpolicy.workload.near_capacity import at_once as small_requests

DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    "_name_or_path": "DeepSeek-V2-Lite", "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 102400, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
PLAIN, LATENT, WINDOWS = "plain", "MLA", "hybrid"
SHAPES: Mapping[str, Mapping[str, Any]] = {PLAIN: LLAMA_3_1_8B, LATENT: DEEPSEEK_V2_LITE}
"""Those that the built-in simulator has; the hybrid one is in ``regimes_hybrid.py``."""
CPU, CPU_MODEL = "cpu", "cpu-llama-native"
GPUS = ("H100-SXM", "A100-SXM-80GB", "L40S", "H20")
MACHINES = (*GPUS, CPU)
ONE, TWO, DECODES, ROLLOUTS, SHORT = "one class", "two classes", "decodes alone", "rollouts", "short requests"
KINDS = (ONE, TWO, DECODES, ROLLOUTS, SHORT)
AT_ONCE = 0.0
LOADS = (AT_ONCE, 0.7, 0.9, 1.2)
URGENT, BATCH = "urgent", "batch"
URGENT_PER_BATCH = 4
CONTEXT_TOKENS = 16384
SEATS, GROUP = 64, 16
SHORT_SEATS, SHORT_SCALE, SHORT_PER_REQUEST = 1024, 0.05, 10
GROUP_MEDIAN, GROUP_SPREAD, SAMPLE_SPREAD, MAX_OUTPUT = 1500, 0.6, 0.8, 16384
GPU_BLOCKS, TWO_BLOCKS, DECODE_BLOCKS, CPU_BLOCKS = 6_000, 4_000, 3_200, 90
"""6,000 blocks of 16 tokens of Llama-3.1-8B are 13 GB: memory is short from early on in runs of so few requests."""
LARGE_BLOCKS = 26_000
"""54 GB."""
CPU_HOST_GIB, CPU_BLOCK = 2.0, 32
THRESHOLDS = (512, 2048)
CPU_THRESHOLDS = (64, 256)
"""Lengths are 0.12 times as long there."""


@dataclass(frozen=True, slots=True)
class Regime:
    """One row of the matrix."""

    machine: str
    kind: str
    load: float
    """Share of capacity; :data:`AT_ONCE`: all requests are there from the beginning."""
    caching: bool
    shape: str
    kv_blocks: int
    requests: int
    """Those of the batch, where there are two classes."""

    def text(self) -> str:
        load = "at once" if self.load == AT_ONCE else f"{self.load:.0%} of capacity"
        caching = "" if self.caching else ", prefix caching off"
        return f"{self.machine}, {self.shape}, {self.kind}, {load}{caching}, {self.kv_blocks:,} blocks"

    @property
    def order(self) -> str:
        """The order that suits it."""
        return {TWO: "urgent", ROLLOUTS: "srpt:lengths"}.get(
            self.kind, "mlfq:base=32" if self.machine == CPU else "mlfq:base=256"
        )

    @property
    def stock(self) -> Arm:
        return Arm(PRIORITY if self.kind == TWO else "fcfs")

    def arms(self) -> list[Arm]:
        """Stock vLLM, its watermarks, thresholds, always-swap and the learned policy; and the order with each."""
        stock = self.stock
        thresholds = CPU_THRESHOLDS if self.machine == CPU else THRESHOLDS
        hows = (*(f"threshold:{tokens}" for tokens in thresholds), "swap", "learned")
        return [
            stock,
            *(replace(stock, watermark=share) for share in WATERMARKS),
            *(replace(stock, how=how) for how in hows),
            *(Arm(self.order, how) for how in self._ordered()),
        ]

    def _ordered(self) -> tuple[str, ...]:
        """How displaced ones come back; always-swap only where runs are short."""
        short = self.kind in (TWO, ROLLOUTS, SHORT) or self.machine == CPU
        return ("recompute", "swap", "learned") if short else ("recompute", "learned")

    def serving(self, arm: Arm) -> Serving:
        """vLLM's own for the machine, but with more host memory, and steps without room for prompts for decodes."""
        cpu = self.machine == CPU
        found = serving_of(self.machine, arm, CPU_HOST_GIB if cpu else HOST_GIB)
        found = replace(found, prefix_caching=self.caching, block_size=CPU_BLOCK if cpu else found.block_size)
        if self.kind == DECODES:
            return replace(found, token_budget=SEATS, max_num_seqs=SEATS)
        return replace(found, max_num_seqs=SHORT_SEATS) if self.kind == SHORT else found

    def cell(self, arm: Arm, hardware: str, workload: Workload, seed: int) -> Cell:
        found = cell_of(hardware, workload, STOCK_HOW, self.kv_blocks, seed, self.serving(arm))
        learned = f"cheapest:{CPU_MODEL}" if self.machine == CPU else HOW["learned"]
        return replace(found, policy=learned if arm.how == "learned" else HOW.get(arm.how, arm.how))

    def together(self, seed: int) -> Workload:
        """All requests, there at once, by which capacity is measured; of two classes shuffled and without priority."""
        whole = Workload("all", tuple(replace(one, arrival_s=0.0, priority=0) for one in drawn(self, seed)), seed)
        return shuffled(whole, seed) if self.kind == TWO else whole

    def workload(self, seed: int, capacity_per_s: float) -> Workload:
        """The requests, arriving. ``capacity_per_s``: requests of all classes."""
        requests = drawn(self, seed)
        if self.load == AT_ONCE and self.kind != TWO:
            return Workload(self.kind, tuple(requests), seed)
        if self.load == AT_ONCE:
            return self._batch_at_once(requests, capacity_per_s, seed)
        return arriving(shuffled(Workload(self.kind, tuple(requests), seed), seed), self.load * capacity_per_s, seed)

    def _batch_at_once(self, requests: Sequence[Request], capacity_per_s: float, seed: int) -> Workload:
        share = URGENT_PER_BATCH / (1 + URGENT_PER_BATCH)
        urgent = Workload(URGENT, tuple(one for one in requests if one.class_name == URGENT), seed)
        batch = [one for one in requests if one.class_name == BATCH]
        return Workload(self.kind, (*batch, *arriving(urgent, share * capacity_per_s, seed)), seed)


STOCK_HOW = Arm()


def hardware_of(regime: Regime, folder: Path) -> str:
    """The machine with the shape's configuration, which is written into ``folder``."""
    if regime.machine == CPU:
        return CPU_MODEL
    folder.mkdir(parents=True, exist_ok=True)
    values = SHAPES[regime.shape]
    config = folder / f"{values['_name_or_path']}.json"
    config.write_text(json.dumps(values))
    return f"{regime.machine}:{config}"


# ---- requests ----


def drawn(regime: Regime, seed: int) -> list[Request]:
    """All there at once."""
    if regime.kind == ROLLOUTS:
        return list(rollouts(regime.requests, seed))
    if regime.machine == CPU:
        return list(small_requests(regime.requests, seed))
    if regime.kind == SHORT:
        return _lengths(f"deepseek-r1?scale={SHORT_SCALE:g}", regime.requests, seed)
    context = WINDOW_CONTEXT if regime.shape == WINDOWS else CONTEXT_TOKENS
    long = _lengths("deepseek-r1", regime.requests, seed, context)
    if regime.kind != TWO:
        return long
    urgent = _lengths("azure-conversation-2023", URGENT_PER_BATCH * regime.requests, seed)
    return [replace(one, class_name=BATCH) for one in long] + [
        replace(one, class_name=URGENT, priority=-1) for one in urgent
    ]


def _lengths(name: str, requests: int, seed: int, context: int = CONTEXT_TOKENS) -> list[Request]:
    options = f"n={requests}&rate=1&context={context}&seed={seed}"
    source = open_workload(f"{name}{'&' if '?' in name else '?'}{options}")
    return [replace(request, arrival_s=0.0) for request in source]


def rollouts(requests: int, seed: int) -> Iterator[Request]:
    """Groups of samples of one prompt, whose blocks they share."""
    rng = random.Random(f"rollouts {seed}")
    for group in range(-(-requests // GROUP)):
        prompt = rng.randint(200, 2000)
        median = GROUP_MEDIAN * rng.lognormvariate(0.0, GROUP_SPREAD)
        prefix = tuple(range(group * CONTEXT_TOKENS, group * CONTEXT_TOKENS + prompt // 16))
        for _ in range(min(GROUP, requests - group * GROUP)):
            output = min(MAX_OUTPUT, max(1, round(median * rng.lognormvariate(0.0, SAMPLE_SPREAD))))
            yield Request(0.0, prompt, output, prefix, 16)


# ---- designs ----


def regime(
    machine: str = "H100-SXM", kind: str = ONE, load: float = 1.2, caching: bool = True, shape: str = PLAIN,
    requests: int = 300, kv_blocks: int | None = None,
) -> Regime:  # fmt: skip
    """``requests``: of one class; there are fewer where runs take long, and more where they are short."""
    blocks = {TWO: TWO_BLOCKS, DECODES: DECODE_BLOCKS}.get(kind, CPU_BLOCKS if machine == CPU else GPU_BLOCKS)
    count = {
        TWO: requests // 4,
        DECODES: 5 * requests // 8,
        ROLLOUTS: 5 * requests // 8,
        SHORT: SHORT_PER_REQUEST * requests,
    }.get(kind, requests)
    if shape == WINDOWS:
        blocks, count = WINDOW_BLOCKS, requests // 6
    return Regime(machine, kind, load, caching, shape, kv_blocks or blocks, max(4, count))


WINDOW_BLOCKS, WINDOW_CONTEXT = 1_400, 8192
"""vLLM asks for blocks of all groups for the longest request."""


def default_design(requests: int = 300) -> list[Regime]:
    """One axis at a time around an H100 at 1.2 of capacity, and the corners in which most is expected."""

    def at(*arguments: Any, **named: Any) -> Regime:
        return regime(*arguments, requests=requests, **named)

    return [
        at(), at(kind=TWO), at(CPU), at(CPU, caching=False), at("H20"), at("H20", caching=False),
        at(load=AT_ONCE), at(caching=False), at(load=0.9), at(load=0.7),
        at(kind=TWO, load=0.9), at(kind=TWO, load=0.7), at(kind=ROLLOUTS, load=AT_ONCE),
        at(kind=ROLLOUTS, load=AT_ONCE, caching=False), at(kind=DECODES, load=AT_ONCE), at("H20", DECODES, AT_ONCE),
        at(shape=LATENT), at("A100-SXM-80GB"), at("L40S"),
        regime("H20", requests=3 * requests // 2, kv_blocks=LARGE_BLOCKS, load=AT_ONCE),
        at("H20", ROLLOUTS, AT_ONCE), at(kind=TWO, load=AT_ONCE), at("H20", TWO), at(kind=TWO, caching=False),
        at("H20", load=0.9), at(kind=DECODES, load=AT_ONCE, caching=False),
        at("H20", shape=LATENT, caching=False), at("H20", SHORT, AT_ONCE, caching=False),
    ]  # fmt: skip


def hybrid_design(requests: int = 300) -> list[Regime]:
    """On request: vLLM's own scheduler runs these, which takes longer than all of the default."""
    return [regime(machine, load=AT_ONCE, shape=WINDOWS, requests=requests) for machine in ("H100-SXM", "H20")]


def full_design(requests: int = 300) -> list[Regime]:
    """Every machine, load, class, prefix caching and shape, as far as there is something that simulates them."""
    crossed = itertools.product(GPUS, (ONE, TWO), LOADS, (True, False), (PLAIN, LATENT, WINDOWS))
    found = [
        regime(machine, kind, load, caching, shape, requests)
        for machine, kind, load, caching, shape in crossed
        if not (shape == WINDOWS and kind == TWO)
    ]
    found += [regime(CPU, ONE, load, caching, PLAIN, requests) for load in LOADS for caching in (True, False)]
    for machine, caching in itertools.product(GPUS, (True, False)):
        found += [regime(machine, DECODES, load, caching, PLAIN, requests) for load in LOADS]
        found.append(regime(machine, ROLLOUTS, AT_ONCE, caching, PLAIN, requests))
    return list(dict.fromkeys([*default_design(requests), *found]))
