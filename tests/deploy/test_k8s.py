"""The Kubernetes manifests, without Kubernetes: its schemas, and every name and number held against the others."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from command_lines import parse_jaxserve, parse_run
from manifests import CONFIG_FOLDER, FILES, ROOT, Workload, check_custom, documents, injected, of_kind, workloads

from jaxserve.config import ENVIRONMENT, load_config
from jaxserve.config.schema import HostsConfig
from jaxserve.hosts import check_hosts
from jaxserve.serve import service
from jaxserve.serve.grpc_server import LIVE_NAME, SERVICE_NAME

OLDEST = "1.30"  # the first in which the sleep of preStop is on by default
WITHOUT_PORT = {"jaxserve-hosts/worker"}
ACCELERATORS = ("nvidia.com/gpu", "google.com/tpu")


@pytest.fixture(params=FILES, ids=lambda p: p.name)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def found(path: Path, tmp_path: Path) -> list[Workload]:
    return workloads(path, tmp_path)


@pytest.fixture
def serving(found: list[Workload]) -> list[Workload]:
    return [w for w in found if w.name not in WITHOUT_PORT]


def test_the_files_are_those_of_the_readme() -> None:
    readme = (ROOT / "deploy/README.md").read_text()
    assert len(FILES) == 6
    assert all(f"k8s/{path.name}" in readme for path in FILES)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_document_follows_the_schema(path: Path, version: str) -> None:
    for document in documents(path):
        if document["kind"] == "LeaderWorkerSet":
            check_custom(document)
            group = document["spec"]["leaderWorkerTemplate"]
            for template in (group["leaderTemplate"], group["workerTemplate"]):
                metadata = {"name": "x", **template["metadata"]}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
                kubernetes_validate.validate(pod, version, strict=True)
        else:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_can_fail(path: Path) -> None:
    document = documents(path)[0] | {"spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, OLDEST, strict=True)


def test_commands_and_images_exist(found: list[Workload]) -> None:
    for w in found:
        name, _, tag = w.container["image"].partition(":")
        assert name == "jaxserve"
        assert (ROOT / f"deploy/docker/{tag}.Dockerfile").exists()
        if "command" in w.container:
            assert w.container["command"] == ["jaxserve"]
            command, options = parse_jaxserve(w.container["args"])
            assert command == "route"
        else:
            options = parse_run(w.container["args"])
        mounts = {m["name"]: m["mountPath"] for m in w.container["volumeMounts"]}
        assert mounts["config"] == CONFIG_FOLDER
        assert str(options["config"]) == f"{CONFIG_FOLDER}/config.yaml"
        model = w.config.config.model.path
        assert model == "demo" or model.startswith(f"{mounts['models']}/")


def test_probes_ask_the_served_port_for_names_that_exist(serving: list[Workload]) -> None:
    for w in serving:
        port = w.config.config.serve.grpc.port
        assert w.ports["grpc"] == port
        assert w.config.config.serve.host == "0.0.0.0"
        asked = {kind: w.container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")}
        assert asked == {
            "startup": {"port": port, "service": LIVE_NAME},
            "readiness": {"port": port, "service": SERVICE_NAME},
            "liveness": {"port": port, "service": LIVE_NAME},
        }
        liveness = w.container["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


def test_servers_have_the_http_door_and_say_where_their_metrics_are(serving: list[Workload]) -> None:
    for w in serving:
        port = w.config.config.serve.http.port
        assert w.ports["http"] == port
        annotations = w.template["metadata"]["annotations"]
        assert annotations == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(port),
            "prometheus.io/path": "/metrics",
        }


def test_whatever_serves_may_be_reached(path: Path, serving: list[Workload]) -> None:
    """A policy that keeps others from a pod lets them in where it serves."""
    for policy in of_kind(path, "NetworkPolicy"):
        for w in serving:
            if policy["spec"]["podSelector"]["matchLabels"].items() <= w.labels.items():
                open_to_all = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
                ports = {port["port"] for rule in open_to_all for port in rule["ports"]}
                assert {w.ports["grpc"], w.ports["http"]} <= ports


def test_followers_have_neither_probes_nor_a_grpc_port(tmp_path: Path) -> None:
    followers = [w for path in FILES for w in workloads(path, tmp_path) if w.name in WITHOUT_PORT]
    assert {w.name for w in followers} == WITHOUT_PORT, "each is there, by this name"
    for w in followers:
        assert not [key for key in w.container if key.endswith("Probe")]
        assert "grpc" not in w.ports


def test_pods_may_stay_for_as_long_as_a_drain_takes(serving: list[Workload]) -> None:
    for w in serving:
        leaving_s = w.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        settings = w.config.config.serve
        ending_s = settings.drain_s + settings.export_s + service._TURN_S + service._STOP_S + service._FAREWELL_S
        assert w.pod["terminationGracePeriodSeconds"] > leaving_s + ending_s


def test_pods_are_confined(found: list[Workload]) -> None:
    for w in found:
        dockerfile = (ROOT / f"deploy/docker/{w.container['image'].split(':')[1]}.Dockerfile").read_text()
        security: dict[str, Any] = w.pod["securityContext"]
        assert security["runAsNonRoot"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in dockerfile
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert w.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert w.pod["automountServiceAccountToken"] is False
        writable = {m["mountPath"] for m in w.container["volumeMounts"] if not m.get("readOnly")}
        needed = {"/tmp"} if w.name == "jaxserve-router" else {"/tmp", "/var/cache/jaxserve"}
        assert writable == needed
        assert w.name == "jaxserve-router" or "JAXSERVE_COMPILE_CACHE=/var/cache/jaxserve" in dockerfile
        assert {m["name"] for m in w.container["volumeMounts"]} == {v["name"] for v in w.pod["volumes"]}


def test_resources_are_asked_for_and_bounded(found: list[Workload]) -> None:
    for w in found:
        asked, limits = w.container["resources"]["requests"], w.container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(asked)
        assert "memory" in limits
        for name in ACCELERATORS:
            assert asked.get(name) == limits.get(name)


def test_as_many_devices_as_the_config_wants(found: list[Workload]) -> None:
    parallel = {w.name: w.config.config.parallel for w in found}
    for w in found:
        p = parallel[w.name]
        wanted = p.tensor * p.pipeline * p.data
        num_processes = w.config.config.hosts.num_processes
        limits = w.container["resources"]["limits"]
        devices = sum(limits.get(name, 0) for name in ACCELERATORS) * num_processes
        assert devices in (0, wanted)
        if "google.com/tpu" in limits:
            topology = w.pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
            assert prod(int(side) for side in topology.split("x")) == wanted


@pytest.mark.parametrize(
    ("file", "planned"),
    [
        ("cuda.yaml", "llama3.1-8b-h200.yaml"),
        ("tpu-single-host.yaml", "llama3.1-8b-v5e-4.yaml"),
        ("tpu-multi-host.yaml", "llama3.3-70b-v5e-16.yaml"),
    ],
)
def test_sizes_are_those_that_the_planner_has_seen(file: str, planned: str, tmp_path: Path) -> None:
    shipped = load_config(ROOT / "configs" / planned, environ={}).config
    for w in workloads(ROOT / "deploy/k8s" / file, tmp_path):
        mine = w.config.config
        assert (mine.cache, mine.sched, mine.parallel) == (shipped.cache, shipped.sched, shipped.parallel)
        assert mine.model.model_copy(update={"path": shipped.model.path}) == shipped.model


def test_services_lead_somewhere(path: Path, found: list[Workload]) -> None:
    for document in of_kind(path, "Service"):
        selector = document["spec"]["selector"].items()
        selected = [w for w in found if selector <= w.labels.items()]
        assert selected, f"{document['metadata']['name']} selects no pod"
        for port in document["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert any(target in (*w.ports.keys(), *w.ports.values()) for w in selected)
    for document in of_kind(path, "PodDisruptionBudget"):
        assert any(document["spec"]["selector"]["matchLabels"] == w.labels for w in found)
    for document in of_kind(path, "HorizontalPodAutoscaler"):
        assert document["spec"]["scaleTargetRef"]["name"] in {w.name for w in found}
    for w in found:
        if w.document["kind"] == "Deployment":  # the controller of a LeaderWorkerSet has labels of its own
            assert w.document["spec"]["selector"]["matchLabels"] == w.labels


def test_the_router_finds_the_replicas_of_each_other_file_and_of_no_two(tmp_path: Path) -> None:
    (router,) = workloads(ROOT / "deploy/k8s/router.yaml", tmp_path)
    others = [path for path in FILES if path.name != "router.yaml"]
    services = {name: s for path in others for s in of_kind(path, "Service")
                if (name := s["metadata"]["name"]).startswith("jaxserve-replicas-")}  # fmt: skip
    assert len(services) == len(others), "one of each, by a name of its own"
    (named,) = router.config.config.route.replicas
    beginning = named.removesuffix("cpu:8500")
    assert beginning == "dns:///jaxserve-replicas-" and router.config.config.route.tokenizer == "demo"
    text = router.file.read_text()
    assert all(f"-{name.removeprefix('jaxserve-replicas-')}" in text for name in services)
    for path in others:
        for w in workloads(path, tmp_path):
            joined = [s for s in services.values() if s["spec"]["selector"].items() <= w.labels.items()]
            assert len(joined) == (0 if w.name in WITHOUT_PORT else 1), w.name
            assert all(s in of_kind(path, "Service") for s in joined)
    for one in services.values():
        assert one["spec"]["clusterIP"] == "None"
        assert [port["port"] for port in one["spec"]["ports"]] == [8500, 8000]
    claims = [c for path in others for c in of_kind(path, "PersistentVolumeClaim")]
    assert all(claim == claims[0] for claim in claims)


def test_the_router_can_have_keys_of_a_secret(tmp_path: Path) -> None:
    """The lines about keys are comments, which are uncommented here; the Secret's files are where they say."""
    path = ROOT / "deploy/k8s/router.yaml"
    (w,) = workloads(path, tmp_path)
    (volume,) = [v for v in w.pod["volumes"] if "secret" in v]
    (folder,) = [m["mountPath"] for m in w.container["volumeMounts"] if m["name"] == volume["name"]]
    assert volume["secret"]["optional"], "it starts without keys, too"
    assert f"kubectl create secret generic {volume['secret']['secretName']} --from-file=keys" in path.read_text()
    keyed = re.sub(
        r"^( *)# (\w+_file:)", r"\1\2", of_kind(path, "ConfigMap")[0]["data"]["config.yaml"], flags=re.MULTILINE
    )
    (tmp_path / "keyed.yaml").write_text(keyed)
    serve = load_config(tmp_path / "keyed.yaml", environ={}).config.serve
    files = [serve.admin_tokens_file, serve.grpc.tokens_file, serve.http.api_keys_file]
    assert files == [f"{folder}/admins", f"{folder}/keys", f"{folder}/keys"]


