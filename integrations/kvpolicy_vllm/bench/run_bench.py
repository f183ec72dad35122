"""`kvpolicy bench`: a load on live servers over HTTP, arm by arm in alternation, resumable. Loads no engine.

Every run is a file under ``runs``; what has been run is not repeated. ``bench.json`` has all of them with the settings.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvpolicy.bench_settings import BenchTarget, ChatLoad, Load, RateLoad
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.stored_values import read_sealed, sealed
from kvpolicy.workload import open_workload
from kvpolicy_vllm.bench.control_arm import put_back, switched
from kvpolicy_vllm.bench.idle_servers import MAX_WAIT_S, is_still, settled
from kvpolicy_vllm.bench.live_arms import LiveArm, Servers, arms_of, dtype_of, sharing_memory
from kvpolicy_vllm.bench.live_server import environment_of
from kvpolicy_vllm.bench.load_kinds import AnalyticsKind, Cell, ChatKind, Kind, Terms
from kvpolicy_vllm.bench.load_report import LoadReport
from kvpolicy_vllm.bench.load_results import differences
from kvpolicy_vllm.bench.openai_api import Api, connected
from kvpolicy_vllm.bench.rate_kind import RateKind
from kvpolicy_vllm.bench.rate_load import has_hints
from kvpolicy_vllm.bench.recorded_prices import recorded_prices, recording_arm
from kvpolicy_vllm.bench.resumed_inputs import digests, variables, versions

PRICES = "prices.json"
NO_RUN = {"plan.json", "model.json"}
"""What is in the folder of a bench that has run nothing."""
SWITCHED = "switched.json"
"""In the folder of a bench while an arm's content is in a control file: see :mod:`kvpolicy_vllm.bench.control_arm`."""
ENVIRONMENT = "environment"
"""In a bench's plan, vLLM's variables of its servers."""
FORMAT = 3
"""Of bench.json."""
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog while seven wizards quietly mix five dozen jugs of black ink, and "
    "nobody asked why the old clock on the north wall ran slow before winter came to the harbour town."
)
"""Its tokens are those that prompts are drawn from."""
WARM_UP_REQUESTS, WARM_UP_TOKENS = 3, 64
"""Requests before the first run of a server, and the tokens of their prompts."""
MAX_RUN_BYTES = 1 << 30
"""Of a run's file, which has every token of its answers."""
DEFAULT_CONTEXT = 4096
"""Of a server that does not say what its context is."""


@dataclass(frozen=True, slots=True)
class Model:
    """What all arms serve, as the first one says it."""

    name: str
    context_tokens: int
    vocabulary: tuple[int, ...]


def kind_of(load: Load) -> Kind:
    """The kind of a load, by its settings."""
    if isinstance(load, RateLoad):
        return RateKind(load)
    return ChatKind(load) if isinstance(load, ChatLoad) else AnalyticsKind(load)


def bench(out: Path, load: Load, at: BenchTarget) -> LoadReport:
    """Put the load on every arm, and write ``out/bench.json``.

    Raises InputError where ``out`` has another bench, EngineFailed where a server does not start or ends.
    """
    given, at = at, sharing_memory(at)
    kind, arms = kind_of(load), arms_of(at)
    refuse_reserving(kind, arms)
    if (workload := getattr(load, "workload", None)) is not None:
        open_workload(
            workload, think_s=getattr(load, "think_s", None)
        )  # what is wrong with it is said before a server is started
    refuse_hinting(kind, arms)
    plan = {"format": FORMAT, "kind": kind.name, "target": at.target, "load": plain(asdict(load)),
            "arms": [arm.to_dict() for arm in arms], "versions": versions(),
            "files": digests(workload, [arm.command for arm in arms], "" if at.is_url else at.target),
            ENVIRONMENT: {} if at.is_url else variables(environment_of(arms[0].command)),
            "rounds_per_start": at.rounds_per_start}  # fmt: skip
    runs = out / "runs"
    if asyncio.run(put_back(out / SWITCHED)):
        say("a control file has again what it had before this bench, which ended in a run without putting it back")
    if at != given:
        say(f"servers of several arms share this machine's memory: each is started with {' '.join(at.vllm_flags[-2:])}")
    with taken_up(out, plan), Servers(out / "logs", say) as servers:
        driver = Driver(kind, arms, servers, out, None if at.is_url else at.start_of)
        rng = random.Random(f"{load.load_seed} order of arms")
        served: list[tuple[Cell, dict[str, dict[str, Any]]]] = []
        while (cell := kind.next_cell(served)) is not None:
            served.append((cell, driver.serve(cell, 0, rng.sample(arms, len(arms)))))
        for round_ in range(1, load.rounds):
            for cell, _ in served:
                driver.serve(cell, round_, rng.sample(arms, len(arms)))
    written = [read_back(out, path) for path in sorted(runs.glob("*.json"))]
    results = plan | {
        "model": read_back(out, out / "model.json")["name"],
        "dtype": dtype_of(at),
        "runs": [run for run in written if "arm" in run],
        "comparisons": [run for run in written if "arm" not in run],
    }
    write(out / "bench.json", results)
    if getattr(load, "price_ratio", False) and not at.is_url:
        # The cell with most chatters, or the longest prefix; texts of a round of its own.
        busiest = max((cell for cell, _ in served), key=lambda cell: next(iter(cell.values())))
        results["prices"] = priced(kind, busiest, load.rounds, at, out)
        write(out / "bench.json", results)
    return LoadReport(results, str(out / "bench.json"))


