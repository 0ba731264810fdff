"""What the manifest tests share: every document of `deploy/`, and the pods in them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxserve.config import ENVIRONMENT, ResolvedConfig, load_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/k8s").glob("*.yaml"))
CONFIG_FOLDER = "/etc/jaxserve"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment or a StatefulSet with the config of its pods.

    Attributes:
      document: all of it.
      pod: spec of its pods.
      container: the only one in a pod.
      config: what `--config` names there, with the environment of the pod of ordinal 0.
    """

    file: Path
    document: Mapping[str, Any]
    pod: Mapping[str, Any]
    container: Mapping[str, Any]
    config: ResolvedConfig

    @property
    def name(self) -> str:
        return self.document["metadata"]["name"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.document["spec"]["template"]["metadata"]["labels"]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents(path) if document["kind"] in kinds]


def workloads(path: Path, folder: Path) -> list[Workload]:
    """Those of one file; `folder` is where ConfigMaps are written to be loaded."""
    found = []
    for document in of_kind(path, "Deployment", "StatefulSet"):
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        config = _load(path, pod, container, folder)
        found.append(Workload(file=path, document=document, pod=pod, container=container, config=config))
    return found


def _load(path: Path, pod: Mapping[str, Any], container: Mapping[str, Any], folder: Path) -> ResolvedConfig:
    (name,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    (source,) = [d for d in of_kind(path, "ConfigMap") if d["metadata"]["name"] == name]
    (file,) = source["data"]
    (folder / file).write_text(source["data"][file])
    environ = {e["name"]: e.get("value", "0") for e in container.get("env", []) if e["name"] in ENVIRONMENT}
    return load_config(folder / file, environ=environ)
