"""Transport of counters and gauges from the scheduler to ``/metrics``.

vLLM sends the connector's stats from the engine core to the API process as a dictionary. This one holds each counter's
increase since the last report and each gauge's present value, keyed by ``name|label=value|...``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "preemptions": ("Preemptions by what was intended, what was executed and why.", ("intended", "executed", "cause")),
    "resumed": ("Preempted requests back at the token they had reached.", ("executed",)),
    "recomputed_tokens": ("Tokens computed again after a preemption.", ()),
    "recompute_microseconds": ("Time that recomputed tokens added to steps: their share of it by the cost model.", ()),
    "beside_recompute_microseconds": ("Time that the decodes alone took of steps that recompute.", ()),
    "beside_recompute_tokens": ("Tokens decoded in steps that recompute.", ()),
    "loaded_tokens": ("Tokens brought back from the host pool.", ()),
    "copy_bytes": ("Bytes copied, all ranks.", ("direction",)),
    "copy_microseconds": ("Time copies took, slowest rank.", ("direction",)),
    "priced_preemptions": ("Preemptions of which the policy predicted what they cost.", ("executed",)),
    "predicted_cost_microseconds": ("Engine time that what was executed was expected to cost.", ("executed",)),
    "other_cheaper": (
        "Preemptions of which the other option was expected to be cheaper: of recomputes, a swap would have paid.",
        ("executed",),
    ),
    "avoidable_cost_microseconds": ("Engine time by which the other option was expected to be cheaper.", ("executed",)),
    "measured_preemptions": ("Resumed preemptions whose cost was measured in full.", ("executed",)),
    "victim_delay_microseconds": ("Measured delay of preempted requests, less their wait for blocks.", ("executed",)),
    "wait_blocks_microseconds": ("Measured wait of preempted requests for free blocks.", ("executed",)),
    "shadow_preemptions": ("Preemptions in shadow mode with both options, by what was intended.", ("intended",)),
    "shadow_cost_microseconds": (
        "Engine time that, in shadow mode, what was intended and what was executed in its place were expected to cost.",
        ("option",),
    ),
    "shadow_untold": ("Preemptions in shadow mode of which nothing can be said, by why.", ("reason",)),
    "fallbacks": ("Recomputed for another reason than that the policy chose to.", ("reason",)),
    "measuring_failed": ("Times that measuring preemptions' costs, or learning from one, failed.", ()),
    "displaced": ("Requests displaced for others by the order of service.", ()),
    "displaced_in_vain": ("Requests that did not come in although others were displaced for them.", ()),
    "order_failed": ("Times that code of the order of service failed; requests were served without.", ("method",)),
    "invalid_marks": ("Requests whose class and deadlines could not be read.", ("reason",)),
    "clamped_marks": ("Requests that claimed more than their class, or the settings, allow.", ("mark",)),
    "unpriced": ("Times that predicting what displacing a request costs failed.", ()),
    "cache_hits": (
        "Requests admitted that went on in the cache of prompts beyond what was on the device.",
        ("tier", "outcome"),
    ),
    "cache_hit_tokens": ("Tokens that these went on for.", ("tier", "outcome")),
    "cache_loaded_tokens": ("Tokens loaded from the cache of prompts.", ("tier",)),
    "cache_blocks": (
        "KV blocks of the cache of prompts: stored, refused, evicted, spoiled; in files found at the start and loaded.",
        ("tier", "event"),
    ),
    "cache_file_bytes": ("Bytes of KV blocks written to files and read from them, all ranks.", ("direction",)),
    "cache_undecided": ("Times that deciding whether to load a prompt, or what a block of it is worth, failed.", ()),
    "cache_failed": ("Times that a caching policy failed; lru took its place.", ("method",)),
    "hinted_blocks": ("KV blocks of the cache of prompts by what became of hints about them.", ("tier", "event")),
    "hints_failed": ("Times that heeding a request's hints about its KV failed.", ()),
    "resume_undecided": ("Times that deciding at resume failed; what was saved was loaded.", ()),
    "control_changes": ("Changes of the control file, applied or refused.", ("result",)),
    "records_dropped": ("Trace rows that could not be written.", ()),
    "untimed_forwards": ("Times that a rank could not time a forward pass; device_s of its step stays empty.", ()),
    "spans_failed": ("Times that a preemption could not be written as a span of OpenTelemetry.", ()),
    "extrapolated": ("Decisions outside what the cost model was trained on.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "measured_cost_microseconds": (
        "Engine time that the measured preemptions took, in all; noise may make it fall.",
        ("executed",),
    ),
    "host_slots_used": ("Host slots (one KV block each) that preempted requests, and loads, need.", ()),
    "host_slots_total": ("Host slots in all.", ()),
    "cached_slots": (
        "Host slots of the cache of prompts, which preempted requests may take.",
        ("tier",),
    ),
    "open_preemptions": ("Preempted requests not yet back.", ()),
    "order": ("1 for the present order of service, 0 for a former one.", ("order",)),
    "shadow": ("1 while decisions are only recorded and every victim is recomputed.", ()),
    "trace_bytes": ("Bytes of the trace's folder, seen at every merge of its files.", ()),
    "trace_files": ("Files of the trace's folder, seen at every merge of its files.", ()),
    "cost_model": ("1, labelled with the policy and the digest of its cost model.", ("policy", "digest")),
}


HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "victim_delay_seconds": (
        "Measured delay of resumed requests, less their wait for blocks.",
        ("executed",),
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    "copy_seconds": (
        "Time that one copy took, slowest rank.",
        ("direction",),
        (1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0),
    ),
    "price_error_seconds": (
        "Distance of a preemption's measured engine time from the predicted one, whichever is longer.",
        ("executed",),
        (1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5),
    ),
}

FROM_ZERO = (
    "fallbacks|reason=error", "control_changes|result=applied", "control_changes|result=refused", "records_dropped",
    "displaced", "displaced_in_vain",
)  # fmt: skip
"""Counters that are there from the start. Prometheus takes one that appears with its first count for one that has not
risen, and an alert on the rise would miss it."""


@dataclass
class KVPolicyStats(KVConnectorStats):
    """``data``: {"counters": {key: added}, "gauges": {key: value}, "observed": {key: values}}."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters = dict(self.data.get("counters", {}))
        for name, amount in other.data.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + amount
        gauges = self.data.get("gauges", {}) | other.data.get("gauges", {})
        observed = {key: list(values) for key, values in self.data.get("observed", {}).items()}
        for key, values in other.data.get("observed", {}).items():
            observed.setdefault(key, []).extend(values)
        return KVPolicyStats({"counters": counters, "gauges": gauges} | ({"observed": observed} if observed else {}))

    def reduce(self) -> dict[str, int | float]:
        """For the periodic log line: totals over labels."""
        totals: dict[str, int | float] = {}
        for name, amount in self.data.get("counters", {}).items():
            short = name.split("|")[0]
            totals[short] = totals.get(short, 0) + amount
        return totals

    def is_empty(self) -> bool:
        return not self.data.get("counters") and not self.data.get("gauges")