def test_pods_log_for_collectors_and_have_no_variables_of_services(found: list[Workload]) -> None:
    for w in found:
        assert w.config.config.runtime.log_format == "json"
        assert w.pod["enableServiceLinks"] is False


def test_the_readme_names_the_oldest_kubernetes() -> None:
    assert f"Kubernetes {OLDEST} or later" in (ROOT / "deploy/README.md").read_text()


def test_routers_try_as_often_as_it_takes_to_find_a_guilty_request(tmp_path: Path) -> None:
    """The numbers are those of the documentation."""
    [least] = re.findall(r"needs `route\.retries` of (\d+) or more", (ROOT / "docs/replicas.md").read_text())
    in_pods = [(w.name, w.config) for file in FILES for w in workloads(file, tmp_path)]
    beside = [(file.name, load_config(file, environ={})) for file in sorted((ROOT / "configs").glob("*.yaml"))]
    resolved = {name: config.config.route.retries for name, config in (*in_pods, *beside)}
    assert "jaxserve-router" in resolved
    assert {name: retries for name, retries in resolved.items() if retries < int(least)} == {}


def test_plans_come_from_the_pods_of_the_service_alone(tmp_path: Path) -> None:
    path = ROOT / "deploy/k8s/tpu-multi-host.yaml"
    leader, follower = workloads(path, tmp_path)
    (policy,) = [p["spec"] for p in of_kind(path, "NetworkPolicy")]
    assert policy["policyTypes"] == ["Ingress"]
    stranger = {"app.kubernetes.io/name": "jaxserve", "app.kubernetes.io/instance": "another"}

    def lets_in(labels: Mapping[str, str], port: int) -> bool:
        return any(
            ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
            and ("from" not in rule or any(_selects(peer, labels) for peer in rule["from"]))
            for rule in policy["ingress"]
        )

    for w in (leader, follower):
        assert _selects({"podSelector": policy["podSelector"]}, w.labels)
        for port in (leader.ports["plans"], leader.ports["coordinator"]):
            assert lets_in(w.labels, port)
            assert not lets_in(stranger, port)
    assert lets_in(stranger, leader.ports["grpc"])


