"""Pages between the device and host memory: how many in one launch, and the two compiled functions.

A page is scattered over the arrays of all layers. `gather_pages` packs whole pages into one contiguous array on each
device, of 32-bit words whatever the cache holds, and `scatter_pages` unpacks them: one copy over the link instead of
one for each array, which was measured five times as slow on a CPU; and no type whose layout a link could get wrong.
The words of a page have a meaning only for the same layout of the cache, so they never leave the process by themselves.

Launches have a few fixed numbers of pages, all compiled at the start; a launch that needs fewer moves the dummy page
in the other places.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxserve.kernels.paged_attention import LayerCache
from jaxserve.runtime.step import DeviceState

MAX_PAGES = 16  # of one launch
_MAX_BYTES = 64 << 20  # of one launch on a device, where pages are large
_WORD = 4  # bytes
DRAINING_LAUNCHES = 2  # full ones, that may wait on the device for their way to host memory
LOADING_LAUNCHES = 2  # that may be on the device, packed, before they are scattered


def move_counts(page_bytes: int) -> tuple[int, ...]:
    """Pages that one launch can move, ascending, where a page takes `page_bytes` of a device."""
    most = MAX_PAGES
    while most > 1 and most * page_bytes > _MAX_BYTES:
        most //= 2
    return tuple(sorted({1, min(4, most), most}))


def pages_of_launch(num_pages: int, counts: Sequence[int]) -> int:
    """The smallest of `counts` that holds `num_pages`, or the largest."""
    return next((count for count in counts if count >= num_pages), counts[-1])


def page_words(caches: tuple[LayerCache, ...]) -> int:
    """Words of a page that is packed, of arrays (or their shapes) as one device has them."""
    return sum(_leaf_words(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(caches))


def gather_pages(state: DeviceState, page_ids: Int[Array, " S"]) -> UInt32[Array, "S W"]:
    """The pages, packed. Does not donate: the state is read and stays as it is."""
    leaves = jax.tree.leaves(state.caches)
    return jnp.concatenate([_to_words(leaf[page_ids]) for leaf in leaves], axis=1)


def scatter_pages(
    state: DeviceState, page_ids: Int[Array, " S"], packed: UInt32[Array, "S W"]
) -> tuple[DeviceState, Int[Array, ""]]:
    """Writes what `gather_pages` packed into other pages. DONATES state.

    The second result is there when `packed` is no longer needed. Padding is page 0, with any content.
    """
    leaves, structure = jax.tree.flatten(state.caches)
    starts = np.cumsum([0, *(_leaf_words(leaf.shape, leaf.dtype) for leaf in leaves)])
    written = [
        leaf.at[page_ids].set(_from_words(packed[:, start:end], leaf.shape[1:], leaf.dtype))
        for leaf, start, end in zip(leaves, starts, starts[1:], strict=False)
    ]
    caches = jax.tree.unflatten(structure, written)
    return dataclasses.replace(state, caches=caches), jnp.sum(page_ids)


def _leaf_words(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return -(-math.prod(shape[1:]) * dtype.itemsize // _WORD)


def _to_words(pages: Array) -> UInt32[Array, "S N"]:
    per_word = _WORD // pages.dtype.itemsize
    flat = pages.reshape(pages.shape[0], -1)
    if per_word == 1:
        return jax.lax.bitcast_convert_type(flat, jnp.uint32)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % per_word)))
    return jax.lax.bitcast_convert_type(flat.reshape(flat.shape[0], -1, per_word), jnp.uint32)


def _from_words(words: UInt32[Array, "S N"], shape: tuple[int, ...], dtype: np.dtype) -> Array:
    flat = jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)
    return flat[:, : math.prod(shape)].reshape(words.shape[0], *shape)
