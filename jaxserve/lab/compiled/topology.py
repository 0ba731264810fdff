"""Devices that are not here: descriptions of TPUs and GPUs that compile code without one.

They have names such as 'v5e:2x2' and 'h200:1'. Nothing can run on a description: a program that compiles for one is
only known to compile.

JAX's own names are not enough: libtpu needs its environment set before it is loaded, and XLA:GPU needs the whole data
sheet of the card, which would otherwise be repeated by the planner, the tests and the scripts.
"""

import dataclasses
import importlib.metadata
from typing import Any

import jax
from jax.experimental import topologies

from jaxserve.assemble.devices import settle_platform
from jaxserve.config import describe_absent_tpu
from jaxserve.errors import ConfigError, MissingCompiler, how_to_install
from jaxserve.kernels.dispatch import Device
from jaxserve.values.chips import Chip, Topology, parse_topology

_GPU_SHEET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {core.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {core.block_shared_bytes}
  shared_memory_per_core: {core.shared_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: {core.fpus} clock_rate_ghz: {core.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {core.l2_bytes} device_memory_size: {memory}
  driver_version: "13.0.0" cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA" runtime_version {{ major: 13 minor: 0 patch: 0 }} dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""
_GPU_PLUGIN = "jax-cuda13-plugin"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """A streaming multiprocessor, as far as a chip does not name it.

    Attributes:
      threads: that it holds at once.
      shared_bytes, block_shared_bytes: its shared memory, and the most that one block may have of it.
      fpus: float32 units.
      clock_ghz: the highest.
      l2_bytes: of the whole card.
      accelerated: it has instructions that no later GPU has (sm_90a, sm_100a).
    """

    threads: int
    shared_bytes: int
    block_shared_bytes: int
    fpus: int
    clock_ghz: float
    l2_bytes: int
    accelerated: bool


# The CUDA programming guide's table of compute capabilities; clock and cache from the architectures' white papers.
_CORES = {
    (8, 0): _Core(
        threads=2048,
        shared_bytes=164 * 2**10,
        block_shared_bytes=163 * 2**10,
        fpus=64,
        clock_ghz=1.41,
        l2_bytes=40 * 2**20,
        accelerated=False,
    ),
    (8, 9): _Core(
        threads=1536,
        shared_bytes=100 * 2**10,
        block_shared_bytes=99 * 2**10,
        fpus=128,
        clock_ghz=2.52,
        l2_bytes=96 * 2**20,
        accelerated=False,
    ),
    (9, 0): _Core(
        threads=2048,
        shared_bytes=228 * 2**10,
        block_shared_bytes=227 * 2**10,
        fpus=128,
        clock_ghz=1.98,
        l2_bytes=50 * 2**20,
        accelerated=True,
    ),
    (10, 0): _Core(
        threads=2048,
        shared_bytes=228 * 2**10,
        block_shared_bytes=227 * 2**10,
        fpus=128,
        clock_ghz=1.965,
        l2_bytes=126 * 2**20,
        accelerated=True,
    ),
}


def absent_devices(name: str) -> list[Any]:
    """The devices of a topology such as 'v5e:2x2' or 'h200:1', to be put into a mesh or a sharding.

    Those of 'cpu:N' are here. Raises ConfigError for a name that is not understood, and where the compiler for it is
    not installed.
    """
    topology = parse_topology(name)
    settle_platform()
    if topology.chip.backend == "tpu":
        return _tpu_devices(topology)
    if topology.chip.backend == "gpu":
        return _gpu_devices(topology.chip, topology.num_devices)
    return _cpu_devices(topology)


def device_of_topology(name: str) -> Device:
    """The description of a topology's devices that kernels are chosen by."""
    chip = parse_topology(name).chip
    return Device(backend=chip.backend, kind=chip.kind, compute_capability=chip.compute_capability)


def _tpu_devices(topology: Topology) -> list[Any]:
    _need("libtpu", "tpu")
    describe_absent_tpu()
    name = topology.name.replace(topology.chip.name, topology.chip.compiler_name)
    # libtpu takes a host to hold 2x2x1 chips unless told otherwise, and would refuse a single one.
    options = {"chips_per_host_bounds": [1, 1, 1]} if topology.num_devices == 1 else {}
    try:
        found = topologies.get_topology_desc(name, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"libtpu knows no topology {name!r}: {error}") from error
    return list(found.devices)


def _gpu_devices(chip: Chip, count: int) -> list[Any]:
    _need(_GPU_PLUGIN, "aot")
    assert chip.compute_capability is not None, chip.name
    major, minor = chip.compute_capability
    core = _CORES[chip.compute_capability]
    sheet = _GPU_SHEET.format(
        cores=chip.num_cores,
        bandwidth=int(chip.memory_bandwidth),
        memory=chip.memory_bytes,
        major=major,
        minor=minor,
        kind=chip.kind,
        core=core,
        extension="feature_extension: ACCELERATED_FEATURES" if core.accelerated else "",
    )
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=sheet, topology=f"1x1x{count}"
    )
    return list(found.devices)


def _cpu_devices(topology: Topology) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < topology.num_devices:
        raise ConfigError(
            f"{topology.name} needs {topology.num_devices} CPU devices, but JAX has {len(found)} here; start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.num_devices}"
        )
    return found[: topology.num_devices]


def _need(package: str, extra: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingCompiler(
            f"compiling for a device that is not here needs the package {package}: {how_to_install(extra)}; or use "
            "--quick, which compiles nothing"
        ) from None
