"""Sums and bytes over the devices of one axis of a mesh, and of several."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.sharding import EXPERT_AXIS, TENSOR_AXIS, Shards
from jaxserve.runtime.executables import device_bytes

AXES = (EXPERT_AXIS, TENSOR_AXIS)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)


def test_each_axis_is_summed_and_numbered_by_itself() -> None:
    experts, tensor = Shards(count=4, axis=EXPERT_AXIS), Shards(count=2, axis=TENSOR_AXIS)

    def everything(x: jax.Array) -> tuple[jax.Array, ...]:
        of_experts, of_tensor = experts.start(3)[None], tensor.start(5)[None]
        return experts.sum(x), tensor.sum(x), experts.max(x), tensor.gather(x), of_experts, of_tensor

    both = PartitionSpec(AXES)
    found = jax.jit(
        jax.shard_map(
            everything,
            mesh=mesh(),
            in_specs=both,
            out_specs=(
                *(both,) * 3,
                PartitionSpec(EXPERT_AXIS),
                PartitionSpec(EXPERT_AXIS),
                PartitionSpec(TENSOR_AXIS),
            ),
            check_vma=False,
        )
    )(jnp.arange(8.0))
    by_expert, by_tensor, highest, gathered, of_experts, of_tensor = (np.asarray(x).tolist() for x in found)
    assert by_expert == [12.0, 16.0] * 4, "0 + 2 + 4 + 6 and 1 + 3 + 5 + 7"
    assert by_tensor == [1.0, 1.0, 5.0, 5.0, 9.0, 9.0, 13.0, 13.0]
    assert highest == [6.0, 7.0] * 4
    assert gathered == list(range(8))
    assert (of_experts, of_tensor) == ([0, 3, 6, 9], [0, 5])


def test_bytes_are_divided_by_every_axis_that_is_named() -> None:
    shape = jax.ShapeDtypeStruct((8, 16, 4), np.float32)
    for spec, parts in (
        (PartitionSpec(), 1),
        (PartitionSpec(None, TENSOR_AXIS), 2),
        (PartitionSpec(EXPERT_AXIS), 4),
        (PartitionSpec(EXPERT_AXIS, TENSOR_AXIS), 8),
        (PartitionSpec(None, AXES), 8),
    ):
        assert device_bytes([shape], [spec], mesh()) == 8 * 16 * 4 * 4 // parts, spec
