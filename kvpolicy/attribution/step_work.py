"""What the steps of a trace computed, priced by their step-time model: the input of :mod:`kvpolicy.headroom`.

A step costs what was measured, without what copies beside it may have added, and its parts share that as the model
says, with the aftermath that it leaves in the next steps charged to itself
(:func:`~kvpolicy.attribution.step_time.recompute_prices`). Recomputed tokens add the difference to the same step
without them; a step of nothing else would not have been executed. A server counts the same in its ``/metrics``, by the
step times of its cost model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.arrays import Floats, causal_pairs
from kvpolicy.attribution.offline import copying_steps, repeated_parts, share_of_step, untouched_rows
from kvpolicy.attribution.step_time import PARTS, StepTimeModel, medians, recompute_prices
from kvpolicy.events import OTHER_COPIES, Preemption
from kvpolicy.headroom import NO_STEP_TIMES, Work, share_text
from kvpolicy.trace import TraceError, weights_of


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one engine core's steps."""

    work: Work
    """Without the cost of swaps."""
    recompute_s: Mapping[str, float]
    """By preemption, the seconds that its recomputed tokens added; empty without a step-time model."""


def step_work(steps: pa.Table, model: StepTimeModel | None, transfers: pa.Table | None = None) -> StepWork:
    """The work of ``steps``, rows of one core in any order. Without a ``model`` its seconds are unknown.

    ``transfers``: the core's; None where nothing was copied. Raises TraceError, naming the row, for a step with more
    repeated tokens than scheduled ones.
    """
    steps = steps.sort_by("start_s")
    parts, duration_s = _parts(steps), _reals(steps, "duration_s")
    row, ids, repeated = repeated_parts(steps)
    rest = parts.copy()
    np.subtract.at(rest, row, repeated)
    for wrong in np.flatnonzero(rest[:, 0] < 0)[:1]:
        raise TraceError(
            f"steps, row {wrong} (step {steps['step'][int(wrong)].as_py()}): repeated holds more tokens than "
            "scheduled_tokens"
        )
    weight = np.asarray(weights_of(steps), dtype=np.float64)
    busy_s = float((duration_s * weight)[parts[:, 0] > 0].sum())
    tokens = repeated[:, 0]
    decoded, recomputed = round(float(rest[:, 1] @ weight)), int(tokens.sum())  # steps that recompute have weight 1
    if model is None:
        return StepWork(Work(decoded, recomputed, None, None if recomputed else 0.0, busy_s), {})
    pace = _pace(steps, transfers, model)
    added_s, decodes_s = recompute_prices(model, tuple(parts.T), tuple(rest.T), duration_s, pace)
    share_s = added_s[row] * share_of_step(row, tokens, len(parts))
    work = Work(decoded, recomputed, float(decodes_s @ weight), float(share_s.sum()), busy_s)
    names, index = np.unique(np.asarray(ids.to_pylist(), dtype=np.str_), return_inverse=True)
    return StepWork(work, dict(zip(names.tolist(), np.bincount(index, share_s, len(names)).tolist(), strict=True)))


def _pace(steps: pa.Table, transfers: pa.Table | None, model: StepTimeModel) -> Floats:
    """How many times longer than predicted each step took, in order of their start; 0 where nothing was computed.

    Beside copies of preemptions and in their aftermath, a step is taken for no slower than the others around it, since
    what copies add is counted with the swaps. So is one right after steps that were left out, whose aftermath is not
    known. Without others their pace is 1.
    """
    duration_s, expected_s = _reals(steps, "duration_s"), model.predict(_parts(steps), steps["step"].to_numpy())
    pace = np.divide(duration_s, expected_s, out=np.zeros(len(duration_s)), where=expected_s > 0)
    copied = np.zeros(0, np.int64)
    if transfers is not None:
        of_preemptions = pc.invert(pc.is_in(transfers["preemption_id"], pa.array(OTHER_COPIES)))
        copied = copying_steps(steps, transfers.filter(of_preemptions)).row
    plain = untouched_rows(steps, copied, ())
    others = np.setdiff1d(np.arange(len(pace)), plain)
    around: Floats | float = medians(pace[plain], np.searchsorted(plain, others), skip=0) if len(plain) > 1 else 1.0
    pace[others] = np.minimum(pace[others], around)
    return pace


def _parts(steps: pa.Table) -> Floats:
    return np.column_stack([_reals(steps, name) for name in PARTS])


def _reals(table: pa.Table, column: str) -> Floats:
    return np.asarray(table[column].to_numpy(), dtype=np.float64)


