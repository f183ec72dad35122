"""Train cost models from datasets, and carry (transfer) one to another machine, link or LLM."""

from kvpolicy.training.pipeline import (
    CalibrateReport,
    TrainReport,
    calibrate,
    natural_outside,
    provenance_of,
    split,
    train,
)

__all__ = ["CalibrateReport", "TrainReport", "calibrate", "natural_outside", "provenance_of", "split", "train"]
