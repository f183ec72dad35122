"""Settings of engines: those of a server, which are the flags of `kvpolicy serve` and the keys that its plugin reads,
and those of a measurement, which are flags of `kvpolicy profile` and `kvpolicy characterize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.extensions import FORM, PREFIX, names_module
from kvpolicy.fields import AMOUNT, POSITIVE, Rule, WrongValue, option, refuse_other, refuse_single, validate
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.order import HELP as ORDERS
from kvpolicy.order import spec as orders
from kvpolicy.policy import HELP, Policy
from kvpolicy.request_marks import HELP as CLASSES
from kvpolicy.request_marks import HINT_HELP, Classes, HintLimits

LINK = "Simulated link, BYTES_PER_S[,LATENCY_S]. Default: the native link."
SEED = "Seed of all random draws."
GIB = 1 << 30
DEFAULT_HOST_GIB = 4.0
"""Host memory for evicted KV, of a server and of a simulated one."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One field per flag and key. The command line, the checks and the plugin all derive from these fields."""

    policy: str = option(HELP)
    shadow: bool = option("Decide and record, but execute vLLM's own recompute.", False)
    host_gib: float = option(
        "Total host memory for evicted KV over the ranks of one engine core, GiB.", DEFAULT_HOST_GIB, POSITIVE
    )
    force_host_gib: bool = option("Let --host-gib take more than half of the available memory.", False)
    pin_memory: bool = option("Do not page-lock the host memory.", True)
    trace: Path | None = option("Folder to record a trace in.", None)
    seed: int = option("Seed of a policy that chooses at random.", 0, flag="--policy-seed")
    link: SimulatedLink | None = option(LINK, None)
    online_state: Path | None = option(
        "File in which an online=on policy keeps what it learned across restarts.",
        None,
        Rule("a file, but is a folder", lambda path: not path.is_dir()),
    )
    allow_untested_version: bool = option("Allow a vLLM newer than the tested versions.", False)
    allow_python_policies: bool = option(f"Let --policy name a module whose code the server runs, {FORM}.", False)
    order: str = option(f"Order of service. {ORDERS}.", "fcfs")
    classes: Classes | None = option(CLASSES, None)
    hints: HintLimits | None = option(HINT_HELP, None)

    def __post_init__(self) -> None:
        _refuse_object(self.policy)
        validate(self)
        for name, value in (("policy", self.policy), ("order", self.order)):
            if names_module(value.replace("/", ":") if name == "order" else value) and not self.allow_python_policies:
                raise WrongValue(
                    name,
                    f"is {value!r}, which names a module to run; a server runs one only with "
                    '--allow-python-policies, in its settings "allow_python_policies": true',
                )
        orders.load(self.order, self.allow_python_policies)


def _refuse_object(policy: object) -> None:
    """Raise WrongValue for a policy object, or its class, with the module path that is to be given in its place."""
    policy_class = policy if isinstance(policy, type) else type(policy)
    if not issubclass(policy_class, Policy):
        return
    path = f"{PREFIX}{policy_class.__module__}:{policy_class.__qualname__}"
    if policy_class.__module__ == "__main__" or "<" in path:
        path = f"{FORM} (of a module that can be imported)"
    raise WrongValue(
        "policy",
        f"is an object of the class {policy_class.__name__}: a server is another process and takes a name, here "
        f"{path} with allow_python_policies=True; only an engine made in Python takes the object",
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings with which a live engine is measured."""

    llm: Path | None = option("Folder of a model, or its id at a hub. Default: a small model is generated.", None)
    quick: bool = option(
        "Fewer states, levels and repeats: takes minutes, or a quarter of an hour for a study on two cores.",
        False,
    )
    link: SimulatedLink | None = option(LINK, None)
    seed: int = option(SEED, 0, AMOUNT)
    vllm_flags: Sequence[str] = ()
    """vLLM's flags of the server that the costs are for, as on its command line: ``["--tensor-parallel-size", "2"]``.
    With any, or with a model's id at a hub, the engine is that server's: its data types and ranks, its block size
    alone, its token budget and requests, and its environment. Without, kvpolicy chooses, over several block sizes."""
    minutes: float | None = option(
        "Minutes that this call may take. What has not been measured by then is listed, and left to the next call.",
        None,
        POSITIVE,
    )

    def __post_init__(self) -> None:
        validate(self)
        refuse_no_flags(self.vllm_flags)
        object.__setattr__(self, "vllm_flags", tuple(self.vllm_flags))


def refuse_no_flags(vllm_flags: Sequence[str]) -> None:
    """Raise WrongValue for what is no list of texts."""
    refuse_single(vllm_flags=vllm_flags)
    for number, flag in enumerate(vllm_flags):
        refuse_other(f"vllm_flags[{number}]", flag, str, "a text")
