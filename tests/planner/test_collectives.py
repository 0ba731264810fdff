"""The count of exchanges on programs small enough to count by hand, compiled for CPUs and TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.lab.compiled.collectives import Collective, count_collectives
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.runtime.hlo import parse_hlo

SHAPE = (64, 1024)  # float32 on each of four devices
ARRAY_BYTES = 4 * 64 * 1024


def compiled(fn, topology):
    mesh = Mesh(np.array(absent_devices(topology)[:4]), ("x",))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((4 * SHAPE[0], SHAPE[1]), jnp.float32, sharding=NamedSharding(mesh, spec))
    return count_collectives(parse_hlo(jax.jit(mapped).lower(x).compile().as_text()), 4)


def summed_in_a_loop(x):
    return jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(y, "x") * 0.5, x)


def summed_in_one_branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda y: jax.lax.psum(y, "x"), lambda y: y + 1, x)


@pytest.mark.parametrize("topology", ["cpu:4", "v5e:2x2"])
@pytest.mark.parametrize(
    ("fn", "kind", "count", "payload"),
    [
        (lambda x: jax.lax.psum(x, "x"), "all-reduce", 1, ARRAY_BYTES),
        (lambda x: jax.lax.all_gather(x, "x").sum(axis=0) * x, "all-gather", 1, 4 * ARRAY_BYTES),
        (
            lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]),
            "collective-permute",
            1,
            ARRAY_BYTES,
        ),
        (summed_in_one_branch, "all-reduce", 1, ARRAY_BYTES),
    ],
    ids=["sum", "gather", "permute", "branch"],
)
def test_exchanges_counted_by_hand(fn, kind, count, payload, topology):
    assert compiled(fn, topology) == (Collective(kind=kind, group=4, count=count, payload_bytes=payload),)


def test_a_loop_counts_its_turns_where_the_compiler_knows_them():
    (found,) = compiled(summed_in_a_loop, "cpu:4")
    assert (found.count, found.payload_bytes) == (5, 5 * ARRAY_BYTES)


def test_bytes_on_the_ring():
    def sent(kind):
        return Collective(kind=kind, group=4, count=1, payload_bytes=1000).sent_bytes

    assert [sent(k) for k in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")] == [
        1500,
        750,
        750,
        1000,
    ]


def test_a_program_of_one_device_exchanges_nothing():
    text = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()
    assert count_collectives(parse_hlo(text), 1) == ()
