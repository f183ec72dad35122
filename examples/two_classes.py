"""Urgent requests beside a batch, simulated: who waits under vLLM's priority scheduling, and who under `urgent`.

    python examples/two_classes.py

The server is that of a cost model that ships (a very small model on two cores); take the folder of your own.
"""

from __future__ import annotations

import kvpolicy

HARDWARE = "cpu-llama-native"
URGENT = "azure-conversation-2023?n=60&rate=1.5&class=urgent&priority=-1"
LOAD = f"{URGENT} + azure-conversation-2023?n=60&rate=1000&class=batch"
ARMS = {
    "vLLM, priority": (kvpolicy.Serving(block_size=32, order="priority"), "always-recompute"),
    "kvpolicy, urgent": (kvpolicy.Serving(block_size=32, order="urgent"), f"cheapest:{HARDWARE}"),
}


def compare() -> dict[str, dict[str, float]]:
    """Mean and p99 time to first token of the urgent, and tokens per second of the batch, by arm."""
    found = {}
    for arm, (serving, policy) in ARMS.items():
        swept = kvpolicy.simulate([LOAD], [policy], [400], HARDWARE, serving=serving, run=kvpolicy.Run(jobs=0))
        (cell,) = swept.to_dict()["cells"]
        classes = cell["classes"]
        found[arm] = {
            "urgent, first token, mean s": classes["urgent"]["ttft_s"]["mean"],
            "urgent, first token, p99 s": classes["urgent"]["ttft_s"]["p99"],
            "batch, tokens/s": classes["batch"]["throughput_tok_s"],
        }
    return found


if __name__ == "__main__":
    for name, figures in compare().items():
        print(name, {what: round(value, 3) for what, value in figures.items()})
