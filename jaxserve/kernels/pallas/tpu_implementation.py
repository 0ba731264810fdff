"""The implementation for TPUs: the write, then one kernel call for rows of one query and one for rows of several.

A batch is divided between the two variants here, block sizes are chosen, and uses that cannot run are refused. The
device code is in `tpu_attention` and `tpu_write`.
"""

import dataclasses
import functools
import logging

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.dispatch import Device
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
from jaxserve.kernels.pallas import tpu_attention
from jaxserve.kernels.pallas.tpu_attention import Blocks
from jaxserve.kernels.pallas.tpu_layout import LANES, PageShape, read_pages, write_pages
from jaxserve.kernels.pallas.tpu_write import touched_tiles
from jaxserve.kernels.pallas.tpu_write import write as write_tiles
from jaxserve.kernels.tuning import TunedTable, load_table

logger = logging.getLogger(__name__)

NAME = "mosaic_tpu"

# MiB of VMEM of one core, by JAX's name of the device.
_VMEM_MIB = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128, "TPU7x": 64}
_USABLE = 0.8  # the rest is the compiler's


def make_attention(
    device: Device, table: TunedTable | None = None, interpret: pltpu.InterpretParams | None = None
) -> PagedAttention:
    """Attention for one kind of TPU. `table` replaces the sizes that ship; `interpret` runs the kernels on a CPU."""
    kernels = _Kernels(device=device, table=load_table(device.kind) if table is None else table, interpret=interpret)
    return PagedAttention(
        name=NAME,
        attend=kernels.attend,
        write=kernels.write,
        init_cache=init_cache,
        copy_pages=copy_pages,
        refuses=kernels.refuses,
        prepare=kernels.log_blocks,
        host_pages=HostPages(read=read_pages, write=write_pages),
    )


def init_cache(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: np.dtype
) -> Float[Array, "pages K planes rows 128"]:
    """Zeros for num_pages + 1 pages; page 0 is the dummy."""
    shape = PageShape.make(page_size, head_dim, dtype)
    return jnp.zeros((num_pages + 1, num_kv_heads, shape.planes, shape.rows, LANES), dtype)


