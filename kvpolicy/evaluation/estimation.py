"""Settings of off-policy estimation: estimators, interval and clusters."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.fields import POSITIVE, WrongValue, one_of, option, validate

ESTIMATORS = ("dm", "ips", "snips", "dr", "cross-fitted-dr", "switch-dr", "dros")
INTERVALS = ("bootstrap", "bernstein", "sequence")
CLUSTERS = ("overflow", "request")


@dataclass(frozen=True, slots=True)
class Estimation:
    """Settings for evaluating on a log. A profile, in which both options were measured, is replayed without them."""

    estimators: tuple[str, ...] = option(
        f"Of a log: {', '.join(ESTIMATORS)}. May be given several times; all of them without it.",
        (),
        flag="--estimator",
    )
    interval: str = option(f"Of a log: {', '.join(INTERVALS)}.", "bootstrap", one_of(*INTERVALS))
    cluster: str = option(
        "Of a log, what varies together: the preemptions of an overflow, or of a request.",
        "overflow",
        one_of(*CLUSTERS),
    )
    limit_s: float | None = option(
        "For the interval bernstein: what no cost exceeds, to either side.", None, POSITIVE, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        validate(self)
        for name in self.estimators:
            one_of(*ESTIMATORS).refuse("estimators", name)
            if self.estimators.count(name) > 1:
                raise WrongValue("estimators", f"has {name} twice, should have it once")
        if (self.limit_s is not None) != (self.interval == "bernstein"):
            needs = "the interval bernstein, and no other, needs a limit in seconds that no cost exceeds"
            raise WrongValue("limit_s", f"is {self.limit_s}: {needs}")
