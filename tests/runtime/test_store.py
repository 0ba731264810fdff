"""Executables that are kept on disk, beside JAX's own cache when the user has turned that on."""

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.runtime.compile import Compiler, Job, num_threads
from jaxserve.runtime.store import ExecutableStore, can_be_loaded

pytestmark = pytest.mark.usefixtures("store_alone")


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[None]:
    """JAX keeps everything, as with JAX_COMPILATION_CACHE_DIR."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path / "jax"), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def make_job(rows: int = 64) -> Job:
    """Several fusions, so that the executable has functions of its own."""

    def fn() -> tuple[jax.Array, ...]:
        return jnp.full((rows, 3), 1.0), jnp.full((8, 3), 2.0), jnp.cumsum(jnp.arange(9.0)) @ jnp.ones(9)

    return Job(name="made", fn=fn, args=(), donate=(), options={})


def start(folder: Path, fact: str, rows: int = 64, job: Job | None = None) -> tuple[bool, float]:
    """A start: whether its executable came out of the store, and what that computes. `fact` stands for the source."""
    store = ExecutableStore(folder, [fact], devices=jax.local_devices()[:1])
    made = Compiler(None, store).build_one(job or make_job(rows))
    return made.stored, float(made.call()[-1])


def test_a_second_start_takes_what_the_first_has_kept(tmp_path: Path) -> None:
    assert start(tmp_path, "a") == (False, 120.0)
    assert start(tmp_path, "a") == (True, 120.0)
    assert start(tmp_path, "b", rows=65) == (False, 120.0), "another program"


def test_after_a_change_of_the_source_what_is_the_same_program_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[str] = []
    trace = Compiler._trace
    monkeypatch.setattr(Compiler, "_trace", lambda self, job: (lowered.append(job.name), trace(self, job))[1])
    assert start(tmp_path, "a") == (False, 120.0)
    size = sum(path.stat().st_size for path in {path.stat().st_ino: path for path in tmp_path.iterdir()}.values())
    assert start(tmp_path, "b") == (True, 120.0) and lowered == ["made"] * 2
    assert start(tmp_path, "b") == (True, 120.0) and lowered == ["made"] * 2, "by its new name, nothing is lowered"
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {size}
    assert len({path.stat().st_ino for path in tmp_path.iterdir()}) == 1, "one file of three names"


def test_a_damaged_file_is_damaged_under_all_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "a")
    next(tmp_path.iterdir()).write_bytes(b"something else")
    assert start(tmp_path, "b") == (False, 120.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert start(tmp_path, "a") == (True, 120.0), "it is that of b"


@pytest.mark.usefixtures("jax_cache")
def test_what_jax_had_cached_is_not_kept_a_second_time(tmp_path: Path) -> None:
    """Such a file could be read, and its executable would fail when it runs."""
    assert start(tmp_path, "a") == (False, 120.0)
    for path in tmp_path.glob("*-*"):
        path.unlink()
    for _ in range(3):
        assert start(tmp_path, "a") == (False, 120.0), "JAX has the program"


@pytest.mark.usefixtures("jax_cache")
@pytest.mark.parametrize("called", [False, True])
def test_what_a_process_has_got_from_jax_is_not_kept_for_another_store(tmp_path: Path, called: bool) -> None:
    """JAX gives a function that it has seen the executable that it has, and tells of no hit in its cache."""
    start(tmp_path / "first", "a")
    same = make_job()
    if called:
        jax.block_until_ready(jax.jit(same.fn)())
    for fact in ("a", "b", "a", "b"):
        assert start(tmp_path / "second", fact, job=same) == (False, 120.0), "JAX has the program"


def test_a_full_disk_is_said_once_and_leaves_no_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    store = ExecutableStore(tmp_path, [], devices=jax.local_devices()[:1])
    for number in range(3):
        job = dataclasses.replace(make_job(), name=f"made {number}")
        Compiler(None, store).build_one(job)
    [line] = caplog.messages
    assert "No space left on device" in line and str(tmp_path) in line
    assert list(tmp_path.iterdir()) == []


def test_what_can_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in an image, say: the time of its last reading cannot be noted."""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    start(tmp_path, "a")
    monkeypatch.setattr(os, "utime", read_only)
    assert start(tmp_path, "a") == (True, 120.0)


def test_beyond_its_size_the_cache_loses_what_was_read_longest_ago(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        (tmp_path / name).write_bytes(bytes(1_000_000))
        os.utime(tmp_path / name, (1e9 + 1e9 - age, 4e9 - age))
    store = ExecutableStore(tmp_path, ["a"], devices=jax.local_devices()[:1], max_bytes=2_500_000)
    Compiler(None, store).build_one(make_job())
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("program-")}
    assert left == {"middle", "newest", f"made-{store.digest}"}
    tight = ExecutableStore(tmp_path, ["b"], devices=jax.local_devices()[:1], max_bytes=0)
    Compiler(None, tight).build_one(make_job(65))
    assert len({path.stat().st_ino for path in tmp_path.iterdir()}) == 1, "its own files it keeps"
    assert (tmp_path / f"made-{tight.digest}").exists()


def test_libtpu_loads_executables_on_its_first_device_alone() -> None:
    first, *others = absent_devices("v5e:2x2")
    assert can_be_loaded([first]) and can_be_loaded([first, *others])
    assert not can_be_loaded(others)
    assert can_be_loaded(jax.devices("cpu")[1:])


def test_by_default_a_tpu_is_compiled_for_by_one_thread() -> None:
    assert (num_threads(None, "tpu"), num_threads(None, "gpu"), num_threads(3, "tpu")) == (1, None, 3)
