"""Chips: the figures in the data sheets of the devices that this engine runs on, and the names of their topologies.

The table has published figures only. The share of a peak that a program reaches is an assumption of the code that
predicts with it. Nothing here needs JAX, so that a simulator may read it.

Figures are per device and not per chip: memory, meshes and programs are JAX's, and JAX calls each half of an Ironwood
chip a device.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

from jaxserve.errors import ConfigError

_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorCores:
    """The cores of one device of a TPU, and their matrix units.

    Attributes:
      number: cores that the device joins; a program without a parallel dimension runs on one of them.
      units: matrix units of each core.
      size: rows and columns of the weights that a unit holds.
      rows: of bfloat16 that a unit multiplies with them in a cycle.
      delay_slots: bundles behind a branch that are issued before it acts; None where it differs from branch to branch.
    """

    number: int
    units: int
    size: int
    rows: int
    delay_slots: int | None

    @property
    def multiply_adds(self) -> int:
        """Of bfloat16, by all units in a cycle."""
        return self.number * self.units * self.size**2 * self.rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of device. Figures are per JAX device; bandwidths are bytes a second, flops are dense.

    Attributes:
      name: the part of a topology's name before the colon.
      kind: JAX's `device_kind`.
      memory_bytes: of the device, as XLA counts it.
      allocatable_bytes: what a process can take of it: of a GPU, the share that it asks for.
      memory_bandwidth: between the device and its memory.
      flops: dtype -> operations a second; a dtype that the device has no units for is absent.
      link_bandwidth: to the other devices, one way, over all links together. 0: none.
      torus: links go to neighbours only; otherwise every device reaches every other through a switch.
      shapes: chips along each dimension of the topologies on offer, ascending.
      devices_per_chip: JAX devices of one chip of a shape.
      compiler_name: what libtpu calls it; '' for others.
      num_cores: streaming multiprocessors of a GPU; 0 for others.
      compute_capability: of a GPU.
      tensor_cores: of a TPU; None for others.
    """

    name: str
    backend: Literal["tpu", "gpu", "cpu"]
    kind: str
    memory_bytes: int
    allocatable_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float
    torus: bool
    shapes: tuple[tuple[int, ...], ...]
    devices_per_chip: int = 1
    compiler_name: str = ""
    num_cores: int = 0
    compute_capability: tuple[int, int] | None = None
    tensor_cores: TensorCores | None = None

    @property
    def clock_hz(self) -> float:
        """Cycles a second of a TPU's cores: the peak, divided by what all matrix units do in a cycle."""
        assert self.tensor_cores is not None, f"{self.name} is no TPU"
        return self.flops["bfloat16"] / (2 * self.tensor_cores.multiply_adds)

    def num_devices(self, shape: tuple[int, ...]) -> int:
        """JAX devices of a topology of this shape."""
        return math.prod(shape) * self.devices_per_chip

    def topology(self, shape: tuple[int, ...]) -> "Topology":
        """The topology of this shape."""
        return Topology(name=f"{self.name}:{'x'.join(map(str, shape))}", chip=self, shape=shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Chips of one kind and how they are joined. `name` is what `parse_topology` reads."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return self.chip.num_devices(self.shape)


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))  # v5e and v6e: a plane of up to 256
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_NODE = ((1,), (2,), (4,), (8,))  # GPUs behind one NVSwitch, or in the PCIe slots of one host

