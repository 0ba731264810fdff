"""One op of a step, attention, compiled alone for a device that is not here.

Tests and scripts compile the cases of `kernels.cases` with it, and the ledger counts the kernels of such a program.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.kernels.cases import Case, Room, attend_layers, make_batch
from jaxserve.kernels.paged_attention import KVScales, PagedAttention
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.models.loading import one_device_mesh


def compile_attend(
    case: Case, implementation: PagedAttention, topology: str, layers: int = 1, room: Room | None = None
) -> tuple[Any, float]:
    """The executable of `attend_layers`, its caches donated, and the seconds that lowering and compiling took."""
    device = absent_devices(topology)[0]
    sharding = NamedSharding(one_device_mesh(device), PartitionSpec())
    cache, args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_inputs(case, implementation, room),
    )
    platform = "cuda" if device.platform == "gpu" else device.platform
    start = time.monotonic()
    traced = jax.jit(attend_layers(case, implementation), donate_argnums=0).trace([cache] * layers, *args)
    return traced.lower(lowering_platforms=(platform,)).compile(), time.monotonic() - start


def abstract_inputs(
    case: Case, implementation: PagedAttention, room: Room | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """Shapes of the cache, and of (q, k, v, batch, (sinks, slopes, scales)); the batch itself has its integers."""
    batch, num_pages = make_batch(case, np.random.default_rng(0), room)
    spec, num_tokens = case.spec, batch.positions.shape[0]
    cache = jax.eval_shape(
        lambda: implementation.init_cache(
            num_pages, case.page_size, spec.num_kv_heads, spec.head_dim, jnp.dtype(case.cache_dtype)
        )
    )

    def of(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    kv = of(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=case.query_dtype)
    q = of(num_tokens, spec.num_query_heads, spec.head_dim, dtype=case.query_dtype)
    by_head, by_kv_head = of(spec.num_query_heads), of(spec.num_kv_heads)
    scales = KVScales(keys=by_kv_head, values=by_kv_head) if jnp.dtype(case.cache_dtype).itemsize == 1 else None
    return cache, (q, kv, kv, batch, (by_head if case.sinks else None, by_head if case.alibi else None, scales))
