"""The header of a trace: engine, machine and settings that one engine core's part of it was recorded on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from sys import float_info
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.extensions import names_module
from kvpolicy.hardware import EngineSpec
from kvpolicy.hardware.link import header_link
from kvpolicy.stored_values import read_json
from kvpolicy.trace.parts import TraceError, make_folder, open_private
from kvpolicy.trace.schemas import SCHEMA_VERSION

LATER_NAMES = ("order", "order_digest", "clock_s")
"""Fields that headers of older versions lack. A header without them has the digest that it had then."""


@dataclass(frozen=True, slots=True)
class Header:
    """Engine, machine and settings that one engine core's part of a trace was recorded on."""

    run_id: str
    source: str
    """``profile``, ``production`` or ``simulation``."""
    created: str
    """ISO 8601, UTC."""
    engine: str
    """Engine and version, as ``vllm 0.32.0``."""
    hardware: Mapping[str, Any]
    """See :func:`kvpolicy.hardware.describe`."""
    geometry: Mapping[str, Any]
    """See :class:`kvpolicy.hardware.Geometry`."""
    block_size: int
    block_bytes: int
    device_blocks: int
    host_blocks: int
    policy: str
    link: Mapping[str, Any] = field(default_factory=lambda: header_link(None))
    """``{"kind": "native"}`` or ``{"kind": "simulated", "bytes_per_s": ..., "latency_s": ...}``."""
    seed: int = 0
    noise: Mapping[str, Any] = field(default_factory=dict)
    """Profiles only: variation of identical undisturbed windows, and how it was handled."""
    notes: str = ""
    token_budget: int | None = None
    """Maximum tokens of a step (``max_num_batched_tokens``, or ``max_num_scheduled_tokens`` where that is less); None
    in headers of versions that did not record it."""
    draw_seed: int | None = None
    """Seed of the policy's random draws in this engine core; None if nothing was drawn or it was not recorded."""
    order: str | None = None
    """Label of the order of service; None in headers of versions that did not record it."""
    order_digest: str | None = None
    """See :attr:`kvpolicy.order.Order.digest`; None as above."""
    clock_s: float | None = None
    """Reading of the engine's clock at ``created``, which gives its rows their time of day; None as above, and in a
    simulation."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def recorded_on(
        cls,
        spec: EngineSpec,
        *,
        run_id: str,
        source: str,
        created: str,
        engine: str,
        device_blocks: int,
        host_blocks: int,
        policy: str,
    ) -> Header:
        """A header with the required fields; set the others with ``replace``.

        Raises TraceError for an engine without ``block_bytes``.
        """
        if spec.block_bytes is None:
            raise TraceError(f"header of {run_id}: the engine's block_bytes are missing")
        return cls(
            run_id=run_id,
            source=source,
            created=created,
            engine=engine,
            hardware=dict(spec.hardware),
            geometry=dict(spec.geometry),
            block_size=spec.block_size,
            block_bytes=spec.block_bytes,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            policy=policy,
            link=dict(spec.link or header_link(None)),
            token_budget=spec.token_budget,
        )

    @property
    def engine_spec(self) -> EngineSpec:
        """The engine that a cost model is checked against."""
        return EngineSpec(
            self.block_size,
            self.token_budget,
            pinned=None,  # in the rows of table transfers
            block_bytes=self.block_bytes,
            geometry=self.geometry,
            hardware=self.hardware,
            link=self.link,
        )

    def write(self, core: Path) -> None:
        make_folder(core)
        scratch = core / f".header.{os.getpid()}"
        with open_private(scratch) as file:
            file.write((json.dumps(asdict(self), indent=2, sort_keys=True) + "\n").encode())
        scratch.replace(core / "header.json")

    @classmethod
    def read(cls, path: Path) -> Header:
        try:
            values = read_json(path)
        except (OSError, InputError) as error:
            raise TraceError(f"{path}: not a readable trace header: {error}") from error
        if not isinstance(values, dict) or "schema_version" not in values:
            raise TraceError(f"{path}: field schema_version is missing: not a kvpolicy trace header")
        if values["schema_version"] != SCHEMA_VERSION:
            version = values["schema_version"]
            raise TraceError(f"{path}: schema_version is {version}, this kvpolicy reads {SCHEMA_VERSION}")
        names = {f.name for f in fields(cls)}
        missing = sorted(names - values.keys() - {"token_budget", "draw_seed", *LATER_NAMES})
        if missing:
            raise TraceError(f"{path}: field {missing[0]} is missing")
        for name in ("block_size", "block_bytes"):
            if type(values[name]) is not int or values[name] < 1:
                raise TraceError(f"{path}: field {name} is {values[name]!r}, should be a whole number above 0")
        for name, subfield in (("link", "kind"), ("hardware", "device")):
            if not isinstance(values[name], dict) or subfield not in values[name]:
                raise TraceError(f"{path}: field {name}.{subfield} is missing")
        if not isinstance(values["policy"], str) or names_module(values["policy"]):
            raise TraceError(
                f"{path}: field policy is {values['policy']!r}, should be a policy's name, and never a module to run"
            )
        budget = values.setdefault("token_budget", None)
        if budget is not None and (type(budget) is not int or budget < 1):
            raise TraceError(f"{path}: field token_budget is {budget!r}, should be a whole number above 0, or null")
        draw_seed = values.setdefault("draw_seed", None)
        if draw_seed is not None and type(draw_seed) is not int:
            raise TraceError(f"{path}: field draw_seed is {draw_seed!r}, should be a whole number, or null")
        for name in ("order", "order_digest"):
            if not isinstance(values.setdefault(name, None), str | None):
                raise TraceError(f"{path}: field {name} is {values[name]!r}, should be a text, or null")
        if not isinstance(values["created"], str):
            raise TraceError(f"{path}: field created is {values['created']!r}, should be an ISO time")
        clock_s = values.setdefault("clock_s", None)
        if clock_s is not None and (type(clock_s) not in (int, float) or not abs(clock_s) <= float_info.max):
            shown = repr(clock_s)
            shown = shown if len(shown) <= 40 else f"{shown[:20]}..., {len(shown)} characters long"
            raise TraceError(f"{path}: field clock_s is {shown}, should be a number, or null")
        return cls(**{name: values[name] for name in names})
