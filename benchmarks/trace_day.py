"""What a day of preemptions takes on disk, as a server's trace writer leaves it: bytes and files, and the most of both.

    python benchmarks/trace_day.py [--hours N] [--preemptions-per-s N] [--steps-per-s N] [--share N] [--out FOLDER]

Rows with the columns and the bits of a real server's (a cost model's prices, times of a clock, pseudonyms) are given to
the plugin's writer on a clock that does not wait: it writes a part of each table every two seconds of that clock,
merges and cuts as in a server. Every preemption is a decision, an outcome and a save or a recompute; half of the
victims belong to a request that is preempted once more. Ends with status 1 above 200 MB or 1,000 files for a day.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
from pathlib import Path

from kvpolicy.cost import load_cost_model
from kvpolicy.events import Decision, Option, Outcome, Preemption, Transfer
from kvpolicy.trace import Header, Row, decision_row, outcome_row, request_row, transfer_row
from kvpolicy.trace.upkeep import MERGED_PARTS, Retention, Upkeep, size
from kvpolicy_vllm.plugin.step_sampler import StepSampler
from kvpolicy_vllm.plugin.trace_writer import TraceWriter

MAX_MB = 200.0
MAX_FILES = 1000
PART_S = 2.0
HOUR_S = 3600.0
BLOCK = 16
MODEL = "cpu-llama-native"
OPTIONS = (Option("recompute"), Option("swap", tier="host"))


class Server:
    """Draws the rows of a server with one overflow every ``1 / preemptions_per_s`` seconds on average."""

    def __init__(
        self, writer: TraceWriter, core: str, preemptions_per_s: float, steps_per_s: float, share: float
    ) -> None:
        self._rng = random.Random(0)
        self._model = load_cost_model(MODEL)
        self._model.warm()
        self._writer = writer
        self._core = core
        self._rate, self._step_s = preemptions_per_s, 1 / steps_per_s
        self._steps = StepSampler(share, 0, lambda row: writer.add("steps", row)) if share < 1 else None
        self._now = 1e5 * self._rng.random()
        self._number = 0
        self._preemptions = 0
        self._recomputing: list[list[int | str]] = []
        self.preempted = 0

    def step(self) -> float:
        """One step; its seconds."""
        rng = self._rng
        self._number += 1
        duration_s = self._step_s * (0.9 + 0.2 * rng.random())
        chance = self._rate * self._step_s
        victims = int(chance) + (rng.random() < chance % 1)
        saves = sum(self._preempt() for _ in range(victims))
        repeated = self._repeated()
        tokens = sum(int(part["tokens"]) for part in repeated)
        decodes = rng.randint(180, 256)
        row = {
            "step": self._number, "start_s": self._now, "duration_s": duration_s, "device_s": None,
            "scheduled_tokens": decodes + tokens, "scheduled_requests": decodes + len(repeated),
            "decode_requests": decodes, "kv_read_tokens": decodes * rng.randint(800, 900),
            "chunk_context": tokens * 700,
            "running_requests": decodes + len(repeated), "waiting_requests": rng.randint(0, 40),
            "used_blocks": 27_000 - rng.randint(0, 30), "recomputed_tokens": tokens, "preemptions": victims,
            "saves": saves, "loads": saves, "repeated": repeated,
        }  # fmt: skip
        if self._steps is None:
            self._writer.add("steps", row)
        else:
            self._steps.add(row)
        self._now += duration_s
        return duration_s

    def _repeated(self) -> list[Row]:
        """Parts of recomputes that go on, 2,048 tokens a step at most."""
        budget, parts = 2048, []
        for victim in list(self._recomputing):
            tokens = min(budget, int(victim[1]))
            if tokens:
                parts.append(
                    {"preemption_id": victim[0], "tokens": tokens, "kv_read_tokens": 0,
                     "chunk_context": tokens * 512, "decodes": 0}
                )  # fmt: skip
            budget, victim[1] = budget - tokens, int(victim[1]) - tokens
            if not victim[1]:
                self._recomputing.remove(victim)
        return parts

    def _preempt(self) -> int:
        """A decision and what follows from it. Returns the copies that it begins."""
        rng, now = self._rng, self._now
        self._preemptions += 1
        self.preempted += 1
        name = f"{self._core}-{self._preemptions}"
        request = hashlib.blake2b(str(self._preemptions // 2).encode(), digest_size=8).hexdigest()
        tokens, blocks = (computed := rng.randint(100, 3000)), -(-computed // BLOCK)
        swap = rng.random() < 0.5
        situation = Preemption(
            time_s=now, computed_tokens=tokens, prompt_tokens=tokens // 2, output_tokens=tokens - tokens // 2,
            block_size=BLOCK, block_bytes=2 << 20, segment_bytes=32768, held_blocks=blocks, shared_blocks=0,
            hashed_blocks=blocks - 1, hit_blocks=blocks * rng.random(), save_blocks=blocks * rng.random(),
            device_blocks=27_000, free_blocks=0, short_blocks=1, host_blocks=8192,
            free_host_blocks=rng.randint(0, 8192), running_requests=rng.randint(180, 256),
            waiting_requests=rng.randint(0, 40), batch_tokens=rng.randint(180_000, 220_000),
            queued_save_bytes=rng.randint(0, 9) << 21, queued_load_bytes=0, earlier_preemptions=rng.randint(0, 2),
            priority=0, cause="memory", absence_tokens=rng.random() * 1e4,
        )  # fmt: skip
        costs = tuple(self._model.predict(situation, OPTIONS))
        decision = Decision(
            OPTIONS, (float(not swap), float(swap)), int(swap), costs, f"cheapest:{MODEL}", "", OPTIONS[swap].kind
        )
        self._writer.add(
            "decisions",
            decision_row(
                situation,
                decision,
                preemption_id=name,
                decision_id=f"{name}-0",
                request=request,
                generation=self._preemptions % 2 + 1,
                step=self._number,
                overflow_id=f"{self._core}-{self._number}",
            ),
        )
        delay_s = 0.2 + rng.random()
        self._writer.add(
            "outcomes",
            outcome_row(
                Outcome(
                    name,
                    "resumed",
                    now + delay_s,
                    delay_s,
                    delay_s * rng.random(),
                    0,
                    tokens if swap else 0,
                    0 if swap else tokens,
                    self._number,
                    self._number + rng.randint(5, 30),
                )
            ),
        )
        if self._preemptions % 2:
            self._end(request, tokens)
        if not swap:
            self._recomputing.append([name, tokens])
            return 0
        for direction, begin_s in (("save", now), ("load", now + delay_s / 2)):
            end_s = begin_s + blocks * 4e-5 * (1 + rng.random())
            copy = Transfer(
                self._preemptions, direction, True, blocks << 21, blocks * 64, 32768, True, 0, begin_s,
                begin_s + 1e-4 * rng.random(), end_s,
            )  # fmt: skip
            self._writer.add("transfers", transfer_row(copy, preemption_id=name, step=self._number, tier="host"))
            if self._steps is not None:
                self._steps.copied(copy.start_s, copy.end_s)
        return 1

    def _end(self, request: str, tokens: int) -> None:
        first_s = self._now - 30 * self._rng.random()
        self._writer.add(
            "requests",
            request_row(
                request=request,
                arrival_s=first_s - self._rng.random(),
                first_token_s=first_s,
                last_token_s=self._now + self._rng.random(),
                prompt_tokens=tokens // 2,
                output_tokens=tokens,
                preemptions=2,
                recomputed_tokens=tokens,
                loaded_tokens=tokens,
                finish="stop",
            ),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--preemptions-per-s", type=float, default=10.0)
    parser.add_argument("--steps-per-s", type=float, default=25.0)
    parser.add_argument("--share", type=float, default=1.0, help="share of the quiet steps, as --trace-steps")
    parser.add_argument("--out", type=Path, help="folder of the trace; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch) / "trace"
        core = folder / "core-0123456789ab"
        header = Header(
            "day", "production", "2026-01-01T00:00:00Z", "vllm 0.32.0", {"device": "none: made up"}, {}, BLOCK, 2 << 20,
            27_000, 8192, f"cheapest:{MODEL}",
        )  # fmt: skip
        # Its thread sleeps: parts are written here, whenever two seconds of the clock have passed.
        writer = TraceWriter(core, header, part_rows=10**9, part_s=1e12, upkeep=Upkeep(core, Retention()))
        server = Server(writer, core.name, options.preemptions_per_s, options.steps_per_s, options.share)
        passed_s, part_s, most = 0.0, PART_S, size(folder)
        while passed_s < options.hours * HOUR_S:
            passed_s += server.step()
            if passed_s >= part_s:
                part_s += PART_S
                writer.flush()
                writer.keep_up()
                if int(part_s) % int(MERGED_PARTS * PART_S * 4) == 0:
                    now = size(folder)
                    most = type(now)(max(most.files, now.files), max(most.bytes, now.bytes))
        writer.close()
        done = size(folder)
        print(f"{server.preempted:,} preemptions in {options.hours:g} h, {writer.dropped} rows dropped")
        for table in sorted(path for path in core.iterdir() if path.is_dir()):
            files = list(table.iterdir())
            print(f"  {table.name:10} {len(files):5} files {sum(file.stat().st_size for file in files) / 1e6:8.1f} MB")
        scale = 24 / options.hours
        megabytes = done.bytes / 1e6 * scale
        print(f"in all {done.files} files (at most {max(most.files, done.files)} at a time), {done.bytes / 1e6:.1f} MB")
        print(f"a day: {megabytes:.0f} MB (bar {MAX_MB:g}), {done.files} files (bar {MAX_FILES})")
        return int(megabytes > MAX_MB or max(most.files, done.files) > MAX_FILES or writer.dropped > 0)


if __name__ == "__main__":
    sys.exit(main())
