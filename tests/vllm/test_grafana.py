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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.vllm.test_server import all_answered, free_port, metrics, server, wait_until

FOLDER = Path("integrations/grafana")
BOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = FOLDER / "alerts.yaml"
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
NEED_STEP_TIMES = ("Bound", "Price error")
"""Panels that stay empty without a cost model that has step times."""
MAY_BE_EMPTY = (
    *NEED_STEP_TIMES, "The other option would have paid", "Avoidable share of time", "Why another option was executed",
    "Changes by the control file", "Displaced by the order of service",
)  # fmt: skip
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


def test_every_panel_is_answered_by_a_prometheus_that_scrapes_a_server(model: str, tmp_path: Path) -> None:
    tool("prometheus")
    with server(model, tmp_path, "--policy", "random:0.5", "--host-gib", "0.25") as (base, _):
        all_answered(base, 4, 0)
        with prometheus(base.removeprefix("http://"), tmp_path) as monitor:

            def scraped() -> bool:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    return bool(answer(monitor, "vllm:kvpolicy_host_slots_total"))
                return False

            wait_until(scraped, lambda: (tmp_path / "prometheus.log").read_text()[-3000:])
            number = 1
            while not (metrics(base)["loaded_tokens_total"] and metrics(base)["recomputed_tokens_total"]):
                all_answered(base, 32, number)
                number += 1
            resumed = metrics(base)["resumed_total"]
            told = lambda: sum(float(one["value"][1]) for one in answer(monitor, "vllm:kvpolicy_resumed_total"))  # noqa: E731
            wait_until(lambda: told() >= resumed, lambda: "not scraped")
            empty = [title for title, text in QUERIES if not answer(monitor, filled_in(text))]
            assert set(empty) <= set(MAY_BE_EMPTY)
            with urllib.request.urlopen(f"{monitor}/api/v1/rules", timeout=60) as reply:
                (group,) = json.loads(reply.read())["data"]["groups"]
            assert [rule["health"] in ("ok", "unknown") for rule in group["rules"]] == [True] * 5
