"""What the heart of the engine knows of features, and which files import each other in circles: both may only shrink.

The heart decides and computes a step. It should know of steps, parts and kinds of cache, and of no feature by name.
`arrows.txt` has the imports that are left: a new one fails, and one that is gone is to be struck out there. Imports
for the type checker alone count.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxserve"
LEFT = Path(__file__).with_name("arrows.txt")

# Modules of features, or their beginnings, in folders that are else of the heart.
FEATURES = {
    "speculation": (
        *("sched.speculate", "sched.draft_counts", "runtime.drafter", "runtime.drafting", "runtime.head_drafting"),
        *("runtime.model_drafting", "runtime.replay_drafts", "runtime.suffix_drafts", "runtime.heads"),
        *("runtime.rounds", "models.drafts", "engine.lookup"),
    ),
    "adapters": ("sched.adapter_slots", "engine.adapters", "runtime.adapters", "models.adapters"),
    "pictures": (
        *("sched.encoder_cache", "engine.pictures", "runtime.picture_inputs", "runtime.towers"),
        *("runtime.tower_building", "models.vision_tower", "models.tower_loading", "vision"),
    ),
    "tiers": (
        *("sched.host_tier", "sched.tier_", "sched.loading", "sched.loading_scheduler", "sched.refill"),
        *("runtime.host_slots", "kv"),
    ),
    "handoff": ("sched.page_exchange", "sched.export", "engine.exchanging", "runtime.canonical_pages"),
    "grammars": ("engine.structured",),
    "pooling": ("engine.embedding", "engine.scoring"),
    "degradation": ("sched.ladder", "engine.degrading"),
    "tenants": ("sched.accounts", "engine.tenants"),
    "pipelines": ("runtime.pipeline", "runtime.stage_links"),
    "batch invariance": ("runtime.batch_invariance", "runtime.sum_order"),
    "later shapes": ("runtime.later",),
    "step log": ("engine.step_log",),
    "deadlines": ("engine.watchdog", "engine.step_deadlines", "engine.restarting"),
    "sparse attention": ("kernels.selection",),
}
HEART = ("api", "engine", "kernels", "models", "runtime", "sched", "text")


def module_of(path: Path) -> str:
    """Its name below the package: "sched.core"; "" of the package itself."""
    return ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__")


MODULES: Mapping[str, Path] = {module_of(path): path for path in PACKAGE.rglob("*.py") if "gen" not in path.parts}


def imports_of(path: Path) -> Iterator[str]:
    """The modules of the package that a file names in an import, wherever it stands.

    The package itself counts only for the modules in it: `from jaxserve import __version__` needs none of them.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("jaxserve.") for alias in node.names if "jaxserve." in alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxserve":
            within = (node.module or "").removeprefix("jaxserve").removeprefix(".")
            for alias in node.names:
                name = f"{within}.{alias.name}".removeprefix(".")
                yield name if name in MODULES else within


GRAPH = {name: sorted({*imports_of(path)} & MODULES.keys() - {name, ""}) for name, path in MODULES.items()}


def feature_of(module: str) -> str | None:
    for feature, beginnings in FEATURES.items():
        for beginning in beginnings:
            if (
                module == beginning
                or module.startswith(f"{beginning}.")
                or (beginning.endswith("_") and module.startswith(beginning))
            ):
                return feature
    return None


def test_the_heart_imports_no_more_of_features_than_it_did():
    arrows = {
        f"{name} -> {imported}"
        for name, imports in GRAPH.items()
        if name.split(".")[0] in HEART and feature_of(name) is None
        for imported in imports
        if feature_of(imported) is not None
    }
    left = {*LEFT.read_text().splitlines()}
    assert not (new := sorted(arrows - left)), f"the heart learns of a feature by name: {new}"
    assert not (gone := sorted(left - arrows)), f"these are gone, so strike them out of {LEFT.name}: {gone}"


def test_every_feature_is_found():
    for feature, beginnings in FEATURES.items():
        for beginning in beginnings:
            assert any(module.startswith(beginning) for module in MODULES), f"{feature}: no module {beginning}"


def circles(graph: Mapping[str, list[str]]) -> list[list[str]]:
    """Its strongly connected components of two and more, each sorted (R. Tarjan, 1972)."""
    numbers: dict[str, int] = {}
    least: dict[str, int] = {}
    open_: list[str] = []
    found = []

    def visit(name: str) -> None:
        numbers[name] = least[name] = len(numbers)
        open_.append(name)
        for other in graph[name]:
            if other not in numbers:
                visit(other)
            if other in open_:
                least[name] = min(least[name], least[other])
        if least[name] == numbers[name]:
            at = open_.index(name)
            if len(open_) - at > 1:
                found.append(sorted(open_[at:]))
            del open_[at:]

    for name in graph:
        if name not in numbers:
            visit(name)
    return found


def test_no_files_import_each_other_in_a_circle():
    assert circles({"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": []}) == [["a", "b", "c"]]
    assert circles(GRAPH) == []
