"""The import floors of the package: a module imports only from lower floors or its own package."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxserve"

# Part of the package -> parts it may import besides itself. Anything not listed here fails.
_F0 = {"api", "errors", "values"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "values": {"errors"},
    "api": {"errors", "values"},
    "files": {"errors"},
    "config": {"errors", "files", "values"},
    "sched": _F0,
    "text": {*_F0, "files"},
    "vision": _F0,
    "routing": _F0,
    "kernels": {*_F0, "config"},
    "kv": {*_F0, "config", "sched"},
    "engine": {*_F0, "routing", "sched", "text"},
    "testing": {*_F0, "sched", "text"},
    "models": {*_F0, "config", "files", "kernels", "progress"},
    "progress": set(),
    "runtime": {*_F0, "config", "kernels", "models", "progress", "sched"},
    "quantise": {*_F0, "config", "files", "kernels", "models", "progress", "runtime"},
    "client": {*_F0, "serve"},
    "telemetry": {*_F0, "config", "engine"},
    "hosts": {*_F0, "config", "files", "kv", "sched"},
    "serve": {*_F0, "config", "engine", "kv", "routing", "sched", "text"},
    "lab.roofline": {"values"},
    "lab.tower_work": {"lab.roofline", "models", "values"},
    "lab.workloads": {*_F0, "text"},
    "lab.compiled": {"assemble", "config", "errors", "kernels", "models", "runtime", "sched", "values"},
    "lab.ledger": {"config", "errors", "kernels", "lab.compiled", "runtime", "values"},
    "lab.planner": {
        *_F0,
        *("assemble", "config", "kernels", "lab.compiled", "lab.ledger", "lab.roofline", "lab.tower_work"),
        *("models", "progress", "runtime", "sched"),
    },
}
# Put the parts together: may import all.
_TOP = {
    "__init__",
    "__main__",
    "assemble",
    "cli",
    "fleet",
    "lab",
    "lab.bench",
    "lab.replay",
    "lab.simulation",
    "lab.study",
    "lab.training",
    "offline",
    "run",
}
_USES_LAB = {"cli", "lab"}  # the engine and its doors need nothing of the workshop

# Parts that must not load heavy libraries, and what they may use from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "errors": set(),
    "values": set(),
    "api": set(),
    "files": set(),
    "lab.roofline": set(),
    "config": {"pydantic", "yaml", "pydantic_core"},
    "sched": set(),
    "routing": set(),
    "progress": {"rich", "IPython"},  # the second only inside a notebook
    "testing": set(),
    "engine": set(),
    "vision": {"numpy", "PIL"},
    "text": {"sentencepiece", "tokenizers", "jinja2", "llguidance"},
    "lab.workloads": {"matplotlib", "numpy", "rich", "typer"},
}


def _part(path: Path) -> str:
    *folders, _ = relative = path.relative_to(PACKAGE).with_suffix("").parts
    return _part_of([*folders] if relative[-1] == "__init__" and folders else [*relative])


def _part_of(names: list[str]) -> str:
    """A file or a folder at the root of the package, or of the workshop."""
    return ".".join(names[:2] if names[0] == "lab" else names[:1])


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found.append(node.module)
            if node.module == "jaxserve":
                found += [f"jaxserve.{alias.name}" for alias in node.names if alias.name != "__version__"]
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "gen" not in path.parts]


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_imports_only_lower_floors() -> None:
    homeless = {part for path in MODULES if (part := _part(path)) not in ALLOWED and part not in _TOP}
    assert not homeless, "these have no floor: add them to ALLOWED"
    wrong = [
        f"{_name(path)} imports {name}"
        for path in MODULES
        if (part := _part(path)) not in _TOP
        for name in _imports(path)
        if name.startswith("jaxserve.") and _part_of(name.split(".")[1:]) not in {part, *ALLOWED[part]}
    ]
    assert not wrong


def test_nothing_but_commands_uses_the_workshop() -> None:
    wrong = [
        f"{_name(path)} imports {name}"
        for path in MODULES
        if _part(path).split(".")[0] not in _USES_LAB
        for name in _imports(path)
        if name.startswith("jaxserve.lab")
    ]
    assert not wrong


def test_light_parts_use_few_libraries() -> None:
    wrong = [
        f"{_name(path)} imports {name}"
        for path in MODULES
        if (part := _part(path)) in OUTSIDE
        for name in _imports(path)
        if (root := name.split(".")[0]) != "jaxserve" and root not in sys.stdlib_module_names | OUTSIDE[part]
    ]
    assert not wrong


def test_environment_is_read_in_config_only() -> None:
    readers = [
        f"{_name(path)}:{node.lineno} reads os.{node.attr}"
        for path in MODULES
        if path != PACKAGE / "config/__init__.py"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in {"environ", "getenv", "putenv"}
    ]
    assert not readers


def test_ray_is_imported_where_its_name_says_so() -> None:
    wrong = [
        f"{_name(path)} imports {name}"
        for path in MODULES
        if path.parent.name != "fleet" or not path.name.startswith("ray_")
        for name in _imports(path)
        if name.split(".")[0] == "ray" or ".fleet.ray_" in name
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("jaxserve", {"jax", "numpy", "flax", "pydantic", "yaml"}),
        ("jaxserve.fleet.options", {"ray", "jax", "grpc"}),
        ("jaxserve.sched", {"jax", "numpy", "flax", "pydantic"}),
        ("jaxserve.routing", {"jax", "numpy", "flax", "pydantic", "grpc"}),
        ("jaxserve.engine", {"jax", "flax", "pydantic"}),
        ("jaxserve.hosts", {"jax", "flax"}),
        ("jaxserve.kv.connector", {"jax", "flax", "pydantic", "grpc", "obstore"}),
        ("jaxserve.testing", {"jax", "flax", "pydantic"}),
        ("jaxserve.vision", {"jax", "flax", "pydantic", "PIL"}),
        ("jaxserve.lab", {"jax", "flax", "pandas", "matplotlib", "grpc"}),
        ("jaxserve.lab.workloads.tables", {"jax", "flax", "pydantic", "matplotlib"}),
        ("jaxserve.cli.top", {"jax", "numpy", "flax", "pydantic", "grpc", "fastapi"}),
        ("jaxserve.client", {"jax", "numpy", "flax", "pydantic", "jaxserve.engine", "jaxserve.sched", "jaxserve.text"}),
    ],
)
def test_fresh_interpreter_loads_no_heavy_library(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert not absent & set(loaded.stdout.split())


def test_every_public_module_says_what_it_owns() -> None:
    bare = [_name(path) for path in MODULES if not ast.get_docstring(_tree(path))]
    assert not bare, f"no docstring: {bare}"
