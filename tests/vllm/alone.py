"""vLLM's scheduler without an engine: a made-up worker answers every step, so whole schedules can be compared.

Run as ``python -m tests.vllm.alone JOB RESULT``. ``KVPOLICY_VLLM_SOURCE`` names a folder of unpacked vLLM sources to
use instead of the installed package, empty for that one: the scheduler is pure Python, so versions without a build here
can be tested.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

if os.environ.get("KVPOLICY_VLLM_SOURCE"):
    sys.path.insert(0, os.environ["KVPOLICY_VLLM_SOURCE"])
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

import vllm
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import Platform, PlatformEnum
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from tests.vllm.disturbances import Disturbances, Shares
from tests.vllm.kv_caches import kv_cache, scheduler_block_size, unserved_groups
from tests.vllm.places import Places, Stalls
from tests.vllm.setups import KINDS

BLOCK = 16
MAX_STEPS = 200_000
COPIED_BLOCK_BYTES = 131072
"""Of every block, as :class:`Worker` reports it."""
OFFLOADS, OFFLOADS_CHUNKS = "SimpleCPUOffloadConnector", "OffloadingConnector"
"""Values of ``job["beside"]`` with which these connectors are beside kvpolicy's, and not the tests' own."""
STEP_TIME = StepTimeModel(1e-4, (1e-6,) * 6, "nothing", 100, HeldOutError(0.0, 0.0, 0.0))
"""Any d0 does where it only matters who is accounted for."""


if "KVPOLICY_VLLM_SOURCE" in os.environ:
    # vLLM would start another process to look at the model: in what is installed, and ten seconds longer.
    registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(
        model.load_model_cls()
    )


def scheduler_for(job: dict[str, Any], grammars: Any = None) -> Any:
    """``job["engine"]``: further engine arguments; ``job["layers"]``: one of :data:`tests.vllm.setups.KINDS`;
    ``job["dense"]``: see :func:`tests.vllm.kv_caches.kv_cache`; ``job["model_runner_v2"]``: whether the scheduler takes
    it to serve the model. ``grammars`` takes the place of vLLM's structured outputs."""
    arguments = EngineArgs(
        model=job["model"], dtype="float32", skip_tokenizer_init=True, block_size=BLOCK, max_model_len=2048,
        max_num_seqs=job["sequences"], max_num_batched_tokens=job["budget"],
        enable_prefix_caching=job["prefix_caching"], scheduling_policy=job["scheduling"],
        **job.get("engine", {}), **(job["plugin"] or {}),
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = job["blocks"]
    # The CPU platform turns it off; the scheduler alone needs no platform.
    config.scheduler_config.async_scheduling = job["asynchronous"]
    layers = job.get("layers", "full")
    caching, offloads = job["prefix_caching"], job.get("beside") == OFFLOADS
    cache = kv_cache(layers, job["blocks"], BLOCK, caching, job.get("dense", True), placed=offloads)
    if "state" in KINDS[layers]:
        config.cache_config.mamba_cache_mode = "align" if job["prefix_caching"] else "none"
    # Where groups have blocks of several sizes, hashes are of the smallest.
    hashed: dict[str, Any] = {"hash_block_size": BLOCK} if "wide" in KINDS[layers] else {}
    if job.get("worker_first"):  # as in an engine, where workers set up before the scheduler
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    runner = mock.patch.object(VllmConfig, "use_v2_model_runner", True) if job.get("model_runner_v2") else nullcontext()
    with runner:
        return config.scheduler_config.get_scheduler_cls()(
            vllm_config=config, kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config) if grammars is None else grammars,
            block_size=scheduler_block_size(cache), log_stats=True, **hashed,
        )  # fmt: skip


