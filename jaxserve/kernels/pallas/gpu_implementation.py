"""Attention on NVIDIA Hopper GPUs: the write, then one kernel for rows of one query and one for longer rows.

A batch is divided between the kernels here, block sizes are chosen, and uses that cannot run are refused. The device
code is in `gpu_decode`, `gpu_prefill` and `gpu_write`.

Rows of one query always go through the decode kernel, beside prompts too: a token's output must not depend on
what else the step holds, beyond the rounding of a different order of sums.
"""

import dataclasses
import functools

from jaxtyping import Array, Float

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    HostPages,
    KVScales,
    PagedAttention,
    attend_by_kind,
)
from jaxserve.kernels.pallas import gpu_decode, gpu_prefill, gpu_write
from jaxserve.kernels.pallas.gpu_decode import DecodeBlocks
from jaxserve.kernels.pallas.gpu_layout import (
    SHARED_MEMORY_BYTES,
    GpuPages,
    Interpret,
    copy_pages,
    init_cache,
    read_pages,
    refuses_device,
    refuses_layout,
    write_pages,
)
from jaxserve.kernels.pallas.gpu_prefill import PrefillBlocks
from jaxserve.kernels.tuning import TunedTable, load_table

NAME = "mosaic_gpu"


def make_attention(device: Device, table: TunedTable | None = None, interpret: Interpret = None) -> PagedAttention:
    """Attention for one kind of GPU. `table` replaces the sizes that ship; `interpret` runs the kernels on a CPU."""
    kernels = _Kernels(device=device, table=load_table(device.kind) if table is None else table, interpret=interpret)
    return PagedAttention(
        name=NAME,
        attend=kernels.attend,
        write=kernels.write,
        init_cache=init_cache,
        copy_pages=copy_pages,
        refuses=kernels.refuses,
        host_pages=HostPages(read=read_pages, write=write_pages),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """The common values of the implementation's functions."""

    device: Device
    table: TunedTable
    interpret: Interpret

    def refuses(self, use: AttentionUse) -> str | None:
        """`PagedAttention.refuses`: other devices, layouts that no kernel reads, sizes beyond shared memory."""
        if reason := refuses_device(self.device):
            return f"{reason}; kernels.paged_attention: xla_batched runs there"
        return refuses_layout(use) or self._refuses_decode(use) or self._refuses_prefill(use)

    def _refuses_decode(self, use: AttentionUse) -> str | None:
        return gpu_decode.refuses_decode(use, self.decode_blocks(use))

    def _refuses_prefill(self, use: AttentionUse) -> str | None:
        blocks = self.prefill_blocks(use)
        needed = gpu_prefill.shared_memory_bytes(use, blocks)
        if needed <= SHARED_MEMORY_BYTES:
            return None
        return (
            f"prefill with {blocks} needs {needed} bytes of shared memory, but a block has {SHARED_MEMORY_BYTES}; "
            "lower its sizes in the tuned table"
        )

    def decode_blocks(self, use: AttentionUse) -> DecodeBlocks:
        measured = self.table.get(NAME, "decode", use)
        return gpu_decode.default_blocks(use) if measured is None else DecodeBlocks(**measured)

    def prefill_blocks(self, use: AttentionUse) -> PrefillBlocks:
        measured = self.table.get(NAME, "prefill", use)
        return gpu_prefill.default_blocks(use) if measured is None else PrefillBlocks(**measured)

    def write(
        self, k: Array, v: Array, cache: GpuPages, batch: AttentionBatch, scales: KVScales | None = None
    ) -> GpuPages:
        """`PagedAttention.write`."""
        return gpu_write.write(k, v, cache, batch, scales, interpret=self.interpret)

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: GpuPages,
        batch: AttentionBatch,
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
        alibi_slopes: Float[Array, " N"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T N H"], GpuPages]:
        """`PagedAttention.attend`. Products in bfloat16 with float32 sums; padding tokens give zeros."""
        cache = self.write(k, v, cache, batch, scales)
        use = AttentionUse(spec=spec, page_size=batch.page_size, query_dtype=q.dtype.name, cache_dtype=cache.dtype.name)
        rows, tiles = (
            functools.partial(f, sinks=sinks, alibi_slopes=alibi_slopes, scales=scales, interpret=self.interpret)
            for f in (gpu_decode.attend_rows, gpu_prefill.attend_tiles)
        )
        out = attend_by_kind(
            q,
            batch,
            lambda q, lens: rows(q, lens, batch.block_tables, cache, spec, self.decode_blocks(use)),
            lambda q: tiles(q, batch, cache, spec, self.prefill_blocks(use)),
        )
        return out, cache
