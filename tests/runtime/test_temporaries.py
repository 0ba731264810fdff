"""The largest arrays that a compiled program makes, and its bytes, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels.pallas.gpu_matmul import HopperCodes
from jaxserve.lab.compiled.temporaries import largest_temporaries, padded_bytes
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.lab.compiled.traffic import memory_traffic, weight_kernels
from jaxserve.runtime.hlo import Module, parse_hlo
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler

MIB = 2**20


def compiled(fn, *shapes, donate=()) -> Module:
    sharding = jax.sharding.SingleDeviceSharding(absent_devices("v5e:2x2")[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    text = jax.jit(fn, donate_argnums=donate).lower(*args).compile().as_text()
    assert text is not None
    return parse_hlo(text)


@pytest.mark.slow
def test_an_array_on_the_way_in_one_branch_is_found_with_where_it_comes_from():
    def best(x):
        with jax.named_scope("ranking"):
            return jnp.sort(x, axis=1)[:, 0]

    def one_of(flag, x):
        return jax.lax.cond(flag > 0, best, lambda x: x[:, 0], x)

    found = largest_temporaries(compiled(one_of, ((), jnp.int32), ((4096, 4096), jnp.float32)), at_least=32 * MIB)
    assert found[0].size >= 64 * MIB and any("ranking" in t.scope for t in found)


def test_what_is_written_in_place_is_none():
    table, line = ((32768, 4096), jnp.float32), ((4096,), jnp.float32)
    assert largest_temporaries(compiled(lambda t, x: t.at[5].set(x), table, line, donate=(0,)), at_least=MIB) == ()
    copied = largest_temporaries(compiled(lambda t, x: t.at[5].set(x), table, line))
    assert copied[0].size == 512 * MIB


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[64,4008,32]{2,1,0:T(8,128)}", 64 * 4008 * 128 * 4),
        ("f32[64,4008,32]{2,1,0}", 64 * 4008 * 32 * 4),
        ("f32[64,4008,32]{1,2,0:T(8,128)}", 64 * 4096 * 32 * 4),
        ("bf16[3,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[64,4008,32]{2,1,0:T(8,128)S(1)}", 0),
        ("pred[]", 1),
    ],
)
def test_bytes_with_the_rest_of_a_tile(shape, size):
    assert padded_bytes(shape) == size


@needs_gpu_compiler
def test_codes_on_a_gpu_are_read_once_for_a_tile_of_rows():
    there = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    weight = HopperCodes(
        codes=there(4096, 1024, dtype=jnp.int4),  # pyright: ignore[reportArgumentType]
        scales=there(8, 4096),  # pyright: ignore[reportArgumentType]
        zeros=None,
        num_in=1,
        run=128,
        in_integers=False,
        dtype="bfloat16",
        cut_over=(),
    )
    for rows, tiles, parts in ((64, 1, 2), (512, 4, 1)):
        x = there(rows, 1024, dtype=jnp.bfloat16)
        module = parse_hlo(compile_for_h200(lambda weight, x: weight.multiply(x), weight, x).as_text())
        (kernel,) = weight_kernels(module)
        once = 4096 * 1024 // 2 + 8 * 4096 * 4
        assert memory_traffic(module)[kernel] == tiles * once + rows * 1024 * 2 + parts * rows * 4096 * 4