def priced(kind: Kind, cell: Cell, round_: int, at: BenchTarget, out: Path) -> dict[str, Any]:
    """What tokens cost at the batches of a cell, from a recorded run. What was found once is not recorded again."""
    path, trace = out / PRICES, (out / "trace").absolute()
    if path.exists():
        return read_back(out, path)

    def serve() -> None:
        shutil.rmtree(trace, ignore_errors=True)  # of a run that was interrupted
        arm = recording_arm(at, trace)
        with Servers(out / "logs", say) as servers:
            Driver(kind, (arm,), servers, out).record(cell, round_, arm)

    found = {"cell": dict(cell)} | recorded_prices(serve, trace)
    if found["price_ratio"] is not None:
        write(path, sealed(found))
    return found


def refuse_reserving(kind: Kind, arms: Sequence[LiveArm]) -> None:
    """Raise WrongValue for an arm that reserves memory under a load whose requests do not."""
    reserving = [arm.name for arm in arms if arm.reserve]
    if reserving and not isinstance(kind, RateKind):
        raise WrongValue("arm", f"{reserving[0]} reserves memory, which is of `kvpolicy bench rate`: leave it out")


def refuse_hinting(kind: Kind, arms: Sequence[LiveArm]) -> None:
    """Raise WrongValue for an arm with hints under a load whose requests have none: it would be one without them."""
    hinting = [arm.name for arm in arms if arm.hints]
    if hinting and isinstance(kind, RateKind) and not has_hints(kind.load):
        raise WrongValue(
            "arm",
            f"{hinting[0]} sends the hints of requests, and those of the workload have none: give --workload a table "
            "with hints, or one with sessions or shared prefixes and hints=sessions, or leave the arm out",
        )


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


@contextmanager
def taken_up(out: Path, plan: Mapping[str, Any]) -> Iterator[None]:
    """As :func:`take_up`; a folder that was made for it goes away again where the bench ends by an error without a run
    or a server's output. Raises InputError for a folder with another bench."""
    was_there = out.exists()
    take_up(out, plan)
    try:
        yield
    except BaseException:
        if not was_there and {path.name for path in out.iterdir() if path.is_file() or any(path.iterdir())} <= NO_RUN:
            shutil.rmtree(out)
        raise


