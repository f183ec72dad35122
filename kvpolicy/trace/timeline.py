"""A trace as trace events: the JSON that ui.perfetto.dev and chrome://tracing open. Called by `kvpolicy export`.

The format is "Trace Event Format" (Chromium project): events with ``ph``, ``ts`` and ``dur`` in microseconds, on tracks
``tid`` of processes ``pid``. A core of an engine is two processes: what it does, and its requests, one track each.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.trace.table import Trace

STEPS, DECISIONS, COPIES = 1, 2, 3
TRACKS = {STEPS: "steps", DECISIONS: "decisions", COPIES: "copies"}
SITUATION = (
    "cause", "computed_tokens", "prompt_tokens", "output_tokens", "held_blocks", "hit_blocks", "save_blocks",
    "free_blocks", "short_blocks", "free_host_blocks", "running_requests", "waiting_requests", "earlier_preemptions",
)  # fmt: skip
"""Columns of a decision that its event has beside the prices."""
STEP_ARGS = (
    "step", "scheduled_tokens", "scheduled_requests", "decode_requests", "recomputed_tokens", "preemptions", "saves",
    "loads",
)  # fmt: skip
COUNTS = {"requests": ("running_requests", "waiting_requests"), "KV blocks": ("used_blocks",)}
Event = dict[str, Any]
Row = Mapping[str, Any]


def write_events(trace: Trace, out: Path) -> int:
    """Write the trace's events to ``out``, compressed if its name ends in .gz; return how many.

    Raises InputError for a name that ends in neither .json nor .json.gz.
    """
    if not out.name.endswith((".json", ".json.gz")):
        raise InputError(f"{out}: trace events are written to a file that ends in .json or .json.gz")
    number = 0
    with gzip.open(out, "wt", encoding="utf-8") if out.suffix == ".gz" else out.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for event in events(trace):
            file.write((",\n" if number else "\n") + json.dumps(event, allow_nan=False))
            number += 1
        file.write("\n]}\n")
    return number


def events(trace: Trace) -> Iterator[Event]:
    """The trace's events. Time 0 of each core is the first thing that it recorded. In a window, requests
    that arrived before it are drawn from its beginning on."""
    for number, core in enumerate(sorted(trace.headers)):
        rows = {name: [row for row in trace.rows(name) if row["core"] == core]
                for name in ("steps", "decisions", "outcomes", "transfers", "requests")}  # fmt: skip
        begin_s = trace.begin_s.get(core, -inf)
        rows["requests"] = [row | {"arrival_s": max(row["arrival_s"], begin_s)} for row in rows["requests"]]
        yield from _Core(core, 2 * number + 1, rows).events()


class _Core:
    """The events of one engine core."""

    def __init__(self, name: str, pid: int, rows: Mapping[str, Sequence[Row]]) -> None:
        self.name, self.pid, self.rows = name, pid, rows
        self.outcomes = {row["preemption_id"]: row for row in rows["outcomes"]}
        self.copies: dict[str, list[Row]] = defaultdict(list)
        for row in rows["transfers"]:
            self.copies[row["preemption_id"]].append(row)
        self.preempted: dict[str, list[Row]] = defaultdict(list)
        seen: set[str] = set()
        for row in sorted(rows["decisions"], key=lambda row: float(row["time_s"])):
            if row["preemption_id"] not in seen:  # a decision at resume is about the same preemption
                self.preempted[row["request"]].append(row)
            seen.add(row["preemption_id"])
        times = [row["start_s"] for row in rows["steps"]] + [row["time_s"] for row in rows["decisions"]]
        times += [row["submit_s"] for row in rows["transfers"]] + [row["arrival_s"] for row in rows["requests"]]
        self.first_s = min(times, default=0.0)
        ends = [row["start_s"] + row["duration_s"] for row in rows["steps"]]
        ends += [row["closed_s"] for row in rows["outcomes"]] + [row["end_s"] for row in rows["transfers"]]
        self.last_s = max([*ends, *times], default=0.0)

    def events(self) -> Iterator[Event]:
        yield self._about("process_name", self.pid, 0, self.name)
        yield self._about("process_name", self.pid + 1, 0, f"{self.name}: requests")
        for track, title in TRACKS.items():
            yield self._about("thread_name", self.pid, track, title)
        yield from self._steps()
        yield from self._decisions()
        yield from self._transfers()
        yield from self._requests()

    def _about(self, what: str, pid: int, track: int, name: str) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": track, "args": {"name": name}}

    def _at(self, time_s: float) -> float:
        return round(1e6 * (time_s - self.first_s), 3)

    def _slice(self, name: str, begin_s: float, end_s: float, pid: int, track: int, args: Mapping[str, Any]) -> Event:
        at = self._at(begin_s)
        return {
            "ph": "X", "name": name, "ts": at, "dur": round(max(0.0, self._at(end_s) - at), 3), "pid": pid,
            "tid": track, "args": dict(args),
        }  # fmt: skip

    def _steps(self) -> Iterator[Event]:
        for row in self.rows["steps"]:
            name = "step" if not row["recomputed_tokens"] else "step that recomputes"
            args = {key: row[key] for key in STEP_ARGS}
            device_s = row["device_s"]
            if device_s is not None:
                args["forward on the device, ms"] = round(1e3 * device_s, 4)
            yield self._slice(name, row["start_s"], row["start_s"] + row["duration_s"], self.pid, STEPS, args)
            for counter, columns in COUNTS.items():
                values = {column: row[column] for column in columns}
                yield self._counted(counter, row, values)
            if device_s is not None and row["duration_s"] > 0:
                share = min(1.0, device_s / row["duration_s"])
                yield self._counted("device", row, {"share of the step in its forward": round(share, 4)})

    def _counted(self, counter: str, row: Row, values: Mapping[str, float]) -> Event:
        """From the beginning of a step on."""
        return {"ph": "C", "name": counter, "ts": self._at(row["start_s"]), "pid": self.pid, "args": dict(values)}

    def _decisions(self) -> Iterator[Event]:
        for row in self.rows["decisions"]:
            yield {
                "ph": "i", "s": "t", "name": row["executed"], "ts": self._at(row["time_s"]), "pid": self.pid,
                "tid": DECISIONS, "args": {"request": row["request"], **self._prices(row)},
            }  # fmt: skip

    def _prices(self, row: Row) -> dict[str, Any]:
        """What was decided and why: the situation, and each option's price beside what it turned out to cost."""
        outcome = self.outcomes.get(row["preemption_id"], {})
        prices = {f"predicted {option['kind']}, ms": round(1e3 * cost["engine_s"], 4)
                  for option, cost in zip(row["options"], row["costs"] or (), strict=False)}  # fmt: skip
        measured = outcome.get("engine_s")
        return {
            "policy": row["policy"],
            "chosen": row["options"][row["chosen"]]["kind"],
            "executed": row["executed"],
            "reason": row["reason"],
            **prices,
            **({} if measured is None else {"measured, ms": round(1e3 * measured, 4)}),
            **({"ended": outcome["ended"]} if outcome else {}),
            **{name: row[name] for name in SITUATION},
        }

    def _transfers(self) -> Iterator[Event]:
        """Copies overlap each other, hence as asynchronous events: each has a beginning, an end and an id."""
        for number, row in enumerate(self.rows["transfers"]):
            args = {name: row[name] for name in ("preemption_id", "tier", "bytes", "segments", "queued_bytes", "ok")}
            for phase, time_s in (("b", row["start_s"]), ("e", row["end_s"])):
                yield {
                    "ph": phase, "cat": "copy", "id": f"{self.pid}-{number}", "name": row["direction"],
                    "ts": self._at(time_s), "pid": self.pid, "tid": COPIES, "args": args if phase == "b" else {},
                }  # fmt: skip

    def _requests(self) -> Iterator[Event]:
        rows = {row["request"]: row for row in self.rows["requests"]}
        for track, name in enumerate(sorted(rows.keys() | self.preempted.keys()), 1):
            yield self._about("thread_name", self.pid + 1, track, name)
            yield from self._life(rows.get(name, {}), self.preempted.get(name, ()), track)

    def _life(self, row: Row, preempted: Sequence[Row], track: int) -> Iterator[Event]:
        """Waiting, running and preempted: one after the other. Copies lie within the time preempted."""
        at_s = row["arrival_s"] if row else preempted[0]["time_s"]
        first_s = row.get("first_token_s")
        for decision in preempted:
            yield from self._served(at_s, decision["time_s"], first_s, track)
            closed_s = self.outcomes.get(decision["preemption_id"], {}).get("closed_s", self.last_s)
            at_s = max(at_s, decision["time_s"])
            yield self._slice("preempted", at_s, closed_s, self.pid + 1, track, self._prices(decision))
            yield from self._swapped(decision["preemption_id"], at_s, closed_s, track)
            at_s = max(at_s, closed_s)
            first_s = at_s if first_s is None or first_s < at_s else first_s
        if row:
            last_s = row.get("last_token_s")
            yield from self._served(at_s, self.last_s if last_s is None else last_s, first_s, track)

    def _served(self, begin_s: float, end_s: float, first_s: float | None, track: int) -> Iterator[Event]:
        """Until its first token a request waits or is prefilled: a trace does not tell the two apart."""
        middle_s = end_s if first_s is None else min(max(first_s, begin_s), end_s)
        for name, (from_s, to_s) in {"waiting or prefill": (begin_s, middle_s), "running": (middle_s, end_s)}.items():
            if to_s > from_s:
                yield self._slice(name, from_s, to_s, self.pid + 1, track, {})

    def _swapped(self, preemption: str, begin_s: float, end_s: float, track: int) -> Iterator[Event]:
        """A slice lies in the one that it began in, or a viewer drops it: copies are cut to the time preempted."""
        for copy in sorted(self.copies.get(preemption, ()), key=lambda copy: float(copy["start_s"])):
            from_s, to_s = max(begin_s, copy["start_s"]), min(end_s, copy["end_s"])
            if to_s > from_s:
                name = "swapped out" if copy["direction"] == "save" else "swapped in"
                yield self._slice(name, from_s, to_s, self.pid + 1, track, {"bytes": copy["bytes"]})
                begin_s = to_s
