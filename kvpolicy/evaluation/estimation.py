"""Settings of off-policy estimation: estimators, interval, clusters, and the deadlines of the log's requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.fields import POSITIVE, WrongValue, one_of, option, validate
from kvpolicy.latency import SLO_FORM, Slo

ESTIMATORS = ("dm", "ips", "snips", "dr", "cross-fitted-dr", "switch-dr", "dros")
INTERVALS = ("bootstrap", "bernstein", "sequence")
CLUSTERS = ("overflow", "request")


@dataclass(frozen=True, slots=True)
class Estimation:
    """Settings for evaluating on a log. A profile, in which both options were measured, is replayed without them."""

    estimators: tuple[str, ...] = option(
        f"For logs: {', '.join(ESTIMATORS)}. May be given several times. Default: all.",
        (),
        flag="--estimator",
    )
    interval: str = option(f"For logs: {', '.join(INTERVALS)}.", "bootstrap", one_of(*INTERVALS))
    cluster: str = option(
        "For logs: preemptions that are resampled together, those of an overflow or of a request.",
        "overflow",
        one_of(*CLUSTERS),
    )
    limit_s: float | None = option(
        "For the interval bernstein: limit on the absolute value of any cost.", None, POSITIVE, metavar="SECONDS"
    )
    slo: Slo | None = option(
        f"For logs: each deadline that a request did not bring itself: {SLO_FORM}. They say what service the "
        "requests got under the log's own policy, and change no estimate.",
        None,
        metavar="DEADLINES",
    )

    def __post_init__(self) -> None:
        validate(self)
        for name in self.estimators:
            one_of(*ESTIMATORS).refuse("estimators", name)
            if self.estimators.count(name) > 1:
                raise WrongValue("estimators", f"has {name} twice, should have it once")
        if (self.limit_s is not None) != (self.interval == "bernstein"):
            needs = "the interval bernstein needs a limit in seconds that no cost exceeds, other intervals take none"
            raise WrongValue("limit_s", f"is {self.limit_s}: {needs}")
