"""Arms that switch a server by its control file, on a small server that reads one as the plugin does.

On a real server: tests/vllm/test_live_bench.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvpolicy.bench_settings import BenchTarget, RateLoad
from kvpolicy.errors import InputError
from kvpolicy_vllm.bench import control_arm, run_bench
from kvpolicy_vllm.bench.rate_kind import RateKind
from tests.bench.live_http import Small, serving

LOAD = RateLoad(rate=(200.0, 400.0), rounds=2, requests=3, workload="sharegpt-8k?n=3&scale=0.01&context=100")
START = {"policy": "cheapest", "order": "fcfs"}


@dataclass
class Controlled(Small):
    """``control``: its file, looked at before every request. ``served_by``: the order of every request of a run."""

    control: Path = Path()
    seen: tuple[int, ...] = ()
    refuses: str = "swop"
    """What a content is refused for."""
    shadow: int = 0
    changes: dict[str, int] = field(default_factory=lambda: {"applied": 0, "refused": 0})
    in_force: dict[str, str] = field(default_factory=lambda: dict(START))
    served_by: list[tuple[str, str]] = field(default_factory=list)
    looked: Callable[[], object] = lambda: None
    """Called before every answer."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        found = self.control.lstat() if self.control.exists() else None
        stamp = () if found is None else (found.st_mtime_ns, found.st_ino)
        if stamp != self.seen:
            self.seen = stamp
            text = self.control.read_text() if found else ""
            refused = self.refuses in text
            self.changes["refused" if refused else "applied"] += 1
            self.in_force = self.in_force if refused else START | json.loads(text or "{}")
        salt = (await request.json()).get("cache_salt", "")
        self.served_by.append((salt.split(" ")[0], self.in_force["order"]))
        self.looked()
        return await super().complete(request)

    async def metrics(self, request: web.Request) -> web.Response:
        rest = await super().metrics(request)
        lines = [f'vllm:kvpolicy_control_changes_total{{engine="0",result="{result}"}} {count}.0'
                 for result, count in self.changes.items()]  # fmt: skip
        lines += [f'vllm:kvpolicy_shadow{{engine="{core}"}} {on}.0' for core, on in enumerate((0, self.shadow))]
        lines += [f'vllm:kvpolicy_order{{engine="0",order="{self.in_force["order"]}"}} 1.0']
        lines += [f'vllm:kvpolicy_cost_model{{digest="",engine="0",policy="{self.in_force["policy"]}"}} 1.0']
        return web.Response(text=f"{rest.text}" + "\n".join(lines) + "\n")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Controlled, str]]:
    controlled = Controlled(control=tmp_path / "control")
    with serving(controlled) as url:
        yield controlled, url


def arms(url: str, file: Path, **settings: str) -> BenchTarget:
    return BenchTarget(url, ("start", f"switched={json.dumps({'control': str(file)} | settings)}"))


@pytest.mark.parametrize("before", [None, '{"order": "las"}\n'])
def test_each_run_is_served_by_its_own_order(
    server: tuple[Controlled, str], before: str | None, tmp_path: Path
) -> None:
    """Also that of the arm without a control file, whatever ran before it. The file is as it was in the end."""
    controlled, url = server
    file = controlled.control
    if before is not None:
        file.write_text(before)
        file.chmod(0o600)
    found = run_bench.bench(tmp_path / "out", LOAD, arms(url, file, order="mlfq:base=16"))
    by_arm = {arm: {order for one, order in controlled.served_by if one == arm} for arm in ("start", "switched")}
    assert by_arm == {"start": {"fcfs" if before is None else "las"}, "switched": {"mlfq:base=16"}}
    in_force = [run["in_force"] for run in found.results["runs"] if run["arm"] == "switched"]
    assert in_force == [{"policy": "cheapest", "order": "mlfq:base=16"}] * 4
    assert (file.read_text() if file.exists() else None) == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == ([] if before is None else ["control"])
    assert found.results["arms"][1]["order"] == "mlfq:base=16", "a bench with another order is another bench"