def made_requests(job: dict[str, Any]) -> list[Request]:
    """``job["continued"]``: whether as many come after them, each of which goes on where one of them should end."""
    rng = random.Random(job["seed"])
    head = [rng.randrange(1000) for _ in range(64)]
    found = []
    for i in range(job["requests"]):
        prompt = (head if i % 2 else []) + [rng.randrange(1000) for _ in range(rng.randint(20, 300))]
        parameters = SamplingParams(temperature=0.0, max_tokens=rng.randint(20, 200), ignore_eos=True)
        found.append(made_request(i, prompt, parameters, priority=i % 3))
    return found + (continuations(found, rng) if job.get("continued") else [])


def continuations(requests: list[Request], rng: random.Random) -> list[Request]:
    """With all that was said before in the prompt, as the next turn of a conversation has it."""
    from tests.vllm.symbolic import text_of  # here: it needs the plugin, which stock vLLM does without

    found = []
    for number, earlier in enumerate(requests, len(requests)):
        said = text_of(earlier)[: earlier.num_prompt_tokens + earlier.max_tokens].tolist()
        parameters = SamplingParams(temperature=0.0, max_tokens=rng.randint(20, 60), ignore_eos=True)
        found.append(made_request(number, said + [rng.randrange(1000) for _ in range(20)], parameters))
    return found


def made_request(number: int, prompt: list[int], parameters: SamplingParams, **more: Any) -> Request:
    """As an engine makes it of what a client asked for; later numbers arrived later."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    parameters.update_from_generation_config({}, eos_token_id=2047)
    return Request(f"r{number}", prompt, parameters, None, arrival_time=float(number), block_hasher=hasher, **more)


class Worker:
    """Answers steps in order; copies take ``late`` steps to load and are always good."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.loading: deque[tuple[int, Any]] = deque()
        self.steps = 0

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        self.steps += 1
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] if sampled[request_id] else [] for request_id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self._copies(output.kv_connector_metadata),
        )

    def weights_changed(self, loaded_and_waiting: int = 0) -> None:
        """Nothing here depends on weights."""

    def found(self) -> dict[str, Any]:
        """What the worker has to say at the end."""
        return {}

    def _copies(self, jobs: Any) -> KVConnectorOutput | None:
        if jobs is None:
            return None
        from kvpolicy_vllm.plugin.messages import Transfer, Transfers

        def done(job: Any, direction: str) -> Transfer:
            size = len(job.slots) * COPIED_BLOCK_BYTES
            return Transfer(job.copy_id, direction, True, size, 1, 32768, False, 0, 0.0, 0.0, 0.0)

        self.loading += [(self.steps + self.late, job) for job in jobs.loads]
        ready = [self.loading.popleft()[1] for _ in range(len(self.loading)) if self.loading[0][0] <= self.steps]
        found = [done(job, "save") for job in jobs.saves] + [done(job, "load") for job in ready]
        return KVConnectorOutput(
            finished_recving={job.request_id for job in ready} or None,
            kv_connector_worker_meta=Transfers(found) if found else None,
        )


