"""The error of an implementation against float64: over any case, and over one small case for a use.

The small cases are run at each start, on the very device (`Op.check`). An implementation that fails is an error, and no
other one takes its place.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.block_codes import BLOCK_CODES
from jaxserve.kernels.cases import Case, GroupedMatmulCase, MatmulCase, make_inputs
from jaxserve.kernels.coded_experts import round_experts
from jaxserve.kernels.coded_weight import round_weight
from jaxserve.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.low_rank import LowRank, TokenAdapters, TokenSlots
from jaxserve.kernels.matmul import Matmul, MatmulUse, Weight
from jaxserve.kernels.oracle import grouped_products, relative_error
from jaxserve.kernels.paged_attention import AttentionUse, PagedAttention
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.kernels.xla_matmul import DenseWeight

# Queries and the weights of softmax are rounded, by each implementation in its own way.
_ROUNDED_LIMIT = 2e-2  # of a product whose activations are rounded to 127 steps
_RANK = 8  # of adapters
_ATTENTION_LIMIT = {"bfloat16": 1e-2, "float32": 1e-4}


def attention_case(use: AttentionUse) -> Case:
    """Decode rows, whole prompts and a later piece."""
    page = use.page_size
    rows = ((1, 1), (1, page), (1, 2 * page + 3), (5, 5), (33, page + 40))
    return Case(
        name="self check",
        spec=use.spec,
        rows=rows,
        page_size=page,
        query_dtype=use.query_dtype,
        cache_dtype=use.cache_dtype,
        padding_rows=1,
        padding_tokens=-sum(n for n, _ in rows) % 32,
        sinks=use.sinks,
        alibi=use.alibi,
    )


def attention_error(attention: PagedAttention, case: Case) -> float:
    """`oracle.relative_error` of what it attends to."""
    inputs = make_inputs(case, attention)
    attend = jax.jit(attention.attend, static_argnums=5, donate_argnums=3)
    out, _ = attend(
        *(inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec),
        *(inputs.sinks, inputs.alibi_slopes, inputs.scales),
    )
    return relative_error(case, inputs, np.asarray(out))


def attention_limit(attention: PagedAttention, use: AttentionUse) -> float:
    """The error that is rounding."""
    del attention
    return _ATTENTION_LIMIT[use.query_dtype]


def matmul_case(use: MatmulUse) -> MatmulCase:
    """Few rows, axes of several sizes, and no size that is a multiple of a vector's."""
    group = None if use.storage is None else use.storage.group
    in_shape = (5, 13) if group is None else (3, 2 * group)
    if use.storage is not None and use.storage.blocks is not None:
        in_shape = (3, BLOCK_CODES[use.storage.blocks].inputs)
    return MatmulCase(
        name="self check",
        rows=9,
        out_shape=(2, 35),
        in_shape=in_shape,
        dtype=use.dtype,
        storage=None if use.storage is None else dataclasses.replace(use.storage, zeros=False),
        arithmetic=use.arithmetic,
        adapters=use.adapters,
    )


def matmul_error(matmul: Matmul, case: MatmulCase) -> float:
    """The root mean square of the differences over that of the exact products, or of gate and up multiplied, where the
    weight has two halves and a way of its own to do that. Their rounding to the dtype of rows is left out. The same
    with adapters, where the case has them and the weight a way of its own."""
    rng = np.random.default_rng(0)
    x, array = (
        jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)
        for shape in ((case.rows, *case.in_shape), (*case.out_shape, *case.in_shape))
    )
    num_in, num_out = len(case.in_shape), len(case.out_shape)
    given, numbers = DenseWeight(array=array, num_in=num_in), np.asarray(array, np.float64)
    if case.storage is not None:
        given = round_weight(np.asarray(array), num_in, case.storage, case.dtype, case.arithmetic)
        numbers = given.numbers()
    weight = matmul.convert(given)
    axes = (range(1, 1 + num_in), range(num_out, num_out + num_in))
    exact = np.tensordot(np.asarray(x, np.float64), numbers, axes)
    error = _products_error(weight, x, exact, case)
    if not case.adapters or type(weight).multiply_adapted is Weight.multiply_adapted:
        return error
    adapters, added = _adapters(weight, np.asarray(x, np.float64), case, rng)
    return max(error, _products_error(weight, x, exact + added, case, adapters))