# TPUs: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}, "System architecture". Links: the pages give both directions
# together (400, 1200, 800 and 1200 GB/s a chip). Memory: what libtpu 0.0.42 reports when a program asks for more.
# Matrix units: the same pages (v5e, v5p: 128 x 128; from v6e on 256 x 256). Two rows a cycle from v6e on: with one, the
# published peaks would need clocks of 3.5 and 4.4 GHz; XLA's own estimate of a large product agrees with two.
# GPUs: NVIDIA's data sheets (of the SXM modules where there are some; of HGX B200, an eighth), flops without sparsity;
# the memory is nvidia-smi's total. The sheets give both directions of links together: NVLink 600, 900 and 1800 GB/s,
# and PCIe 4.0 64 GB/s of an L40S, which has no NVLink.
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            backend="tpu",
            kind="TPU v5 lite",
            memory_bytes=int(15.75 * _GIB),
            allocatable_bytes=int(15.75 * _GIB),
            memory_bandwidth=819e9,
            flops={"bfloat16": 197e12, "int8": 394e12},
            link_bandwidth=200e9,
            torus=True,
            shapes=_FLAT,
            compiler_name="v5e",
            tensor_cores=TensorCores(number=1, units=4, size=128, rows=1, delay_slots=4),
        ),
        Chip(
            name="v5p",
            backend="tpu",
            kind="TPU v5",
            memory_bytes=int(95.74 * _GIB),
            allocatable_bytes=int(95.74 * _GIB),
            memory_bandwidth=2765e9,
            flops={"bfloat16": 459e12, "int8": 918e12},
            link_bandwidth=600e9,
            torus=True,
            shapes=_CUBES,
            compiler_name="v5p",
            tensor_cores=TensorCores(number=2, units=4, size=128, rows=1, delay_slots=4),
        ),
        Chip(
            name="v6e",
            backend="tpu",
            kind="TPU v6 lite",
            memory_bytes=int(31.25 * _GIB),
            allocatable_bytes=int(31.25 * _GIB),
            memory_bandwidth=1638e9,
            flops={"bfloat16": 918e12, "int8": 1836e12, "float8": 918e12},
            link_bandwidth=400e9,
            torus=True,
            shapes=_FLAT,
            compiler_name="v6e",
            tensor_cores=TensorCores(number=1, units=2, size=256, rows=2, delay_slots=4),
        ),
        Chip(  # half of a chip each: 192 GiB, 7380 GB/s, 2307 and 4614 Tflop/s, 1200 GB/s
            name="v7x",
            backend="tpu",
            kind="TPU7x",
            memory_bytes=int(94.75 * _GIB),
            allocatable_bytes=int(94.75 * _GIB),
            memory_bandwidth=3690e9,
            flops={"bfloat16": 1153.5e12, "float8": 2307e12},
            link_bandwidth=300e9,
            torus=True,
            shapes=_CUBES,
            devices_per_chip=2,
            compiler_name="tpu7x",
            tensor_cores=TensorCores(number=1, units=2, size=256, rows=2, delay_slots=None),
        ),
        Chip(
            name="a100",
            backend="gpu",
            kind="NVIDIA A100-SXM4-80GB",
            memory_bytes=85_899_345_920,
            allocatable_bytes=85_899_345_920,
            memory_bandwidth=2039e9,
            flops={"bfloat16": 312e12, "int8": 624e12, "float32": 19.5e12},
            link_bandwidth=300e9,
            torus=False,
            shapes=_NODE,
            num_cores=108,
            compute_capability=(8, 0),
        ),
        Chip(
            name="l40s",
            backend="gpu",
            kind="NVIDIA L40S",
            memory_bytes=48_305_799_168,
            allocatable_bytes=48_305_799_168,
            memory_bandwidth=864e9,
            flops={"bfloat16": 362e12, "int8": 733e12, "float8": 733e12, "float32": 91.6e12},
            link_bandwidth=32e9,
            torus=False,
            shapes=_NODE,
            num_cores=142,
            compute_capability=(8, 9),
        ),
        Chip(
            name="h100",
            backend="gpu",
            kind="NVIDIA H100 80GB HBM3",
            memory_bytes=85_520_809_984,
            allocatable_bytes=85_520_809_984,
            memory_bandwidth=3350e9,
            flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 67e12},
            link_bandwidth=450e9,
            torus=False,
            shapes=_NODE,
            num_cores=132,
            compute_capability=(9, 0),
        ),
        Chip(
            name="h200",
            backend="gpu",
            kind="NVIDIA H200",
            memory_bytes=150_754_820_096,
            allocatable_bytes=150_754_820_096,
            memory_bandwidth=4800e9,
            flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 67e12},
            link_bandwidth=450e9,
            torus=False,
            shapes=_NODE,
            num_cores=132,
            compute_capability=(9, 0),
        ),
        Chip(
            name="b200",
            backend="gpu",
            kind="NVIDIA B200",
            memory_bytes=192_265_846_784,
            allocatable_bytes=192_265_846_784,
            memory_bandwidth=8000e9,
            flops={"bfloat16": 2250e12, "int8": 4500e12, "float8": 4500e12, "float32": 75e12},
            link_bandwidth=900e9,
            torus=False,
            shapes=_NODE,
            num_cores=148,
            compute_capability=(10, 0),
        ),
        # No data sheet: a laptop of eight cores with AVX2 at 3 GHz, dual-channel DDR5-4800 and 16 GiB, half of it free.
        Chip(
            name="cpu",
            backend="cpu",
            kind="cpu",
            memory_bytes=16 * _GIB,
            allocatable_bytes=8 * _GIB,
            memory_bandwidth=76.8e9,
            flops={"float32": 768e9},
            link_bandwidth=0,
            torus=False,
            shapes=((1,), (2,), (4,), (8,)),
        ),
    )
}


_OTHER_KINDS = {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}


def canonical_kind(kind: str) -> str:
    """The one of JAX's names for a device that the tables use: some versions of libtpu give the marketing name."""
    return _OTHER_KINDS.get(kind, kind)


def chip_of_kind(kind: str) -> Chip | None:
    """The data sheet of a device by JAX's name for it; None for one that has none here."""
    return next((chip for chip in CHIPS.values() if chip.kind == canonical_kind(kind)), None)


def parse_topology(name: str) -> Topology:
    """'v5e:2x4' by shape, or 'v5e:8', 'h200:2' by number of chips. Raises ConfigError with what there is."""
    kind, _, shape = name.partition(":")
    chip = CHIPS.get(kind)
    if chip is None:
        raise ConfigError(
            f"no topology is called {name!r}: there are {', '.join(CHIPS)}; names look like v5e:2x2 or h200:1"
        )
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        given = tuple(map(int, shape.split("x")))
        if given in chip.shapes:
            return chip.topology(given)
        by_count = [s for s in chip.shapes if given == (math.prod(s),)]
        if by_count:
            return chip.topology(by_count[0])
    offered = ", ".join(chip.topology(s).name for s in chip.shapes)
    raise ConfigError(f"no topology is called {name!r}; of {kind} there are {offered}")
