"""What a token of a prompt costs beside a decoded one, p / d, at the batches of a load: from one more run, recorded.

The run is served by vLLM's own decisions, with the plugin in shadow mode, so that the server is like the arm without
the plugin. Called by :mod:`kvpolicy_vllm.bench.run_bench` after its rounds. Loads no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpolicy import trace as traces
from kvpolicy.bench_settings import BenchTarget
from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation.log_headroom import log_headroom, log_token_prices
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.live_arms import LiveArm

RECORDED = "recorded"
"""Name of the arm, and of its log."""


def recording_arm(at: BenchTarget, trace: Path) -> LiveArm:
    """The server of the arms, with vLLM's own decisions, that records a trace."""
    settings = ServerSettings("always-recompute", shadow=True, trace=trace)
    return LiveArm(RECORDED, command=tuple(launch.serve_command(at.target, launch.options(settings), at.vllm_flags)))


def recorded_prices(serve: Callable[[], None], trace: Path) -> dict[str, Any]:
    """What the trace says that ``serve`` writes; of all figures None, and ``unknown`` why, where it cannot be served
    or the trace does not say."""
    try:
        serve()
        found = traces.read(trace)
        prices, unknown = log_token_prices(found)
        lost = log_headroom([found]).price_ratio
    except KVPolicyError as error:
        return {"price_ratio": None, "unknown": " ".join(str(error).split())}
    return {
        "price_ratio": prices.price_ratio,
        "prompt_token_s": prices.prompt_token_s,
        "decoded_token_s": prices.decoded_token_s,
        "batch": prices.batch,
        "prompt_tokens": prices.prompt_tokens,
        "decoded_tokens": prices.decoded_tokens,
        "lost_price_ratio": lost,
        "unknown": unknown,
    }


def sentence(prices: dict[str, Any]) -> str:
    """The prices for a person."""
    if prices["price_ratio"] is None:
        return f"p / d at the batches that ran is not known: {prices['unknown']}"
    lost = prices["lost_price_ratio"]
    alone = "" if lost is None else f"; of tokens that preemptions lost {lost:.3g}"
    return (
        f"p / d at the batches that ran, {prices['batch']:.1f} decodes a step: {prices['price_ratio']:.3g} (a prompt "
        f"token adds {1e3 * prices['prompt_token_s']:.3g} ms to a step, a decoded one takes "
        f"{1e3 * prices['decoded_token_s']:.3g} ms){alone}"
    )
