"""How the suite runs: nothing stale is kept, failures are tried again, the tests that a change can break are found."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import affected_tests
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from suite.reach import Reached, read_record, write_record

from jaxserve.runtime import store

TESTS = Path(__file__).parents[1]


@pytest.fixture
def hits(tmp_path: Path) -> Iterator[Counter[str]]:
    """Events of JAX's cache in an empty folder, which is otherwise as for all tests."""
    found: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: found.update([event.rpartition("/")[2]]))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    yield found
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_changed_function_is_compiled_anew(hits: Counter[str]) -> None:
    def result(fn: Callable[[jax.Array], jax.Array]) -> tuple[float, bool]:
        jax.clear_caches()
        hits.clear()
        return float(jax.jit(fn)(jnp.float32(3.0))), hits["cache_misses"] > 0

    assert result(lambda x: x * 2.0 + 1.0) == (7.0, True)
    assert result(lambda x: x * 2.0 + 1.0) == (7.0, False)
    assert result(lambda x: x * 2.0 + 2.0) == (8.0, True)


def test_a_changed_part_of_a_program_has_executables_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that a program can come from is in the key: `test_store_key.py` says which those are."""
    package = tmp_path / "jaxserve"
    for path in store.traced_files():
        copy = package / path.relative_to(store._PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    monkeypatch.setattr(store, "_PACKAGE", package)
    files = store.traced_files()
    digest = store.source_digest.__wrapped__
    seen = {digest()}
    for file in files[:: len(files) // 12]:
        file.write_text(file.read_text() + "\n")
        assert digest() not in seen, file
        seen.add(digest())


def run_pytest(folder: Path, *arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A run of its own on a folder of tests, with the plugins of this suite."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JAXSERVE_"))}
    environment |= {"PYTHONPATH": str(TESTS), "JAXSERVE_TEST_CACHE": str(cache or folder / "cache")}
    names = [f"suite.{name}" for name in ("kept", "order", "failures", "costs", "reach", "resumed")]
    (folder / "conftest.py").write_text(f"pytest_plugins = {names}\n")
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


FLAKY = """
import pathlib
def test_passes():
    assert True
def test_always_fails():
    assert "this" == "that"
def test_fails_once():
    seen = pathlib.Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "only the first time"
"""


def test_failures_are_shown_at_once_and_tried_again_alone(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(FLAKY)
    ended = run_pytest(tmp_path, "--costs=costs.jsonl", "--resume")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    shown, _, rest = ended.stdout.partition("alone, try 1 of 2")
    assert "'this' == 'that'" in shown and "only the first time" in shown
    assert "[3/0 after 0 min] FAILED" in shown
    flaky = rest.partition("flaky: failed once")[2].partition("short test summary")[0]
    assert "NEW  test_one.py::test_fails_once" in flaky and "always" not in flaky
    costs = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in costs if line["phase"] == "call"] == ["passed", "failed", "failed"]
    assert all("own_cpu_s" in line for line in costs if line["phase"] == "teardown")
    assert json.loads((tmp_path / "cache" / "failures.json").read_text()) == {"test_one.py": 20}

    again = run_pytest(tmp_path, "--resume", "--no-retry")
    assert "1 failed, 1 passed, 1 deselected" in again.stdout, again.stdout


def test_a_record_says_which_tests_reach_a_file(tmp_path: Path) -> None:
    tests = {
        "tests/a/test_x.py::test_1": Reached(seconds=1.5, files={"jaxserve/a.py", "jaxserve/b.py"}),
        "tests/a/test_x.py::test_2": Reached(seconds=0.25, files={"jaxserve/b.py"}),
        "tests/a/test_y.py::test_3": Reached(seconds=2.0, files={"jaxserve/b.py", "tests/fixtures/m/config.json"}),
    }
    write_record(tmp_path / "reach.json", tests)
    read = read_record(tmp_path / "reach.json")
    assert read.pop("tests/a/test_y.py::test_3").files == {"jaxserve/b.py", "tests/fixtures/m"}
    assert read == {name: test for name, test in tests.items() if "test_x" in name}


def test_what_is_reached_is_seen_in_functions_fixtures_data_and_processes(tmp_path: Path) -> None:
    """The record of a run in this repository, of one test that does each."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-retry"),
            f"--reach={tmp_path / 'reach.json'}",
            "tests/test_registry.py",
            "tests/contracts/test_start.py::test_a_model_without_orbax_weights_does_not_load_orbax",
        ],
        cwd=TESTS.parent,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = read_record(tmp_path / "reach.json")
    registry = [test for name, test in record.items() if name.startswith("tests/test_registry.py")]
    assert registry and any("jaxserve/values/registry.py" in test.files for test in registry)
    assert not any("jaxserve/sched/core.py" in test.files for test in registry)


QUEUE, CORE = "jaxserve/sched/queue.py", "jaxserve/sched/core.py"
RECORD = {
    "tests/sched/test_queue.py::test_a": Reached(seconds=400.0, files={QUEUE}),
    "tests/sched/test_core.py::test_b": Reached(seconds=100.0, files={QUEUE, CORE}),
    "tests/e2e/test_demo.py::test_c": Reached(seconds=190.0, files={f"jaxserve/{i}.py" for i in range(9)}),
    "tests/e2e/test_demo.py::test_d": Reached(seconds=1.0, files={f"jaxserve/{i}.py" for i in range(10)}),
}


def test_the_tests_about_a_file_come_first_and_the_others_while_there_is_time() -> None:
    chosen, left_out = affected_tests.choose(RECORD, [QUEUE], seconds=465.0)
    assert chosen == ["tests/sched/test_queue.py::test_a", "tests/sched/test_core.py::test_b", *[*RECORD][2:]]
    chosen, left_out = affected_tests.choose(RECORD, [QUEUE], seconds=266.0)
    assert left_out == ["tests/e2e/test_demo.py::test_c"]
    chosen, left_out = affected_tests.choose(RECORD, [QUEUE], seconds=20.0)
    assert chosen == ["tests/sched/test_queue.py::test_a"], "however long it takes"


def test_tests_that_no_record_knows_are_found_by_their_imports_and_the_files_they_name() -> None:
    found = affected_tests.affected([QUEUE], {})
    assert any(name.startswith("tests/sched/test_queue.py") for name in found)
    assert not any(name.startswith("tests/text/test_detokenizer") for name in found)
    found = affected_tests.affected(["docs/glossary.md", "tests/serve/http/transcripts.py"], {})
    assert any(name.startswith("tests/serve/http/") for name in found)


def test_a_test_that_the_record_knows_is_affected_by_the_files_it_reaches_and_by_its_own() -> None:
    name = affected_tests.test_functions()["tests/sched/test_queue.py"][0]
    record = {name: Reached(seconds=1.0, files={QUEUE, "tests/fixtures/llama"})}
    assert name not in affected_tests.affected([CORE], record)
    for changed in (QUEUE, "tests/fixtures/llama/config.json", "tests/sched/test_queue.py"):
        assert affected_tests.affected([changed], record)[name] == record[name], changed
