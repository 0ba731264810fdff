"""The table of chips: names of topologies, and that the table agrees with the compilers."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic import tpu_info  # has no public name yet

from jaxserve.errors import ConfigError
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.values.chips import CHIPS, canonical_kind, parse_topology

GIB = 2**30


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.backend == "tpu"], ids=lambda chip: chip.name)
def test_every_name_that_jax_takes_for_a_tpu_is_known(chip):
    version = tpu_info.chip_version_from_device_kind
    names = [f"TPU {name}" for name in ("v4", "v5", "v5e", "v5p", "v5 lite", "v6e", "v6 lite")] + ["TPU7x"]
    same = [name for name in names if version(name) == version(chip.kind)]
    assert chip.kind in same
    assert {canonical_kind(name) for name in same} == {chip.kind}


@pytest.mark.parametrize(
    ("name", "canonical", "devices"),
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("v5e:8", "v5e:2x4", 8),
        ("v6e:1", "v6e:1x1", 1),
        ("v5p:2x2x1", "v5p:2x2x1", 4),
        ("v7x:4", "v7x:2x2x1", 8),  # two devices a chip
        ("h200:2", "h200:2", 2),
        ("cpu:1", "cpu:1", 1),
    ],
)
def test_topologies_by_shape_and_by_count(name, canonical, devices):
    topology = parse_topology(name)
    assert (topology.name, topology.num_devices) == (canonical, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v99:2x2", "names look like v5e:2x2"),
        ("h200", "of h200 there are h200:1, h200:2"),
        ("h200:3", "of h200 there are"),
        ("v6e:4x2", "of v6e there are"),
        ("v6e:0", "of v6e there are"),
        ("v6e:2x", "of v6e there are"),
    ],
)
def test_names_of_nothing_are_refused_with_what_there_is(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(name)


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.backend != "cpu"], ids=lambda chip: chip.name)
def test_every_topology_of_the_table_is_known_to_its_compiler(chip):
    for shape in chip.shapes[:4]:
        topology = chip.topology(shape)
        devices = absent_devices(topology.name)
        assert len(devices) == topology.num_devices
        assert devices[0].device_kind == device_of_topology(topology.name).kind == chip.kind


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "v7x"])
def test_memory_is_what_the_compiler_says(name):
    """A program that asks for too much is told what there is."""
    chip = CHIPS[name]
    device = absent_devices(chip.topology(chip.shapes[0]).name)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    huge = jax.ShapeDtypeStruct((300 * GIB,), jnp.bfloat16, sharding=sharding)
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    found = re.search(r"available HBM \(([\d.]+)G\)", str(refused.value))
    assert found is not None, refused.value
    # The libtpu that belongs to JAX 0.11 keeps a few megabytes more for itself.
    assert float(found[1]) == pytest.approx(chip.memory_bytes / GIB, abs=0.011)


def test_figures_are_of_one_order():
    """A slipped power of ten would show as a chip that needs far more, or far fewer, operations for each byte."""
    for chip in CHIPS.values():
        fastest = max(chip.flops.values())
        assert 5 < fastest / chip.memory_bandwidth < 1500, chip.name
        assert chip.allocatable_bytes <= chip.memory_bytes
        assert [chip.num_devices(shape) for shape in chip.shapes] == sorted({chip.num_devices(s) for s in chip.shapes})