def test_a_change_that_is_not_taken_is_refused_and_the_file_restored(
    server: tuple[Controlled, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, url = server
    monkeypatch.setattr(control_arm, "SEEN_S", 0.5)
    other = tmp_path / "another file"
    with pytest.raises(InputError, match=r"shows no change .* of one of .*another file: .* started with by --control"):
        run_bench.bench(tmp_path / "a", LOAD, arms(url, other, order="las"))
    with pytest.raises(InputError, match=r'refuses what .*control has, \{"policy": "always-swop"\} \(engine core 0\)'):
        run_bench.bench(tmp_path / "b", LOAD, arms(url, controlled.control, policy="always-swop"))
    with pytest.raises(InputError, match="nowhere/control: cannot be written: "):
        run_bench.bench(tmp_path / "c", LOAD, arms(url, tmp_path / "nowhere" / "control", order="las"))
    longest = tmp_path / ("l" * os.pathconf(tmp_path, "PC_NAME_MAX"))  # no file fits beside it
    with pytest.raises(InputError, match=f"{longest.name}: cannot be written: "):
        run_bench.bench(tmp_path / "c", LOAD, arms(url, longest, order="las"))
    open_file = tmp_path / "open"
    open_file.write_text("off")
    open_file.chmod(0o644)
    with pytest.raises(InputError, match="open: has mode 644"):
        run_bench.bench(tmp_path / "d", LOAD, arms(url, open_file, order="las"))
    assert not other.exists() and not controlled.control.exists() and open_file.read_text() == "off"


def test_a_change_that_another_made_is_not_taken_for_this_one(
    server: tuple[Controlled, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is counted, but the metrics name another order."""
    controlled, url = server
    write = control_arm._write

    def at_the_same_time(file: Path, content: str) -> None:
        write(file, content)
        controlled.control.write_text('{"order": "urgent"}')

    monkeypatch.setattr(control_arm, "SEEN_S", 0.5)
    monkeypatch.setattr(control_arm, "_write", at_the_same_time)
    with pytest.raises(InputError, match="shows no change"):
        run_bench.bench(tmp_path / "out", LOAD, arms(url, tmp_path / "other", order="las"))
    assert controlled.changes["applied"] == 1
    assert "switched" not in {arm for arm, _ in controlled.served_by}, "a run was measured under another order"


def test_a_run_is_kept_where_the_server_refuses_what_the_file_had(
    server: tuple[Controlled, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose model has been deleted during the run. Refused before the run, it is an error before it."""
    controlled, url = server
    file, out, run = controlled.control, tmp_path / "out", RateKind.run
    file.write_text('{"policy": "cheapest:former"}')
    file.chmod(0o600)
    at = BenchTarget(url, arms(url, file, order="las").arms[1:])

    async def deleted(*given: Any) -> dict[str, Any]:
        found = await run(*given)
        controlled.refuses = "former"
        return found

    monkeypatch.setattr(RateKind, "run", deleted)
    for _ in range(2):
        with pytest.raises(InputError, match=r'refuses what .*control has, \{"policy": "cheapest:former"\} \('):
            run_bench.bench(out, LOAD, at)
        assert [path.name for path in (out / "runs").glob("*-arm-*")] == ["round-000-rate-200.0-arm-switched.json"]
        assert "former" in file.read_text()


def test_a_policy_is_not_measured_in_shadow_mode(server: tuple[Controlled, str], tmp_path: Path) -> None:
    """It would execute nothing. An order is served in shadow mode, too."""
    controlled, url = server
    controlled.shadow = 1
    with pytest.raises(InputError, match=r"is in shadow mode \(engine core 1\).* policy always-swap is started with"):
        run_bench.bench(tmp_path / "out", LOAD, arms(url, controlled.control, policy="always-swap"))
    assert not controlled.control.exists()
    assert "switched" not in {arm for arm, _ in controlled.served_by}
    run_bench.bench(tmp_path / "out", LOAD, arms(url, controlled.control, order="las"))


def test_a_server_without_the_plugin_is_refused(tmp_path: Path) -> None:
    with serving(Small()) as url, pytest.raises(InputError, match="serves without kvpolicy: an arm with a control"):
        run_bench.bench(tmp_path / "out", LOAD, arms(url, tmp_path / "control", order="las"))
    assert not (tmp_path / "control").exists()


def test_a_run_that_fails_restores_the_file(
    server: tuple[Controlled, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, url = server

    async def interrupted(*_: object) -> None:
        assert "las" in controlled.control.read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy_vllm.bench.rate_kind.RateKind.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench.bench(tmp_path / "out", LOAD, BenchTarget(url, arms(url, controlled.control, order="las").arms[1:]))
    assert not controlled.control.exists()


def test_where_the_file_cannot_be_restored_the_error_of_the_run_is_raised(
    server: tuple[Controlled, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled, url = server

    async def interrupted(*_: object) -> None:
        controlled.control.unlink()
        controlled.control.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy_vllm.bench.rate_kind.RateKind.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench.bench(tmp_path / "out", LOAD, BenchTarget(url, arms(url, controlled.control, order="las").arms[1:]))
    state = tmp_path / "out" / run_bench.SWITCHED
    written = state.read_text()
    monkeypatch.undo()
    state.write_text(written.replace("las", "fcfs"))
    with pytest.raises(InputError, match=r"switched.json: was damaged .*: give the control file what it should have"):
        run_bench.bench(tmp_path / "out", LOAD, arms(url, controlled.control, order="las"))
    state.write_text(written)
    controlled.control.rmdir()
    controlled.control.write_text('{"order": "urgent"}')
    controlled.control.chmod(0o600)
    run_bench.bench(tmp_path / "out", LOAD, arms(url, controlled.control, order="las"))
    assert controlled.control.read_text() == '{"order": "urgent"}', "what an operator has written since stays"
    assert {order for arm, order in controlled.served_by if arm == "start"} == {"urgent"}


@pytest.mark.parametrize("there", [True, False])
def test_the_file_belongs_to_whom_it_belonged(server: tuple[Controlled, str], there: bool, tmp_path: Path) -> None:
    """A server cannot read a file of mode 600 that root, who measures it, has made his own. Without a file, a new one
    is of the folder's user."""
    controlled, url = server
    user = os.geteuid() or 12345
    folder = tmp_path / "of the server"
    folder.mkdir()
    controlled.control = file = folder / "control"
    if there:
        file.write_text('{"order": "las"}')
        file.chmod(0o600)
    os.chown(file if there else folder, user, -1)
    found: set[int] = set()
    controlled.looked = lambda: found.add(file.stat().st_uid) if file.exists() else None
    run_bench.bench(tmp_path / "out", LOAD, arms(url, file, order="mlfq:base=16"))
    assert found == {user}
    assert file.exists() == there


@pytest.mark.parametrize("former", [None, '{"order": "urgent"}\n'])
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_is_killed_leaves_no_arm_in_the_file(
    server: tuple[Controlled, str], by: signal.Signals, former: str | None, tmp_path: Path
) -> None:
    """By SIGTERM, or SIGHUP, it puts the file back itself; after SIGKILL, which it does not see, as soon as it is
    called again, before the server measures anything: otherwise the other arm would be served by this one's order,
    too."""
    controlled, url = server
    file, out = controlled.control, tmp_path / "out"
    if former is not None:
        file.write_text(former)
        file.chmod(0o600)
    arm = json.dumps({"control": str(file), "order": "las"})
    words = f"bench rate {url} --out {out} --workload {LOAD.workload} --rate 200 --rate 400 --rounds 2 --requests 3"
    command = [sys.executable, "-m", "kvpolicy.cli", *words.split(), "--arm", "start", "--arm", f"switched={arm}"]
    in_a_run, killed = threading.Event(), threading.Event()

    def wait_in_a_run() -> None:
        if controlled.served_by[-1][0] == "switched":
            in_a_run.set()
            killed.wait(60)

    controlled.looked = wait_in_a_run

    def heed() -> None:
        """Where the tests themselves run in a shell's background, or under nohup, what they start ignores these."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        assert in_a_run.wait(60)
        process.send_signal(by)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        killed.set()
    assert process.returncode, errors
    assert "Traceback" not in errors
    left = file.read_text() if file.exists() else None
    assert left == (former if by != signal.SIGKILL else '{"order": "las"}')
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, again.stderr
    assert ("has again what it had" in again.stderr) == (by == signal.SIGKILL)
    by_start = {order for arm, order in controlled.served_by if arm == "start"}
    assert by_start == {"fcfs" if former is None else "urgent"}
    runs = json.loads((out / "bench.json").read_text())["runs"]
    assert [run["in_force"]["order"] for run in runs if run["arm"] == "switched"] == ["las"] * 4
    assert (file.read_text() if file.exists() else None) == former
    assert not (out / run_bench.SWITCHED).exists()
