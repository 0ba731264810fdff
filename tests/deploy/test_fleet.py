"""The files of `deploy/fleet`, without a cluster: our schemas, and every name in them held against the others."""

import copy
import re
from pathlib import Path
from typing import Any

import check_crds  # pyright: ignore[reportMissingImports]  # of scripts/
import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import FILES, ROOT, SCHEMAS, check_custom, documents, of_kind, workloads

from jaxserve.serve.metrics import PREFIX

FOLDER = ROOT / "deploy/fleet"
PICKER, KEDA = FOLDER / "endpoint-picker.yaml", FOLDER / "keda.yaml"


def _one(path: Path, kind: str) -> dict[str, Any]:
    (document,) = of_kind(path, kind)
    return document


def test_every_document_follows_its_schema_and_the_page_names_its_file() -> None:
    page = (ROOT / "docs/fleets.md").read_text()
    for path in FOLDER.glob("*.yaml"):
        assert f"deploy/fleet/{path.name}" in page
        for document in documents(path):
            if f"{document['apiVersion']} {document['kind']}" in SCHEMAS:
                check_custom(document)
            else:
                kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


MISTAKES = ({"targetPort": 8000}, {"appProtocol": "h2c"}, {"targetPorts": []}, {"selector": 1})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_our_schemas_can_fail(mistake: dict[str, Any]) -> None:
    pool = copy.deepcopy(_one(PICKER, "InferencePool"))
    pool["spec"] |= mistake
    with pytest.raises(jsonschema.ValidationError):
        check_custom(pool)


def test_the_script_finds_what_a_crd_does_not_allow(tmp_path: Path) -> None:
    """A CRD without `appProtocol`, and with a picker that is required, and called differently."""
    pool = {"selector": {"type": "object"}, "targetPorts": {"type": "array", "items": {"type": "object"}}}
    schema = {"type": "object", "required": ["picker"], "properties": {**pool, "picker": {"type": "string"}}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": schema}}}}
    crd = {
        "kind": "CustomResourceDefinition",
        "spec": {
            "group": "inference.networking.k8s.io",
            "names": {"kind": "InferencePool"},
            "versions": [version],
        },
    }
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(crd))
    faults = "\n".join(check_crds.check([tmp_path / "crd.yaml"]))
    assert "'picker' is a required property" in faults and "'appProtocol'" in faults
    assert "InferencePool: ['picker'] required there" in faults
    assert "InferencePool: there is no field endpointPickerRef" in faults
    assert "no file has a CRD of keda.sh/v1alpha1 ScaledObject" in faults


def test_the_pool_holds_the_pods_that_serve_and_the_picker_reads_its_config(tmp_path: Path) -> None:
    pool, service, deployment = (_one(PICKER, kind) for kind in ("InferencePool", "Service", "Deployment"))
    selector = pool["spec"]["selector"]["matchLabels"].items()
    for path in FILES:
        for w in workloads(path, tmp_path):
            # A picker chooses servers, and a worker of several hosts has no port.
            is_server = w.name != "jaxserve-router" and not w.name.endswith("/worker")
            assert (selector <= w.labels.items()) == is_server, w.name
            if is_server:
                assert [port["number"] for port in pool["spec"]["targetPorts"]] == [w.config.config.serve.http.port]
    assert pool["spec"]["appProtocol"] == "http", "the HTTP door speaks HTTP/1.1"
    ref = pool["spec"]["endpointPickerRef"]
    assert ref["name"] == service["metadata"]["name"] == deployment["metadata"]["name"]
    assert [ref["port"]["number"]] == [port["port"] for port in service["spec"]["ports"]]
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert arguments["pool-name"] == pool["metadata"]["name"]
    assert pool["apiVersion"].startswith(arguments["pool-group"])
    assert (ports["ext-proc"], ports["health"]) == (int(arguments["grpc-port"]), int(arguments["grpc-health-port"]))
    assert {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("readiness", "liveness")} == {ports["health"]}
    config = _one(PICKER, "ConfigMap")
    (mount,) = container["volumeMounts"]
    (volume,) = template["spec"]["volumes"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert arguments["config-file"] in [f"{mount['mountPath']}/{file}" for file in config["data"]]
    assert template["spec"]["serviceAccountName"] == _one(PICKER, "ServiceAccount")["metadata"]["name"]
    binding, role = _one(PICKER, "RoleBinding"), _one(PICKER, "Role")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [template["spec"]["serviceAccountName"]]
    (rule,) = _one(PICKER, "HTTPRoute")["spec"]["rules"]
    assert [backend["name"] for backend in rule["backendRefs"]] == [pool["metadata"]["name"]]


def test_the_plugins_of_the_picker_refer_to_each_other() -> None:
    (text,) = _one(PICKER, "ConfigMap")["data"].values()
    config = yaml.safe_load(text)
    plugins = {plugin.get("name", plugin["type"]): plugin.get("parameters", {}) for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} <= plugins.keys()
    metrics = plugins["core-metrics-extractor"]
    assert metrics["defaultEngine"] in [engine["name"] for engine in metrics["engineConfigs"]]


def test_keda_scales_a_workload_that_is_there_by_queue_and_first_tokens(tmp_path: Path) -> None:
    spec = _one(KEDA, "ScaledObject")["spec"]
    target = spec["scaleTargetRef"]
    found = [d for path in FILES for d in documents(path) if d["metadata"]["name"] == target["name"]]
    (scaled,) = [d for d in found if (d["apiVersion"], d["kind"]) == (target["apiVersion"], target["kind"])]
    assert not [d for path in FILES for d in of_kind(path, "HorizontalPodAutoscaler")
                if d["spec"]["scaleTargetRef"]["name"] == target["name"]], "two autoscalers would fight"  # fmt: skip
    assert spec["maxReplicaCount"] > spec["minReplicaCount"] >= 1, "the first request would wait for a whole start"
    assert spec["minReplicaCount"] == scaled["spec"]["replicas"]
    named = {trigger["name"]: set(re.findall(rf"{PREFIX}[a-z0-9_]+", trigger["metadata"]["query"]))
             for trigger in spec["triggers"]}  # fmt: skip
    assert named == {
        "queue": {"jaxserve:num_requests_waiting"},
        "ttft-p95": {"jaxserve:time_to_first_token_seconds_bucket"},
    }
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    (w,) = [w for path in FILES for w in workloads(path, tmp_path) if w.name == target["name"]]
    assert min(policy["periodSeconds"] for policy in down["policies"]) >= w.pod["terminationGracePeriodSeconds"]
