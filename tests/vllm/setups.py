"""Drawn configurations of a scheduler, its requests, its workers and what befalls it. Needs no vLLM."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass, fields
from typing import Any

BLOCK = 16
MAX_SHARED_TOKENS = 96
"""Prompts begin alike up to here."""


WINDOW = 40
"""Tokens, no whole number of blocks."""
KINDS = {
    "full": ("full",),
    "two-full": ("full", "full"),
    "window": ("window",),
    "full-window": ("window", "full"),
    "full-windows": ("window", "full", "window"),
    "two-sizes": ("wide", "full"),
    "full-states": ("state", "full", "state"),
}
"""Kinds of the groups of layers, by name. ``wide`` is a window whose blocks have twice the tokens."""
MAX_STATES = 2
"""Blocks of states that a request has at a time, of one group."""
MAX_SESSIONS = 2
MAX_FURTHER_TOKENS = 160
"""What a session's further inputs and the answers to them come to."""


FICKLE = "python:tests.fickle:Fickle"
RAISING, RUBBISH = "python:tests.unruly:Raising", "python:tests.unruly:Rubbish"
HOLDING = "python:tests.holds:Holds"
UNRULY = (RAISING, RUBBISH)
"""Orders whose code fails."""
ORDERS = (
    "mlfq:base=4", "mlfq:base=8,promote=2", "mlfq:base=4,victims=cheapest", "las:quantum=8,promote=5", "srpt:lengths",
    "gittins:quantum=8", "urgent", "urgent:quantum=8,promote=3", "urgent/mlfq:base=4,promote=4", "reserve:.2",
    "deadline:ttft=.5,tpot=.05", *UNRULY, "urgent:quantum=2,promote=4,cool=1", "mlfq:base=4,promote=3,cool=.5",
    "gittins:quantum=4,promote=5,cool=2,victims=least-computed", "srpt:lengths,quantum=4,promote=4,bound=.5", HOLDING,
    "python:tests.holds:Measured",
)  # fmt: skip


CACHES = ("lru", "lfu", "arc", "s3fifo", "cost", "cost", "python:tests.careless:Careless")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One schedule. Its `repr` is one line that :meth:`parse` makes it from again."""

    seed: int
    """Of the requests, the workers' faults and the disturbances."""
    # The engine.
    scheduling: str
    asynchronous: bool
    prefix_caching: bool
    token_budget: int
    max_running: int
    spare_blocks: int
    """KV blocks beyond those that the longest possible request takes."""
    ranks: int
    # The plugin.
    policy: str
    host_gib: float
    order: str
    """Drawn order of service; :attr:`served` is the one that serves."""
    # The requests.
    requests: int
    max_prompt_tokens: int
    max_output_tokens: int
    stops: bool
    """Half of the requests end at one of some tokens."""
    prompt_logprobs: bool
    """Some requests may read no cached prefix."""
    adapters: int
    """LoRA adapters, of which a batch holds one; 0: none."""
    grammars: bool
    """Some requests wait for a grammar."""
    # The workers.
    copies_fail: bool
    max_late_steps: int
    # What comes from outside.
    harried: bool
    """Aborts and forced preemptions."""
    resets: str
    """``none``, ``weights`` or ``cache``."""
    pauses: bool
    # What vLLM's admission goes by besides.
    sessions: bool
    """Some requests are sessions, whose next input comes while they are served or later."""
    reserves_whole: bool
    """Whether the blocks of a whole sequence must be free before its first chunk is computed."""
    long_prefill: int
    """Tokens of a prompt in one step, at most; 0: as many as fit."""
    throttled: bool
    """Now and then a step computes no prompts."""
    # An encoder.
    pictures: int
    """Tokens of the largest picture in a prompt; 0: there are none."""
    encoder_room: float
    """What the encoder takes in a step, and its cache holds, in largest pictures."""
    # The model.
    layers: str
    """One of :data:`KINDS`."""
    dense: bool
    """Whether windows and states are cached at the end of every block, and not only of the prompt."""
    # What host memory is for besides.
    cache: str
    """Drawn caching policy; :attr:`caches` is the one that serves."""

    @classmethod
    def draw(cls, seed: int, **fixed: Any) -> Setup:
        """Every seed draws one. ``fixed`` fields are as given; the others are what they would be without."""
        rng = random.Random(f"setup {seed}")
        drawn = {name: draw(rng) for name, draw in _DRAWS.items()}
        return cls(**{"seed": seed} | drawn | fixed)

    @classmethod
    def parse(cls, text: str) -> Setup:
        """From its `repr`; fields may be changed or left out, but for the seed. Raises ValueError naming what is
        wrong."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            assert isinstance(call, ast.Call)
            given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        except (SyntaxError, AssertionError, ValueError) as error:
            raise ValueError(f"{text!r} is not of the form Setup(seed=1, ...)") from error
        unknown = given.keys() - {field.name for field in fields(cls)}
        if unknown or "seed" not in given:
            wrong = f"unknown {sorted(unknown)}" if unknown else "no seed"
            raise ValueError(f"{text!r}: {wrong}; the fields are {', '.join(field.name for field in fields(cls))}")
        return cls.draw(**given)

    @property
    def served(self) -> str:
        """The order of service: vLLM's own where its scheduling is another than first come, first served."""
        return self.order if self.scheduling == "fcfs" else "fcfs"

    @property
    def caches(self) -> str:
        """The caching policy: only for one block table, with prefix caching."""
        return self.cache if self.prefix_caching and self.layers == "full" else "off"

    @property
    def picture_tokens(self) -> int:
        """Only without adapters. vLLM counts the adapters of those running requests that it schedules: one whose
        picture waits for the encoder is not, another adapter takes its slot, and an assertion of vLLM's ends the
        engine."""
        return 0 if self.adapters else self.pictures

    @property
    def has_sessions(self) -> bool:
        """Only where the order of service is not vLLM's own, whose running list :class:`Places` checks by arrival. Not
        where weights change, as vLLM lets an idle session keep what it computed under the old ones, nor scheduling
        ahead: vLLM loses a session from its queues that is preempted while the token that stops it is in flight."""
        return self.sessions and not self.asynchronous and self.served != "fcfs" and self.resets != "weights"

    @property
    def blocks(self) -> int:
        """KV blocks of the device, vLLM's own null block among them."""
        longest = MAX_SHARED_TOKENS + self.max_prompt_tokens + self.max_output_tokens
        # Sessions keep their blocks while they wait, which nothing can take: beside them the longest request must fit.
        kept = MAX_SESSIONS * (self._held_at_most(longest + MAX_FURTHER_TOKENS)) if self.has_sessions else 0
        return self._held_at_most(longest) + 1 + self.spare_blocks + kept

    def _held_at_most(self, tokens: int) -> int:
        """Blocks of a request of so many tokens, over all groups. In a window are the tokens of two steps, too."""
        step_tokens = max(self.token_budget, self.max_running)
        seen = min(tokens, WINDOW + 2 * step_tokens + BLOCK)
        by_kind = {
            "full": tokens // BLOCK + 1, "window": seen // BLOCK + 1, "wide": seen // (2 * BLOCK) + 1,
            "state": MAX_STATES,
        }  # fmt: skip
        return sum(by_kind[kind] for kind in KINDS[self.layers])


