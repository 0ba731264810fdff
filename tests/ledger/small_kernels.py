"""Three kernels small enough to count by hand, compiled for a v5e: prints what the ledger counts of each, as JSON.

A program of its own: libtpu reads the arguments that make it print schedules once, when it is loaded.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding

from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.lab.ledger import captured_kernels, estimated_cycles, kernel_calls, print_schedules, time_of_call
from jaxserve.runtime.hlo import parse_hlo
from jaxserve.values.chips import parse_topology

FOLDER = Path(sys.argv[1])
TOPOLOGY = "v5e:2x2"
ROWS, DEPTH, COLUMNS = 4096, 1024, 1024


def copy(x: jax.Array) -> jax.Array:
    """[16384, 128] float32 through the fast memory, in 32 tiles."""

    def copy_tile(source, target):
        target[...] = source[...]

    tile = pl.BlockSpec((512, 128), lambda i: (i, 0))
    return pl.pallas_call(
        copy_tile, grid=(32,), in_specs=[tile], out_specs=tile, out_shape=jax.typeof(x), name="copy_tiles"
    )(x)


def softmax(x: jax.Array) -> jax.Array:
    """Rows of 128 of [16384, 128] float32, in 32 tiles."""

    def softmax_tile(source, target):
        raised = jnp.exp2(source[...] - jnp.max(source[...], axis=1, keepdims=True))
        target[...] = raised / jnp.sum(raised, axis=1, keepdims=True)

    tile = pl.BlockSpec((512, 128), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_tile, grid=(32,), in_specs=[tile], out_specs=tile, out_shape=jax.typeof(x), name="softmax_tiles"
    )(x)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """bfloat16 [4096, 1024] times [1024, 1024], the weights held in the fast memory, in 8 tiles of rows."""

    def product_tile(rows, weights, target):
        target[...] = jnp.dot(rows[...], weights[...], preferred_element_type=jnp.float32).astype(target.dtype)

    return pl.pallas_call(
        product_tile,
        grid=(8,),
        in_specs=[pl.BlockSpec((ROWS // 8, DEPTH), lambda i: (i, 0)), pl.BlockSpec((DEPTH, COLUMNS), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((ROWS // 8, COLUMNS), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), x.dtype),
        name="product_tiles",
    )(x, w)


def main() -> None:
    print_schedules(FOLDER)
    sharding = SingleDeviceSharding(absent_devices(TOPOLOGY)[0])
    chip = parse_topology(TOPOLOGY).chip

    def compiled(function, *args):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).compile()

    tall = jax.ShapeDtypeStruct((16384, 128), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16, sharding=sharding)
    found = {}
    for function, args in ((copy, (tall,)), (softmax, (tall,)), (product, (x, w))):
        (call,) = kernel_calls(function, *args)
        compiled(function, *args)
        (printed,) = (c for c in captured_kernels(FOLDER) if c.name.startswith(call.name))
        time = time_of_call(printed.program(), call, chip)
        units = {name: sum(loop.units[name] for loop in time.walk.loops) for name in ("EUP", "VLOAD", "VSTORE", "XLU")}
        found[call.name] = units | {
            "cycles": time.walk.cycles,
            "bundles": time.walk.bundles,
            "stalled": time.walk.stalled_cycles,
            "copied": time.walk.copied_bytes,
            "us": time.seconds * 1e6,
            "byte_us": time.byte_seconds * 1e6,
            "turns": [loop.turns for loop in time.walk.loops],
        }
    text = compiled(lambda x, w: x @ w, x, w).as_text()
    found["xla_product"] = {"cycles": sum(estimated_cycles(parse_hlo(text)).values())}
    print(json.dumps(found))


main()
