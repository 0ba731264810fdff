"""Attention of others for TPUs, on the cases of this project: three kernels of JAX, and one of tpu-inference.

    ragged_paged_attention    of JAX: decode and prompts from pages
    splash_attention          of JAX: prompts from whole arrays of keys and values
    flash_attention           of JAX: the same, a key/value head for every query head
    v3                        ragged paged attention v3 of tpu-inference, whose source is given as a folder

None of JAX's writes new keys and values into pages; v3 does. They are compiled for chips that are not here, which needs
helpers replaced that ask the default device what chip it is.
"""

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic import tpu_info  # has no public name for chips that are not here
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from jaxserve.kernels.cases import Case, make_batch
from jaxserve.values.chips import Chip

RAGGED, SPLASH, FLASH = "jax ragged_paged_attention", "jax splash_attention", "jax flash_attention"
V3 = "tpu-inference ragged_paged_attention v3"
_VMEM_BYTES = 100 * 2**20
_SMALLER_VMEM = {"v5p": 50 * 2**20, "v7x": 50 * 2**20}
_VERSIONS = {
    "v5e": (tpu_info.ChipVersion.TPU_V5E, 5, 1),
    "v5p": (tpu_info.ChipVersion.TPU_V5P, 5, 2),
    "v6e": (tpu_info.ChipVersion.TPU_V6E, 6, 1),
    "v7x": (tpu_info.ChipVersion.TPU_7X, 7, 1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuPeer:
    """One setting of a peer's kernel: `function(*args)`, the integers of a batch known and the arrays as shapes."""

    by: str
    setting: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def tpu_peers(case: Case, chip: Chip, tpu_inference: Path | None) -> Iterator[TpuPeer]:
    """Every peer that can run a case, with a few block sizes. `tpu_inference`: a folder with that source."""
    if case.spec.head_dim != 128 or case.cache_dtype != "bfloat16" or case.sinks or case.alibi:
        return
    _pretend(chip)
    if len(case.rows) == 1 and case.rows[0][0] == case.rows[0][1] > 1 and case.spec.window is None:
        yield from _splash_attention(case)
        yield from _flash_attention(case)
    if tpu_inference is not None:
        yield from _ragged_paged_attention_v3(case, chip, tpu_inference)
    yield from _ragged_paged_attention(case, chip)


def _ragged_paged_attention(case: Case, chip: Chip) -> Iterator[TpuPeer]:
    """JAX has sizes tuned for few shapes."""
    spec, rows = case.spec, len(case.rows)
    lens, tables, starts, num_pages = _integers(case)
    q = _bfloat16(sum(n for n, _ in case.rows), spec.num_query_heads, spec.head_dim)
    pages = _bfloat16(num_pages + 1, case.page_size, 2 * spec.num_kv_heads, spec.head_dim)
    args = (q, pages, lens, tables, starts, np.array([rows], np.int32))
    sizes = ((8, 64), (16, 32))
    if case.decode_only:  # long blocks of many heads compile for minutes, and the short ones already await their bytes
        sizes = ((16, 8), (64, 8)) if spec.num_kv_heads < 8 else ((16, 8),)
    for block_pages, block_queries in sizes:

        def attend(*given: Any, block_pages: int = block_pages, block_queries: int = block_queries) -> jax.Array:
            return ragged_paged_attention(
                *given,
                sm_scale=spec.scale,
                sliding_window=spec.window,
                soft_cap=spec.soft_cap,
                num_kv_pages_per_block=block_pages,
                num_queries_per_block=block_queries,
                vmem_limit_bytes=_SMALLER_VMEM.get(chip.name, _VMEM_BYTES),
            )

        yield TpuPeer(by=RAGGED, setting=f"{block_queries} queries, {block_pages} pages", function=attend, args=args)


def _splash_attention(case: Case) -> Iterator[TpuPeer]:
    spec, (length, _) = case.spec, case.rows[0]
    q = _bfloat16(spec.num_query_heads, length, spec.head_dim)
    kv = _bfloat16(spec.num_kv_heads, length, spec.head_dim)
    for block_q, block_kv, compute in ((1024, 1024, 512), (1024, 2048, 1024)):

        def attend(q: Any, k: Any, v: Any, sizes: tuple[int, int, int] = (block_q, block_kv, compute)) -> jax.Array:
            kernel = splash.make_splash_mha(
                splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * spec.num_query_heads),
                block_sizes=splash.BlockSizes(block_q=sizes[0], block_kv=sizes[1], block_kv_compute=sizes[2]),
                attn_logits_soft_cap=spec.soft_cap,
                downcast_smem_data=False,  # the ledger reads integers of 32 bits
                head_shards=1,
                q_seq_shards=1,
            )
            return kernel(q, k, v)

        setting = f"{block_q} queries, {block_kv} keys, {compute} at once"
        yield TpuPeer(by=SPLASH, setting=setting, function=attend, args=(q, kv, kv))


def _flash_attention(case: Case) -> Iterator[TpuPeer]:
    spec, (length, _) = case.spec, case.rows[0]
    if spec.soft_cap is not None:
        return
    each = _bfloat16(1, spec.num_query_heads, length, spec.head_dim)
    for block_q, block_kv, compute in ((512, 512, 512), (1024, 1024, 512)):

        def attend(q: Any, k: Any, v: Any, sizes: tuple[int, int, int] = (block_q, block_kv, compute)) -> jax.Array:
            blocks = flash.BlockSizes(block_q=sizes[0], block_k_major=sizes[1], block_k=sizes[2], block_b=1)
            return flash.flash_attention(q, k, v, causal=True, sm_scale=spec.scale, block_sizes=blocks)

        setting = f"{block_q} queries, {block_kv} keys, {compute} at once"
        yield TpuPeer(by=FLASH, setting=setting, function=attend, args=(each, each, each))


def _ragged_paged_attention_v3(case: Case, chip: Chip, folder: Path) -> Iterator[TpuPeer]:
    """With the sizes of its own heuristic, and some more."""
    if "tpu_inference" not in sys.modules:  # its own __init__ needs vLLM and more
        package = types.ModuleType("tpu_inference")
        package.__path__ = [str(folder / "tpu_inference")]
        sys.modules["tpu_inference"] = package
    v3 = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    v3.get_tpu_version = lambda: _VERSIONS[chip.name][1]  # type: ignore[attr-defined]
    spec, rows, decode = case.spec, len(case.rows), case.decode_only
    lens, tables, starts, num_pages = _integers(case)
    tokens = sum(n for n, _ in case.rows)
    q = _bfloat16(tokens, spec.num_query_heads, spec.head_dim)
    new = _bfloat16(tokens, spec.num_kv_heads, spec.head_dim)
    cache = _bfloat16(
        *v3.get_kv_cache_shape(num_pages + 1, case.page_size, spec.num_kv_heads, spec.head_dim, jnp.bfloat16)
    )
    alone = (rows, rows, rows) if decode else (0, 0, rows)
    columns = -(-int(lens.max()) // case.page_size)
    args = (q, new, new, cache, lens, tables[:, :columns].reshape(-1), starts, np.array(alone, np.int32))
    longest = columns * case.page_size
    tried = (1, longest, 1, longest // 4) if decode else (256, 1024, 128, 512)
    for sizes in (None, tried):

        def attend(*given: Any, sizes: tuple[int, int, int, int] | None = sizes) -> Any:
            # Two kernels for each call: one walks the rows of one query, the other the rest.
            return v3.ragged_paged_attention(
                *given,
                sm_scale=spec.scale,
                sliding_window=spec.window,
                soft_cap=spec.soft_cap,
                d_block_sizes=sizes if decode else None,
                m_block_sizes=None if decode else sizes,
            )

        yield TpuPeer(by=V3, setting="its own sizes" if sizes is None else f"sizes {sizes}", function=attend, args=args)


def _integers(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Lengths, block tables and starts of the rows, without padding, and the number of pages."""
    batch, num_pages = make_batch(case, np.random.default_rng(0))
    rows = len(case.rows)
    tables, lens = np.asarray(batch.block_tables)[:rows], np.asarray(batch.context_lens)[:rows]
    return lens, tables, np.asarray(batch.q_starts)[: rows + 1], num_pages


def _bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _pretend(chip: Chip) -> None:
    version, generation, cores = _VERSIONS[chip.name]
    info = tpu_info.get_tpu_info_for_chip(version, cores)
    tpu_info.get_tpu_info = pltpu.get_tpu_info = lambda: info
    for name, module in list(sys.modules.items()):
        if name.startswith("jax.experimental.pallas.ops.tpu.ragged") and hasattr(module, "get_tpu_version"):
            module.get_tpu_version = lambda: generation  # type: ignore[attr-defined]
