"""The order of sums in optimised HLO of GPUs and TPUs that are not here, and the refusal where it cannot be kept."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxserve.errors import ConfigError
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.kernels.xla_matmul import XLA_MATMUL
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.runtime.batch_invariance import check_kernels, check_steps, describe_invariance
from jaxserve.runtime.sum_order import Finding, Sum, compare_orders

# All that pins the products of a GPU: no part of the depth apart from the others, and one tile for all shapes.
PINS = {
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_override_gemm_autotuner": "block_m: 64 block_n: 64 block_k: 64 num_stages: 3 num_warps: 4 num_ctas: 1",
}


def compiled(
    topology: str, rows: tuple[int, ...], shape: tuple[int, int], options: Mapping[str, int | bool | str] = {}
) -> dict[str, str]:
    """The HLO of a norm and a product with a weight [out, in], for each number of rows."""
    sharding = SingleDeviceSharding(absent_devices(topology)[0])
    num_out, depth = shape

    def norm_and_product(x, weight):
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            x = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))).astype(x.dtype)
        with jax.named_scope("head"):
            return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def text(num_rows: int) -> str:
        x, weight = (
            jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in ((num_rows, depth), (num_out, depth))
        )
        return jax.jit(norm_and_product).lower(x, weight).compile(compiler_options={**options}).as_text() or ""

    return {f"{n} rows": text(n) for n in rows}


def product_and_norm(steps: Mapping[str, str]) -> tuple[Finding, Finding]:
    product, norm = compare_orders(steps)
    depth = product.sum.depth
    assert product.sum == Sum(place="head", kind="product", depth=depth)
    assert norm.sum == Sum(place="norm", kind="sum", depth=depth)
    return product, norm


def test_on_a_gpu_split_and_tiles_of_a_product_depend_on_the_rows_unless_they_are_pinned():
    product, norm = product_and_norm(compiled("h200:1", (1, 8, 256), (2048, 1024)))
    alone, few, many = (next(iter(orders)) for orders in product.orders.values())
    assert "reduction" in alone and "split in" in few and "tiles" in many
    assert product.differs and norm.differs
    product, norm = product_and_norm(compiled("h200:1", (8, 256), (2048, 1024), PINS))
    assert not product.differs and "split" not in str(product)
    assert norm.differs, "no flag pins a reduction"


def test_on_a_gpu_the_order_of_cublas_is_not_shown_and_counts_as_another_for_each_shape():
    product, _ = product_and_norm(compiled("h200:1", (8, 256), (2048, 1024), {"xla_gpu_enable_triton_gemm": False}))
    assert product.differs and "cuBLAS" in str(product)


def test_on_a_tpu_the_window_of_the_depth_depends_on_the_rows():
    product, norm = product_and_norm(compiled("v5e:1x1", (1, 8, 64), (1024, 4096)))
    alone, few, many = (next(iter(orders)) for orders in product.orders.values())
    assert "reduction" in alone and "with 4096 of the depth" in few and "with 2048 of the depth" in many
    assert norm.differs


def test_steps_that_differ_are_refused_by_the_name_of_step_and_product():
    steps = compiled("h200:1", (8, 256), (2048, 1024))
    with pytest.raises(ConfigError, match=r"the product over 1024 numbers in head: .* in 8 rows; .*row_buckets"):
        check_steps(steps)
    check_steps({"decode 8x8": steps["8 rows"], "mixed 8x8": steps["8 rows"]})


def test_kernels_are_refused_by_name_and_the_log_says_what_holds():
    fixed, packed = (dataclasses.replace(x, row_invariant=True) for x in (XLA_ATTENTION, XLA_MATMUL))
    with pytest.raises(ConfigError, match=r"kernels.paged_attention: xla adds .* and kernels.matmul: xla adds"):
        check_kernels("cpu", XLA_ATTENTION, {"matmul": XLA_MATMUL})
    with pytest.raises(ConfigError, match=r"is true, but kernels.paged_attention: xla adds"):
        check_kernels("tpu", XLA_ATTENTION, {"matmul": XLA_MATMUL})
    check_kernels("cpu", fixed, {"matmul": packed})
    check_kernels("gpu", fixed, {"matmul": XLA_MATMUL})
    assert "kernels.matmul: xla" in describe_invariance("cpu", fixed, {"matmul": XLA_MATMUL})
    assert "do not depend" in describe_invariance("cpu", fixed, {"matmul": packed})
    assert "XLA orders" in describe_invariance("tpu", fixed, {"matmul": XLA_MATMUL})
