"""The kernels for processors with shorter vectors: LLVM makes them for this one, too, so that they run here."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import jaxserve.kernels.cpu.target as targets
target = targets.Target(lanes=int(sys.argv[1]), vectors=int(sys.argv[2]), row_steps=(6, 4, 2, 1))
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

rng = np.random.default_rng(0)
weight = rng.standard_normal((100, 33), np.float32)
for rows in range(1, 20):
    x = rng.standard_normal((rows, 33), np.float32)
    found = pack(jnp.asarray(weight), 1, target.width).multiply(jnp.asarray(x))
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, atol=1e-4)
device = Device(backend="cpu", kind="cpu")
experts = GroupedMatmulUse(dtype="float32", num_experts=4, hidden_size=33, size=50, num_devices=1)
assert GROUPED_MATMUL.check(make_grouped_matmul(device), experts, device) < 1e-6
implementation = make_attention(device)
for head_dim, page, dtype in (
    (64, 16, "float32"), (8, 24, "float32"), (80, 64, "int8"), (8, 24, "float8_e4m3fn"), (64, 16, "float8_e5m2")
):
    spec = AttentionSpec(num_query_heads=6, num_kv_heads=2, head_dim=head_dim, scale=0.1)
    use = AttentionUse(spec=spec, page_size=page, query_dtype="float32", cache_dtype=dtype)
    assert implementation.refuses(use) is None
    assert PAGED_ATTENTION.check(implementation, use, device) < 1e-6
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "vectors"), [(8, 2), (4, 4)], ids=["avx2", "neon"])
def test_other_vectors_give_right_results(lanes: int, vectors: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(lanes), str(vectors)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "right\n", done.stderr
