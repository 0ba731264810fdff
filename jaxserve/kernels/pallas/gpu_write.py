"""The write of a step's keys and values into their pages, on Hopper.

It is one small kernel that moves bytes. Numbers are rounded to the cache's type by `stored`, which XLA fuses into the
computation of the keys.

    k, v [T, K, H'] --one copy for some tokens--> shared memory --one copy a token--> keys, values [page, :, slot, :]

Why not XLA's scatter: it moves one number a thread and computes an address for each; here one thread starts a copy of
all heads of a token. Why the cache is a mutable reference: the kernel's in- and output are then one buffer by
construction, and no copy of the cache can be asked for.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, KVScales, stored
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_layout import GpuPages, Interpret

_MAX_TOKENS = 16  # of one program: enough to have copies in flight, few enough to spread a decode step over the card
_MAX_BYTES = 64 * 1024  # of keys or values of one program, so that three fit on a multiprocessor


@functools.partial(jax.jit, static_argnames="interpret")
def write(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: GpuPages,
    batch: AttentionBatch,
    scales: KVScales | None = None,
    *,
    interpret: Interpret = None,
) -> GpuPages:
    """`PagedAttention.write`; padding tokens go to the dummy page. In place where the caller donates the cache."""
    page_ids, slots = _places(batch)
    kept_keys = _as_stored(k, None if scales is None else scales.keys, cache)
    kept_values = _as_stored(v, None if scales is None else scales.values, cache)
    keys_ref, values_ref = (jax.new_ref(x, memory_space=plgpu.GMEM) for x in (cache.keys, cache.values))
    num_tokens, padded_heads, lanes = kept_keys.shape
    tokens = _tokens_per_program(num_tokens, padded_heads * lanes * cache.dtype.itemsize)
    own_heads = pl.ds(0, k.shape[1])

    def write_tokens(page_ids_ref, slots_ref, k_ref, v_ref, keys_ref, values_ref) -> None:
        pl.run_scoped(
            functools.partial(scatter, page_ids_ref, slots_ref, k_ref, v_ref, keys_ref, values_ref),
            plgpu.SMEM((tokens, padded_heads, lanes), cache.dtype),
            plgpu.SMEM((tokens, padded_heads, lanes), cache.dtype),
            plgpu.Barrier(num_arrivals=2),
            collective_axes="wg",
        )

    def scatter(page_ids_ref, slots_ref, k_ref, v_ref, keys_ref, values_ref, k_smem, v_smem, arrived) -> None:
        # The last program reaches back over tokens of the one before it, and writes the same bytes again.
        first = jnp.minimum(lax.axis_index("block") * tokens, num_tokens - tokens)
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, tokens)], k_smem, arrived)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, tokens)], v_smem, arrived)
        places = [(page_ids_ref[first + i], slots_ref[first + i]) for i in range(tokens)]
        plgpu.barrier_wait(arrived)
        for i, (page_id, slot) in enumerate(places):
            plgpu.copy_smem_to_gmem(k_smem.at[i, own_heads], keys_ref.at[page_id, :, slot])
            plgpu.copy_smem_to_gmem(v_smem.at[i, own_heads], values_ref.at[page_id, :, slot])
        plgpu.wait_smem_to_gmem(0)

    layout.launch_in_place(write_tokens, grid={"block": -(-num_tokens // tokens)}, interpret=interpret)(
        page_ids, slots, kept_keys, kept_values, keys_ref, values_ref
    )
    return GpuPages(keys=jax.freeze(keys_ref), values=jax.freeze(values_ref))


def _places(batch: AttentionBatch) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    real = batch.token_rows < batch.context_lens.shape[0]
    columns = batch.positions // batch.page_size
    page_ids = batch.block_tables.at[batch.token_rows, columns].get(mode="clip")
    return (
        jnp.where(real, page_ids, 0).astype(jnp.int32),
        jnp.where(real, batch.positions % batch.page_size, 0).astype(jnp.int32),
    )


def _as_stored(x: Float[Array, "T K H"], scale: Float[Array, " K"] | None, cache: GpuPages) -> Array:
    """As the cache keeps it. One more head where a token's bytes would not start at a multiple of 128, as copies do."""
    lanes = cache.keys.shape[-1]
    heads_step = 128 // math.gcd(128, lanes * cache.dtype.itemsize)
    kept = stored(x, scale, cache.dtype)
    return jnp.pad(kept, ((0, 0), (0, -x.shape[1] % heads_step), (0, lanes - x.shape[2])))


def _tokens_per_program(num_tokens: int, token_bytes: int) -> int:
    return max(1, min(num_tokens, _MAX_TOKENS, _MAX_BYTES // token_bytes))