def take_up(out: Path, plan: Mapping[str, Any]) -> None:
    """Begin a bench in a folder, or go on with the one there, once it has a run. Raises InputError for another one."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file, should be a folder")
    (out / "runs").mkdir(parents=True, exist_ok=True)
    path = out / "plan.json"
    if not any((out / "runs").iterdir()):
        (out / PRICES).unlink(missing_ok=True)  # of another bench, whose runs were removed
        write(path, sealed(plan))
        return
    before = read_back(out, path)
    different = [name for name in plan if before.get(name) != plan[name]]
    if ENVIRONMENT in different:
        then, now = ({*(one.get(ENVIRONMENT) or {}).items()} for one in (before, plan))
        different[different.index(ENVIRONMENT)] = ", ".join(sorted({name for name, _ in then ^ now})) or ENVIRONMENT
    if different:
        raise InputError(
            f"{out} has a bench with other settings ({', '.join(different)}): give --out another folder, or delete it"
        )


def read_back(out: Path, path: Path) -> dict[str, Any]:
    """What an earlier call wrote into a bench's folder. Raises InputError where it is not there or was changed."""
    try:
        return read_sealed(path, MAX_RUN_BYTES)
    except InputError as error:
        raise InputError(f"{error}; the bench in {out} cannot be resumed: give --out another folder") from None


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a whole file or none."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(values, allow_nan=False) + "\n")
    beside.replace(path)


def say(line: str) -> None:
    """What is going on, for a person who waits."""
    print(f"kvpolicy bench: {line}", file=sys.stderr, flush=True)


