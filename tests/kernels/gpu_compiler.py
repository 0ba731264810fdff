"""Compiles for a GPU that is not here, with shapes in place of arrays."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.cases import Case, Inputs, make_batch
from jaxserve.kernels.paged_attention import KVScales
from jaxserve.kernels.pallas.gpu_layout import init_cache
from jaxserve.lab.compiled.topology import absent_devices

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra `aot`: jax-cuda13-plugin"
)


def compile_for_h200(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(absent_devices("h200:1")[0])
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    traced = jax.jit(function, donate_argnums=donate).trace(*there)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def shapes_of(case: Case) -> Inputs:
    """What `make_inputs` would make for the GPU implementation, without the numbers."""
    spec, dtype = case.spec, jnp.dtype(case.cache_dtype)
    batch, num_pages = make_batch(case, np.random.default_rng(0))
    num_tokens = batch.positions.shape[0]
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    by_head, by_kv_head = shape(spec.num_query_heads), shape(spec.num_kv_heads)
    narrow = dtype.itemsize == 1
    return Inputs(
        q=shape(num_tokens, spec.num_query_heads, spec.head_dim, dtype=jnp.bfloat16),
        k=shape(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=jnp.bfloat16),
        v=shape(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=jnp.bfloat16),
        cache=jax.eval_shape(lambda: init_cache(num_pages, case.page_size, spec.num_kv_heads, spec.head_dim, dtype)),
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch),
        sinks=by_head if case.sinks else None,
        alibi_slopes=by_head if case.alibi else None,
        scales=KVScales(keys=by_kv_head, values=by_kv_head) if narrow else None,
        keys=(),
        values=(),
    )
