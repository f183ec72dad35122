"""Train cost models from datasets, and carry (transfer) one to another machine, link or LLM."""

from kvpolicy.training.pipeline import (
    calibrate,
    natural_outside,
    provenance_of,
    split,
    train,
)
from kvpolicy.training.reports import CalibrateReport, TrainReport

__all__ = ["CalibrateReport", "TrainReport", "calibrate", "natural_outside", "provenance_of", "split", "train"]
