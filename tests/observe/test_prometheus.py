"""A real Prometheus scrapes a real server: every query of the dashboard and of KEDA has data, and every alert can be
judged.

What else reads `/metrics` in these tests parses plain text, which says nothing of the format that a Prometheus asks
for. Without the program (Debian's package `prometheus`) the test is skipped; `.ci/run` installs it.
"""

import contextlib
import json
import math
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from adapter_parts import byte_adapters
from serve_parts import WAIT_S, IdleStore, Served
from watched import http, until, until_idle, watched

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.config import field_docs
from jaxserve.config.schema import EventsConfig
from jaxserve.kv.page_events import PageEvents
from jaxserve.sched.plan import HostSlots

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "jaxserve.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
KEDA = DEPLOY / "fleet" / "keda.yaml"

# What the two send of themselves (2.42 and 3.5, without the protobuf format, which is off by default).
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
UNDERSCORES = PROMETHEUS_3.replace("allow-utf-8", "underscores")  # metric_name_escaping_scheme of Prometheus 3

NAME = re.compile(r"jaxserve:[a-z0-9_]+")
ROUTER = "jaxserve:router_"
# These begin the metrics of handoffs, for which servers exchange pages, of pictures, of routers and of sequences with
# an adapter: this server is alone, its model takes text, and no request names an adapter.
ABSENT = ("jaxserve:handoff_", "jaxserve:mm_", ROUTER, "jaxserve:adapter_sequences")


def _names(accept: str | None) -> tuple[str, set[str]]:
    """The type and the names of the samples of one scrape."""
    with watched() as parts:
        answer = http.get(f"{parts.http_url}/metrics", headers={} if accept is None else {"accept": accept})
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return answer.headers["content-type"], {re.split(r"[{ ]", line)[0] for line in lines}


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4"),
        (PROMETHEUS_2, "application/openmetrics-text; version=1.0.0"),
        (PROMETHEUS_3, "application/openmetrics-text; version=1.0.0"),
        (UNDERSCORES, "application/openmetrics-text; version=1.0.0"),
    ],
)
def test_names_are_the_documented_ones_in_every_format(accept: str | None, kind: str) -> None:
    content_type, names = _names(accept)
    assert content_type.startswith(kind)
    assert {"jaxserve:steps_total", "jaxserve:step_duration_seconds_bucket", "jaxserve:num_requests_running"} <= names
    assert {name for name in names if not name.startswith("jaxserve:")} == {
        name for name in names if name.startswith("process_")
    }


class Prometheus:
    """One that runs. `ask` returns the samples of a query: their values by their labels."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **params: str) -> Any:
        answer = http.get(f"{self._url}/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def ask(self, query: str) -> list[float]:
        found = self.get("query", query=query)
        assert found["resultType"] == "vector", found
        return [float(one["value"][1]) for one in found["result"]]

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return http.get(f"{self._url}/-/ready").status_code == 200
        return False


@contextlib.contextmanager
def _prometheus(folder: Path, target: str, program: str) -> Iterator[Prometheus]:
    """Scrapes `target` once a second, and knows the alerts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALERTS)],
                "scrape_configs": [
                    {
                        "job_name": "jaxserve",
                        "static_configs": [{"targets": [target], "labels": {"namespace": "default"}}],
                    }
                ],
            }
        )
    )
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            prometheus = Prometheus(port)
            until(lambda: prometheus.is_ready() or process.poll() is not None, "a Prometheus that is ready")
            assert process.poll() is None, (folder / "log").read_text()
            yield prometheus
        finally:
            process.terminate()
            process.wait(WAIT_S)


def _queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [
        query.replace("$model", ".*")
        .replace("$engine", ".*")
        .replace("$instance", ".*")
        .replace("$__rate_interval", "5m")
        for query in found
    ]


def _load(parts: Served) -> None:
    """Something of everything: answers and refusals, through both doors, and pages that push others to the host."""
    url = parts.http_url
    http.post(f"{url}/v1/completions", json={"prompt": secrets.token_hex(20), "max_tokens": 2})
    for body in ({"prompt": "abcdefgh", "max_tokens": 6, "n": 2}, {"prompt": "a", "max_tokens": 0}, {"prompt": 1}):
        http.post(f"{url}/v1/completions", json=body)
    http.get(f"{url}/nowhere")
    with Client(parts.address) as client:
        list(client.generate("abc", SamplingParams(max_tokens=4)))
        with contextlib.suppress(RequestFailed):
            list(client.generate("abc", SamplingParams(max_tokens=100_000)))
    until_idle(parts)


