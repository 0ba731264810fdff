"""The ops of this package: one record each."""

from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.kernels import self_check
from jaxserve.kernels.cases import CASES, GROUPED_MATMUL_CASES, MATMUL_CASES, REAL
from jaxserve.kernels.dispatch import ENTRY_POINTS, Op
from jaxserve.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.matmul import Matmul, MatmulUse
from jaxserve.kernels.paged_attention import CACHE_DTYPES, AttentionUse, PagedAttention
from jaxserve.kernels.product_rates import slower_products
from jaxserve.values.registry import Registry


def _validate_attention(use: AttentionUse) -> None:
    spec = use.spec
    if spec.num_query_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{spec.num_query_heads} query heads do not divide by {spec.num_kv_heads} key/value heads; "
            "check num_attention_heads and num_key_value_heads of the checkpoint"
        )
    if spec.window is not None and spec.window < 1:
        raise ConfigError(f"attention window is {spec.window}, but must be at least 1 token")
    if use.cache_dtype not in CACHE_DTYPES:
        raise ConfigError(f"cache dtype {use.cache_dtype!r} is not one of {', '.join(CACHE_DTYPES)}")


def _describe_attention(use: AttentionUse) -> str:
    spec = use.spec
    return (
        f"{use.query_dtype} queries of {spec.num_query_heads} heads over {spec.num_kv_heads} key heads of "
        f"{spec.head_dim} in {use.cache_dtype} pages of {use.page_size} tokens"
    )


PAGED_ATTENTION: Op[PagedAttention, AttentionUse] = Op(
    name="paged_attention",
    kind=PagedAttention,
    implementations=Registry(
        "paged_attention implementation",
        ENTRY_POINTS,
        {
            "xla": "jaxserve.kernels.xla_attention:XLA_ATTENTION",
            "xla_batched": "jaxserve.kernels.xla_batched:make_attention",
            "mosaic_tpu": "jaxserve.kernels.pallas.tpu_implementation:make_attention",
            "mosaic_gpu": "jaxserve.kernels.pallas.gpu_implementation:make_attention",
            "numba_cpu": "jaxserve.kernels.cpu.implementation:make_attention",
        },
    ),
    # Never "xla" on an accelerator: its loops are made for CPUs, and a long prompt takes seconds with them there.
    preferred={
        "cpu": ("numba_cpu", "xla"),
        "gpu": ("mosaic_gpu", "xla_batched"),
        "tpu": ("mosaic_tpu", "xla_batched"),
    },
    validate=_validate_attention,
    describe=_describe_attention,
    cases=CASES | REAL,
    case_of=self_check.attention_case,
    error=self_check.attention_error,
    limit=self_check.attention_limit,
)

MATMUL: Op[Matmul, MatmulUse] = Op(
    name="matmul",
    kind=Matmul,
    implementations=Registry(
        "matmul implementation",
        ENTRY_POINTS,
        {
            "xla": "jaxserve.kernels.xla_matmul:XLA_MATMUL",
            "mosaic_tpu": "jaxserve.kernels.pallas.tpu_matmul:make_matmul",
            "mosaic_gpu": "jaxserve.kernels.pallas.gpu_matmul:make_matmul",
            "numba_cpu": "jaxserve.kernels.numba_matmul:make_matmul",
        },
    ),
    preferred={"cpu": ("numba_cpu", "xla"), "gpu": ("mosaic_gpu", "xla"), "tpu": ("mosaic_tpu", "xla")},
    describe=str,
    cases=MATMUL_CASES,
    case_of=self_check.matmul_case,
    error=self_check.matmul_error,
    limit=self_check.matmul_limit,
    slower=slower_products,
)

GROUPED_MATMUL: Op[GroupedMatmul, GroupedMatmulUse] = Op(
    name="grouped_matmul",
    kind=GroupedMatmul,
    implementations=Registry(
        "grouped_matmul implementation",
        ENTRY_POINTS,
        {
            "xla": "jaxserve.kernels.xla_grouped_matmul:XLA_GROUPED_MATMUL",
            "ragged_tpu": "jaxserve.kernels.ragged_grouped_matmul:make_grouped_matmul",
            "mosaic_gpu": "jaxserve.kernels.pallas.gpu_grouped_matmul:make_grouped_matmul",
            "numba_cpu": "jaxserve.kernels.packed_experts:make_grouped_matmul",
        },
    ),
    preferred={"cpu": ("numba_cpu", "xla"), "gpu": ("mosaic_gpu", "xla"), "tpu": ("ragged_tpu",)},
    describe=str,
    cases=GROUPED_MATMUL_CASES,
    case_of=self_check.grouped_matmul_case,
    error=self_check.grouped_matmul_error,
    limit=self_check.matmul_limit,
)

OPS: tuple[Op[Any, Any], ...] = (PAGED_ATTENTION, MATMUL, GROUPED_MATMUL)