# ---- p / d in the steps that ran ----


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What tokens cost in steps that ran. Sums over steps; seconds are None without a step-time model."""

    prompt_tokens: int = 0
    """Computed for prompts; those lost to preemptions and computed again included."""
    prompt_s: float | None = 0.0
    """That they add to the steps. A step without decodes counts in full."""
    decoded_tokens: int = 0
    decode_s: float | None = 0.0
    """That the steps take with their decodes alone."""
    decode_steps: float = 0.0
    """Steps in which any request decodes."""

    def __add__(self, other: TokenPrices) -> TokenPrices:
        def together(one: float | None, another: float | None) -> float | None:
            return None if one is None or another is None else one + another

        return TokenPrices(
            self.prompt_tokens + other.prompt_tokens,
            together(self.prompt_s, other.prompt_s),
            self.decoded_tokens + other.decoded_tokens,
            together(self.decode_s, other.decode_s),
            self.decode_steps + other.decode_steps,
        )

    @property
    def prompt_token_s(self) -> float | None:
        """p"""
        return self.prompt_s / self.prompt_tokens if self.prompt_s is not None and self.prompt_tokens else None

    @property
    def decoded_token_s(self) -> float | None:
        """d"""
        return self.decode_s / self.decoded_tokens if self.decode_s is not None and self.decoded_tokens else None

    @property
    def price_ratio(self) -> float | None:
        """p / d"""
        p, d = self.prompt_token_s, self.decoded_token_s
        return None if p is None or not d else p / d

    @property
    def batch(self) -> float | None:
        """Mean number of requests that decode, in steps in which any does."""
        return self.decoded_tokens / self.decode_steps if self.decode_steps else None


def token_prices(steps: pa.Table, model: StepTimeModel | None, transfers: pa.Table | None = None) -> TokenPrices:
    """Of ``steps``, rows of one core; arguments as for :func:`step_work`."""
    steps = steps.sort_by("start_s")
    parts = _parts(steps)
    tokens, decodes, reads, _ = parts.T
    weight = np.asarray(weights_of(steps), dtype=np.float64)
    counts = round(float((tokens - decodes) @ weight)), round(float(decodes @ weight))
    decode_steps = float(weight[decodes > 0].sum())
    if model is None:
        return TokenPrices(counts[0], None, counts[1], None, decode_steps)
    rest, duration_s = (decodes, decodes, reads, 0.0), _reals(steps, "duration_s")
    pace = _pace(steps, transfers, model)
    added_s, decodes_s = recompute_prices(model, tuple(parts.T), rest, duration_s, pace)
    added_s = np.where(tokens > decodes, added_s, 0.0)
    return TokenPrices(counts[0], float(added_s @ weight), counts[1], float(decodes_s @ weight), decode_steps)


# ---- p / d at a batch ----


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that decodes, and a victim that is recomputed beside it."""

    requests: int
    """That decode; 1 or more."""
    context_tokens: int
    """Of all of them."""
    victim_tokens: int
    """That are recomputed, from the first one on; 1 or more."""


def price_ratio(model: StepTimeModel, batch: Batch) -> float:
    """p / d: the price of a recomputed token in a step that decodes ``batch``, over that of one of its decoded tokens.

    See :mod:`kvpolicy.headroom`. A long victim is taken as one chunk; a token budget that splits it changes its
    aftermath alone.
    """
    requests, reads, tokens = batch.requests, batch.context_tokens + batch.requests, batch.victim_tokens
    alone_s = float(model.own_s(requests, requests, reads, 0))
    both_s = float(model.own_s(requests + tokens, requests, reads, causal_pairs(0, tokens)))
    return (both_s - alone_s) / tokens * requests / alone_s if alone_s else 0.0


def batches_of(situations: Iterable[Preemption]) -> list[Batch]:
    """The batches beside the victims; situations in which nothing ran beside the victim are left out."""
    return [
        Batch(situation.running_requests, situation.batch_tokens, situation.computed_tokens)
        for situation in situations
        if situation.running_requests and situation.computed_tokens
    ]


@dataclass(frozen=True, slots=True)
class BatchPrices:
    """p / d at the batches that were measured, where nobody knows yet how many tokens will be recomputed."""

    lowest: float | None = None
    """None if it is not known, like the others."""
    highest: float | None = None
    min_requests: int | None = None
    """Size of the smallest batch."""
    max_requests: int | None = None
    unknown: str = ""
    """Why nothing is known; empty if it is."""

    def sentence(self) -> str:
        if self.lowest is None or self.highest is None:
            return f"how much of throughput is to be won by choosing better is not known: {self.unknown}."
        low, high = share_text(self.lowest), share_text(self.highest)
        sizes = f"{self.min_requests} to {self.max_requests} requests"
        if self.min_requests == self.max_requests:
            sizes = f"{self.min_requests} request{'' if self.min_requests == 1 else 's'}"
        return (
            f"beside {sizes} a recomputed token takes {low if low == high else f'{low} to {high}'} of the time of a "
            f"decoded one: for every 10% of the decoded tokens that are computed again, at most "
            f"{share_text(0.1 * self.highest)} of throughput is to be won by choosing better; how many will be, a "
            "profile cannot say."
        )


def batch_prices(model: StepTimeModel | None, batches: Sequence[Batch]) -> BatchPrices:
    """The range of :func:`price_ratio` over ``batches``."""
    if model is None:
        return BatchPrices(unknown=NO_STEP_TIMES)
    if not batches:
        return BatchPrices(unknown="nothing ran beside a victim")
    ratios, sizes = [price_ratio(model, batch) for batch in batches], [batch.requests for batch in batches]
    return BatchPrices(min(ratios), max(ratios), min(sizes), max(sizes))
