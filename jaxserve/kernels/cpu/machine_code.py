"""From kernels in Python to targets that XLA calls by name.

Kernels are compiled with Numba, their machine code is kept on disk, and XLA is told their addresses. This module,
`scratch` and `implementation` can be imported without Numba.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import KernelsUnavailable

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LOCK = threading.Lock()
_UNUSED_S = 30 * 86400.0  # as long as `runtime.store` keeps executables that no start reads
_INTERFACES = ("0.3", "0.4")  # of JAX 0.10 and 0.11: `call` reads their structures
DTYPES = ("float32", "bfloat16")  # of weights and caches


def missing() -> str | None:
    """The reason why there are no kernels for CPUs here, and the remedy; None where there are."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed; pip install 'jaxserve[cpu]'"
    try:
        importlib.import_module("jaxserve.kernels.cpu.simd")
    except (ImportError, AttributeError) as error:  # of parts of Numba that its versions may change
        version = metadata.version("numba")
        return f"Numba {version} lacks what the kernels are made with ({error}); install that of constraints.txt"
    if not knows_interface():
        version = metadata.version("jaxlib")
        return f"jaxlib {version} calls kernels by another interface ({_interface_version()}) than those known here"
    return None


def knows_interface() -> bool:
    """Whether the structures by which this jaxlib calls functions are those that `call` and `runtime.zeros` read."""
    return _interface_version() in _INTERFACES


@functools.cache
def _interface_version() -> str:
    """Version of XLA's foreign function interface, from the header in jaxlib."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header, re.MULTILINE))
    return f"{found['MAJOR']}.{found['MINOR']}"


def keep_machine_code(directory: Path) -> None:
    """Has Numba keep all it compiles from now on below this directory, apart for each version of the kernels.

    Where nothing can be written it is compiled at each start; the log says so.
    """
    from numba.core import config

    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):  # Numba itself looks at the file of the outermost function alone
        digest.update(path.read_bytes())
    kept = directory / "machine_code" / digest.hexdigest()[:16]
    try:  # without a directory that it can write to Numba would take one beside the sources
        kept.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
    except OSError as error:
        logger.warning("Numba's kernels are compiled at each start, since %s cannot be written to: %s", kept, error)
        return
    config.CACHE_DIR = str(kept)  # pyright: ignore[reportAttributeAccessIssue]
    _remove_unused(kept)


def _remove_unused(kept: Path) -> None:
    """Marks a directory as used now, and removes its neighbours, of former kernels, that no start has used for long."""
    with contextlib.suppress(OSError):  # of a file system that can only be read
        os.utime(kept)
        for other in kept.parent.iterdir():
            if other != kept and other.stat().st_mtime < time.time() - _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


def is_kept() -> bool:
    """Whether an earlier process has left machine code where `keep_machine_code` looks for it."""
    from numba.core import config

    kept = getattr(config, "CACHE_DIR", "")
    return bool(kept) and any(Path(kept).rglob("*.nbi"))


def provide(kernel: str, form: str) -> str:
    """The name of a kernel's target for XLA. The first call compiles it (seconds), or reads it from its file.

    Raises KernelsUnavailable where Numba cannot compile it.

    The kernel is the function `<kernel>_<form>` of the module `<kernel>`. The form is the dtype of weights or of the
    cache, or what the module names its functions by.
    """
    with _LOCK:
        return _register(kernel, form)[0]


@functools.cache  # XLA keeps only addresses: a registered function must live as long as the process
def _register(kernel: str, form: str) -> tuple[str, Any]:
    from numba.core import config

    name = f"{kernel}_{form}"
    function = getattr(importlib.import_module(f"jaxserve.kernels.cpu.{kernel}"), name)
    kept = getattr(config, "CACHE_DIR", "")
    compiled = _compile_kept(function, kept) if kept else _compile(function, keep=False)
    address = jax.ffi.pycapsule(ctypes.cast(compiled.address, ctypes.c_void_p))
    jax.ffi.register_ffi_target(f"jaxserve_{name}", address, platform="cpu")
    return f"jaxserve_{name}", compiled


def _compile_kept(function: Callable[[Any], int], kept: str) -> Any:
    """Reads machine code, or makes and writes it. A failed write costs time at the next start, and is no error."""
    try:
        return _compile(function, keep=True)
    except KernelsUnavailable:
        raise
    except OSError as error:
        return _compile_unkept(function, kept, error)
    except Exception as error:  # unpickling a damaged file may raise anything
        logger.error("machine code in %s cannot be read, and is made anew: %s", kept, error)
        shutil.rmtree(kept, ignore_errors=True)
    try:
        return _compile(function, keep=True)
    except Exception as error:
        return _compile_unkept(function, kept, error)


def _compile_unkept(function: Callable[[Any], int], kept: str, error: Exception) -> Any:
    """Stops keeping machine code, with one warning: one kernel that is compiled twice is enough."""
    from numba.core import config

    logger.warning("Numba's kernels are compiled at each start, since %s cannot be written to: %s", kept, error)
    config.CACHE_DIR = ""  # pyright: ignore[reportAttributeAccessIssue]
    return _compile(function, keep=False)


def _compile(function: Callable[[Any], int], *, keep: bool) -> Any:
    from numba import cfunc, types
    from numba.core.errors import NumbaError

    # What is read from a file may be damaged, and raise anything; what is not, fails in Numba or LLVM.
    failures = NumbaError if keep else Exception
    try:
        return cfunc(types.intp(types.voidptr), cache=keep)(function)
    except failures as error:
        # Where colorama is installed, Numba colours its messages for a terminal.
        reason = re.sub(r"\x1b\[[\d;]*m", "", str(error))
        raise KernelsUnavailable(
            f"Numba {metadata.version('numba')} cannot compile the kernels for CPUs: {reason}; install the version of "
            "constraints.txt, or set kernels.paged_attention, kernels.matmul and kernels.grouped_matmul to xla"
        ) from error
