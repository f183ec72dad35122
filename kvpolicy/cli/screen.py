"""`kvpolicy watch`: one frame of what a server says of its preemptions, and the loop that shows it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.events import KINDS
from kvpolicy.server_gain import gain_of
from kvpolicy.server_metrics import OURS, Metrics, fetch, last_decisions

DECISIONS = 8
FILE_EVENTS = ("found", "stored", "loaded", "store_failed", "load_failed", "late")
"""What may become of a block that is in files, goes there or comes from them."""


class Watcher:
    """Asks a server, remembers what it said before, and makes frames of it."""

    def __init__(self, url: str, trace: Path | None, ask: Callable[[str], Metrics] = fetch) -> None:
        self.url, self.trace, self._ask = url, trace, ask
        self._now: Metrics | None = None
        self._before: Metrics | None = None
        self._at_s = self._before_s = 0.0
        self._restarts = 0
        self._silence = ""

    def look(self, now_s: float) -> None:
        """Ask once, ``now_s`` since the epoch. A server that does not answer is shown as silent, with what it said
        last. Raises InputError where the address is wrong."""
        try:
            metrics = self._ask(self.url)
        except OSError as error:
            self._silence = str(getattr(error, "reason", error))
            return
        self._silence = ""
        self._before, self._before_s = self._now, self._at_s
        if self._before is not None and metrics.restarted_since(self._before):
            self._restarts += 1
            self._before = None
        self._now, self._at_s = metrics, now_s

    @property
    def silence(self) -> str:
        return self._silence

    def frame(self) -> RenderableType:
        parts: list[RenderableType] = [self._head()]
        if self._now is not None:
            parts.append(self._pressure(self._now))
            if self._now.has_plugin:
                parts += [self._choices(self._now), _not_chosen(self._now), self._costs(self._now)]
            parts.append(Text(f"A better choice between recompute and swap: {gain_of(self._now, self._at_s).text()}"))
        if self.trace is not None:
            parts.append(self._decisions(self.trace))
        return Group(*parts)

    def _head(self) -> Text:
        head = Text(self.url, style="bold")
        if self._restarts:
            head.append(f"   restarted {self._restarts} times while watched; counts begin anew", style="yellow")
        if self._silence:
            last = "" if self._now is None else "; below is what it said last"
            head.append(f"\ndoes not answer ({self._silence}){last}", style="red")
        if self._now is not None and not self._now.has_plugin:
            head.append("\nkvpolicy is not switched on in this server: these are vLLM's own metrics", style="yellow")
        return head

    def _pressure(self, now: Metrics) -> Table:
        usage = now.largest("vllm:kv_cache_usage_perc")
        table = _table("Pressure", "", "now")
        rows = [
            ("KV memory in use", "unknown" if usage is None else f"{usage:.0%}"),
            ("requests running", f"{now.total('vllm:num_requests_running'):g}"),
            ("requests waiting", f"{now.total('vllm:num_requests_waiting'):g}"),
            ("preemptions, as vLLM counts", self._with_rate("vllm:num_preemptions_total")),
        ]
        if now.has_plugin:
            used, slots = now.total(f"{OURS}host_slots_used"), now.total(f"{OURS}host_slots_total")
            in_force = [f"policy {one[0]}" + (f" ({one[1][:12]})" if one[1] else "")
                        for one, on in now.by(f"{OURS}cost_model", "policy", "digest").items() if on]  # fmt: skip
            in_force += [f"order {one[0]}" for one, on in now.by(f"{OURS}order", "order").items() if on]
            in_force += ["shadow mode: every victim is recomputed"] if now.total(f"{OURS}shadow") else []
            rows += [
                ("preempted, not yet back", f"{now.total(f'{OURS}open_preemptions'):g}"),
                ("host blocks in use", f"{used:g} of {slots:g}"),
                ("in force", "; ".join(in_force)),
            ]
            rows += [("prompts cached", _cached(now))] if now.largest(f"{OURS}cached_slots") is not None else []
            rows += [("prompts in files", files)] if (files := _in_files(now)) else []
        return _filled(table, rows)

    def _choices(self, now: Metrics) -> Table:
        table = _table("Choices", "executed", "intended", "preemptions", "the other was expected to be cheaper")
        name, rows = f"{OURS}preemptions_total", []
        for executed, intended in sorted(now.by(name, "executed", "intended")):
            labels = {"executed": executed, "intended": intended}
            other = now.total(f"{OURS}other_cheaper_total", executed=executed)
            priced = now.total(f"{OURS}priced_preemptions_total", executed=executed)
            cheaper = f"{other:g} of the {priced:g} executed with prices" if priced else "none with prices"
            rows.append((executed, intended, self._with_rate(name, **labels), cheaper))
        return _filled(table, rows)

    def _costs(self, now: Metrics) -> Table:
        """Means, each over the preemptions that have it: a policy without prices predicts nothing, and a server may
        have had several policies."""
        table, rows = _table("Cost, ms a preemption", "executed", "predicted", "measured", "delay of the victim"), []
        for kind in KINDS:
            priced = now.total(f"{OURS}priced_preemptions_total", executed=kind)
            measured = now.total(f"{OURS}measured_preemptions_total", executed=kind)
            resumed = now.total(f"{OURS}resumed_total", executed=kind)
            means = (
                _mean_ms(now.total(f"{OURS}predicted_cost_microseconds_total", executed=kind), priced),
                _mean_ms(now.total(f"{OURS}measured_cost_microseconds", executed=kind), measured),
                _mean_ms(now.total(f"{OURS}victim_delay_microseconds_total", executed=kind), resumed),
            )
            rows.append((kind, *means))
        return _filled(table, rows)

    def _decisions(self, trace: Path) -> RenderableType:
        heads = ("request", "tokens", "executed", "why", "predicted, ms", "measured, ms", "policy")
        table = _table("Last decisions", *heads)
        try:
            rows = last_decisions(trace, DECISIONS)
        except (KVPolicyError, OSError) as error:  # a trace that is being written may be incomplete for a moment
            return Text(f"trace: {error}", style="yellow")
        return _filled(table, map(_decided, rows))

    def _with_rate(self, name: str, **labels: str) -> str:
        assert self._now is not None
        count = self._now.total(name, **labels)
        seconds = self._at_s - self._before_s
        if self._before is None or seconds <= 0:
            return f"{count:g}"
        return f"{count:g}, {(count - self._before.total(name, **labels)) / seconds:.2g} a second"


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False, show_edge=False, pad_edge=False)
    for head in heads:
        table.add_column(head)
    return table


def _filled(table: Table, rows: Iterable[Sequence[str]]) -> Table:
    """The table with these rows, as they are: what a server or a trace says is no markup."""
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _not_chosen(now: Metrics) -> Text:
    """Why preemptions of the table above were recomputed though the policy did not choose to; empty where none was."""
    counts = sorted(now.by(f"{OURS}fallbacks_total", "reason").items())
    reasons = [f"{reason.replace('_', ' ')} {count:g}" for (reason,), count in counts if count]
    return Text(f"of these recomputed, not by choice: {', '.join(reasons)}" if reasons else "")


def _cached(now: Metrics) -> str:
    """What host memory holds of prompts and gave to requests, and what hints hold back there."""
    held = now.total(f"{OURS}hinted_blocks_total", tier="host", event="held")
    parts = [
        f"{now.total(f'{OURS}cached_slots'):g} blocks in host memory",
        f"{now.total(f'{OURS}cache_loaded_tokens_total'):g} tokens loaded",
    ]
    return "; ".join([*parts, f"{held:g} held back for hints so far"] if held else parts)


def _in_files(now: Metrics) -> str:
    """What became of blocks in files; empty where there was none."""
    files = {event: now.total(f"{OURS}cache_blocks_total", tier="files", event=event) for event in FILE_EVENTS}
    failed = files["store_failed"] + files["load_failed"] + files["late"]
    found = f"{files['found']:g} blocks found at the start, {files['stored']:g} written, {files['loaded']:g} read"
    return f"{found}, {failed:g} failed or late" if any(files.values()) else ""


def _mean_ms(microseconds: float, count: float) -> str:
    return f"{microseconds / count / 1e3:.3g}" if count else "none"


def _decided(row: dict[str, Any]) -> tuple[str, ...]:
    prices = ", ".join(f"{option['kind']} {1e3 * cost['engine_s']:.3g}"
                       for option, cost in zip(row["options"], row["costs"] or (), strict=False))  # fmt: skip
    measured = "" if row["measured_s"] is None else f"{1e3 * row['measured_s']:.3g}"
    why = row["reason"].replace("_", " ") or "chosen"
    return (row["request"][:16], f"{row['computed_tokens']}", row["executed"], why, prices, measured, row["policy"])


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, as http://localhost:8000.")],
    trace: Annotated[
        Path | None, typer.Option(help="Folder of the server's trace: shows its last decisions, with reasons.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two frames.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave, for scripts.")] = False,
) -> None:
    """Watch a live server: pressure, queues, choices, predicted against measured cost, last decisions."""
    watcher, console = Watcher(url, trace), Console()
    watcher.look(time.time())
    if once:
        if watcher.silence:
            raise InputError(f"{url} does not answer: {watcher.silence}")
        console.print(watcher.frame())
        return
    try:
        with Live(watcher.frame(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                watcher.look(time.time())
                live.update(watcher.frame(), refresh=True)
    except KeyboardInterrupt:
        console.print(watcher.frame())
