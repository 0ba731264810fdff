"""What the manifest tests share: every document of `deploy/`, and the pods in them."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from jaxserve.config import ResolvedConfig, load_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/k8s").glob("*.yaml"))
SCHEMAS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "crd_schemas.yaml").read_text())
CONFIG_FOLDER = "/etc/jaxserve"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment, or the leader or the workers of a LeaderWorkerSet, with the config of its pods.

    Attributes:
      name: of the object; with `/leader` or `/worker` of a LeaderWorkerSet.
      document: all of it.
      template: of its pods.
      container: the only one in a pod.
      config: what `--config` names there, with the environment of a pod: the leader's, or that of worker 1.
    """

    file: Path
    name: str
    document: Mapping[str, Any]
    template: Mapping[str, Any]
    container: Mapping[str, Any]
    config: ResolvedConfig

    @property
    def pod(self) -> Mapping[str, Any]:
        return self.template["spec"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents(path) if document["kind"] in kinds]


def check_custom(document: Mapping[str, Any]) -> None:
    """Raises jsonschema.ValidationError for what our schema of the kind of custom resource does not allow."""
    jsonschema.validate(document["spec"], SCHEMAS[f"{document['apiVersion']} {document['kind']}"])


def workloads(path: Path, folder: Path) -> list[Workload]:
    """Those of one file; `folder` is where ConfigMaps are written to be loaded."""
    found = []
    for document in of_kind(path, "Deployment", "LeaderWorkerSet"):
        name = document["metadata"]["name"]
        if document["kind"] == "Deployment":
            parts = [(name, document["spec"]["template"], {})]
        else:
            group = document["spec"]["leaderWorkerTemplate"]
            parts = [
                (f"{name}/leader", group["leaderTemplate"], injected(document, 0)),
                (f"{name}/worker", group["workerTemplate"], injected(document, 1)),
            ]
        for part, template, environ in parts:
            (container,) = template["spec"]["containers"]
            config = _load(path, template["spec"], container, folder, environ)
            found.append(
                Workload(file=path, name=part, document=document, template=template, container=container, config=config)
            )
    return found


def injected(document: Mapping[str, Any], worker: int) -> dict[str, str]:
    """The variables that the controller puts before those of a container, in a pod of group 0."""
    name = document["metadata"]["name"]
    return {
        "LWS_LEADER_ADDRESS": f"{name}-0.{name}.default",
        "LWS_GROUP_SIZE": str(document["spec"]["leaderWorkerTemplate"]["size"]),
        "LWS_WORKER_INDEX": str(worker),
    }


def _load(
    path: Path, pod: Mapping[str, Any], container: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> ResolvedConfig:
    (name,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    (source,) = [d for d in of_kind(path, "ConfigMap") if d["metadata"]["name"] == name]
    (file,) = source["data"]
    (folder / file).write_text(source["data"][file])
    own = {
        e["name"]: _expand(e["value"], environ) for e in container.get("env", []) if e["name"].startswith("JAXSERVE_")
    }
    return load_config(folder / file, environ=own)


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """As the kubelet: $(NAME) of a variable that stands before this one."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], text)
