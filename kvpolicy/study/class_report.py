"""The service that requests got, as means over runs, for reports: of all requests and of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from kvpolicy.extensions import names_module
from kvpolicy.fields import WrongValue
from kvpolicy.order import Order
from kvpolicy.order import spec as orders
from kvpolicy.order.by_class import ranked_classes, unlisted_classes
from kvpolicy.request_marks import DEFAULT_CLASS, Classes
from kvpolicy.study.cache import Result
from kvpolicy.study.server_flags import order_of, ordered_by

SERVICE = (
    "e2e_s",
    "ttft_s",
    "itl_s",
    "longest_gap_s",
    "e2e_per_token_s",
    "fairness",
    "deadline_requests",
    "slo_share",
    "goodput_req_s",
    "classes",
)
"""Fields of a result about the service that requests got."""
HEADS = (
    "class", "requests", "tok/s", "e2e s", "ttft s", "ttft p99", "itl ms", "itl p99", "ms/token", "gap p99 s",
    "fairness", "in time", "goodput/s",
)  # fmt: skip
"""``ms/token``: end-to-end time per output token; ``in time``: share of the requests with a deadline that met it."""

LENGTH_HEADS = ("prompt tok", "requests", "e2e s", "e2e p99", "ttft s", "ttft p99")


def service_means(results: Sequence[Result]) -> dict[str, Any]:
    """The fields ``SERVICE`` as means over runs, in the shape that they have in one; of runs that have a figure."""
    return {name: _means([result[name] for result in results]) for name in SERVICE}


def _means(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list):  # bins by number: runs of other requests have other edges, and perhaps fewer bins
        return [_means(bins) for bins in zip_longest(*known)]
    if isinstance(known[0], Mapping):
        names = sorted({name for value in known for name in value}) if _differ(known) else list(known[0])
        return {name: _means([value[name] for value in known if name in value]) for name in names}
    return fmean(known)


def _differ(values: Sequence[Mapping[str, Any]]) -> bool:
    """Whether they hold different names: not every run need have a request of every class."""
    return any(value.keys() != values[0].keys() for value in values)


def has_classes(results: Sequence[Result]) -> bool:
    """Whether a table by class says more than one of all requests: several classes, or deadlines."""
    return any(len(result["classes"]) > 1 or result["deadline_requests"] for result in results)


def class_rows(groups: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """Rows of a table with its heads: each policy's classes, means over runs. Blank where a figure is undefined."""
    rows = [["policy", *HEADS]]
    for policy, results in groups.items():
        for name, service in service_means(results)["classes"].items():
            e2e, ttft, itl = service["e2e_s"], service["ttft_s"], service["itl_s"]
            rows.append(
                [
                    policy,
                    name,
                    _shown(service["requests"], ".0f"),
                    _shown(service["throughput_tok_s"], ".1f"),
                    _shown(e2e["mean"]),
                    _shown(ttft["mean"]),
                    _shown(ttft["p99"]),
                    _shown(itl["mean"], scale=1e3),
                    _shown(itl["p99"], scale=1e3),
                    _shown(service["e2e_per_token_s"]["mean"], scale=1e3),
                    _shown(service["longest_gap_s"]["p99"]),
                    _shown(service["fairness"]),
                    _shown(service["slo_share"], ".1%"),
                    _shown(service["goodput_req_s"]),
                ]
            )
    return rows


def has_lengths(results: Sequence[Result]) -> bool:
    """Whether requests differ in the length of their prompts."""
    return any(len(result["by_prompt_length"]) > 1 for result in results)


def length_rows(groups: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """Rows of a table with its heads: each policy's requests in bins by prompt length, means over runs."""
    rows = [["policy", *LENGTH_HEADS]]
    for policy, results in groups.items():
        for one in _means([result["by_prompt_length"] for result in results]):
            edges = f"{one['min_tokens']:.0f} to {one['max_tokens']:.0f}"
            tails = (one[name][statistic] for name in ("e2e_s", "ttft_s") for statistic in ("mean", "p99"))
            rows.append([policy, edges, _shown(one["requests"], ".0f"), *map(_shown, tails)])
    return rows


def class_warnings(results: Sequence[Result]) -> list[str]:
    """Warnings about classes that ``--classes`` lists, or the order ranks by, and no request of a workload was of, and
    about classes that the order ranks by and ``--classes`` does not list. An order of the user's own is not looked
    into."""
    warnings = []
    for inputs in (result["inputs"] for result in results):
        classes, workload = ordered_by(inputs["serving"]).get("classes"), inputs["workload"]
        seen = {name for other in results if other["inputs"]["workload"] == workload for name in other["classes"]}
        order = _shipped_order(inputs)
        if classes:
            listed = Classes.parse(classes).names
            warnings += [f"{workload}: no request is of the class {name}, which --classes lists"
                         for name in listed if name not in seen]  # fmt: skip
            warnings += [] if order is None else unlisted_classes(order, listed)
        elif order is not None:
            warnings += [f"{workload}: no request is of the class {name}, by which order {order.name} ranks"
                         for name in ranked_classes(order) if name not in (*seen, DEFAULT_CLASS)]  # fmt: skip
    return list(dict.fromkeys(warnings))


def _shipped_order(inputs: Mapping[str, Any]) -> Order | None:
    """The order of these inputs; None for one of the user's own, and for one that today's names refuse."""
    name = order_of(inputs)
    if "order_digest" in inputs["serving"] or names_module(name.replace("/", ":")):
        return None
    try:
        return orders.load(name)
    except WrongValue:  # of a run that was made before its numbers were bounded
        return None


def _shown(value: float | None, form: str = ".3g", scale: float = 1.0) -> str:
    return "" if value is None else format(scale * value, form)
