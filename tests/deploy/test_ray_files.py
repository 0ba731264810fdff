"""The Ray Serve files, without a cluster: Ray's own schema, our options, and the application that they build."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.fleet.options import FleetOptions

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/ray"
IMAGE_FOLDER = "/opt/jaxserve/"


def _rayservice() -> tuple[dict[str, Any], dict[str, Any]]:
    service, front = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
    return service, front


def _serve_configs() -> dict[str, dict[str, Any]]:
    embedded = yaml.safe_load(_rayservice()[0]["spec"]["serveConfigV2"])
    files = {name: yaml.safe_load((FOLDER / name).read_text()) for name in ("serve.yaml", "apart.yaml")}
    return {**files, "rayservice.yaml": embedded}


@pytest.fixture(params=["serve.yaml", "apart.yaml", "rayservice.yaml"])
def deployed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _serve_configs()[request.param]


def test_ray_takes_the_file(deployed: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(deployed)
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert schema.grpc_options.port == 8500
    for path in schema.grpc_options.grpc_servicer_functions:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_every_method_of_the_services_is_there(deployed: dict[str, Any]) -> None:
    from grpc_health.v1 import health_pb2

    from jaxserve.fleet.ray_ingress import Ingress
    from jaxserve.serve.gen import inference_pb2 as pb

    assert len(deployed["grpc_options"]["grpc_servicer_functions"]) == 2
    services = (pb.DESCRIPTOR.services_by_name["Inference"], health_pb2.DESCRIPTOR.services_by_name["Health"])
    names = {method.name for service in services for method in service.methods}
    # Listing all health names is for people with tools, and has no meaning before many replicas.
    assert names - {"List"} <= set(vars(Ingress))


def test_our_options_build_an_application(
    deployed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray.serve import Application

    from jaxserve.fleet.ray_app import build_app

    monkeypatch.chdir(ROOT)
    args = dict(deployed["applications"][0]["args"])
    args["config"] = args["config"].replace(IMAGE_FOLDER, "")
    if "prefill" in args:
        (tmp_path / "secret").write_text("0123456789abcdef0123")
        args["overrides"] = {**args["overrides"], "handoff.secret_file": str(tmp_path / "secret")}
    options = FleetOptions(**args)
    assert isinstance(build_app(options), Application)
    config = load_config(options.config, options.overrides).config
    assert config.model.path == "demo"
    assert options.max_replicas > options.min_replicas


def test_the_deployment_drains_and_routes_as_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.fleet.ray_app import build_engine_deployment

    monkeypatch.chdir(ROOT)
    options = FleetOptions(config="configs/ray-demo.yaml", min_replicas=2, max_replicas=3, cpus_per_replica=0.5)
    resolved = load_config(options.config, {"route.policy": "least_load", "route.slack": 3, "serve.drain_s": 7})
    deployment = build_engine_deployment(options, resolved, "Engine", resolved.config.route.policy)
    config = deployment._deployment_config
    assert config.graceful_shutdown_timeout_s > 7 + resolved.config.serve.export_s
    assert config.autoscaling_config is not None
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (2, 3)
    assert config.max_ongoing_requests > resolved.config.sched.max_waiting
    assert config.request_router_config.request_router_kwargs["policy"] == "least_load"
    assert config.request_router_config.request_router_kwargs["slack"] == 3
    assert deployment.ray_actor_options is not None
    assert deployment.ray_actor_options["num_cpus"] == 0.5


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="below min_replicas"):
        FleetOptions(config="x", min_replicas=3, max_replicas=2)
    with pytest.raises(ValueError, match="replicas_min"):
        FleetOptions.model_validate({"config": "x", "replicas_min": 3})


def test_a_model_over_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.fleet.ray_app import build_app

    monkeypatch.chdir(ROOT)
    overrides = {"hosts.num_processes": 2, "hosts.coordinator": "a:1"}
    with pytest.raises(ConfigError, match=r"hosts\.num_processes is 2"):
        build_app(FleetOptions(config="configs/ray-demo.yaml", overrides=overrides))


@pytest.mark.parametrize(
    ("overrides", "prefill", "message"),
    [
        ({"handoff.secret_file": "SECRET"}, None, "no replica computes prompts for others; set `prefill`"),
        ({}, {}, r"handoff\.secret_file is not set"),
        ({"handoff.secret_file": "SECRET"}, {}, r"set cache\.host_bytes"),
        ({"handoff.secret_file": "SECRET", "handoff.role": "decode"}, {}, r"handoff\.role is set, but the fleet"),
        ({"handoff.secret_file": "SECRET", "handoff.port": 8511}, {}, r"handoff\.port is set, but replicas on one"),
    ],
)
def test_settings_of_handoffs_that_no_fleet_can_have_are_refused(
    overrides: dict[str, object], prefill: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from jaxserve.fleet.ray_app import build_app

    monkeypatch.chdir(ROOT)
    (tmp_path / "secret").write_text("0123456789abcdef0123")
    overrides = {name: str(tmp_path / "secret") if value == "SECRET" else value for name, value in overrides.items()}
    with pytest.raises(ConfigError, match=message):
        build_app(FleetOptions(config="configs/ray-demo.yaml", overrides=overrides, prefill=prefill))


@pytest.mark.parametrize(
    "setting",
    [
        *("serve.grpc.tokens_file", "serve.grpc.tls_cert", "serve.grpc.tls_client_ca", "serve.admin_tokens_file"),
        *("serve.http.api_keys_file", "serve.http.tls_client_ca"),
    ],
)
def test_a_fleet_with_keys_is_refused_since_nobody_would_ask_for_them(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxserve.fleet.ray_app import build_app

    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=rf"{re.escape(setting)} is set, but callers of a fleet come to Ray's proxy"):
        build_app(FleetOptions(config="configs/ray-demo.yaml", overrides={setting: "a-file"}))


def test_the_pods_of_the_rayservice_are_pods() -> None:
    service, front = _rayservice()
    kubernetes_validate.validate(front, kubernetes_validate.latest_version(), strict=True)
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": group["template"]["metadata"]}
        pod["metadata"] = {"name": "x", **pod["metadata"]}
        pod["spec"] = group["template"]["spec"]
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "jaxserve:cpu"
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
    (worker,) = cluster["workerGroupSpecs"]
    args = _serve_configs()["rayservice.yaml"]["applications"][0]["args"]
    asked = worker["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert float(asked["cpu"]) >= args["cpus_per_replica"], "a replica fits into a worker"
    assert worker["maxReplicas"] >= args["max_replicas"]
    assert front["spec"]["selector"] == worker["template"]["metadata"]["labels"]
    from jaxserve.fleet.ray_app import _leaving_s

    leaving_s = _leaving_s(load_config(ROOT / "configs/ray-demo.yaml").config)
    assert worker["template"]["spec"]["terminationGracePeriodSeconds"] > leaving_s
    assert cluster["headGroupSpec"]["rayStartParams"]["disable-usage-stats"] == "true"
    assert "RAY_USAGE_STATS_ENABLED=0" in (ROOT / "deploy/docker/cpu.Dockerfile").read_text()


def test_paths_in_the_files_are_in_the_repository() -> None:
    for name, deployed in _serve_configs().items():
        path = deployed["applications"][0]["args"]["config"]
        assert os.path.exists(ROOT / path.replace(IMAGE_FOLDER, "")), name