def refusals(job: dict[str, Any]) -> dict[str, str]:
    """What each configuration is told when its scheduler is made; empty where it is not refused."""

    def told(plugin: dict[str, Any], layers: str = "full", only_configure: bool = False) -> str:
        try:
            own = {
                "model": plugin.get("model", job["model"]),
                "plugin": {k: v for k, v in plugin.items() if k != "model"},
            }
            # Up to 0.25 its offloading worker takes the place of ours, and divides by the tensors that it lacks here.
            tensorless = vllm.__version__.startswith(("0.24", "0.25")) and "kv_offloading_size" in plugin
            worker_first = "kv_transfer_config" in plugin and not tensorless
            if only_configure:
                EngineArgs(model=job["model"], skip_tokenizer_init=True, **plugin).create_engine_config()
            else:
                scheduler_for(job | own | {"worker_first": worker_first, "layers": layers})
        except Exception as error:  # noqa: BLE001  # the test reads whatever was raised
            return f"{type(error).__name__}: {error}"
        return ""

    found = {name: told(plugin) for name, plugin in job["refusals"].items()}
    good = job["refusals"]["nothing fits"] | {}
    good = with_policy(good, "always-swap")
    with mock.patch("kvpolicy_vllm.plugin.engine_config.device_name", return_value="NVIDIA H100 80GB HBM3"):
        for layers in KINDS:
            found[f"layers {layers}"] = told(good, layers)
            found[f"layers {layers} cheapest:analytic"] = told(with_policy(good, "cheapest:analytic"), layers)
    found |= refused_groups(job, good, told)
    for device in ("cpu", "cuda", "rocm", "xpu", "tpu", "oot"):
        made = type("Made", (Platform,), {"_enum": PlatformEnum[device.upper()], "device_name": device})()
        with mock.patch("kvpolicy_vllm.plugin.config_refusals.platform", return_value=made):
            found[f"device {device}"] = told(good)
    engine = EngineArgs(model=job["model"], dtype="float32", skip_tokenizer_init=True, **good).create_engine_config()
    with set_current_vllm_config(engine):
        found["derived"] = told(job["refusals"]["pooling"], only_configure=True)
    with mock.patch.object(engine, "diffusion_config", object()):
        found["diffusion by its settings"] = refused(engine)
    with mock.patch.dict(engine.model_config.__dict__, is_diffusion=True):
        found["diffusion by its model"] = refused(engine)
    with mock.patch.object(ModelConfig, "use_mla", True):
        found["MLA"] = refused(engine)
        with mock.patch.object(engine.model_config.hf_text_config, "index_topk", 2048, create=True):
            found["MLA with an indexer"] = refused(engine)
        with mock.patch.object(ModelConfig, "is_hybrid", True):
            found["MLA and states"] = refused(engine)
    with (
        mock.patch.object(ModelConfig, "is_hybrid", True),
        mock.patch.object(VllmConfig, "use_v2_model_runner", True, create=True),
    ):
        found["states beside attention"] = refused(engine)
        with mock.patch.dict(engine.kv_transfer_config.kv_connector_extra_config, allow_untested_states_v2=True):
            found["states beside attention, allowed"] = refused(engine)
    with mock.patch("kvpolicy_vllm.plugin.engine_config.device_name", return_value="NVIDIA H100 80GB HBM3"):
        found["untrained"] = told(with_policy(good, "cheapest:analytic"))
    real, vllm.__version__ = vllm.__version__, "0.99.0"
    found["version"] = told(good)
    found["version asked for"] = told(with_policy(good, "always-swap", allow_untested_version=True))
    vllm.__version__ = real
    return found


def refused_groups(job: dict[str, Any], good: dict[str, Any], told: Callable[..., str]) -> dict[str, str]:
    """What is said of groups of layers that no model here has."""
    from kvpolicy_vllm.plugin.versions import engine_version  # here: stock vLLM does without it

    found = {"serves block tables": "yes" if engine_version() >= (0, 32) else ""}
    found["layers full-window in order urgent"] = told(with_policy(good, "always-swap", order="urgent"), "full-window")
    config = EngineArgs(model=job["model"], dtype="float32", skip_tokenizer_init=True, **good).create_engine_config()
    for name, group in unserved_groups(BLOCK).items():
        cache = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[group])
        with mock.patch.object(VllmConfig, "use_v2_model_runner", True, create=True):
            found[name] = refused(config, cache)
            if name == "states on runner v2":
                extra = config.kv_transfer_config.kv_connector_extra_config
                with mock.patch.dict(extra, allow_untested_states_v2=True):
                    found[f"{name}, allowed"] = refused(config, cache)
                with mock.patch.dict(extra, allow_untested_states_v2=True, order="urgent"):
                    found[f"{name}, allowed, in order urgent"] = refused(config, cache)
    return found


def refused(config: Any, cache: Any = None) -> str:
    """What a configuration is told that vLLM would not make on this device. ``cache``: its KV cache, where known."""
    from kvpolicy_vllm.plugin.config_refusals import refuse_unsupported  # here: stock vLLM does without the plugin

    try:
        refuse_unsupported(config, cache)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_policy(plugin: dict[str, Any], policy: str, **more: Any) -> dict[str, Any]:
    extra = {"kv_connector_extra_config": {"policy": policy, **more}}
    return plugin | {"kv_transfer_config": plugin["kv_transfer_config"] | extra}


