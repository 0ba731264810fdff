"""What moves between stages of different processes: here one process has the devices of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.schema import ParallelConfig
from jaxserve.runtime.mesh import make_meshes, replicated
from jaxserve.runtime.pipeline import launch_order
from jaxserve.runtime.sampling import Logprobs
from jaxserve.runtime.stage_links import AbstractLinks, StageLinks
from jaxserve.runtime.step_output import StepOutput
from jaxserve.sched.plan import Bucket

BUCKETS = (Bucket(2, 2, True), Bucket(8, 2, False))
WIDTH = 4


def output(bucket: Bucket) -> StepOutput:
    """Values that a sum, or a type of more digits, would change."""
    rows = bucket.rows
    logprobs = Logprobs(
        logprob=jnp.array([[-jnp.inf, -0.0]], jnp.float32),
        rank=jnp.array([[1, 2**24 + 1]], jnp.int32),
        top_ids=jnp.arange(rows * 3).reshape(1, rows, 3),
        top_logprobs=jnp.full((1, rows, 3), jnp.nan, jnp.bfloat16),
    )
    sums = None if bucket.decode_only else jnp.full((rows, WIDTH), 0.1, jnp.float32)
    return StepOutput(
        token_ids=jnp.array([[[5], [-1]]]), logprobs=logprobs, last_token=jnp.array([7, 8, 0]), hidden_sums=sums
    )


@pytest.mark.parametrize("cut", [{"pipeline": 3}, {"pipeline": 3, "tensor": 2}])
def test_each_stage_gets_what_the_one_before_has_left(cut: dict[str, int]) -> None:
    [meshes] = make_meshes(ParallelConfig(**cut), jax.devices())
    outputs = {bucket: output(bucket) for bucket in BUCKETS}
    shapes = AbstractLinks(
        meshes=meshes,
        hidden=jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16),
        outputs=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), outputs),
    )
    links = StageLinks(shapes, shapes.compile({}, None, lambda *_: None))
    for bucket in BUCKETS:
        carried = jax.random.normal(jax.random.key(1), (bucket.tokens, WIDTH), jnp.bfloat16)
        want, place = np.asarray(carried), [replicated(mesh) for mesh in meshes]
        for number in range(2):
            moved = links.forward(number, bucket.tokens, jax.device_put(carried, place[number]))
            assert moved is not None and moved.sharding == place[number + 1]
            np.testing.assert_array_equal(np.asarray(moved), want)
        shared = links.share(bucket, jax.device_put(outputs[bucket], place[-1]))
        assert shared.last_token is not None and shared.last_token.sharding == place[0]
        for found, leaf in zip(jax.tree.leaves(shared), jax.tree.leaves(outputs[bucket]), strict=True):
            assert found.is_fully_replicated
            assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
            assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes()


@given(st.integers(1, 6), st.integers(1, 5))
def test_a_part_is_one_stage_further_in_each_tick(num_parts: int, num_stages: int) -> None:
    order = [*launch_order(num_parts, num_stages)]
    assert len(order) == num_parts + num_stages - 1
    ticks = {launch: tick for tick, launches in enumerate(order) for launch in launches}
    assert ticks == {(stage, part): stage + part for stage in range(num_stages) for part in range(num_parts)}
