"""Settings of engines: those of a server, which are the flags of `kvpolicy serve` and the keys that its plugin reads,
and those of a measurement, which are flags of `kvpolicy profile` and `kvpolicy characterize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.caching import spec as caching
from kvpolicy.extensions import FORM, PREFIX, names_module
from kvpolicy.fields import (
    AMOUNT,
    POSITIVE,
    Rule,
    WrongValue,
    option,
    refuse_other,
    refuse_single,
    validate,
)
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.order import HELP as ORDERS
from kvpolicy.order import Order
from kvpolicy.order import spec as orders
from kvpolicy.order.by_class import unlisted_classes
from kvpolicy.order.kept_first import KeptFirst, may_read_hints
from kvpolicy.order.order_parts import parts
from kvpolicy.policy import HELP, Policy
from kvpolicy.request_marks import HELP as CLASSES
from kvpolicy.request_marks import HINT_HELP, Classes, HintLimits

LINK = "Simulated link, BYTES_PER_S[,LATENCY_S]. Default: the native link."
SEED = "Seed of all random draws."
DEMO_ORDER = "mlfq:base=32"
"""The order of service that a demo shows, where no other is asked for."""
GIB = 1 << 30
DEFAULT_HOST_GIB = 4.0
"""Host memory for evicted KV, of a simulated server, and of one whose machines or ranks may not see the same memory."""
DEFAULT_CACHE_FILES_GIB = 100.0
NO_FILES = {"cache_files": None, "cache_files_gib": DEFAULT_CACHE_FILES_GIB, "cache_files_policy": "lru"}
"""Settings of a server without files of KV."""
DEFAULT_TRACE_GIB = 10.0
"""Of a server's trace: some weeks, see docs/operating.md."""
SHARE = Rule("above 0, and 1 at most", lambda value: 0 < value <= 1)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One field per flag and key. The command line, the checks and the plugin all derive from these fields."""

    policy: str = option(HELP)
    shadow: bool = option(
        "Decide and record, but execute vLLM's own recompute. --host-gib is then the memory that decisions assume, and "
        "none is taken.",
        False,
    )
    host_gib: float | None = option(
        "Total host memory for evicted KV over the ranks of one engine core, GiB. Default: a quarter of the memory "
        "available at the start, at most half of it times this server's part of the machine's GPUs; where the device "
        "is the CPU an eighth, at most half of what vLLM leaves; shared evenly by the engine cores of this machine, at "
        "most 64.",
        None,
        POSITIVE,
    )
    force_host_gib: bool = option("Let --host-gib take more than half of the available memory.", False)
    pin_memory: bool = option("Do not page-lock the host memory.", True)
    share_replicated_kv: bool = option(
        "Keep KV that is the same on all ranks, as MLA's is, once for all of them on a GPU, too, where it was never "
        "tested. On a CPU it is kept once.",
        False,
    )
    trace: Path | None = option("Folder to record a trace in.", None)
    trace_gib: float | None = option(
        "Size of the trace's folder, GiB, above which its oldest part files are removed.", DEFAULT_TRACE_GIB, POSITIVE
    )
    trace_days: float | None = option(
        "Age, days, from which its part files are removed. Default: no limit.", None, POSITIVE
    )
    trace_steps: float = option(
        "Share of the steps recorded that no preemption touched; those that one touched always are.", 1.0, SHARE
    )
    seed: int = option("Seed of a policy that chooses at random.", 0, flag="--policy-seed")
    link: SimulatedLink | None = option(LINK, None)
    online_state: Path | None = option(
        "File in which an online=on policy keeps what it learned across restarts.",
        None,
        Rule("a file, but is a folder", lambda path: not path.is_dir()),
    )
    allow_untested_version: bool = option("Allow a vLLM newer than the tested versions.", False)
    allow_untested_states_v2: bool = option(
        "Serve models whose layers keep states on vLLM's model runner v2, never tested on a GPU. The blocks of a "
        "preempted request are held until they are saved.",
        False,
    )
    allow_python_policies: bool = option(
        f"Let --policy, --order, --cache and --cache-files-policy name a module whose code the server runs, {FORM}.",
        False,
    )
    order: str = option(f"Order of service. {ORDERS}.", "fcfs")
    classes: Classes | None = option(CLASSES, None)
    cache: str = option(
        f"Caching policy by which host memory that no preempted request needs holds prompts. {caching.HELP}.",
        caching.OFF,
        aliases=("--host-cache",),
    )
    cache_files: Path | None = option(
        "Folder, on an NVMe drive, in which --cache also holds prompts, beyond restarts.",
        None,
        Rule("a folder, but is a file", lambda path: not path.is_file()),
    )
    cache_files_gib: float = option(
        "Total size of these files over the ranks of one engine core, GiB.", DEFAULT_CACHE_FILES_GIB, POSITIVE
    )
    hints: HintLimits | None = option(HINT_HELP, None)
    cache_files_policy: str = option(
        f"Caching policy by which these files are given up: lru, lfu, arc, s3fifo, cost, or {FORM}.", "lru"
    )
    control: Path | None = option(
        "File, of mode 600, by which policy, order and shadow are switched while the server runs: POLICY, "
        "order=ORDER and shadow=on joined by commas, or off. Without the file the flags hold.",
        None,
        Rule("a file, but is a folder", lambda path: not path.is_dir()),
    )

    def __post_init__(self) -> None:
        _refuse_object("policy", self.policy, Policy)
        _refuse_object("order", self.order, Order)
        validate(self)
        for name in ("policy", "order", "cache", "cache_files_policy"):
            value = getattr(self, name)
            if names_module(value.replace("/", ":") if name == "order" else value) and not self.allow_python_policies:
                raise WrongValue(
                    name,
                    f"is {value!r}, which names a module to run; a server runs one only with "
                    '--allow-python-policies, in its settings "allow_python_policies": true',
                )
        orders.load(self.order, self.allow_python_policies)
        if self.cache_files is not None and self.cache == caching.OFF:
            raise WrongValue("cache_files", "is given without a caching policy: give --cache, too, as --cache cost")
        if self.shadow and self.cache != caching.OFF:
            raise WrongValue(
                "cache", "is given with --shadow, which keeps nothing in host memory: leave one of them out"
            )
        caching.load(self.cache, 1, allow_python=self.allow_python_policies)
        caching.load_for_files(self.cache_files_policy, 1, self.allow_python_policies, "cache_files_policy")
        for name, default in NO_FILES.items():
            if self.cache_files is None and getattr(self, name) != default:
                raise WrongValue(name, "is given without --cache-files: give that, too, as --cache-files /nvme/kv")

    def warnings(self) -> list[str]:
        """What a server with these settings would do in vain."""
        order = orders.load(self.order, self.allow_python_policies)
        said = unlisted_classes(order, () if self.classes is None else self.classes.names)
        if self.hints is None:
            return said
        if self.hints.keep_s and not self.heeds_hints and self.control is None:  # which may name an order by hints yet
            said.append("--hints is given without --cache and without an order by hints: nothing comes of hints")
        if not self.hints.keep_s and any(isinstance(part, KeptFirst) for part in parts(order)):
            said.append(f"order {order.name} puts nobody first: --hints none, which is given, too, grants no keep_s")
        return said

    @property
    def heeds_hints(self) -> bool:
        """Whether anything may come of what requests say of their KV."""
        return self.cache != caching.OFF or may_read_hints(orders.load(self.order, self.allow_python_policies))


def _refuse_object(field: str, value: object, base: type[Any]) -> None:
    """Raise WrongValue for an object of the class ``base``, or its class, with the module path that is to be given in
    its place."""
    own_class = value if isinstance(value, type) else type(value)
    if not issubclass(own_class, base):
        return
    path = f"{PREFIX}{own_class.__module__}:{own_class.__qualname__}"
    if own_class.__module__ == "__main__" or "<" in path:
        path = f"{FORM} (of a module that can be imported)"
    raise WrongValue(
        field,
        f"is an object of the class {own_class.__name__}: a server is another process and takes a name, here "
        f"{path} with allow_python_policies=True; only an engine made in Python takes the object",
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings with which a live engine is measured."""

    llm: str | Path | None = option(
        "Folder of a model, or its id at a hub. Default: a small model is generated.", None, metavar="MODEL"
    )
    """As a text, ``./x`` is a folder; a path does not keep the ``./``."""
    quick: bool = option(
        "Fewer states, levels and repeats: takes minutes, or a quarter of an hour for a study on two cores.",
        False,
    )
    link: SimulatedLink | None = option(LINK, None)
    seed: int = option(SEED, 0, AMOUNT)
    vllm_flags: Sequence[str] = ()
    """vLLM's flags of the server that the costs are for, as on its command line: ``["--tensor-parallel-size", "2"]``.
    With any, or with a model's id at a hub, the engine is that server's: its data types and ranks, its block size
    alone, its token budget and requests, and its environment. Without, kvpolicy chooses, over several block sizes, and
    the data type is the one that vLLM takes for the model."""
    minutes: float | None = option(
        "Minutes that this call may take. What has not been measured by then is listed, and left to the next call.",
        None,
        POSITIVE,
    )

    def __post_init__(self) -> None:
        if isinstance(self.llm, Path):
            object.__setattr__(self, "llm", str(self.llm))
        validate(self)
        refuse_no_flags(self.vllm_flags)
        object.__setattr__(self, "vllm_flags", tuple(self.vllm_flags))

    @property
    def llm_folder(self) -> Path | None:
        """The model's folder; None where it has none here."""
        folder = None if self.llm is None else Path(self.llm).expanduser()
        return folder if folder is not None and folder.exists() else None


def refuse_no_flags(vllm_flags: Sequence[str]) -> None:
    """Raise WrongValue for what is no list of texts."""
    refuse_single(vllm_flags=vllm_flags)
    for number, flag in enumerate(vllm_flags):
        refuse_other(f"vllm_flags[{number}]", flag, str, "a text")
