"""Paged attention of others for TPUs, on the cases of this project: JAX's own ragged paged attention kernel.

It is compiled for chips that are not here, which needs two of its helpers replaced: they ask the default device what
chip it is.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic import tpu_info  # has no public name for chips that are not here
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from jaxserve.chips import Chip
from jaxserve.kernels.cases import Case, make_batch

_VMEM_BYTES = 100 * 2**20
_VERSIONS = {
    "v5e": (tpu_info.ChipVersion.TPU_V5E, 5, 1),
    "v5p": (tpu_info.ChipVersion.TPU_V5P, 5, 2),
    "v6e": (tpu_info.ChipVersion.TPU_V6E, 6, 1),
    "v7x": (tpu_info.ChipVersion.TPU_7X, 7, 1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuPeer:
    """One setting of a peer's kernel: `function(*args)`, the integers of a batch known and the arrays as shapes."""

    setting: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def ragged_paged_attention_peers(case: Case, chip: Chip) -> Iterator[TpuPeer]:
    """JAX's kernel with several block sizes; it has none tuned for most shapes. Nothing for what it cannot run."""
    spec = case.spec
    if spec.head_dim != 128 or case.cache_dtype != "bfloat16" or case.sinks or case.alibi:
        return
    _pretend(chip)
    batch, num_pages = make_batch(case, np.random.default_rng(0))
    num_tokens = sum(n for n, _ in case.rows)
    rows = len(case.rows)
    q = jax.ShapeDtypeStruct((num_tokens, spec.num_query_heads, spec.head_dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((num_pages + 1, case.page_size, 2 * spec.num_kv_heads, spec.head_dim), jnp.bfloat16)
    tables, lens = np.asarray(batch.block_tables)[:rows], np.asarray(batch.context_lens)[:rows]
    starts = np.asarray(batch.q_starts)[: rows + 1]
    args = (q, pages, lens, tables, starts, np.array([rows], np.int32))
    for block_pages, block_queries in ((8, 64), (16, 32), (16, 128)) if num_tokens > rows else ((16, 8), (64, 8)):

        def attend(*given: Any, block_pages: int = block_pages, block_queries: int = block_queries) -> jax.Array:
            return ragged_paged_attention(
                *given,
                sm_scale=spec.head_dim**-0.5,
                sliding_window=spec.window,
                soft_cap=spec.soft_cap,
                num_kv_pages_per_block=block_pages,
                num_queries_per_block=block_queries,
                vmem_limit_bytes=_VMEM_BYTES,
            )

        yield TpuPeer(setting=f"{block_queries} queries, {block_pages} pages", function=attend, args=args)


def _pretend(chip: Chip) -> None:
    version, generation, cores = _VERSIONS[chip.name]
    info = tpu_info.get_tpu_info_for_chip(version, cores)
    tpu_info.get_tpu_info = lambda: info
    for name, module in list(sys.modules.items()):
        if name.startswith("jax.experimental.pallas.ops.tpu.ragged") and hasattr(module, "get_tpu_version"):
            module.get_tpu_version = lambda: generation  # type: ignore[attr-defined]
