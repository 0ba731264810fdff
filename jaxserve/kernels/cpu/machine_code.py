"""From kernels in Python to targets that XLA calls by name.

Owns compiling with Numba, where the machine code outlives the process, and the registration with XLA. Refuses to choose
kernels. This, `scratch` and `body` can be imported without Numba.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import re
import shutil
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LOCK = threading.Lock()
_INTERFACES = ("0.3", "0.4")  # of JAX 0.10 and 0.11: `call` reads their structures
DTYPES = ("float32", "bfloat16")  # of weights and caches


def missing() -> str | None:
    """Why there are no kernels for CPUs here, and the remedy; None where there are."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed; pip install 'jaxserve[cpu]'"
    version = _interface_version()
    if version not in _INTERFACES:
        return (
            f"jaxlib {metadata.version('jaxlib')} calls kernels by another interface ({version}) than those known here"
        )
    return None


@functools.cache
def _interface_version() -> str:
    """Of XLA's foreign function interface, from the header that jaxlib brings along."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header, re.MULTILINE))
    return f"{found['MAJOR']}.{found['MINOR']}"


def keep_machine_code(directory: Path) -> None:
    """Has Numba keep all it compiles from now on below this directory, apart for each version of the kernels."""
    from numba.core import config

    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):  # Numba itself looks at the file of the outermost function alone
        digest.update(path.read_bytes())
    kept = directory / "machine_code" / digest.hexdigest()[:16]
    try:  # without a directory Numba would take one beside the sources
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"machine code cannot be kept in {kept}: {error}; name another runtime.compile_cache, or null for none"
        ) from error
    config.CACHE_DIR = str(kept)  # pyright: ignore[reportAttributeAccessIssue]


def provide(kernel: str, dtype: str) -> str:
    """The name of a kernel's target for XLA. The first call compiles it (seconds), or reads it from its file."""
    with _LOCK:
        return _register(kernel, dtype)[0]


@functools.cache  # XLA knows addresses alone: what is registered must live as long as the process
def _register(kernel: str, dtype: str) -> tuple[str, Any]:
    from numba.core import config

    name = f"{kernel}_{dtype}"
    function = getattr(importlib.import_module(f"jaxserve.kernels.cpu.{kernel}"), name)
    kept = getattr(config, "CACHE_DIR", "")
    try:
        compiled = _compile(function, keep=bool(kept))
    except Exception as error:  # whatever unpickling makes of a damaged file
        if not kept:
            raise
        logger.error("machine code in %s cannot be read, and is made anew: %s", kept, error)
        shutil.rmtree(kept, ignore_errors=True)
        compiled = _compile(function, keep=True)
    address = jax.ffi.pycapsule(ctypes.cast(compiled.address, ctypes.c_void_p))
    jax.ffi.register_ffi_target(f"jaxserve_{name}", address, platform="cpu")
    return f"jaxserve_{name}", compiled


def _compile(function: Callable[[Any], int], *, keep: bool) -> Any:
    from numba import cfunc, types

    return cfunc(types.intp(types.voidptr), cache=keep)(function)
