"""Paged attention in plain XLA: the implementation for CPUs, and the reference that all others are checked against.

Its cache layout and the write of a step's keys and values are here; a batch is split into rows of one query
(`xla_rows`) and rows of several (`xla_tiles`). It runs on every backend, but its loops take many small turns: GPUs and
TPUs without kernels of their own have `xla_batched`.

One gather and one einsum would move every page three times, at a cost that follows from the size of the block table and
not from the length of the rows (docs/attention-cpu.md has the figures of each formulation that was tried).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    HostPages,
    KVScales,
    PagedAttention,
    attend_by_kind,
    stored,
)
from jaxserve.kernels.xla_rows import attend_rows
from jaxserve.kernels.xla_softmax import PageArrays
from jaxserve.kernels.xla_tiles import attend_tiles


def init_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> PageArrays:
    """Zeros for num_pages + 1 pages; page 0 is the dummy."""
    return PageArrays(
        keys=jnp.zeros((num_pages + 1, num_kv_heads, head_dim, page_size), dtype),
        values=jnp.zeros((num_pages + 1, num_kv_heads, page_size, head_dim), dtype),
    )


def copy_pages(cache: PageArrays, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> PageArrays:
    """All sources are read before any target is written. The cache is donated by the caller."""
    return jax.tree.map(lambda leaf: leaf.at[targets].set(leaf[sources]), cache)


def read_pages(leaves: Sequence[np.ndarray], page_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """`HostPages.read`."""
    keys, values = leaves
    assert keys.shape[2:] == (head_dim, page_size), (keys.shape, head_dim, page_size)
    return keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)


def write_pages(keys: np.ndarray, values: np.ndarray) -> Sequence[np.ndarray]:
    """`HostPages.write`."""
    return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)


HOST_PAGES = HostPages(read=read_pages, write=write_pages)


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
    kv_heads, group = spec.num_kv_heads, spec.num_query_heads // spec.num_kv_heads
    cache = write(k, v, cache, batch, scales)
    grouped = (q.astype(jnp.float32) * spec.scale).reshape(-1, kv_heads, group, spec.head_dim)
    if scales is not None:  # scores are linear in keys, and the output in values
        grouped = grouped * scales.keys[:, None, None]
    by_head = [x if x is None else x.astype(jnp.float32).reshape(kv_heads, group) for x in (sinks, alibi_slopes)]

    out = attend_by_kind(
        grouped,
        batch,
        lambda q, lens: attend_rows(q, lens, batch.block_tables, cache, spec, *by_head),
        lambda q: attend_tiles(q, batch, cache, spec, *by_head),
    )
    if scales is not None:
        out = out * scales.values[:, None, None]
    return out.reshape(q.shape).astype(q.dtype), cache


def write(k: Array, v: Array, cache: PageArrays, batch: AttentionBatch, scales: KVScales | None = None) -> PageArrays:
    """`PagedAttention.write`: a scatter."""
    key_scale, value_scale = (None, None) if scales is None else (scales.keys, scales.values)
    kept_keys, kept_values = stored(k, key_scale, cache.keys.dtype), stored(v, value_scale, cache.values.dtype)
    return put(kept_keys, kept_values, cache, batch)


def put(kept_keys: Array, kept_values: Array, cache: PageArrays, batch: AttentionBatch) -> PageArrays:
    """Scatters numbers [T, K, H] that are as the cache keeps them."""
    page_ids, slots = slots_of(batch)
    return PageArrays(
        keys=cache.keys.at[page_ids, :, :, slots].set(kept_keys),
        values=cache.values.at[page_ids, :, slots].set(kept_values),
    )


def slots_of(batch: AttentionBatch) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """The page and the slot in it where each token of the step is kept; of padding tokens, the dummy page."""
    real = batch.token_rows < batch.context_lens.shape[0]
    columns = batch.positions // batch.page_size
    page_ids = jnp.where(real, batch.block_tables.at[batch.token_rows, columns].get(mode="clip"), 0)
    return page_ids, jnp.where(real, batch.positions % batch.page_size, 0)


def refuses(use: AttentionUse) -> str | None:
    """None: this implementation runs every case."""
    del use


XLA_ATTENTION = PagedAttention(
    name="xla",
    attend=attend,
    write=write,
    init_cache=init_cache,
    copy_pages=copy_pages,
    refuses=refuses,
    host_pages=HOST_PAGES,
)
