"""The kernels for processors with shorter vectors: LLVM makes them for this one, too, so that they run here."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from jaxserve.kernels.cpu.code_runs import run_product
from jaxserve.kernels.cpu.target import Target, find_target

WITH_DOT = pytest.mark.skipif(not find_target().dot_int8, reason="this processor has no vpdpbusd")

SCRIPT = """
import sys
import jaxserve.kernels.cpu.target as targets
lanes, vectors, dot, every = (int(word) for word in sys.argv[1:])
target = targets.Target(lanes=lanes, vectors=vectors, row_steps=(6, 4, 2, 1), dot_int8=bool(dot))
targets.find_target = lambda: target
import jax.numpy as jnp
import numpy as np
from jaxserve.kernels.cpu.implementation import make_attention
from jaxserve.kernels.grouped_matmul import GroupedMatmulUse
from jaxserve.kernels.ops import GROUPED_MATMUL, PAGED_ATTENTION
from jaxserve.kernels.packed_experts import make_grouped_matmul
from jaxserve.kernels.packed_weight import pack
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse
from tests.kernels.code_products import Given, chain, gated

rng = np.random.default_rng(0)
weight = rng.standard_normal((100, 33), np.float32)
forms = [(160, 32, True, 128, "int8"), (33, 16, False, None, "int4")]
if every:
    forms += [
        (160, None, False, 128, "int8"), (33, 16, False, None, "int8"), (160, 32, True, 128, "int4"),
        (33, 16, False, None, "float8_e4m3fn"),
    ]
for depth, group, zeros, block, code in forms:
    given = Given(50, depth, target.width, group=group, zeros=zeros, block=block, code=code)
    for rows in (1, 2, 7, 19):
        x = rng.standard_normal((rows, depth), np.float32)
        np.testing.assert_array_equal(given.packed.multiply(jnp.asarray(x)), given.product(x))
if dot:  # the instruction multiplies codes, nothing else
    print("right")
    sys.exit()
for dtype, all_rows in (("float32", range(1, 20)), ("bfloat16", (1, 2, 9, 17)))[: 1 + every]:
    rounded = jnp.asarray(weight, dtype)
    for rows in all_rows:
        x = rng.standard_normal((rows, 33), np.float32)
        found = pack(rounded, 1, target.width).multiply(jnp.asarray(x))
        np.testing.assert_array_equal(found, chain(x, np.asarray(rounded)))
halves = rng.standard_normal((2, 21, 33), np.float32)
for packed, rows in (
    (pack(jnp.asarray(halves), 1, target.width), 7),
    (Given(42, 160, target.width, group=32, code="int4", out_shape=(2, 21)).packed, 1),
):
    x = rng.standard_normal((rows, packed.in_shape[0]), np.float32)
    both = np.asarray(packed.multiply(jnp.asarray(x)))
    found = packed.multiply_gated(jnp.asarray(x), "gelu_tanh")
    np.testing.assert_array_equal(found, gated(both[:, 0], both[:, 1], "gelu_tanh"))
device = Device(backend="cpu", kind="cpu")
experts = GroupedMatmulUse(dtype="float32", num_experts=4, hidden_size=33, size=50, num_devices=1)
assert GROUPED_MATMUL.check(make_grouped_matmul(device), experts, device) < 1e-6
implementation = make_attention(device)
caches = [(8, 24, "float32"), (80, 64, "int8")]
if every:
    caches += [(64, 16, "float32"), (8, 24, "float8_e4m3fn"), (64, 16, "float8_e5m2")]
for head_dim, page, dtype in caches:
    spec = AttentionSpec(num_query_heads=6, num_kv_heads=2, head_dim=head_dim, scale=0.1)
    use = AttentionUse(spec=spec, page_size=page, query_dtype="float32", cache_dtype=dtype)
    assert implementation.refuses(use) is None
    assert PAGED_ATTENTION.check(implementation, use, device) < 1e-6
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "vectors", "dot", "every"),
    [(8, 2, 0, 1), pytest.param(8, 2, 1, 0, marks=WITH_DOT), (4, 4, 0, 0)],
    ids=["avx2", "avx-vnni", "neon"],
)
def test_other_vectors_give_right_results(lanes: int, vectors: int, dot: int, every: int) -> None:
    """Some forms for two of them, every form for one: the forms are the same code, and compiling takes long."""
    command = [sys.executable, "-c", SCRIPT, *(str(word) for word in (lanes, vectors, dot, every))]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize(
    ("lanes", "vectors", "dot"),
    [(16, 2, False), (8, 2, False), pytest.param(8, 2, True, marks=WITH_DOT), (4, 4, False)],
    ids=["avx512f", "avx2", "avx-vnni", "neon"],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_run_is_the_same_integers_with_and_without_the_instruction(
    bits: int, lanes: int, vectors: int, dot: bool
) -> None:
    """The extremes of codes and rows are among them."""
    target = Target(lanes=lanes, vectors=vectors, row_steps=(1,), dot_int8=dot)
    one_run, width, steps = run_product(1, 1, target), target.width, 32
    kind = np.uint32(0) if bits == 8 else np.uint16(0)

    @njit
    def multiply(x: int, codes: int, total: int, x_scale: int, scales: int, c: int) -> None:
        add, strides = False, (0, 0, 0)
        one_run(
            *(x, 0, codes, steps, total, 0, 0, x_scale, 0, scales, c, 0),
            *(add, strides, codes, 0, np.int8(0), None, kind),
        )

    rng = np.random.default_rng(0)
    codes = rng.choice(np.asarray([0, 1, 127, 128, 254, 255], np.uint8), (steps, width, 4))
    inputs = codes[:, None] if bits == 8 else np.stack([codes & 15, codes >> 4], axis=1)
    x = rng.choice(np.asarray([-127, -1, 0, 1, 127], np.int8), (steps, inputs.shape[1], 4))
    total, one, c = np.asarray([x.sum(dtype=np.int32)]), np.ones(width, np.float32), np.zeros(width, np.float32)
    multiply(*(array.ctypes.data for array in (x, codes, total, one, one, c)))
    wanted = np.einsum("spc,spwc->w", x.astype(np.int64), inputs.astype(np.int64) - 2 ** (bits - 1))
    assert list(c) == list(wanted)
