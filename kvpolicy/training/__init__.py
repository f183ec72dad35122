"""Training cost models from datasets, and carrying one to another machine."""

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
