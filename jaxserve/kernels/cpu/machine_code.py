"""From kernels in Python to targets that XLA calls by name.

Kernels are compiled with Numba, their machine code is kept on disk, and XLA is told their addresses. This module,
`scratch` and `implementation` can be imported without Numba.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import KernelsUnavailable, how_to_install

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_LOCK = threading.Lock()
_UNUSED_S = 30 * 86400.0  # as long as `runtime.store` keeps executables that no start reads
_INTERFACES = ("0.3", "0.4")  # of JAX 0.10 and 0.11: `call` reads their structures
DTYPES = ("float32", "bfloat16")  # of weights and caches
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxserve.kernels.cpu import machine_code; machine_code.make_file(*sys.argv[2:])"
)
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclasses.dataclass(slots=True)
class _Kept:
    """Where machine code is kept: one place for the process, as XLA has one table of targets for it.

    `making`: processes that make files of kernels, by name.
    """

    folder: Path | None = None
    making: dict[str, "subprocess.Popen[bytes]"] = dataclasses.field(default_factory=dict)


_KEPT = _Kept()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """One kernel. `read`: from a file. `owner` must live as long as the `address` is used."""

    address: int
    read: bool
    owner: Any

    @classmethod
    def of(cls, symbol: str, state: Any, *, read: bool) -> "MachineCode":
        """From what Numba says of a compiled library."""
        from numba.core.runtime import rtsys  # pyright: ignore[reportPrivateImportUsage]

        context = _context()
        rtsys.initialize(context)  # the functions of Numba's that machine code names
        library = context.codegen().unserialize_library(state)
        return cls(address=library.get_pointer_to_function(symbol), read=read, owner=library)


def missing() -> str | None:
    """The reason why there are no kernels for CPUs here, and the remedy; None where there are."""
    if importlib.util.find_spec("numba") is None:
        return f"Numba is not installed; {how_to_install('cpu')}"
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
    """Has all that is compiled from now on kept below this directory, apart for each version of the kernels.

    Kernels are found by their text, not by their place: another checkout or environment with the same files reads
    them, too. (Numba's own cache has a folder for each path of the source, and reading from it imports all of Numba's
    compiler.) Where nothing can be written they are compiled at each start; the log says so.
    """
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):  # a kernel calls functions of other files
        digest.update(path.read_bytes())
    kept = directory / "machine_code" / digest.hexdigest()[:16]
    try:
        kept.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
    except OSError as error:
        _tell_unkept(kept, error)
        return
    _KEPT.folder = kept
    _remove_unused(kept)


def _tell_unkept(kept: Path, error: OSError) -> None:
    logger.warning("Numba's kernels are compiled at each start, since %s cannot be written to: %s", kept, error)


def _remove_unused(kept: Path) -> None:
    """Marks a directory as used now, and removes its neighbours, of former kernels, that no start has used for long."""
    with contextlib.suppress(OSError):  # of a file system that can only be read
        os.utime(kept)
        for other in kept.parent.iterdir():
            if other != kept and other.stat().st_mtime < time.time() - _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


def is_kept() -> bool:
    """Whether an earlier process has left machine code where `keep_machine_code` looks for it."""
    return _KEPT.folder is not None and any(_KEPT.folder.iterdir())


def make_beside(kernel: str, form: str) -> None:
    """Has another process compile a kernel that `provide` will be asked for, where its file is not there yet.

    Numba compiles one kernel at a time in a process, on one core.
    """
    name = f"{kernel}_{form}"
    with _LOCK:
        path = _path(name)
        if path is None or path.exists() or name in _KEPT.making:
            return
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(path.parent), kernel, form]
        with contextlib.suppress(OSError):  # then this process compiles it
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            _KEPT.making[name] = process
            atexit.register(_end, process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Of a process for which nobody may have waited: this one leaves none, be it one that has ended."""
    process.kill()
    process.wait()


def make_file(folder: str, kernel: str, form: str) -> None:
    """The work of such a process. What it fails at, the process that waits for it does again, and tells."""
    _KEPT.folder = Path(folder)
    _make(kernel, f"{kernel}_{form}")


def provide(kernel: str, form: str) -> str:
    """The name of a kernel's target for XLA. The first call compiles it (seconds), or reads it from its file.

    Raises KernelsUnavailable where Numba cannot compile it.

    The kernel is the function `<kernel>_<form>` of the module `<kernel>`. The form is the dtype of weights or of the
    cache, or what the module names its functions by.
    """
    with _LOCK:
        return _register(kernel, form)[0]