def _selects(peer: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(peer) == {"podSelector"} and set(peer["podSelector"]) == {"matchLabels"}, "the test knows no others"
    return peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_processes_of_several_hosts_know_each_other(tmp_path: Path) -> None:
    path = ROOT / "deploy/k8s/tpu-multi-host.yaml"
    leader, worker = workloads(path, tmp_path)
    spec = leader.document["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart", "all start together"
    assert spec["startupPolicy"] == "LeaderCreated", "the leader is ready once the workers are there"
    hosts: HostsConfig = leader.config.config.hosts
    assert hosts == worker.config.config.hosts.model_copy(update={"process_id": 0})
    assert worker.config.config.hosts.process_id == 1
    assert hosts.num_processes == spec["leaderWorkerTemplate"]["size"]
    address = injected(leader.document, 0)["LWS_LEADER_ADDRESS"]
    assert hosts.coordinator == f"{address}:{leader.ports['coordinator']}"
    assert leader.ports["plans"] == hosts.plan_port
    names = {v["configMap"]["name"] for w in (leader, worker) for v in w.pod["volumes"] if "configMap" in v}
    assert len(names) == 1
    for w in (leader, worker):
        environ = {e["name"]: e["value"] for e in w.container["env"]}
        assert {name for name in environ if name.startswith("JAXSERVE_")} <= set(ENVIRONMENT)
        assert int(environ["TPU_PROCESS_PORT"]) not in w.ports.values()
        (volume,) = [v["secret"] for v in w.pod["volumes"] if "secret" in v]
        (folder,) = [m["mountPath"] for m in w.container["volumeMounts"] if m["name"] == "hosts-secret"]
        header = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        assert f"kubectl create secret generic {volume['secretName']} --from-literal=secret=" in header
        assert hosts.secret_file == f"{folder}/secret"
        assert volume["defaultMode"] == 0o440 and w.pod["securityContext"]["fsGroup"], "the user of the pod can read it"
    assert worker.pod["terminationGracePeriodSeconds"] >= leader.pod["terminationGracePeriodSeconds"], "it ends last"
    check_hosts(leader.config.config)
    (replicas,) = of_kind(path, "Service")
    assert not replicas["spec"]["selector"].items() <= worker.labels.items(), "only process 0 answers"


def test_servers_with_roles_reach_each_other_and_others_do_not(tmp_path: Path) -> None:
    path = ROOT / "deploy/k8s/apart-cuda.yaml"
    found = workloads(path, tmp_path)
    handoffs = {w.config.config.handoff.role: w.config.config.handoff for w in found}
    assert set(handoffs) == {"prefill", "decode"}
    assert handoffs["decode"] == handoffs["prefill"].model_copy(update={"role": "decode"}), "the same but for the role"
    for w in found:
        handoff, cache = w.config.config.handoff, w.config.config.cache
        assert w.ports["pages"] == handoff.port and cache.host_bytes > 0
        assert w.container["args"][-1] == f"handoff.address=$(POD_IP):{handoff.port}"
        (volume,) = [v["secret"] for v in w.pod["volumes"] if "secret" in v]
        (folder,) = [m["mountPath"] for m in w.container["volumeMounts"] if m["name"] == "handoff"]
        files = [handoff.secret_file, handoff.tls_cert, handoff.tls_key, handoff.tls_ca]
        header = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        assert f"generic {volume['secretName']} --from-literal=secret=" in header
        for name in files:
            assert name is not None and name.startswith(f"{folder}/") and Path(name).name in header
    (policy,) = [p["spec"] for p in of_kind(path, "NetworkPolicy")]
    inside, outside = policy["ingress"]
    assert all(_selects({"podSelector": policy["podSelector"]}, w.labels) for w in found)
    assert all(_selects(peer, w.labels) for peer in inside["from"] for w in found) and "ports" not in inside
    assert found[0].ports["pages"] not in [port["port"] for port in outside["ports"]]
    shipped = load_config(ROOT / "deploy/../configs/llama3.1-8b-h200.yaml", environ={}).config
    for w in found:
        assert w.config.config.sched == shipped.sched and w.config.config.model.max_len == shipped.model.max_len