def _products_error(
    weight: Weight, x: jax.Array, exact: np.ndarray, case: MatmulCase, *adapters: TokenAdapters
) -> float:
    def multiply(weight: Weight, x: jax.Array, *adapters: TokenAdapters) -> jax.Array:
        return weight.multiply_adapted(x, *adapters) if adapters else weight.multiply(x)

    def gate(weight: Weight, x: jax.Array, *adapters: TokenAdapters) -> jax.Array:
        return weight.multiply_gated_adapted(x, "silu", *adapters) if adapters else weight.multiply_gated(x, "silu")

    error = _relative(np.asarray(jax.jit(multiply)(weight, x, *adapters), np.float64), exact)
    if len(case.out_shape) != 2 or case.out_shape[0] != 2 or type(weight).multiply_gated is Weight.multiply_gated:
        return error
    wanted = exact[:, 0] / (1 + np.exp(-exact[:, 0])) * exact[:, 1]
    rounding = 0.0 if case.dtype == "float32" else 2.0**-8
    both = np.asarray(jax.jit(gate)(weight, x, *adapters), np.float64)
    return max(error, _relative(both, wanted) - rounding)


def _adapters(
    weight: Weight, x: np.ndarray, case: MatmulCase, rng: np.random.Generator
) -> tuple[TokenAdapters, np.ndarray]:
    """Two adapters with a part for each index of the first axis of outputs, of which some rows have none; and what they
    add, in float64."""
    (num_parts, *rest), num_slots = case.out_shape, 3
    slots = rng.integers(0, num_slots, case.rows)

    def make(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    ones = [
        LowRank(
            down=make(num_parts, _RANK, *case.in_shape),
            up=tuple(make(1, *rest, _RANK) for _ in range(num_parts)),
            axis=0,
        )
        for _ in range(1, num_slots)
    ]
    shapes = weight.slots_for(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), ones[0]), num_slots
    )
    arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    added = np.zeros((case.rows, *case.out_shape))
    for slot, one in enumerate(ones, start=1):
        arrays = arrays.written(jnp.asarray(slot), one)
        for part, up in enumerate(one.up):
            down = np.asarray(one.down[part], np.float64).reshape(_RANK, -1)
            inner = x[slots == slot].reshape(-1, down.shape[1]) @ down.T
            added[slots == slot, part] = np.tensordot(inner, np.asarray(up[0], np.float64), (1, -1))
    return TokenAdapters(arrays, TokenSlots.of(jnp.asarray(slots, jnp.int32), num_slots)), added


def matmul_limit(matmul: Matmul | GroupedMatmul, use: MatmulUse | GroupedMatmulUse) -> float:
    """The error that rounding explains."""
    return matmul.rounding if use.arithmetic.activations == "float" else _ROUNDED_LIMIT


def grouped_matmul_case(use: GroupedMatmulUse) -> GroupedMatmulCase:
    """Few rows, of which some are others', and small sizes that are as far from a multiple of 64 as the model's."""
    group = None if use.storage is None else use.storage.group
    return GroupedMatmulCase(
        name="self check",
        num_experts=min(use.num_experts, 5),
        of_experts=min(use.num_experts, 5) + 2,
        per_token=2,
        tokens=9,
        out_shape=(2, 64 + use.size % 64),
        depth=128 + use.hidden_size % 64 if group is None else 2 * max(group, 64 // group * group),
        dtype=use.dtype,
        storage=None if use.storage is None else dataclasses.replace(use.storage, zeros=False),
        arithmetic=use.arithmetic,
    )


def grouped_matmul_error(grouped: GroupedMatmul, case: GroupedMatmulCase) -> float:
    """The root mean square of the differences over that of the exact products; rows of no expert must be zeros."""
    rng = np.random.default_rng(0)
    x, array = (
        jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)
        for shape in ((case.tokens * case.per_token, case.depth), (case.num_experts, *case.out_shape, case.depth))
    )
    chosen = [rng.permutation(case.of_experts)[: case.per_token] for _ in range(case.tokens)]
    sizes = np.bincount(np.concatenate(chosen), minlength=case.of_experts)[: case.num_experts].astype(np.int32)
    given, numbers = DenseExperts(array=array), np.asarray(array)
    if case.storage is not None:
        given = round_experts(numbers, case.storage, case.dtype, case.arithmetic)
        numbers = given.numbers()
    weight = grouped.convert(given)
    multiply = jax.jit(lambda weight, x, sizes: weight.multiply(x, sizes))
    out = np.asarray(multiply(weight, x, jnp.asarray(sizes)), np.float64)
    return _relative(out, grouped_products(np.asarray(x), numbers, sizes))


def _relative(out: np.ndarray, exact: np.ndarray) -> float:
    if not np.isfinite(out).all():
        return float("inf")
    size = np.mean(np.square(exact)) or 1.0  # no row has an expert: all must be zeros
    return float(np.sqrt(np.mean(np.square(out - exact)) / size))
