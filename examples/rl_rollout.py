"""A rollout of reinforcement learning, simulated: all prompts are there at once, the step ends with the last answer.

    python examples/rl_rollout.py

Nobody waits for a first token; what counts is the time until all are done. Memory is short, and vLLM preempts. What a
rollout gains by machine, with groups of samples of a prompt, is in docs/when-to-switch-on.md.
"""

from __future__ import annotations

import kvpolicy

HARDWARE = "cpu-llama-native"
LOAD = "azure-conversation-2023?n=150&rate=1000000"
ARMS = {
    "vLLM": ("fcfs", "always-recompute"),
    "kvpolicy": ("fcfs", f"cheapest:{HARDWARE}"),
    "kvpolicy, shortest remaining first": ("srpt:lengths", f"cheapest:{HARDWARE}"),
}


def compare() -> dict[str, dict[str, float]]:
    """Seconds of the whole rollout, preemptions and recomputed tokens, by arm."""
    found = {}
    for arm, (order, policy) in ARMS.items():
        serving = kvpolicy.Serving(block_size=32, order=order, prefix_caching=False)
        swept = kvpolicy.simulate([LOAD], [policy], [400], HARDWARE, serving=serving, run=kvpolicy.Run(jobs=0))
        (cell,) = swept.to_dict()["cells"]
        found[arm] = {
            "rollout, s": cell["makespan_s"],
            "preemptions": sum(cell["preemptions"].values()),
            "recomputed tokens": cell["recomputed_tokens"],
        }
    return found


if __name__ == "__main__":
    for name, figures in compare().items():
        print(name, {what: round(value, 3) for what, value in figures.items()})
