"""Many simulations: grids of workload x policy x memory x link x seed, and what to deploy by them."""

from __future__ import annotations

from kvpolicy.study.grid import simulate
from kvpolicy.study.recommend import recommend

__all__ = ["recommend", "simulate"]