@contextlib.contextmanager
def _watching(parts: Served) -> Iterator[None]:
    """Pages are told of, although nobody listens."""
    events = PageEvents(EventsConfig(), port=0, replica=0)
    parts.scheduler.watch_pages(events)
    events.start(parts.runner.limits.page_size, parts.runner.limits.page_groups)
    try:
        yield
    finally:
        events.close()


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus on this machine: apt-get install prometheus")
    slots = HostSlots(num_slots=16, max_draining=8, max_loads=8)
    with (
        watched(
            grpc=True, drafts=True, num_pages=12, slots=slots, store=IdleStore(), adapters=byte_adapters(2)
        ) as parts,
        _watching(parts),
        _prometheus(tmp_path, parts.http_url.removeprefix("http://"), program) as found,
    ):
        until(lambda: found.ask("jaxserve:steps_total") == [0.0], "a first scrape, with the documented names")
        keda = [trigger["metadata"]["query"] for trigger in yaml.safe_load(KEDA.read_text())["spec"]["triggers"]]
        assert [found.ask(query) for query in keda] == [[0.0], [0.0]], "KEDA takes one number, without a request, too"
        left = dict.fromkeys(_queries(), "")
        left["jaxserve:kv_host_pages_total{event='saved'} > 0"] = left[
            "jaxserve:kv_events_total{state='noted'} > 0"
        ] = ""
        assert len(left) > 60
        deadline_s = time.monotonic() + 2 * WAIT_S
        empty = {query for query in left if any(name in query for name in ABSENT)}
        while left.keys() - empty:
            _load(parts)
            for query in [*left]:
                values = found.ask(query)
                left[query] = f"{len(values)} values, none of which is a number" if values else "nothing"
                if any(math.isfinite(value) for value in values):
                    del left[query]
            assert time.monotonic() < deadline_s, left
            time.sleep(0.5)
        assert left.keys() == empty, "these have data, and are listed as empty"
        (waiting,), (ttft_s,) = (found.ask(query) for query in keda)
        assert waiting >= 0 and ttft_s > 0
        for label in ("model_name", "engine"):
            assert found.get(f"label/{label}/values", **{"match[]": "jaxserve:steps_total"}), label
        [adapters] = found.get("query", query="jaxserve:lora_requests_info")["result"]
        assert adapters["metric"]["max_lora"] == "1" and float(adapters["value"][1]) == pytest.approx(
            time.time(), abs=99
        )
        refused = found.get("query", query="sum by (door) (jaxserve:refused_total) > 0")["result"]
        assert {one["metric"]["door"] for one in refused} == {"http", "grpc"}
        stored = set(found.get("label/__name__/values"))
        assert not {name for name in stored if name.startswith("jaxserve_")}
        _check_alerts(found, stored)


def _check_alerts(prometheus: Prometheus, stored: set[str]) -> None:
    """Each is evaluated without an error, on metrics that are there; of a server that is well, none fires."""
    wanted = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation of every alert")
    assert {rule["name"] for rule in rules()} == wanted
    for rule in rules():
        assert rule["health"] == "ok", rule
        assert rule["state"] != "firing", rule
        # A router is another process; `test_alerts_of_routers_name_what_routers_export` has its names.
        assert {name for name in NAME.findall(rule["query"]) if not name.startswith(ROUTER)} <= stored, rule


def test_each_alert_says_what_is_and_what_to_look_at() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "description"}, rule
            assert all(text.endswith(".") for text in rule["annotations"].values()), rule
            settings = re.findall(r"\b[a-z_/]+(?:\.[a-z_]+)+\b", rule["annotations"]["description"])
            known = {doc.name for doc in field_docs()}
            assert all(name in known or (DEPLOY.parent / name).is_file() for name in settings), settings


def test_alerts_of_routers_name_what_routers_export() -> None:
    """By the table of the documentation, which a test of routers holds against a router."""
    named = {name for name in NAME.findall(ALERTS.read_text()) if name.startswith(ROUTER)}
    shown = re.findall(r"`(jaxserve:router_[a-z_]+)`", (DEPLOY.parent / "docs" / "observability.md").read_text())
    assert len(named) >= 4 and named <= set(shown)


@pytest.mark.slow
def test_a_server_that_goes_raises_an_alert_and_is_shown(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no Prometheus on this machine: apt-get install prometheus")
    [dead] = [query for query in _queries() if query.startswith("count(up == 0")]

    def raised() -> set[str]:
        return {alert["labels"]["alertname"] for alert in found.get("alerts")["alerts"]}

    with contextlib.ExitStack() as server:
        parts = server.enter_context(watched())
        target = parts.http_url.removeprefix("http://")
        with _prometheus(tmp_path, target, program) as found:
            until(lambda: found.ask("jaxserve:engine_accepting") == [1.0], "a first scrape")
            until(lambda: "JaxserveAbsent" not in raised(), "an evaluation after it")
            assert found.ask(dead) == [0.0] and "JaxserveDown" not in raised()
            server.close()
            until(lambda: "JaxserveDown" in raised(), "the alert")  # pending: it fires after a minute
            assert found.ask(dead) == [1.0]


_SERVER = 'instance="a:1", job="j"'
_SERIES: dict[str, dict[str, str]] = {  # of each alert: samples of each minute that raise it in the tenth
    "JaxserveDown": {f"up{{{_SERVER}}}": "1x4 0x10", f"jaxserve:engine_accepting{{{_SERVER}}}": "1x4 _x10"},
    "JaxserveAbsent": {f"jaxserve:router_accepting{{{_SERVER}}}": "1x20"},
    "JaxserveRestarts": {
        f"process_start_time_seconds{{{_SERVER}}}": "1 1 2 2 3 3 4 4 4x10",
        f"jaxserve:router_accepting{{{_SERVER}}}": "1x20",
    },
    "JaxserveIncomplete": {f"jaxserve:router_degraded{{{_SERVER}}}": "1x20"},
    "JaxserveRouterMissesServer": {f'jaxserve:router_replica_well{{{_SERVER}, replica="b:2"}}': "1x4 0x10"},
    "JaxserveQuarantine": {f"jaxserve:router_quarantined{{{_SERVER}}}": "1x20"},
    "JaxserveReplicaDead": {f'jaxserve:engine_alive{{{_SERVER}, engine="1"}}': "0x20"},
}


@pytest.mark.parametrize("alert", _SERIES)
def test_alerts_fire(alert: str, tmp_path: Path) -> None:
    """Prometheus' own test of rules, with the series of a server or router that is in trouble, and without it."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    well = {f"up{{{_SERVER}}}": "1x20", f"jaxserve:engine_accepting{{{_SERVER}}}": "1x20"}
    for series, fires in ((_SERIES[alert], True), (well, False)):
        test = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                    "eval_time": "11m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }
        file = tmp_path / f"{fires}.yaml"
        file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
        done = subprocess.run([program, "test", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
