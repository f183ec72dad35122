"""Prompt and output lengths as quantiles of public traces; quantiles can be shipped where traces cannot."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpolicy.workload.requests import WorkloadError

LEVELS = (0.0, 0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99, 1.0)
"""Levels of the quantiles of :class:`Lengths`: every 5%, the ends and the 1% tails."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths as quantiles at :data:`LEVELS`; the two are drawn independently."""

    name: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        for values in (self.prompt_tokens, self.output_tokens):
            if len(values) != len(LEVELS) or list(values) != sorted(values):
                raise WorkloadError(f"lengths {self.name}: {len(LEVELS)} rising quantiles are needed, got {values}")

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """Prompt and output tokens of one request, by inversion: linear between the quantiles."""
        prompt_at, output_at = rng.random(), rng.random()
        return length_at(self.prompt_tokens, prompt_at), length_at(self.output_tokens, output_at)


AZURE_CONVERSATION = Lengths(
    "azure-conversation-2023",
    prompt_tokens=(
        *(2, 39, 181, 310, 379, 389, 398, 406, 426, 944, 1009, 1033),
        *(1055, 1080, 1106, 1142, 1204, 1322, 2221, 4076, 4086, 4123, 14050),
    ),
    output_tokens=(
        *(7, 16, 38, 49, 60, 71, 80, 87, 93, 100, 110, 134),
        *(162, 198, 374, 390, 396, 403, 414, 427, 460, 610, 1000),
    ),
    source=(
        "quantiles of the first 1800 s (10,108 requests) of AzureLLMInferenceTrace_conv.csv, "
        "Azure/AzurePublicDataset, CC-BY-4.0"
    ),
)
"""Conversations; rank correlation of prompt and output 0.03, variation of the times between arrivals 1.07."""

SHAREGPT = Lengths(
    "sharegpt-8k",
    prompt_tokens=(
        *(1, 12, 28, 73, 176, 384, 591, 784, 981, 1214, 1469, 1739),
        *(2068, 2408, 2811, 3236, 3737, 4291, 4918, 5696, 6560, 7420, 8141),
    ),
    output_tokens=(
        *(2, 6, 43, 84, 130, 180, 228, 272, 313, 347, 381, 414),
        *(453, 493, 534, 583, 629, 687, 756, 834, 920, 997, 1024),
    ),
    source=(
        "quantiles of every second row (15,366 requests) of the ShareGPT lengths (Llama-2 tokens, 8K context) of "
        "project-etalon/etalon, Apache-2.0"
    ),
)
"""Conversations sent with their whole history; rank correlation of prompt and output 0.05."""

DEEPSEEK_R1 = Lengths(
    "deepseek-r1",
    prompt_tokens=(
        *(4, 9, 12, 15, 18, 22, 27, 30, 39, 51, 65, 84),
        *(114, 171, 210, 234, 387, 436, 1019, 2419, 6876, 22876, 54954),
    ),
    output_tokens=(
        *(9, 150, 247, 343, 413, 473, 548, 662, 812, 966, 1106, 1223),
        *(1324, 1425, 1538, 1702, 2029, 2686, 3538, 4721, 6993, 13482, 32768),
    ),
    source=(
        "quantiles of the first 12 h of data/reason/deepseek-r1 of alibaba/ServeGen, Apache-2.0: its clients' length "
        "distributions weighted by their rates"
    ),
)
"""Reasoning: short questions, long answers. Requests grow in memory while they run, which causes preemptions."""

TWEET_SENTIMENT = Lengths(
    "tweet-sentiment",
    prompt_tokens=(
        *(5, 11, 13, 16, 19, 20, 21, 23, 24, 25, 25, 27),
        *(27, 28, 29, 29, 31, 32, 33, 35, 36, 39, 41),
    ),
    output_tokens=(2,) * len(LEVELS),
    source=(
        "quantiles of the words of 2,000 texts (validation rows of datasets/sentiment of cardiffnlp/tweeteval), "
        "4/3 tokens a word; outputs of two tokens, a label"
    ),
)
"""Short messages to be classified. The texts themselves are not included."""


def length_at(quantiles: Sequence[float], level: float) -> float:
    """The length at ``level``, 0 to 1, linear between ``quantiles``, which are those at :data:`LEVELS`."""
    if not 0.0 <= level <= 1.0:
        raise WorkloadError(f"quantile level {level}: should be from 0 to 1")
    upper = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[upper - 1], LEVELS[upper]
    share = (level - low) / (high - low)
    return quantiles[upper - 1] + share * (quantiles[upper] - quantiles[upper - 1])


def scale_to(lengths: Lengths, context_tokens: int) -> float:
    """The factor, at most 1, that scales the sum of the 99% quantiles of prompt and output to ``context_tokens``."""
    ninety_nine = LEVELS.index(0.99)
    return min(1.0, context_tokens / (lengths.prompt_tokens[ninety_nine] + lengths.output_tokens[ninety_nine]))


SHIPPED: Mapping[str, Lengths] = {lengths.name: lengths for lengths in (AZURE_CONVERSATION, SHAREGPT, DEEPSEEK_R1)}
"""Lengths that can be named without a file."""