def copy_pages(cache: Array, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Array:
    """All sources are read before any target is written. The cache is donated by the caller."""
    return cache.at[targets].set(cache[sources])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """The common values of the implementation's functions."""

    device: Device
    table: TunedTable
    interpret: pltpu.InterpretParams | None

    def refuses(self, use: AttentionUse) -> str | None:
        """`PagedAttention.refuses`: other devices, and shapes that do not fit into VMEM."""
        if self.device.kind not in _VMEM_MIB:
            return f"it knows {', '.join(_VMEM_MIB)}, and this is {self.device.kind!r}"
        limit = int(_VMEM_MIB[self.device.kind] * 2**20 * _USABLE)
        for variant in ("decode", "prefill"):
            blocks = self.blocks(variant, use)
            sizes = dataclasses.astuple(blocks)
            if any(n < 1 or n & (n - 1) for n in sizes) or blocks.compute > blocks.pages:
                return f"the tuned sizes {blocks} are not powers of two, or compute is above pages; correct the table"
            needed = tpu_attention.vmem_bytes(use, blocks)
            if needed > limit:
                return (
                    f"its {variant} variant needs {needed / 2**20:.0f} MiB of VMEM for {use.spec.num_kv_heads} key "
                    f"heads of {use.spec.head_dim} and pages of {use.page_size}, and {self.device.kind} has "
                    f"{limit / 2**20:.0f} MiB to give; take smaller pages (cache.page_size) or more devices"
                )
        return None

    def blocks(self, variant: str, use: AttentionUse) -> Blocks:
        tuned = self.table.get(NAME, variant, use)
        return tpu_attention.default_blocks(variant, use) if tuned is None else Blocks(**tuned)

    def log_blocks(self, use: AttentionUse) -> None:
        """Says which sizes run, and where they come from."""
        for variant in ("decode", "prefill"):
            origin = self.table.origin(NAME, variant, use)
            logger.info("%s %s on %s: %s, %s", NAME, variant, self.device.kind, self.blocks(variant, use), origin)

    def write(self, k: Array, v: Array, cache: Array, batch: AttentionBatch, scales: KVScales | None = None) -> Array:
        """`PagedAttention.write`."""
        shape = PageShape.make(batch.page_size, k.shape[-1], cache.dtype)
        key_scale, value_scale = (None, None) if scales is None else (scales.keys, scales.values)
        lines = shape.join(stored(k, key_scale, cache.dtype), stored(v, value_scale, cache.dtype))
        return write_tiles(lines, cache, touched_tiles(batch, shape), shape, self.interpret)

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: Array,
        batch: AttentionBatch,
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
        alibi_slopes: Float[Array, " N"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T N H"], Array]:
        """`PagedAttention.attend`. Products in bfloat16 with float32 sums, or all in float32 for float32 queries."""
        cache = self.write(k, v, cache, batch, scales)
        use = AttentionUse(spec=spec, page_size=batch.page_size, query_dtype=q.dtype.name, cache_dtype=cache.dtype.name)
        kernel = functools.partial(
            self._attend_tiles, cache=cache, batch=batch, use=use, sinks=sinks, slopes=alibi_slopes, scales=scales
        )
        grouped = q.reshape(q.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        out = attend_by_kind(
            grouped, batch, lambda q, lens: kernel("decode", q, lens), lambda q: kernel("prefill", q, None)
        )
        return out.reshape(q.shape), cache

    def _attend_tiles(
        self,
        variant: str,
        q: Float[Array, "T K G H"],
        single_lens: Int[Array, " R"] | None,
        *,
        cache: Array,
        batch: AttentionBatch,
        use: AttentionUse,
        sinks: Float[Array, " N"] | None,
        slopes: Float[Array, " N"] | None,
        scales: KVScales | None,
    ) -> Float[Array, "T K G H"]:
        spec, shape = use.spec, PageShape.of(use)
        blocks = self.blocks(variant, use).within(batch.block_tables.shape[1], q.shape[0])
        block_q, block_tokens = blocks.block_q, blocks.pages * batch.page_size
        if single_lens is not None:
            work = tpu_attention.decode_work(single_lens, spec, block_tokens)
        else:
            work = tpu_attention.prefill_work(batch, spec, block_q, block_tokens)
        num_tokens, kv_heads, group, _ = q.shape
        rows = tpu_attention.tile_rows(spec, block_q)
        num_tiles = -(-num_tokens // block_q)
        padded = jnp.pad(shape.pad_queries(q), ((0, num_tiles * block_q - num_tokens), (0, 0), (0, 0), (0, 0)))
        tiles = padded.reshape(num_tiles, block_q, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        tiles = tiles.reshape(num_tiles, kv_heads, group * block_q, -1)
        tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, rows - group * block_q), (0, 0)))

        def by_row(x: Float[Array, " N"] | None) -> Float[Array, "K M"] | None:
            if x is None:
                return None
            heads = jnp.repeat(x.astype(jnp.float32).reshape(kv_heads, group), block_q, axis=1)
            return jnp.pad(heads, ((0, 0), (0, rows - group * block_q)))

        out = tpu_attention.attend(
            tiles,
            cache,
            batch.block_tables,
            work,
            use,
            blocks,
            sinks=by_row(sinks),
            slopes=by_row(slopes),
            scales=scales,
            interpret=self.interpret,
        )[:, :, : group * block_q]
        out = shape.values_of(out).reshape(num_tiles, kv_heads, group, block_q, -1).transpose(0, 3, 1, 2, 4)
        return out.reshape(num_tiles * block_q, kv_heads, group, -1)[:num_tokens]
