"""Holds the custom resources of deploy/ against published CustomResourceDefinitions, and our own schemas as well.

    python scripts/check_crds.py FILE...

FILE: CRDs as YAML, as their projects publish them or as `kubectl get crd NAME -o yaml` prints them. Two questions:
  * does every manifest of these kinds follow the CRD, with no field that it does not know?
  * does the schema that the tests use (tests/deploy/crd_schemas.yaml, a part of the CRD, written by hand) allow nothing
    that the CRD forbids, as far as names, types, enums, required fields and bounds go?
Rules in CEL (`x-kubernetes-validations`), which an API server evaluates, are left out. Exit code 1 when something
differs, or when a kind in deploy/ is in none of the files.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[1]
OURS = ROOT / "tests/deploy/crd_schemas.yaml"
_BUILT_IN = ("v1", "apps/", "autoscaling/", "policy/", "networking.k8s.io/", "rbac.authorization.k8s.io/")
_BOUNDS = (("minimum", max), ("maximum", min), ("minItems", max), ("maxItems", min))
_NO_SCHEMA = {"ray.io/v1 RayService"}  # tests/deploy/test_ray_files.py holds it against Ray's own classes


def manifests(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """The custom resources of all YAML files below: file, "APIVERSION KIND", document."""
    for path in sorted(folder.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            version = document.get("apiVersion", "v1")  # what has none is a file of another program
            if version != "v1" and not version.startswith(_BUILT_IN):
                yield path, f"{version} {document['kind']}", document


def published(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """The schema of `spec` of every version in the CRDs, by "APIVERSION KIND"."""
    found = {}
    for path in paths:
        for crd in yaml.safe_load_all(path.read_text()):
            if crd is None or crd.get("kind") != "CustomResourceDefinition":
                continue
            for version in crd["spec"]["versions"]:
                name = f"{crd['spec']['group']}/{version['name']} {crd['spec']['names']['kind']}"
                found[name] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI schema as a JSON schema that refuses fields it does not list, as `kubectl apply` does."""
    made = {k: v for k, v in schema.items() if not k.startswith("x-") and k not in ("description", "format", "default")}
    if "x-kubernetes-int-or-string" in schema:
        made["type"] = ["integer", "string"]
        made.pop("anyOf", None)
    for word in ("allOf", "anyOf", "oneOf", "not"):
        made.pop(word, None)  # refinements, whose properties are not all of the fields
    if "items" in made:
        made["items"] = strict(made["items"])
    if "properties" in made:
        made["properties"] = {name: strict(inner) for name, inner in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(made["additionalProperties"])
    return made


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> Iterator[str]:
    """What `ours` allows and `theirs`, a strict schema, does not."""
    kinds = [set(t if isinstance(t, list) else [t]) for t in (ours.get("type", []), theirs.get("type", []))]
    if not kinds[0] <= kinds[1]:
        yield f"{where}: type {ours.get('type')} is {theirs.get('type')} there"
    if "enum" in theirs and not set(ours.get("enum", ["?"])) <= set(theirs["enum"]):
        yield f"{where}: one of {theirs['enum']} there, and {ours.get('enum')} here"
    if missing := set(theirs.get("required", [])) - set(ours.get("required", [])):
        yield f"{where}: {sorted(missing)} required there"
    for word, tighter in _BOUNDS:
        if word in theirs and (word not in ours or tighter(ours[word], theirs[word]) != ours[word]):
            yield f"{where}: {word} {theirs[word]} there, and {ours.get(word)} here"
    for name, inner in ours.get("properties", {}).items():
        if name not in theirs.get("properties", {}):
            yield f"{where}: there is no field {name}"
        else:
            yield from differences(inner, theirs["properties"][name], f"{where}.{name}")
    if "items" in ours:
        yield from differences(ours["items"], theirs["items"], f"{where}[]")


def check(paths: list[Path]) -> list[str]:
    """All faults, in words."""
    crds, ours = published(paths), yaml.safe_load(OURS.read_text())
    faults = []
    kinds = set()
    for path, kind, document in manifests(ROOT / "deploy"):
        kinds.add(kind)
        if kind not in crds:
            continue
        for error in jsonschema.Draft202012Validator(strict(crds[kind])).iter_errors(document["spec"]):
            faults.append(f"{path.relative_to(ROOT)}: {kind} at {error.json_path}: {error.message}")
    faults += [f"no file has a CRD of {kind}" for kind in sorted(kinds - crds.keys() - _NO_SCHEMA)]
    for kind, schema in ours.items():
        if kind in crds:
            faults += differences(schema, strict(crds[kind]), f"{OURS.name}: {kind}")
    return faults


def main() -> int:
    """The command."""
    if len(sys.argv) == 1:
        print(__doc__)
        return 2
    faults = check([Path(argument) for argument in sys.argv[1:]])
    print("\n".join(faults) or "manifests and schemas follow the CRDs")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
