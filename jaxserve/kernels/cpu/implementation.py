"""Paged attention on CPUs, around the machine code of `cpu.attention`.

It prepares the arguments of a call and does everything that the machine code cannot. Pages are laid out as in
`xla_attention`.
"""

import os

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels import xla_attention
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.scratch import AttentionScratch
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse, KVScales, PagedAttention
from jaxserve.kernels.xla_softmax import PageArrays


def make_attention(device: Device) -> PagedAttention:
    """The implementation for a device; it refuses every device but CPUs."""

    def refuses(use: AttentionUse) -> str | None:
        if device.backend != "cpu":
            return "it runs on CPUs alone"
        return machine_code.missing() or _refusal(use.spec.head_dim, use.page_size, use.cache_dtype)

    return PagedAttention(
        name="numba_cpu",
        attend=attend,
        write=write,
        init_cache=init_cache,
        copy_pages=xla_attention.copy_pages,
        refuses=refuses,
        prepare=lambda use: machine_code.provide("attention", use.cache_dtype),
        row_invariant=True,
    )


def _refusal(head_dim: int, page_size: int, cache_dtype: str) -> str | None:
    from jaxserve.kernels.cpu.target import find_target  # needs Numba

    lanes = find_target().lanes
    for name, size in (("head dimension", head_dim), ("page size", page_size)):
        if size % lanes:
            return f"the {name} is {size}, and must be a multiple of the {lanes} numbers of a vector"
    if cache_dtype not in machine_code.DTYPES:
        return f"the cache holds {cache_dtype}, and can be read as {' or '.join(machine_code.DTYPES)} alone"
    return None


def init_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> PageArrays:
    """Zeros for num_pages + 1 pages. bfloat16 is kept as its bits: XLA:CPU would scatter it by way of float32, and the
    whole cache with it."""
    kept = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return xla_attention.init_cache(num_pages, page_size, num_kv_heads, head_dim, jnp.dtype(kept))


def write(k: Array, v: Array, cache: PageArrays, batch: AttentionBatch, scales: KVScales | None = None) -> PageArrays:
    """`PagedAttention.write`."""
    if cache.keys.dtype == jnp.uint16:
        k, v = (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) for x in (k, v))
    return xla_attention.write(k, v, cache, batch, scales)


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: PageArrays,
    batch: AttentionBatch,
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], PageArrays]:
    """`PagedAttention.attend`. Computes in float32 whatever the dtypes of `q` and the cache."""
    dtype = "bfloat16" if cache.keys.dtype == jnp.uint16 else cache.keys.dtype.name
    assert scales is None and _refusal(spec.head_dim, batch.page_size, dtype) is None, (spec, batch)
    cache = write(k, v, cache, batch)
    num_tokens, heads, head_dim = q.shape
    by_head = [jnp.zeros(heads) if x is None else x.astype(jnp.float32) for x in (sinks, alibi_slopes)]
    numbers = jnp.concatenate([jnp.asarray([spec.scale, spec.soft_cap or 0.0], jnp.float32), *by_head])
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
    out, _ = jax.ffi.ffi_call(machine_code.provide("attention", dtype), results)(
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