_DRAWS = {
    "scheduling": lambda rng: rng.choice(["fcfs", "priority"]),
    "asynchronous": lambda rng: rng.random() < 0.6,
    "prefix_caching": lambda rng: rng.random() < 0.6,
    "token_budget": lambda rng: rng.choice([48, 128, 512, 2048]),
    "max_running": lambda rng: rng.choice([4, 16, 48]),
    # Two of three have memory for one or two of the longest requests.
    "spare_blocks": lambda rng: rng.randint(0, 8) if rng.random() < 2 / 3 else rng.randint(20, 140),
    "ranks": lambda rng: rng.choice([1, 1, 2]),
    "policy": lambda rng: rng.choice(["always-swap", "random:0.7", FICKLE]),
    "host_gib": lambda rng: rng.choice([0.25, 0.25, 0.02, 0.005, 0.001]),
    "requests": lambda rng: rng.choice([12, 60]),
    "max_prompt_tokens": lambda rng: rng.choice([100, 300]),
    "max_output_tokens": lambda rng: rng.choice([30, 200]),
    "stops": lambda rng: rng.random() < 0.5,
    "prompt_logprobs": lambda rng: rng.random() < 0.3,
    "adapters": lambda rng: rng.choice([0, 0, 2, 4]),
    "grammars": lambda rng: rng.random() < 0.3,
    "copies_fail": lambda rng: rng.random() < 0.5,
    "max_late_steps": lambda rng: rng.choice([0, 1, 4, 12]),
    "harried": lambda rng: rng.random() < 0.5,
    "resets": lambda rng: rng.choice(["none", "none", "weights", "cache"]),
    "pauses": lambda rng: rng.random() < 0.3,
    "order": lambda rng: rng.choice(["fcfs", *ORDERS]),
    "sessions": lambda rng: rng.random() < 0.3,
    "reserves_whole": lambda rng: rng.random() < 0.7,
    "long_prefill": lambda rng: rng.choice([0, 0, 40]),
    "throttled": lambda rng: rng.random() < 0.2,
    "pictures": lambda rng: rng.choice([0, 0, 24, 60]),
    "encoder_room": lambda rng: rng.choice([1.0, 1.0, 1.5, 4.0]),
    # Several block tables are served from vLLM 0.32 on only: tests ask for them.
    "layers": lambda rng: "full",
    "dense": lambda rng: rng.random() < 0.5,
    "cache": lambda rng: rng.choice(["off", "off", *CACHES]),
}
