"""The import floors of the package: a module imports only from lower floors or its own package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxserve"

# Part of the package -> parts it may import besides itself. Anything not listed here fails.
_F0 = {"api", "collector", "errors", "registry", "structured_output"}
ALLOWED: dict[str, set[str]] = {
    "collector": set(),
    "errors": set(),
    "registry": {"errors"},
    "api": {"errors", "structured_output"},
    "structured_output": {"errors"},
    "chips": {"errors"},
    "roofline": {"chips"},
    "config_yaml": {"errors"},
    "config_schema": set(),
    "config": {"errors", "config_schema", "config_yaml"},
    "sched": _F0,
    "text": _F0,
    "routing": _F0,
    "kernels": {*_F0, "config"},
    "engine": {*_F0, "routing", "sched", "text"},
    "testing": {*_F0, "sched", "testing_parts", "text"},
    "testing_parts": set(),
    "models": {*_F0, "config", "kernels"},
    "runtime": {*_F0, "chips", "config", "config_schema", "kernels", "models", "sched"},
    "workloads": {*_F0, "text"},
    "planner": {*_F0, "chips", "config", "config_schema", "kernels", "models", "roofline", "runtime", "sched"},
    "client": {*_F0, "serve"},
    "telemetry": {*_F0, "config_schema", "engine"},
    "top": {"errors"},
    "hosts": {*_F0, "config_schema", "sched"},
    "serve": {*_F0, "config_schema", "engine", "routing", "sched", "text"},
}
# Put the parts together: may import all.
_TOP = {
    "many_hosts",
    "assemble",
    "replay",
    "bench",
    "front_door",
    "llm",
    "async_llm",
    "run",
    "cli",
    "commands",
    "command_line",
    "console",
    "offline",
    "fleet",
    "lab",
    "__init__",
}

# Parts that must not load heavy libraries, and what they may use from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "errors": set(),
    "registry": set(),
    "api": set(),
    "structured_output": set(),
    "chips": set(),
    "roofline": set(),
    "config_schema": {"pydantic"},
    "config": {"pydantic", "yaml", "pydantic_core"},
    "config_yaml": {"yaml"},
    "sched": set(),
    "routing": set(),
    "testing": set(),
    "testing_parts": set(),
    "engine": set(),
    "text": {"sentencepiece", "tokenizers", "jinja2", "llguidance"},
    "top": {"prometheus_client", "rich"},
    "workloads": {"matplotlib", "numpy", "rich", "typer"},
}


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "gen" not in p.parts]


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found.append(node.module)
            if node.module == "jaxserve":
                found += [f"jaxserve.{alias.name}" for alias in node.names if alias.name != "__version__"]
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_lower_floors(path: Path) -> None:
    part = _part(path)
    if part in _TOP:
        return
    assert part in ALLOWED, f"{part} has no floor: add it to ALLOWED"
    for name in _imports(path):
        if name.startswith("jaxserve."):
            target = name.split(".")[1]
            assert target == part or target in ALLOWED[part], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_light_parts_use_few_libraries(path: Path) -> None:
    part = _part(path)
    if part not in OUTSIDE:
        return
    for name in _imports(path):
        root = name.split(".")[0]
        allowed = root == "jaxserve" or root in sys.stdlib_module_names or root in OUTSIDE[part]
        assert allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_environment_is_read_in_config_only(path: Path) -> None:
    if path.name == "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in {"environ", "getenv", "putenv"}, f"{path.name}:{node.lineno} reads the environment"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_ray_is_imported_where_its_name_says_so(path: Path) -> None:
    if path.parent.name != "fleet" or not path.name.startswith("ray_"):
        assert not [name for name in _imports(path) if name.split(".")[0] == "ray" or ".fleet.ray_" in name]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("jaxserve", {"jax", "numpy", "flax", "pydantic", "yaml"}),
        ("jaxserve.fleet.options", {"ray", "jax", "grpc"}),
        ("jaxserve.sched", {"jax", "numpy", "flax", "pydantic"}),
        ("jaxserve.routing", {"jax", "numpy", "flax", "pydantic", "grpc"}),
        ("jaxserve.engine", {"jax", "flax", "pydantic"}),
        ("jaxserve.hosts", {"jax", "flax"}),
        ("jaxserve.testing", {"jax", "flax", "pydantic"}),
        ("jaxserve.lab", {"jax", "flax", "pandas", "matplotlib", "grpc"}),
        ("jaxserve.workloads.tables", {"jax", "flax", "pydantic", "matplotlib"}),
        ("jaxserve.top", {"jax", "numpy", "flax", "pydantic", "grpc", "fastapi"}),
        ("jaxserve.client", {"jax", "numpy", "flax", "pydantic", "jaxserve.engine", "jaxserve.sched", "jaxserve.text"}),
    ],
)
def test_fresh_interpreter_loads_no_heavy_library(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not absent & set(loaded.stdout.split())


def test_every_public_module_says_what_it_owns() -> None:
    bare = [str(p) for p in _modules() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not bare, f"no docstring: {bare}"


def test_files_stay_readable() -> None:
    long = {str(p): n for p in _modules() if (n := len(p.read_text().splitlines())) > 400 and "pallas" not in p.parts}
    assert not long, f"more than 400 lines: {long}"
