"""Products with packed weights: right, the same bits for a row in any crowd, and never stuck however calls meet."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.packed_weight import PackedWeight, empty_panels, pack
from tests.kernels.code_products import chain

WIDTH = find_target().width
ROWS = (1, 2, 7, 8, 9, 16, 17, 64, 513)  # every mix of the heights of blocks
# Axes of the weight that stay, and those that are multiplied away: no output is a multiple of a panel's width but one,
# and there are panels that are nearly empty.
SHAPES = [
    ((WIDTH,), (1,)),
    ((7,), (5,)),
    ((WIDTH + 1,), (33,)),
    ((5 * WIDTH - 3,), (768,)),
    ((3, 5), (768,)),
    ((100,), (4, 40)),
    ((2, 70), (128,)),
    ((2, 3, 11), (5, 7)),
]
multiply = jax.jit(PackedWeight.multiply)


def make(out_shape, in_shape, dtype=np.float32, seed=0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*out_shape, *in_shape), np.float32), dtype)


def make_packed(out_shape, in_shape, dtype=np.float32) -> PackedWeight:
    return pack(make(out_shape, in_shape, dtype), len(in_shape), WIDTH)


def make_x(rows: int, in_shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, *in_shape), np.float32)


def check(out: np.ndarray, x: np.ndarray, weight: jax.Array, num_in: int) -> None:
    """Against NumPy in float64. A chain of 768 rounded sums could be off by 5e-5 of the sum of |x| |w|; it is not."""
    wide, x = np.asarray(weight).astype(np.float64), x.astype(weight.dtype).astype(np.float64)
    product = functools.partial(np.tensordot, axes=(range(1, num_in + 1), range(wide.ndim - num_in, wide.ndim)))
    limit = 2e-6 * product(np.abs(x), np.abs(wide))
    assert out.dtype == np.float32 and out.shape == (len(x), *wide.shape[: wide.ndim - num_in])
    assert (np.abs(out - product(x, wide)) <= limit).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("out_shape", "in_shape"), SHAPES)
def test_a_product_is_right_for_every_number_of_rows(out_shape, in_shape, dtype):
    weight = make(out_shape, in_shape, dtype)
    packed = pack(weight, len(in_shape), WIDTH)
    assert packed.panels.dtype == dtype
    for rows in ROWS:
        x = make_x(rows, in_shape)
        check(np.asarray(multiply(packed, x)), x, weight, len(in_shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [5, 160])
def test_an_output_is_one_chain_of_multiply_adds(depth, dtype):
    weight, x = make((WIDTH + 7,), (depth,), dtype), make_x(17, (depth,))
    found = np.asarray(multiply(pack(weight, 1, WIDTH), x))
    np.testing.assert_array_equal(found.view(np.uint32), chain(x, np.asarray(weight)).view(np.uint32))


def test_bfloat16_rows_are_multiplied_as_they_are():
    packed, x = make_packed((70,), (33,)), jnp.asarray(make_x(9, (33,)), jnp.bfloat16)
    np.testing.assert_array_equal(multiply(packed, x), multiply(packed, x.astype(jnp.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("out_shape", "in_shape"), SHAPES[2::2])
def test_a_row_has_the_same_bits_alone_and_in_any_crowd(out_shape, in_shape, dtype):
    packed, x = make_packed(out_shape, in_shape, dtype), make_x(130, in_shape)
    crowd = np.asarray(multiply(packed, x))
    for first in (0, 64, 114):
        few = np.asarray(multiply(packed, x[first : first + 16]))
        np.testing.assert_array_equal(few, crowd[first : first + 16])
    for row in (0, 1, 7, 8, 125, 126, 127, 128, 129):
        np.testing.assert_array_equal(np.asarray(multiply(packed, x[row : row + 1]))[0], crowd[row])


@pytest.mark.parametrize("rows", [1, 9, 17])
def test_nan_and_infinity_stay_in_their_rows(rows):
    packed, x = make_packed((70,), (33,)), make_x(rows + 2, (33,))
    clean = np.asarray(multiply(packed, x))
    spoilt = x.copy()
    spoilt[0, 4], spoilt[rows, 32] = np.nan, np.inf
    out = np.asarray(multiply(packed, spoilt))
    assert np.isnan(out[0]).all() and np.isinf(out[rows]).all()
    others = [r for r in range(rows + 2) if r not in (0, rows)]
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [WIDTH, 3 * WIDTH, 3 * WIDTH - 5, 7])
def test_take_gives_the_rows_of_the_weight(size, dtype):
    """Of a table whose last panel is padded, too."""
    table = make((size,), (21,), dtype)
    packed = pack(table, 1, WIDTH)
    rows = np.random.default_rng(0).permutation(np.concatenate([np.arange(size), [0, size - 1]]))
    taken = jax.jit(PackedWeight.take)(packed, rows)
    assert taken.dtype == table.dtype
    np.testing.assert_array_equal(taken, table[rows])


def test_padding_is_zeros():
    """Rows past the last are read by every product, and what is read must not be slow or trap."""
    packed = make_packed((WIDTH + 1,), (5,))
    assert packed.panels.shape == (2, 5, WIDTH)
    assert (np.asarray(packed.panels)[1, :, 1:] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_panels_are_not_copied_into_buffers_of_small_pages(dtype):
    panels = empty_panels(jax.ShapeDtypeStruct((3, 5, 2 * WIDTH + 1), dtype))
    assert panels.shape == (3, 5, 2 * WIDTH + 1) and panels.dtype == jnp.dtype(dtype) and not panels.any()
    assert jax.device_put(panels).unsafe_buffer_pointer() == panels.ctypes.data


def test_inside_of_a_loop():
    """The scratch array of one turn is that of the next one."""
    weight = make((40,), (40,)) / 8
    packed = pack(weight, 1, WIDTH)

    def turn(carry):
        count, x = carry
        return count + 1, packed.multiply(x)

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda carry: carry[0] < 20, turn, (0, x))[1])
    x = make_x(9, (40,))
    by_hand = x
    for _ in range(20):
        by_hand = multiply(packed, by_hand)
    np.testing.assert_array_equal(looped(x), by_hand)


def test_several_products_of_one_executable_run_at_once():
    """XLA starts a product while another one's workers are busy where neither needs the other."""
    weights = [make((300 + i,), (200,), seed=i) for i in range(6)]
    packed = [pack(weight, 1, WIDTH) for weight in weights]
    x = make_x(33, (200,))
    together = jax.jit(lambda packed, x: [p.multiply(x) for p in packed])
    for out, weight in zip(together(packed, x), weights, strict=True):
        check(np.asarray(out), x, weight, 1)


