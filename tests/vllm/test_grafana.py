"""The dashboard and the alert rules: every query is run by a real Prometheus that scrapes a live server.

Prometheus is Debian's package ``prometheus`` (with ``promtool``); where it is not installed, what needs it is skipped,
unless KVPOLICY_REQUIRE_PROMETHEUS=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.plugin.test_control_file import write
from tests.vllm import harness, test_measured_cost
from tests.vllm.test_server import ROUNDS, complete, free_port, metrics, server, wait_until

FOLDER = Path("integrations/grafana")
BOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = FOLDER / "alerts.yaml"
TARGETS = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]
QUERIES = [(title, target["expr"]) for title, target in TARGETS]
recorded = test_measured_cost.recorded
CLIENTS = 32
KEEPS = {"kvpolicy": {"keep_s": 60}}
OURS = re.compile(r"vllm:kvpolicy_(\w+)")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed here: apt-get install prometheus"
        if os.environ.get("KVPOLICY_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def exported() -> set[str]:
    names = {f"{name}_total" for name in COUNTERS} | set(GAUGES)
    return names | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def test_queries_and_rules_name_metrics_that_there_are() -> None:
    texts = [expression for _, expression in QUERIES] + [ALERTS.read_text()]
    named = {name for text in texts for name in OURS.findall(text)}
    assert named and named <= exported()


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """What Grafana's schema of a dashboard asks for, as far as this one uses it."""
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= set(BOARD)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids) and len({panel["title"] for panel in BOARD["panels"]}) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "timeseries" and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) and all(target["legendFormat"] for target in panel["targets"])
    variables = {one["name"] for one in BOARD["templating"]["list"]}
    used = {name for _, text in QUERIES for name in re.findall(r"\$(\w+)", text)}
    assert used <= variables | {"__rate_interval"}


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    promtool = tool("promtool")
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True, capture_output=True)
    fails = 'vllm:kvpolicy_fallbacks_total{instance="a",reason="error"}'
    order_fails = {
        "exp_labels": {"severity": "warning", "instance": "a"},
        "exp_annotations": {"summary": "Code of the order of service fails on a: requests are served without"},
    }
    unit = {
        "rule_files": [str(ALERTS.absolute())],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": fails, "values": "0 0 0 1 1 1"},
                    {"series": 'vllm:kvpolicy_order_failed_total{instance="a",method="rank"}', "values": "_ _ _ 1x30"},
                ],
                "alert_rule_test": [
                    {"eval_time": "1m", "alertname": "KVPolicyDecidingFails", "exp_alerts": []},
                    {
                        "eval_time": "5m",
                        "alertname": "KVPolicyDecidingFails",
                        "exp_alerts": [
                            {
                                "exp_labels": {"severity": "warning", "instance": "a"},
                                "exp_annotations": {
                                    "summary": "Deciding fails on a: its victims are recomputed",
                                    "description": "The server's log has the exception, once.",
                                },
                            }
                        ],
                    },
                    {"eval_time": "2m", "alertname": "KVPolicyOrderFails", "exp_alerts": []},
                    {"eval_time": "4m", "alertname": "KVPolicyOrderFails", "exp_alerts": [order_fails]},
                    {"eval_time": "14m", "alertname": "KVPolicyOrderFails", "exp_alerts": []},
                ],
            }
        ],
    }
    (tmp_path / "unit.yaml").write_text(yaml.safe_dump(unit))
    done = subprocess.run([promtool, "test", "rules", "unit.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes a server every second."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS.absolute())],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        tool("prometheus"), f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def answer(base: str, expression: str) -> list[Any]:
    """What Prometheus says to a query now. Raises where it does not understand it."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{base}/api/v1/query?{query}", timeout=60) as reply:
        return list(json.loads(reply.read())["data"]["result"])


def filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "10m").replace("$instance", ".*")


def unanswered(monitor: str) -> list[str]:
    """Panels with a query that Prometheus has no answer to, or whose answer lacks a label that the legend shows."""
    found = []
    for title, target in TARGETS:
        series = answer(monitor, filled_in(target["expr"]))
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        if not series or any(not shown <= set(one["metric"]) for one in series):
            found.append(f"{title}, {target['refId']}")
    return found


def test_every_panel_is_answered_by_a_prometheus_that_scrapes_a_server(
    model: str, recorded: Path, tmp_path: Path
) -> None:
    """A server that decides by prices and by chance, under an order that displaces, switched by its control file, with
    prompts in host memory and files: each panel shows something."""
    tool("prometheus")
    prices = test_measured_cost.fitting_model(recorded, tmp_path / "model")
    write(tmp_path / "control", "order=mlfq:base=8")
    options = (
        "--policy", f"explore:{prices}", "--host-gib", "0.25", "--control", str(tmp_path / "control"),
        "--cache", "lru", "--cache-files", str(tmp_path / "kv"), "--cache-files-gib", "0.25",
    )  # fmt: skip
    conversations = harness.prompts(CLIENTS, (100, 200), (60, 120), seed=8)
    with server(model, tmp_path, *options) as (base, _):
        complete(base, 0)

        def serve_all() -> None:
            """The same requests at every call, who therefore find what they left."""
            with ThreadPoolExecutor(CLIENTS) as pool:
                for served in [
                    pool.submit(complete, base, 0, kv_transfer_params=KEEPS, **one) for one in conversations
                ]:
                    assert served.result()["usage"]["completion_tokens"] == served.result()["wanted"]

        with prometheus(base.removeprefix("http://"), tmp_path) as monitor:

            def scraped(at_least: float) -> bool:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    told = answer(monitor, "vllm:kvpolicy_resumed_total")
                    return sum(float(one["value"][1]) for one in told) >= at_least
                return False

            for _ in range(ROUNDS):
                serve_all()
                resumed = metrics(base)["resumed_total"]
                wait_until(partial(scraped, resumed), lambda: (tmp_path / "prometheus.log").read_text()[-3000:])
                empty = unanswered(monitor)
                if not empty:
                    break
            assert empty == []
            with urllib.request.urlopen(f"{monitor}/api/v1/rules", timeout=60) as reply:
                (group,) = json.loads(reply.read())["data"]["groups"]
            assert [rule["health"] in ("ok", "unknown") for rule in group["rules"]] == [True] * 5
