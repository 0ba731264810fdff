"""Builds of an implementation: compiled for a device that is not here, or interpreted on this CPU.

The output of compilers and interpreters is captured, and ptxas' report read. `device_check` runs kernels on an
accelerator.

The compiler's own report is read and not the machine code: XLA packs the code into a compressed container, while Mosaic
GPU prints, when asked through its environment variables, exactly what ptxas said of each kernel.
"""

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from kernel_runs import find_implementation, on_host, prepare

from jaxserve.kernels.cases import Case
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.oracle import relative_error
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.lab.compiled.attention import compile_attend
from jaxserve.lab.compiled.topology import device_of_topology

# What makes Mosaic GPU print ptxas' report, and the launch with its shared memory.
ENVIRONMENT = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
_CPU = Device(backend="cpu", kind="cpu")
_SIMULATED = {"mosaic_tpu": device_of_topology("v5e:2x2"), "mosaic_gpu": device_of_topology("h200:1")}
_RACE = "RACE DETECTED"  # what both interpreters print
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
# ptxas puts waits around each matrix product where it cannot see that they may overlap: note C7510, C7514 and others.
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized.*function '(\w+)'")
_SHARED = re.compile(r"@mosaic_gpu_get_function\(ptr [^,]+, ptr @(\w+?)_name, i32 (\d+),")
# Sizes of the grid, the cluster and the block, and the shared memory, which JAX 0.10 says at the kernel's load, too.
_LAUNCH = re.compile(r"call (?:void|i32) @mosaic_gpu_launch_kernel\(ptr [^,]+, ((?:i32 [^,]+, ){10})")


def compile_for(case: Case, implementation_name: str, topology: str) -> dict[str, Any]:
    """Compiles `attend` of a whole case for one device of `topology`: seconds, memory, and each GPU kernel's use.

    {"refused": why} if the implementation does not run the case there.
    """
    implementation = find_implementation(implementation_name, device_of_topology(topology))
    refusal = implementation.refuses(case.use)
    if refusal is not None:
        return {"refused": refusal}
    with capture() as printed:
        compiled, seconds = compile_attend(case, implementation, topology)
    memory = compiled.memory_analysis()
    found = {"seconds": round(seconds, 1), "temporary_bytes": memory.temp_size_in_bytes}
    return found | ({"kernels": kernels_of(printed[0])} if implementation_name == "mosaic_gpu" else {})


def interpret(case: Case, implementation_name: str) -> dict[str, Any]:
    """Error of a case in an interpreter, unused memory poisoned, and whether it saw a race. Short cases only.

    Those in plain XLA need no interpreter: they run on this CPU.
    """
    refusal = find_implementation(implementation_name, _SIMULATED.get(implementation_name, _CPU)).refuses(case.use)
    if refusal is not None:
        return {"refused": refusal}
    start = time.monotonic()
    with capture() as printed, _interpreted(implementation_name) as implementation:
        inputs = prepare(case, implementation)
        options = (inputs.sinks, inputs.alibi_slopes, inputs.scales)
        attend = jax.jit(implementation.attend, static_argnums=5)
        out, _ = attend(inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, *options)
        error = relative_error(case, on_host(inputs), np.asarray(out))
    return {"error": error, "races": _RACE in printed[0], "seconds": round(time.monotonic() - start, 1)}


@contextlib.contextmanager
def _interpreted(name: str) -> Iterator[PagedAttention]:
    """As the tests interpret it. Imported late, since it needs private modules of JAX, and pytest."""
    if name == "mosaic_tpu":
        from tests.kernels.tpu_interpreter import IMPLEMENTATION

        yield IMPLEMENTATION
    elif name == "mosaic_gpu":
        from tests.kernels.gpu_interpreter import IMPLEMENTATION, watched

        with watched():
            yield IMPLEMENTATION
    else:
        yield find_implementation(name, _CPU)


def kernels_of(printed: str) -> list[dict[str, Any]]:
    """Each kernel that ptxas reported on, with the launch that Mosaic GPU wrote for it."""
    found: dict[str, dict[str, Any]] = {}
    name = ""
    for line in printed.splitlines():
        if match := _ENTRY.search(line):
            # Two kernels of one program may have one name: the later one gets a number.
            name = base = match[1]
            while name in found:
                name = f"{base}#{len([n for n in found if n.startswith(base)]) + 1}"
            found[name] = {"kernel": name}
        elif (match := _STACK.search(line)) and name:
            found[name] |= {"stack_bytes": int(match[1]), "spill_bytes": int(match[2]) + int(match[3])}
        elif (match := _USED.search(line)) and name:
            found[name] |= {"registers": int(match[1])}
        elif match := _SHARED.search(line):
            name = next((n for n in reversed(found) if n.partition("#")[0] == match[1]), "")
            if name:
                found[name] |= {"shared_bytes": int(match[2])}
        elif (match := _LAUNCH.search(line)) and name:
            sizes = re.findall(r"i32 (\S+),", match[1])
            threads = [int(x) for x in sizes[6:9] if x.isdigit()]
            if len(threads) == 3:
                found[name] |= {"threads": int(np.prod(threads))}
            if sizes[9].isdigit():
                found[name].setdefault("shared_bytes", int(sizes[9]))
    for serialized in _SERIALIZED.findall(printed):  # which of several of one name is not said
        for kernel in found.values():
            if kernel["kernel"].partition("#")[0] == serialized:
                kernel["serialized"] = True
    return list(found.values())


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """What this process prints meanwhile, from Python or from C, is the only entry of the list at the end."""
    printed: list[str] = []
    sys.stdout.flush()
    _flush_c()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with os.fdopen(os.dup(1), "w") as text, contextlib.redirect_stdout(text):
                yield printed
        finally:
            _flush_c()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))


def _flush_c() -> None:
    ctypes.CDLL(None).fflush(None)
