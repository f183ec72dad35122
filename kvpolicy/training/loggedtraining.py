"""Training from production logs: records in, a model folder and a report out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy.cost import store
from kvpolicy.cost.model import Provenance
from kvpolicy.datasets.logs import Record, Records, read_records
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.doublyrobust import Average
from kvpolicy.training.logs import MOST_WEIGHT, clipped, dealt_requests, fit_logged, held_out_scores

HANDS = 4
"""Requests are dealt to so many; one of them is held out."""


@dataclass(frozen=True, slots=True)
class LogTrainReport:
    """What was trained from logs, and how far it can be trusted."""

    out: str
    family: str
    digest: str
    records: Mapping[Kind, int]
    """Trained on."""
    held_out_records: int
    held_out: Mapping[str, Any]
    """See :func:`kvpolicy.training.logs.held_out_scores`."""
    trees: Mapping[Kind, int]
    clipped: Mapping[Kind, int]
    """Training records that stand for more situations than a weight may."""
    least_chance: Mapping[Kind, float]
    averages: Mapping[Kind, Average]
    """Over all situations of the logs, directly and doubly robustly; where they differ the model was scaled."""
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    replaced: bool
    """Whether a model was in the folder before."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        lines = [
            f"cost model {self.out} ({self.family}), from logs, digest {self.digest[:12]}",
            *(["replaces the cost model that was there"] if self.replaced else []),
            f"records: {', '.join(f'{kind} {count}' for kind, count in self.records.items())} trained on, "
            f"{self.held_out_records} of other requests held out",
            "held-out error of single preemptions, |log(measured / predicted)|, weighted by 1 / chance:",
            f"  {'option':<10} {'mean':>7} {'bias':>7} {'formula alone':>14} {'trees':>6}  90% interval holds",
        ]
        for kind in KINDS:
            score = self.held_out.get(kind)
            if score is None:
                lines.append(f"  {kind:<10} no record was held out")
                continue
            held = score["coverage"]
            holds = f"{held['holds']:.0%} of {held['states']} [{held['low']:.0%}, {held['high']:.0%}]"
            lines.append(
                f"  {kind:<10} {score['mean_error']:>7.1%} {score['bias']:>+7.1%} {score['law_mean_error']:>14.1%} "
                f"{self.trees[kind]:>6}  {holds}"
            )
        for kind in KINDS:
            lines.append(
                f"{kind}: least chance {self.least_chance[kind]:.3g}; {self.clipped[kind]} of {self.records[kind]} "
                f"records stand for more than {MOST_WEIGHT:g} situations and count as that many"
            )
        for kind in KINDS:
            one = self.averages[kind]
            lines.append(
                f"{kind}: over all situations {one.direct_s * 1e3:.3g} ms by the law, {one.robust_s * 1e3:.3g} ms "
                f"[{one.low_s * 1e3:.3g}, {one.high_s * 1e3:.3g}] doubly robustly"
            )
        lines += [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def train_logged(
    folders: Sequence[Path | str], out: Path | str, family: str, seed: int, mixed_hardware: bool
) -> LogTrainReport:
    """Fit a cost model to production logs and write it to folder ``out``. One request in four is held out.

    Raises TraceError as :func:`kvpolicy.datasets.logs.read_records`, and naming the option that has too few records;
    FileExistsError where ``out`` holds something that is no cost model.
    """
    replaced = store.holds_model(Path(out))
    records = read_records(folders, mixed_hardware)
    hand = dealt_requests(records.records, HANDS, random.Random(f"held out {seed}"))
    seen = tuple(record for record in records.records if hand[record.request])
    held = tuple(record for record in records.records if not hand[record.request])
    training = replace(records, records=seen)
    fitted = fit_logged(family, training, _provenance(family, records, seen), seed)
    notes = (
        *fitted.notes,
        "trained from logs, in which no situation was met with both options: the interval of their ratio is put "
        "together from either's, and is wider than one from a profile",
        "delays of victims and others are not learned from logs: objective engine only",
    )
    scores = held_out_scores(fitted.model, held)
    made = replace(fitted.model.provenance, held_out=scores, notes=notes)
    store.save(replace(fitted.model, provenance=made), fitted.forests, Path(out))
    return LogTrainReport(
        out=str(out),
        family=family,
        digest=store.load(Path(out)).digest,
        records={kind: len(training.under(kind)) for kind in KINDS},
        held_out_records=len(held),
        held_out=scores,
        trees=fitted.trees,
        clipped={kind: clipped(training.under(kind)) for kind in KINDS},
        least_chance={kind: min(record.chance for record in training.under(kind)) for kind in KINDS},
        averages=fitted.averages,
        left_out=records.left_out,
        notes=notes,
        replaced=replaced,
    )


def _provenance(family: str, records: Records, seen: Sequence[Record]) -> Provenance:
    """``state_ids`` are the requests that were learned from: an estimate must not be made on them again."""
    header = records.any_header
    return Provenance(
        family=family,
        hardware=dict(header.hardware),
        geometry=records.geometry,
        link=dict(header.link),
        block_sizes=tuple(sorted({one.block_size for one in records.headers.values()})),
        kv_bytes_per_token=header.block_bytes / header.block_size,
        trace_digests=records.digests,
        state_ids=tuple(sorted({record.request for record in seen})),
        noise={"variation": None},
        held_out={},
    )