class Driver:
    """Runs cells, and leaves out what has been run."""

    def __init__(
        self,
        kind: Kind,
        arms: Sequence[LiveArm],
        servers: Servers,
        out: Path,
        start_of: Callable[[int], int] | None = None,
    ) -> None:
        """``start_of``: the start of the servers that serves a round; None where they are not ended between rounds."""
        self._kind, self._arms, self._servers, self._out, self._start_of = kind, arms, servers, out, start_of
        self._start = 0
        self._warm: set[str] = set()
        self._model: Model | None = None

    def _path(self, cell: Cell, round_: int, name: str) -> Path:
        values = "-".join(f"{key}-{value}" for key, value in cell.items())
        return self._out / "runs" / f"round-{round_:03}-{values}-{name}.json"

    def serve(self, cell: Cell, round_: int, arms: Sequence[LiveArm]) -> dict[str, dict[str, Any]]:
        """One setting by all arms, in this order, and then their tokens compared. Returns each arm's figures."""
        missing = [arm for arm in arms if not self._path(cell, round_, f"arm-{arm.name}").exists()]
        if missing:
            self._begin(round_)
        for arm in missing:
            asyncio.run(self._run_once(cell, round_, arm))
        compared = self._path(cell, round_, "tokens")
        if not compared.exists():
            tokens = asyncio.run(self._compare(cell, round_))
            write(compared, sealed({"cell": cell, "round": round_, "tokens": tokens}))
        return {arm.name: self._figures(cell, round_, arm) for arm in self._arms}

    def _begin(self, round_: int) -> None:
        """Have all servers of a round's start, so that no run is made while one of them is not there yet. They are
        started in the order of the arms, and in the other one at every second start: the first finds an idle machine.
        """
        start = self._start_of(round_) if self._start_of else 0
        if start != self._start:
            self._servers.end()
            self._warm.clear()  # a new server may have the port of one that has ended
            self._start = start
            say(f"round {round_ + 1}: start {start + 1} of the servers")
        of_servers: dict[tuple[str, ...], LiveArm] = {}
        for arm in self._arms:
            of_servers.setdefault((arm.url, *arm.command), arm)
        for arm in reversed(of_servers.values()) if start % 2 else of_servers.values():
            self._servers.url(arm)

    async def _run_once(self, cell: Cell, round_: int, arm: LiveArm) -> None:
        """One run, whose file is written before the server is switched back, which may fail."""
        async with self._run(cell, round_, arm) as figures:
            write(self._path(cell, round_, f"arm-{arm.name}"), sealed(figures))
            say(f"{words(cell)}, round {round_ + 1}, {arm.name}: {self._line(figures)}")

    def record(self, cell: Cell, round_: int, arm: LiveArm) -> None:
        """One run that is not one of the results."""
        asyncio.run(self._record(cell, round_, arm))

    async def _record(self, cell: Cell, round_: int, arm: LiveArm) -> None:
        async with self._run(cell, round_, arm) as figures:
            say(f"{words(cell)}, {arm.name}: {self._line(figures)}")

    def _line(self, figures: Mapping[str, Any]) -> str:
        rate, errors = figures[self._kind.rate], sum(figures["errors"].values())
        done = "nothing was answered" if rate is None else f"{rate:.3g} {self._kind.rate.removesuffix('_s')} per second"
        return done + (f", {errors} errors" if errors else "")

    @asynccontextmanager
    async def _run(self, cell: Cell, round_: int, arm: LiveArm) -> AsyncIterator[dict[str, Any]]:
        """The figures of a run. A server that was switched for it is switched back at the exit."""
        async with connected(self._servers.url(arm)) as api, AsyncExitStack() as stack:
            terms = await self._terms(api, cell, round_, arm)
            await self._warm_up(api, terms)
            in_force = {}
            if arm.switch is not None:
                switching = switched(arm.switch, api, terms.vocabulary[:1], self._out / SWITCHED)
                in_force["in_force"] = await stack.enter_async_context(switching)
            busy_cores = await self._settled(f"{words(cell)}, round {round_ + 1}, {arm.name}")
            before_s = self._servers.cpu_s(arm)
            figures = await self._kind.run(cell, round_, terms) | in_force
            after_s = self._servers.cpu_s(arm)
            self._servers.url(arm)  # which raises where the server has ended: its run is no result
            cpu_s = None if before_s is None or after_s is None else after_s - before_s
            start = {"start": self._start_of(round_)} if self._start_of else {}
            took = {"cpu_s": cpu_s, "cores": self._servers.cores(arm), "busy_cores_before": busy_cores}
            yield {"cell": cell, "round": round_, "arm": arm.name} | took | start | figures

    async def _settled(self, run: str) -> float | None:
        """Wait until the servers of all arms stand still, which may have files of the last run to write; say so where
        they do not. Returns how many cores the busiest one took last; None where the bench has started none. ``run``:
        the one that begins, in words."""
        if not self._servers.any_started:
            return None
        cores = await settled(self._servers.all_cpu_s)
        if not is_still(cores):
            say(f"{run}: begins while a server takes {cores:.2g} cores, {MAX_WAIT_S:g} s after the last request")
        return cores

    async def _terms(self, api: Api, cell: Cell, round_: int, arm: LiveArm) -> Terms:
        if self._model is None:
            name, context_tokens = await api.describe()
            vocabulary = tuple(sorted(set(await api.tokenize(SAMPLE_TEXT))))
            self._model = Model(name, context_tokens or DEFAULT_CONTEXT, vocabulary)
            write(self._out / "model.json", sealed(asdict(self._model)))
        # Two runs on one server share no cached prefix, so that neither finds what the other has computed: not even
        # runs of two benches, or of one that was interrupted, on a server or in files that outlive them.
        salt = f"{arm.name} {words(cell)} {round_} {uuid4().hex}"
        return Terms(api, self._model.vocabulary, self._model.context_tokens, salt, arm.hints, arm.reserve)

    async def _warm_up(self, api: Api, terms: Terms) -> None:
        """Some requests before a server's first run. Raises InputError where they fail."""
        if api.url in self._warm:
            return
        for number in range(WARM_UP_REQUESTS):
            prompt = random.Random(number).choices(terms.vocabulary, k=WARM_UP_TOKENS)
            answer = await api.complete(prompt, 4, "warm-up")
            if answer.error:
                raise InputError(f"{api.url} does not serve: {answer.error}")
        self._warm.add(api.url)

    async def _compare(self, cell: Cell, round_: int) -> dict[str, Any]:
        """The tokens of each arm against those of the first, and how close the choice was where they differ."""
        first, *others = self._arms
        if not others:
            return {}
        rows = self._rows(cell, round_, first)
        found = {arm.name: differences(rows, self._rows(cell, round_, arm)) for arm in others}
        if any(one["different"] for one in found.values()):
            async with connected(self._servers.url(first)) as api:
                terms = await self._terms(api, cell, round_, first)
                for at in (at for one in found.values() for at in one["different"]):
                    at["gap"] = await api.gap(self._kind.prompt(cell, round_, terms, rows, at))
        return found

    def _rows(self, cell: Cell, round_: int, arm: LiveArm) -> list[dict[str, Any]]:
        return list(self._figures(cell, round_, arm)["rows"])

    def _figures(self, cell: Cell, round_: int, arm: LiveArm) -> dict[str, Any]:
        return read_back(self._out, self._path(cell, round_, f"arm-{arm.name}"))


def words(cell: Cell) -> str:
    """A setting for a person."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in cell.items())