def accounts_left(scheduler: Any) -> int:
    """Preemptions the plugin still keeps an account of."""
    from kvpolicy_vllm.plugin.cost_meter import CostMeter  # here: stock vLLM does without the plugin

    observers = scheduler.kvpolicy.observers._all if hasattr(scheduler, "kvpolicy") else ()
    return sum(len(observer) for observer in observers if isinstance(observer, CostMeter))


def open_accounts(scheduler: Any) -> set[str]:
    """Preemptions whose cost is still being measured."""
    from kvpolicy_vllm.plugin.cost_meter import CostMeter  # here: stock vLLM does without the plugin

    meters = [observer for observer in scheduler.kvpolicy.observers._all if isinstance(observer, CostMeter)]
    return {name for meter in meters for name in (*meter._live._accounts, *meter._live._early)}


def measure(controller: Any) -> None:
    """Have the controller measure costs, by a step-time model that nothing was measured for."""
    from kvpolicy_vllm.plugin.cost_meter import CostMeter  # here: stock vLLM does without the plugin

    meter = CostMeter(STEP_TIME, controller.observers.tell, controller.metrics.tally)
    controller.observers.replace(CostMeter, meter)


def watch_counts() -> list[tuple[list[int], list[int]]]:
    """Of every victim from now on, what is counted of it and of those who run: as the plugin tells it, and one by one.

    Shared blocks, hashed blocks, tokens of the others, and blocks that the failed allocation lacked.
    """
    from kvpolicy_vllm.plugin import controller

    seen: list[tuple[list[int], list[int]]] = []
    situation_of = controller.situation_of

    def watched(request: Any, of: Any, running: Any, cause: Any, *rest: Any) -> Any:
        blocks = of.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        blocks = blocks[: -(-request.num_computed_tokens // BLOCK)]
        shared, hashed = sum(b.ref_cnt > 1 for b in blocks), sum(b.block_hash is not None for b in blocks)
        others = sum(other.num_computed_tokens for other in of.running)
        by_hand = [shared, hashed, others, lacking_blocks(of, request) if cause == "memory" else 0]
        told = situation_of(request, of, running, cause, *rest)
        seen.append(([told.shared_blocks, told.hashed_blocks, told.batch_tokens, told.short_blocks], by_hand))
        return told

    controller.situation_of = watched
    return seen


def lacking_blocks(scheduler: Any, victim: Any) -> int:
    """Blocks lacked by the first running request that has not enough of them, looked for from the first one on."""
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for request in [*scheduler.running, victim]:
        ahead = max(1, request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)
        computed = request.num_computed_tokens + min(ahead, scheduler.max_num_scheduled_tokens)
        held = len(scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        if -(-computed // BLOCK) - held > free:
            return -(-computed // BLOCK) - held - free
    return 0


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    if "refusals" in job:
        result: Any = {"messages": refusals(job)}
    elif "crowds" in job:
        from tests.vllm import agreement  # here: it needs the plugin, which stock vLLM does without

        result = {"differences": agreement.differences_in_crowds(job["crowds"])}
    elif "mode" in job:
        from tests.vllm.pause_scheduler import pause  # here: it needs the plugin, which stock vLLM does without

        result = {"runs": [pause(job | {"seed": seed}) for seed in job["seeds"]]}
    elif "seeds" in job:
        result = {"runs": [run(job | {"seed": seed}) for seed in job["seeds"]]}
    else:
        result = run(job)
    Path(result_path).write_text(json.dumps(result))


def run(job: dict[str, Any]) -> dict[str, Any]:
    scheduler = scheduler_for(job)
    arriving = deque(made_requests(job))
    worker: Any = Worker(job.get("late", 3))
    if job.get("symbolic"):
        worker = symbolic_worker(job.get("beside"))(
            scheduler, list(arriving), BLOCK, job["seed"], clears_first=job.get("model_runner_v2", False)
        )
    schedule: list[Any] = []
    if hasattr(scheduler, "kvpolicy"):
        # The same draws at every run, and a suspension of swapping that lasts some steps on a machine of any speed.
        scheduler.kvpolicy.decider._rng = random.Random(job["seed"])
        scheduler.kvpolicy.clock = lambda: float(len(schedule))
    counts = watch_counts() if job.get("counts") else []
    if job.get("measured"):
        measure(scheduler.kvpolicy)
    disturb, places, stalls = _disturbances(job, scheduler, worker), Places(scheduler), Stalls(scheduler)

    def before_step() -> None:
        disturb()
        places.before_step()
        stalls.before_step()

    for output in drive(scheduler, arriving, worker.execute, job["asynchronous"], before_step):
        places.after_step()
        stalls.after_step(output)
        preempted = sorted(getattr(output, "preempted_req_ids", None) or ())
        order = [request.request_id for request in scheduler.running]
        schedule.append([dict(sorted(output.num_scheduled_tokens.items())), preempted, order])
        if len(schedule) == MAX_STEPS:
            break
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "version": vllm.__version__,
        "base": [base.__name__ for base in type(scheduler).__mro__],
        "schedule": schedule,
        "free_blocks": pool.get_num_free_blocks(),
        "device_blocks": pool.num_gpu_blocks,
        "stats": scheduler.kvpolicy.stats() if hasattr(scheduler, "kvpolicy") else {},
        "unfinished": len(scheduler.requests),
        "counts": counts,
        "accounts": accounts_left(scheduler),
        "misplaced": places.wrong,
        "put_back": places.put_back,
        "stalled": stalls.stalled,
        "beside_prompts": stalls.beside_prompts,
    } | worker.found()


def symbolic_worker(beside: Any) -> Any:
    """The class of the worker for what is beside kvpolicy's connector. Imported here: they need the plugin, which stock
    vLLM does without, and the connectors of one version."""
    if beside == OFFLOADS:
        from tests.vllm.offloaded import OffloadingWorker as Worker
    elif beside == OFFLOADS_CHUNKS:
        from tests.vllm.offloading_connector import OffloadingConnectorWorker as Worker
    elif beside:
        from tests.vllm.store import WorkerBeside as Worker
    else:
        from tests.vllm.symbolic import SymbolicWorker as Worker
    return Worker


def drive(
    scheduler: Any,
    arriving: deque[Any],
    execute: Callable[[Any, dict[str, bool]], ModelRunnerOutput],
    asynchronous: bool,
    before_step: Callable[[], None] = lambda: None,
    throttles: Callable[[], bool] = lambda: False,
    add: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """Step until everything is served, with two arrivals a step; yields what each step scheduled, already executed.

    What was scheduled is executed at once and in order, as in an engine; only the answer may be read later.
    ``throttles``: whether the next step is told to compute no prompts. ``add``: what is done with what arrives, instead
    of giving it to the scheduler.
    """
    flying = deque[tuple[Any, ModelRunnerOutput]]()
    depth = 2 if asynchronous else 1
    while True:
        for _ in range(2):
            if arriving:
                (add or scheduler.add_request)(arriving.popleft())
        paused = scheduler.pause_state != PauseState.UNPAUSED
        if not arriving and not scheduler.has_requests() and not paused:
            if not flying:
                return
            scheduler.update_from_output(*flying.popleft())
            continue
        before_step()
        output = scheduler.schedule(throttles())
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        flying.append((output, execute(output, sampled)))
        yield output
        if len(flying) == depth:
            scheduler.update_from_output(*flying.popleft())


def _disturbances(job: dict[str, Any], scheduler: Any, worker: Any) -> Callable[[], None]:
    if not job.get("harry"):
        return lambda: None
    shares = Shares(aborts=0.02, forced=0.08, resets=0.005 if job.get("resets", True) else 0.0, resets_when_loaded=0.5)
    return Disturbances(scheduler, [worker], job["seed"], shares).before_step


if __name__ == "__main__":
    main(*sys.argv[1:])