def test_calls_from_many_threads_at_once_are_right():
    """More calls than the pool has threads: none may wait for another one's workers, or take them for its own."""
    packed = make_packed((20 * WIDTH + 3,), (65,))
    inputs = [make_x(rows, (65,), seed=rows) for rows in (1, 2, 5, 9, 16, 17, 40, 64)]
    wanted = [np.asarray(multiply(packed, x)) for x in inputs]
    start, wrong, ended = threading.Barrier(len(inputs)), [], []

    def ask(number: int) -> None:
        start.wait(60)
        for turn in range(50):
            chosen = (number + turn) % len(inputs)
            if not np.array_equal(multiply(packed, inputs[chosen]), wanted[chosen]):
                wrong.append((number, turn))
        ended.append(number)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)  # long past any slowness: calls that wait for each other never end
    assert sorted(ended) == list(range(len(inputs))), "some calls never returned"
    assert not wrong


# Attention and products, in a process of its own: the pool is as large as the first import of JAX finds it.
_SCRIPT = """
import os, sys, threading
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pathlib import Path
import numpy as np
from jaxserve.kernels.cases import case, make_inputs
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.oracle import relative_error
from tests.kernels.cpu_implementations import NUMBA, run
from tests.kernels.test_packed_weight import check, make, make_x, multiply, pack, WIDTH

machine_code.keep_machine_code(Path(sys.argv[2]))
weight = make((9 * WIDTH - 1,), (65,))
packed = pack(weight, 1, WIDTH)
wide = case("gemma2", "mixed", 128)  # a worker needs much room
inputs = make_inputs(wide, NUMBA)

def ask():
    for rows in (1, 9, 130):
        x = make_x(rows, (65,))
        check(np.asarray(multiply(packed, x)), x, weight, 1)
    for _ in range(3):
        error = relative_error(wide, inputs, run(NUMBA, inputs, wide.spec), 3)
        assert error < 1e-5, error
    done.append(True)

done = []
threads = [threading.Thread(target=ask) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(done) == 3
print("right")
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux ties a process to processors")
@pytest.mark.parametrize("threads", [pytest.param("one", marks=pytest.mark.slow), "16"])
def test_a_pool_of_any_size_gives_the_same(threads, machine_code_folder):
    """One thread: a call that waited for others would wait for ever. More threads than processors, as NPROC gives them
    (and many devices on one host): all of them may come to work on one call."""
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    env.pop("NPROC", None)
    if threads != "one":
        env["NPROC"] = threads
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _SCRIPT, threads, str(machine_code_folder)]
    ended = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "right\n"
