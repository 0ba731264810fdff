"""Paged attention on CPUs, around the machine code of `cpu.attention`.

It prepares the arguments of a call and does everything that the machine code cannot. Pages are laid out as in
`xla_attention`.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels import xla_attention
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.scratch import AttentionScratch
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    KVScales,
    PagedAttention,
    stored,
)
from jaxserve.kernels.xla_softmax import PageArrays

_KEPT = {"bfloat16": jnp.dtype("uint16"), "float8_e4m3fn": jnp.dtype("uint8"), "float8_e5m2": jnp.dtype("uint8")}


def make_attention(device: Device) -> PagedAttention:
    """The implementation for a device; it refuses every device but CPUs."""

    def refuses(use: AttentionUse) -> str | None:
        if device.backend != "cpu":
            return "it runs on CPUs alone"
        return machine_code.missing() or _refusal(use.spec.head_dim, use.page_size)

    return PagedAttention(
        name="numba_cpu",
        attend=attend,
        write=write,
        init_cache=init_cache,
        copy_pages=xla_attention.copy_pages,
        refuses=refuses,
        prepare=lambda use: machine_code.provide("attention", use.cache_dtype),
        row_invariant=True,
        host_pages=xla_attention.HOST_PAGES,
    )


def _refusal(head_dim: int, page_size: int) -> str | None:
    from jaxserve.kernels.cpu.target import find_target  # needs Numba

    lanes = find_target().lanes
    for name, size in (("head dimension", head_dim), ("page size", page_size)):
        if size % lanes:
            return f"the {name} is {size}, and must be a multiple of the {lanes} numbers of a vector"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuPages:
    """The cache of one layer, laid out as `PageArrays`. Floats of two bytes and one are kept as their bits, since
    XLA:CPU would scatter them by way of float32, and the whole cache with them.

    `dtype`: name of the type of the numbers.
    """

    keys: Array
    values: Array
    dtype: str = dataclasses.field(metadata={"static": True})


def init_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> CpuPages:
    """Zeros for num_pages + 1 pages."""
    dtype = jnp.dtype(dtype)
    kept = xla_attention.init_cache(num_pages, page_size, num_kv_heads, head_dim, _KEPT.get(dtype.name, dtype))
    return CpuPages(keys=kept.keys, values=kept.values, dtype=dtype.name)


def write(k: Array, v: Array, cache: CpuPages, batch: AttentionBatch, scales: KVScales | None = None) -> CpuPages:
    """`PagedAttention.write`."""
    key_scale, value_scale = (None, None) if scales is None else (scales.keys, scales.values)
    dtype = jnp.dtype(cache.dtype)
    keys, values = stored(k, key_scale, dtype), stored(v, value_scale, dtype)
    if cache.dtype in _KEPT:
        keys, values = (jax.lax.bitcast_convert_type(x, _KEPT[cache.dtype]) for x in (keys, values))
    pages = xla_attention.put(keys, values, PageArrays(keys=cache.keys, values=cache.values), batch)
    return CpuPages(keys=pages.keys, values=pages.values, dtype=cache.dtype)


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: CpuPages,
    batch: AttentionBatch,
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], CpuPages]:
    """`PagedAttention.attend`. Computes in float32 whatever the dtypes of `q` and the cache: numbers of the cache are
    widened in registers, the scale of keys is a factor of the queries, that of values one of the weights' share."""
    assert _refusal(spec.head_dim, batch.page_size) is None, (spec, batch)
    cache = write(k, v, cache, batch, scales)
    num_tokens, heads, head_dim = q.shape
    by_head = [jnp.zeros(heads) if x is None else x.astype(jnp.float32) for x in (sinks, alibi_slopes)]
    by_kv_head = [jnp.ones(spec.num_kv_heads)] * 2 if scales is None else [scales.keys, scales.values]
    numbers = jnp.concatenate([jnp.asarray([spec.scale, spec.soft_cap or 0.0], jnp.float32), *by_head, *by_kv_head])
    scratch = AttentionScratch.of(
        num_rows=batch.context_lens.shape[0],
        num_tokens=num_tokens,
        group=heads // spec.num_kv_heads,
        head_dim=head_dim,
        page_size=batch.page_size,
        workers=os.cpu_count() or 1,
    )
    options = [spec.window or 0, spec.soft_cap is not None, sinks is not None, alibi_slopes is not None]
    sizes = [scratch.tile_tokens, scratch.buffers_begin, scratch.buffer_bytes, scratch.workers]
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((scratch.num_bytes,), jnp.uint8))
    out, _ = jax.ffi.ffi_call(machine_code.provide("attention", cache.dtype), results)(
        q.astype(jnp.float32),
        cache.keys,
        cache.values,
        batch.q_starts,
        batch.context_lens,
        batch.block_tables,
        jnp.asarray([*options, *sizes], jnp.int32),
        numbers,
    )
    return out.astype(q.dtype), cache