@functools.cache  # XLA keeps only addresses: a registered function must live as long as the process
def _register(kernel: str, form: str) -> tuple[str, "MachineCode"]:
    name = f"{kernel}_{form}"
    if (beside := _KEPT.making.pop(name, None)) is not None:
        beside.wait()
    code = _read(name) or _make(kernel, name)
    address = jax.ffi.pycapsule(ctypes.c_void_p(code.address))
    jax.ffi.register_ffi_target(f"jaxserve_{name}", address, platform="cpu")
    return f"jaxserve_{name}", code


def _context() -> Any:
    """Numba's for the processor at hand: what compiles, and what is known of its functions."""
    from numba.core.registry import cpu_target

    return cpu_target.target_context


def _path(name: str) -> Path | None:
    """The file of a kernel: of one compiler and one processor."""
    if _KEPT.folder is None:
        return None
    versions = (sys.version, metadata.version("numba"), metadata.version("llvmlite"))
    key = hashlib.sha256(repr((versions, _context().codegen().magic_tuple())).encode()).hexdigest()[:16]
    return _KEPT.folder / f"{name}-{key}"


def _read(name: str) -> "MachineCode | None":
    """None where there is no file, or a damaged one, which is removed."""
    path = _path(name)
    if path is None or not path.exists():
        return None
    try:
        data = path.read_bytes()
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:  # LLVM ends the process for an object that is not whole
            raise ValueError("it is not as it was written")
        return MachineCode.of(*pickle.loads(content), read=True)
    except Exception as error:  # whatever else Numba finds wrong
        logger.error("machine code in %s cannot be read, and is made anew: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _make(kernel: str, name: str) -> "MachineCode":
    """Compiles and writes. A failed write costs time at the next start, and is no error."""
    compiled = _compile(getattr(importlib.import_module(f"jaxserve.kernels.cpu.{kernel}"), name))
    symbol, state = compiled.native_name, compiled._library.serialize_using_object_code()
    if (path := _path(name)) is not None:
        content = pickle.dumps((symbol, state))
        part: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
                part = Path(file.name)
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        except OSError as error:
            _tell_unkept(path.parent, error)
            _KEPT.folder = None  # one kernel that is compiled twice is enough
            with contextlib.suppress(OSError):
                if part is not None:
                    part.unlink(missing_ok=True)
    return MachineCode(address=compiled.address, read=False, owner=compiled)


def _compile(function: Callable[[Any], int]) -> Any:
    from numba import cfunc, types

    try:
        with _whole_kernels(function.__qualname__):
            return cfunc(types.intp(types.voidptr))(function)
    except Exception as error:  # of Numba or LLVM
        # Where colorama is installed, Numba colours its messages for a terminal.
        reason = re.sub(r"\x1b\[[\d;]*m", "", str(error))
        raise KernelsUnavailable(
            f"Numba {metadata.version('numba')} cannot compile the kernels for CPUs: {reason}; install the version of "
            "constraints.txt, or set kernels.paged_attention, kernels.matmul and kernels.grouped_matmul to xla"
        ) from error


@contextlib.contextmanager
def _whole_kernels(outermost: str) -> Iterator[None]:
    """While a kernel is compiled, the functions that it calls are optimised to be linked into it, and no more; and
    none of them can be seen from outside of it.

    By itself Numba also makes machine code of each, with one wrapper for Python and one for C: half of the time. They
    cannot be called from Python then, and nothing does.

    Numba tells functions of one name apart by a number that begins at 1 in each process, and links what has the same
    name once. So of two kernels that two processes have compiled, one could call a function of the other.
    """
    from numba.core.compiler_lock import global_compiler_lock

    context = _context()
    make_wrapper = context.create_cfunc_wrapper

    def link_only(library: Any, descriptor: Any, environment: Any) -> Callable[..., Any]:
        def finish() -> None:
            library._finalized = True

        library._finalize_final_module = finish
        return [].append  # Numba wants a C function, another for each, as its key

    def wrap_outermost(library: Any, descriptor: Any, environment: Any, call_helper: Any) -> None:
        if descriptor.qualname == outermost:
            make_wrapper(library, descriptor, environment, call_helper)
            library._optimize_final_module = functools.partial(
                _optimize_and_hide, library, library._optimize_final_module, descriptor.llvm_cfunc_wrapper_name
            )

    replaced = {
        "get_executable": link_only,
        "create_cpython_wrapper": lambda *_, **__: None,
        "create_cfunc_wrapper": wrap_outermost,
    }
    with global_compiler_lock:
        vars(context).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                delattr(context, name)


def _optimize_and_hide(library: Any, optimize: Callable[[], None], seen: str) -> None:
    """The module of a kernel, in which no name but one is seen from outside."""
    optimize()
    module = library._final_module
    for defined in (*module.functions, *module.global_variables):
        if not defined.is_declaration and defined.name != seen:
            defined.linkage = "internal"
