"""The key of kept executables: all that a program follows from, and nothing else."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import for_batches, load_config
from jaxserve.models import plan_model
from jaxserve.runtime import build, store

PACKAGE = Path(build.__file__).parents[1]
DEMO = PACKAGE.parent / "configs" / "demo.yaml"

# What makes programs: steps, the implementations that stand in them, the models, and the list of all of them.
ROOTS = ("runtime/step.py", "runtime/executables.py")
OUTSIDE = {  # imported on the way, and yet no part of a program
    "config/__init__.py": "the environment and files; what follows from them is in the sizes",
    "config/model_path.py": "where a model is; what is there is in the key",
    "config/schema.py": "fields; their values reach a program as sizes",
    "errors.py": "the types of errors",
    "files/gguf_file.py": "what the header of a file says; the config and shapes that follow from it are in the key",
    "files/new_directory.py": "a folder that appears as a whole",
    "progress.py": "what a start says",
    "sched/base.py": "the protocol between scheduler and runner",
    "sched/codec.py": "plans as JSON",
    "values/content.py": "what pages are named by; a step knows pages by number",
    "values/other_names.py": "what options are called elsewhere, for messages",
    "values/registry.py": "finds an implementation or a family by name; both names are in the key",
    "values/structured_output.py": "options of requests; masks reach a step as values",
}


def _module(parts: list[str]) -> Path | None:
    path = PACKAGE.parent.joinpath(*parts)
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found else None


def _imports(file: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            module = node.module.split(".")
            names = [[*module, alias.name] for alias in node.names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{file} imports by a relative name"
            continue
        for name in names:
            if name[0] == "jaxserve":
                found = _module(name) or _module(name[:-1])
                assert found is not None, f"{file}: {name}"
                yield found


def test_the_key_covers_all_source_that_programs_are_made_from() -> None:
    covered = {path.relative_to(PACKAGE).as_posix() for path in store.traced_files()}
    roots = [PACKAGE / root for root in ROOTS]
    roots += [path for part in ("kernels", "models") for path in (PACKAGE / part).rglob("*.py")]
    seen, waiting = set(roots), roots
    while waiting:
        for path in _imports(waiting.pop()):
            if path not in seen:
                seen.add(path)
                if path.relative_to(PACKAGE).as_posix() not in OUTSIDE:
                    waiting.append(path)
    met = {path.relative_to(PACKAGE).as_posix() for path in seen}
    assert "api.py" in met and "kernels/cpu/attention.py" in met, "the walk goes nowhere"
    assert met - covered == set(OUTSIDE) & met
    assert set(OUTSIDE) <= met, "an exception for a file that nothing imports"


class _Found(Exception):
    def __init__(self, digest: str) -> None:
        self.digest = digest


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The key of a start, which goes no further."""

    def stop(directory: Path, facts: list[str], devices: list[Any], max_bytes: int) -> None:
        raise _Found(store.ExecutableStore(directory, facts, devices).digest)

    monkeypatch.setattr(build, "ExecutableStore", stop)

    def find(
        path: Path | None,
        *,
        batches: bool = False,
        free_bytes: int = 16 * 2**30,
        scaled: bool = True,
        **settings: object,
    ) -> str:
        monkeypatch.setattr(build, "device_memory_bytes", lambda device: free_bytes)
        overrides = {name.replace("__", "."): value for name, value in settings.items()}
        plain = {"kernels.matmul": "xla", "kernels.paged_attention": "xla", "runtime.compile_cache": str(tmp_path)}
        resolved = load_config(path, {"model.path": "demo", **plain, **overrides}, environ={})
        config = (for_batches(resolved) if batches else resolved).config
        file = None if config.cache.scales is None else Path(config.cache.scales)
        kept = config.cache.dtype if scaled else "auto"
        planned = plan_model("demo", dtype=config.model.dtype, cache_dtype=kept, cache_scales=file)
        with pytest.raises(_Found) as found:
            build.build_runners(config, [planned], say=lambda line: None)
        return found.value.digest

    return find


def test_all_doors_of_the_demo_share_executables(digest) -> None:
    """The command, prompts, `LLM`, a server; with and without the variable that make exports."""
    server = digest(DEMO)
    assert digest(DEMO, batches=True) == server
    assert digest(None, batches=True) == server, 'LLM(model="demo")'
    assert digest(None) == server, 'AsyncLLM(model="demo")'
    assert digest(DEMO, sched__max_mixed_tokens=64) == server
    assert digest(DEMO, sched__policy="fair", serve__http__port=8000, model__name="other") == server
    assert digest(DEMO, runtime__token_buckets=[64]) == server, "of each bucket only its own program follows"
    assert digest(DEMO, free_bytes=17 * 10**9) == server
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    try:
        for platforms in (None, "cpu"):
            jax.config.update("jax_platforms", platforms)
            assert digest(DEMO) == server
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    "settings",
    [
        {"sched__max_rows": 16},
        {"cache__page_size": 32},
        {"cache__num_pages": 24},
        {"cache__dtype": "bfloat16"},
        {"cache__dtype": "int8"},
        {"model__dtype": "bfloat16"},
        {"model__max_len": 512},
    ],
)
def test_what_changes_a_program_changes_the_key(digest, settings: dict[str, object]) -> None:
    assert digest(DEMO, **settings) != digest(DEMO)


def test_scales_of_the_cache_are_in_the_key_and_their_values_are_not(digest, tmp_path: Path) -> None:
    int8 = digest(DEMO, cache__dtype="int8")
    assert digest(DEMO, cache__dtype="int8", scaled=False) != int8
    assert digest(DEMO, cache__dtype="float8_e4m3fn") != int8
    table = json.loads((PACKAGE / "demo_model" / "cache_scales.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(table | {"keys": table["values"]}))
    assert digest(DEMO, cache__dtype="int8", cache__scales=str(other)) == int8


def test_settings_of_jax_and_versions_change_the_key(digest, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(DEMO)
    with jax.default_matmul_precision("highest"):
        assert digest(DEMO) != before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert digest(DEMO) != before
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(store, "_version", lambda package: "next" if package == "numba" else "now")
    assert digest(DEMO) != before


def test_a_missing_extra_is_a_version_too() -> None:
    assert store._version("no-such-package") == "absent"  # pyright: ignore[reportPrivateUsage]
