"""What tests compile is kept between runs: a second run on a machine compiles what has changed since.

Three caches lie in one folder, each with its own key: executables of engines (`jaxserve.runtime.store`: the text of all
source that is traced, or the program), machine code of Numba's kernels (`jaxserve.kernels.cpu.machine_code`: the text
of the kernels), and all else that JAX compiles (its own cache: the lowered program and the flags).

`JAXSERVE_TEST_CACHE` names another folder, or is `off` for one that ends with the run.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "JAXSERVE_TEST_CACHE"
_UNUSED_S = 30 * 86400.0
_UNREADABLE = "Error reading persistent compilation cache entry"


def kept_folder() -> Path | None:
    """The folder of this machine; None where nothing is kept."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve-tests"
    return Path(named) if named else base


def _processor() -> str:
    """A folder on a shared disk has one part for each kind of processor: JAX's key leaves it out."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = [platform.processor()]
    text = "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return hashlib.sha256(f"{platform.machine()}\n{text}".encode()).hexdigest()[:12]


def pytest_configure(config: pytest.Config) -> None:
    """One folder for all that this run compiles: its worker processes, and those that tests start, find it there."""
    config.pluginmanager.register(Programs(), "programs")
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose environment is the controller's
        return
    kept = kept_folder()
    if kept is None:
        folder = Path(tempfile.mkdtemp(prefix="jaxserve-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    else:
        folder = kept / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        _forget_unused(folder / "jax")
    os.environ["JAXSERVE_COMPILE_CACHE"] = str(folder)


class Programs:
    """Turns on JAX's own cache in a process that runs tests, before the first of them that has JAX.

    Engines have a store of their own in front of it. Compilers for absent devices can write their programs, not read
    them.
    """

    def __init__(self) -> None:
        self._on = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._on or "jax" not in sys.modules:
            return
        self._on = True
        import jax
        from jax._src import compilation_cache

        for name, value in settings_of_jax().items():
            jax.config.update(name, value)
        is_used = compilation_cache.is_cache_used
        compilation_cache.is_cache_used = lambda backend: backend.platform == "cpu" and is_used(backend)
        compilation_cache.reset_cache()


def settings_of_jax() -> dict[str, Any]:
    """Of its cache, for all that this run compiles, however small."""
    return {
        "jax_compilation_cache_dir": os.path.join(os.environ["JAXSERVE_COMPILE_CACHE"], "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def _forget_unused(folder: Path) -> None:
    for path in folder.glob("*"):
        try:
            if max(path.stat().st_atime, path.stat().st_mtime) < time.time() - _UNUSED_S:
                path.unlink()
        except FileNotFoundError:  # another run was faster
            pass


def pytest_warning_recorded(warning_message: Any) -> None:
    """JAX never writes an entry again that it could not read, as after a run that was killed while it wrote."""
    if str(warning_message.message).startswith(_UNREADABLE) and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(Path(os.environ["JAXSERVE_COMPILE_CACHE"]) / "jax", ignore_errors=True)
