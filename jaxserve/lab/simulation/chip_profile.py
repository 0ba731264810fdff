"""Chips of one's own in simulations, from a file with the figures of their data sheet.

    name: a10g
    backend: gpu                 # tpu, gpu or cpu: the defaults of a server
    memory_gib: 24               # that a process can take
    memory_gb_s: 600
    tflops: {bfloat16: 70}       # dense; a type that it does not name is not computed
    link_gb_s: 0                 # to the other chips, one way, through a switch; 0: none

A device is then 'FILE.yaml:1', with the number of chips. Nothing compiles for such a chip: `jaxserve plan` takes the
chips of `jaxserve.values.chips` alone.
"""

from pathlib import Path
from typing import Literal

import pydantic
import yaml

from jaxserve.errors import ConfigError
from jaxserve.values.chips import Chip, Topology, parse_topology

_COUNTS = (1, 2, 4, 8, 16)
_GIB = 2**30


class ChipProfile(pydantic.BaseModel):
    """The content of the file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = pydantic.Field(min_length=1)
    backend: Literal["tpu", "gpu", "cpu"] = "gpu"
    memory_gib: float = pydantic.Field(gt=0, le=1e6)
    memory_gb_s: float = pydantic.Field(gt=0)
    tflops: dict[Literal["float32", "bfloat16", "float16", "int8", "float8"], pydantic.PositiveFloat] = pydantic.Field(
        min_length=1
    )
    link_gb_s: float = pydantic.Field(default=0.0, ge=0)

    def chip(self) -> Chip:
        """The data sheet in the form of those in `jaxserve.values.chips`."""
        memory = int(self.memory_gib * _GIB)
        return Chip(
            name=self.name,
            backend=self.backend,
            kind=self.name,
            memory_bytes=memory,
            allocatable_bytes=memory,
            memory_bandwidth=self.memory_gb_s * 1e9,
            flops={dtype: value * 1e12 for dtype, value in self.tflops.items()},
            link_bandwidth=self.link_gb_s * 1e9,
            torus=False,
            shapes=tuple((count,) for count in (_COUNTS if self.link_gb_s else (1,))),
        )


def topology_of(name: str) -> Topology:
    """'FILE.yaml:2' by a profile, anything else as `parse_topology`. Raises ConfigError, which names the file."""
    file, _, count = name.rpartition(":")
    if not file.endswith((".yaml", ".yml")):
        if name.endswith((".yaml", ".yml")):
            raise ConfigError(f"{name!r} has no number of chips; write {name}:1")
        return parse_topology(name)
    path = Path(file)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that is none
        raise ConfigError(f"the profile {path} cannot be read: {error}") from error
    try:
        chip = ChipProfile.model_validate(tree).chip()
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'profile'}: {one['msg']}" for one in error.errors()]
        raise ConfigError(f"the profile {path}: {'; '.join(problems[:5])}") from error
    if (count,) not in {tuple(map(str, shape)) for shape in chip.shapes}:
        offered = ", ".join(f"{path}:{shape[0]}" for shape in chip.shapes)
        more = "" if chip.link_bandwidth else "; several need link_gb_s"
        raise ConfigError(f"there is no {name!r}; there are {offered}{more}")
    return chip.topology((int(count),))
