"""Compose, systemd and Prometheus' operator, without any of them: every name and number held against the others."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import parse_jaxserve, parse_run
from manifests import FILES, ROOT, check_custom, documents, workloads

from jaxserve.config import load_config
from jaxserve.config.schema import ServeConfig
from jaxserve.serve import service

COMPOSE, UNIT = ROOT / "deploy/compose/compose.yaml", ROOT / "deploy/systemd/jaxserve.service"


def _ending_s(serve: ServeConfig) -> float:
    return serve.drain_s + serve.export_s + service._TURN_S + service._STOP_S + service._FAREWELL_S


def _compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)s", text)
    assert found is not None, text
    return int(found[1])


def _unit() -> tuple[configparser.RawConfigParser, list[str]]:
    """The unit, and its `Environment=` lines with those that are comments."""
    text = UNIT.read_text()
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = lambda optionstr: optionstr
    parser.read_string(text)
    return parser, re.findall(r"^#?Environment=(\S+)$", text, re.MULTILINE)


def test_the_server_of_compose_reads_its_config_and_has_time_to_drain() -> None:
    tree = _compose()
    server = tree["services"]["server"]
    (config,) = server["configs"]
    assert str(parse_run(server["command"])["config"]) == config["target"]
    serve = load_config(COMPOSE.parent / tree["configs"][config["source"]]["file"], environ={}).config.serve
    assert _seconds(server["stop_grace_period"]) > _ending_s(serve)
    assert server["ports"] == [f"127.0.0.1:{port}:{port}" for port in (serve.http.port, serve.grpc.port)]
    assert serve.host == "0.0.0.0" and serve.http.open_metrics, "Prometheus has no key"
    assert {serve.http.api_keys_file, serve.grpc.tokens_file} == {f"/run/secrets/{name}" for name in server["secrets"]}
    build = server["build"]
    context = (COMPOSE.parent / build["context"]).resolve()
    dockerfile = (context / build["dockerfile"]).read_text()
    assert context == ROOT and server["image"] in dockerfile
    (volume,) = server["volumes"]
    assert f"JAXSERVE_COMPILE_CACHE={volume.partition(':')[2]}" in dockerfile and server["read_only"]


def test_the_parts_of_compose_refer_to_each_other() -> None:
    tree = _compose()
    text = COMPOSE.read_text()
    ignored = (COMPOSE.parent / ".gitignore").read_text().split()
    for one in tree["services"].values():
        assert {config["source"] for config in one.get("configs", [])} <= tree["configs"].keys()
        assert set(one.get("secrets", [])) <= tree["secrets"].keys()
        assert {volume.partition(":")[0] for volume in one.get("volumes", [])} <= tree["volumes"].keys()
        assert all(port.startswith("127.0.0.1:") for port in one["ports"]), "nobody else is let in unasked"
        assert ":" in one["image"], "a version"
    for secret in tree["secrets"].values():
        assert secret["file"] in ignored and f"> {secret['file']}" in text
    for config in tree["configs"].values():
        assert "content" in config or (COMPOSE.parent / config["file"]).is_file()


def test_prometheus_and_grafana_of_compose_have_what_is_shipped() -> None:
    tree = _compose()
    targets = {c["source"]: c["target"] for one in tree["services"].values() for c in one["configs"]}
    prometheus = yaml.safe_load(tree["configs"]["prometheus"]["content"])
    assert prometheus["rule_files"] == [targets["alerts"]]
    serve = load_config(COMPOSE.parent / "jaxserve.yaml", environ={}).config.serve
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"server:{serve.http.port}"]}]
    (source,) = yaml.safe_load(tree["configs"]["datasource"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (provider,) = yaml.safe_load(tree["configs"]["dashboards"]["content"])["providers"]
    assert Path(targets["dashboard"]).parent == Path(provider["options"]["path"])
    password = tree["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert password == f"/run/secrets/{tree['services']['grafana']['secrets'][0]}"


def test_the_unit_runs_a_command_that_exists_and_has_time_to_drain() -> None:
    unit, variables = _unit()
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "jaxserve"
    command, options = parse_jaxserve(arguments)
    assert command == "run" and str(options["config"]) == "/etc/jaxserve/config.yaml"
    credentials = f"/run/credentials/{UNIT.name}"  # what systemd puts there for %d
    environ = dict(variable.replace("%d", credentials).split("=", 1) for variable in variables)
    resolved = load_config(UNIT.parent / "jaxserve.yaml", environ=environ).config
    assert int(unit["Service"]["TimeoutStopSec"]) > _ending_s(resolved.serve)
    assert resolved.serve.grpc.port is not None and resolved.serve.http.port is not None
    assert resolved.serve.host == ServeConfig().host == "127.0.0.1", "nobody else is let in unasked"
    assert resolved.serve.http.api_keys_file == resolved.serve.grpc.tokens_file == f"{credentials}/keys"
    assert unit["Service"]["CacheDirectory"] == Path(environ["JAXSERVE_COMPILE_CACHE"]).name
    assert (unit["Service"]["KillSignal"], unit["Service"]["KillMode"]) == ("SIGTERM", "mixed")
    wait_s = sum([service._TURN_S, service._STOP_S, service._FAREWELL_S])
    assert f"and {wait_s:g} seconds" in UNIT.read_text()
    (variable,) = re.findall(r"such as (JAXSERVE_\w+=\w+)", UNIT.read_text())
    assert load_config(environ=dict([variable.split("=")])).config.serve.http.port == 8080


def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd on this machine")

    def complaints(text: str) -> str:
        copy = tmp_path / UNIT.name
        copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
        done = subprocess.run([program, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
        return "\n".join(line for line in done.stderr.splitlines() if UNIT.name in line)

    assert "Unknown key" in complaints(UNIT.read_text().replace("[Service]", "[Service]\nNoSuchKey=1"))
    assert complaints(UNIT.read_text()) == ""


def test_the_pod_monitor_selects_every_pod_that_has_metrics(tmp_path: Path) -> None:
    (monitor,) = documents(ROOT / "deploy/prometheus/podmonitor.yaml")
    check_custom(monitor)
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for path in FILES:
        for w in workloads(path, tmp_path):
            selected = (
                monitor["spec"]["selector"]["matchLabels"].items() <= w.labels.items()
                and w.labels[expression["key"]] in expression["values"]
            )
            annotations = w.template["metadata"].get("annotations", {})
            assert selected == ("prometheus.io/scrape" in annotations), w.name
            assert not selected or (
                endpoint["port"] in w.ports and endpoint["path"] == annotations["prometheus.io/path"]
            )


def test_the_readme_names_them() -> None:
    readme = (ROOT / "deploy/README.md").read_text()
    assert all(
        name in readme for name in ("compose/compose.yaml", "systemd/jaxserve.service", "prometheus/podmonitor.yaml")
    )
