"""The count of bytes on programs small enough to count by hand, compiled for a TPU."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.lab.compiled.traffic import memory_traffic

MIB = 2**20


def moved(fn, *shapes, donate=()):
    sharding = jax.sharding.SingleDeviceSharding(absent_devices("v5e:2x2")[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    hlo = jax.jit(fn, donate_argnums=donate).lower(*args).compile().as_text()
    return sum(memory_traffic(hlo).values())


F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


@pytest.mark.parametrize(
    ("fn", "shapes", "donate", "wanted"),
    [
        (lambda x: x + 1, [((4096, 4096), F32)], (), 128 * MIB),
        (lambda x, w: x @ w, [((8, 8192), BF16), ((8192, 8192), BF16)], (), 128 * MIB),
        # 64 lines of a table of 512 MiB, read and written.
        (lambda t, i: t[i], [((32768, 4096), F32), ((64,), I32)], (), 2 * MIB),
        # One line of it written in place.
        (lambda t, x: t.at[5].set(x), [((32768, 4096), F32), ((4096,), F32)], (0,), 2**15),
    ],
)
def test_bytes_of_programs_counted_by_hand(fn, shapes, donate, wanted):
    assert moved(fn, *shapes, donate=donate) == pytest.approx(wanted, rel=0.05)


def test_a_copy_of_the_table_would_be_counted():
    """Without donation the update must copy: both ways through memory."""
    assert moved(lambda t, x: t.at[5].set(x), ((32768, 4096), F32), ((4096,), F32)) > 900 * MIB