class KVPolicyPromMetrics(KVConnectorPromMetrics):
    """The Prometheus side, in the API process."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._metrics: dict[str, Any] = {}
        for definitions, kind in ((COUNTERS, metric_types[Counter]), (GAUGES, metric_types[Gauge])):
            # With several API processes a gauge has the value reported last, as vLLM's own gauges have.
            options = {"multiprocess_mode": "mostrecent"} if definitions is GAUGES else {}
            for name, (text, labels) in definitions.items():
                self._metrics[name] = kind(
                    name=f"vllm:kvpolicy_{name}", documentation=text, labelnames=[*labelnames, *labels], **options
                )

        for name, (text, labels, buckets) in HISTOGRAMS.items():
            self._metrics[name] = metric_types[Histogram](
                name=f"vllm:kvpolicy_{name}",
                documentation=text,
                labelnames=[*labelnames, *labels],
                buckets=list(buckets),
            )
        for engine in self.per_engine_labelvalues:
            for key in FROM_ZERO:
                self._child(key, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data.get("counters", {}).items():
            self._child(key, engine_idx).inc(max(0, amount))
        for key, value in transfer_stats_data.get("gauges", {}).items():
            self._child(key, engine_idx).set(value)
        for key, values in transfer_stats_data.get("observed", {}).items():
            for value in values:
                self._child(key, engine_idx).observe(value)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, *labels = key.split("|")
        values = [label.split("=", 1)[1] for label in labels]
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *values)
