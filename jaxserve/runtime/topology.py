"""Devices that are not here: descriptions of TPUs and GPUs that compile code without one.

Owns the names ('v5e:2x2', 'h200:1') and what each compiler wants to be told. Refuses to run anything: what compiles
for a description is only known to compile.

Why not ask JAX by its own names: libtpu wants its environment set before it is loaded, and XLA:GPU wants the whole
data sheet of the card, which would otherwise be repeated by the planner, the tests and the scripts.
"""

import importlib.metadata
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxserve.config import describe_absent_tpu
from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import Device

# JAX's name of one chip.
_TPU_KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5"}

# NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities.
_GPU_SHEET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA" runtime_version {{ major: 13 minor: 0 patch: 0 }} dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""
_GPUS = {
    "h100": {"kind": "NVIDIA H100 80GB HBM3", "cores": 132, "bandwidth": 3_350_000_000_000, "memory": 85_520_809_984},
    "h200": {"kind": "NVIDIA H200", "cores": 132, "bandwidth": 4_800_000_000_000, "memory": 150_754_820_096},
}
_GPU_PLUGIN = "jax-cuda13-plugin"


def absent_devices(name: str) -> list[Any]:
    """The devices of a topology such as 'v5e:2x2' or 'h200:1', to be put into a mesh or a sharding.

    Raises ConfigError for a name that is not understood, and where the compiler for it is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind in _TPU_KINDS and re.fullmatch(r"\d+x\d+(x\d+)?", shape):
        return _tpu_devices(name)
    if kind in _GPUS and shape.isdigit():
        return _gpu_devices(kind, int(shape))
    known = ", ".join([f"{k}:2x2" for k in _TPU_KINDS] + [f"{k}:1" for k in _GPUS])
    raise ConfigError(f"no topology is called {name!r}; names look like {known}")


def device_of_topology(name: str) -> Device:
    """What a kernel body may know of the devices of a topology."""
    kind = name.partition(":")[0]
    if kind in _TPU_KINDS:
        return Device(backend="tpu", kind=_TPU_KINDS[kind])
    if kind in _GPUS:
        return Device(backend="gpu", kind=str(_GPUS[kind]["kind"]), compute_capability=(9, 0))
    raise ConfigError(f"no topology is called {name!r}; kinds are {', '.join([*_TPU_KINDS, *_GPUS])}")


def _tpu_devices(name: str) -> list[Any]:
    _need("libtpu", "jaxserve[tpu]")
    describe_absent_tpu()
    try:
        found = topologies.get_topology_desc(name, platform="tpu")
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"libtpu knows no topology {name!r}: {error}") from error
    return list(found.devices)


def _gpu_devices(kind: str, count: int) -> list[Any]:
    _need(_GPU_PLUGIN, "jaxserve[aot]")
    sheet = _GPU_SHEET.format(**_GPUS[kind])
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=sheet, topology=f"1x1x{count}"
    )
    return list(found.devices)


def _need(package: str, extra: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"compiling for a device that is not here needs the package {package}: pip install '{extra}'"
        ) from None


def single_device_mesh(device: Any) -> jax.sharding.Mesh:
    """A mesh of one device, whose abstract form tells Pallas what it lowers for."""
    return jax.sharding.Mesh(np.array([device]), ("device",))
