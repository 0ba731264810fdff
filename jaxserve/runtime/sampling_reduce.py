"""Reductions over the vocabulary: the largest logit, where it stands, and the best twenty.

V is this device's part of the vocabulary; indices are those of the whole.

Reductions go by blocks: the maxima of blocks of up to 256 tokens cost one pass that writes almost nothing, and tell in
which few blocks to look. XLA's argmax took 20 times as long on a CPU, and its top_k gathers logits that are spread over
devices; maxima stay where the logits are. A vocabulary without a divisor near 256 is slower, and right all the same.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.sharding import WHOLE, Shards

_MAX_BLOCK = 256


def row_max(values: Float[Array, "R V"], shards: Shards = WHOLE) -> Float[Array, " R"]:
    """Largest value of each row; NaN counts as -inf."""
    return shards.max(jnp.max(_block_maxima(_blocks(values)), axis=1))


def first_argmax(values: Float[Array, "R V"], shards: Shards = WHOLE) -> Int[Array, " R"]:
    """Index of the largest value, the lowest among equals. NaN counts as -inf; a row of -inf gives 0."""
    blocks = _blocks(values)
    maxima = _block_maxima(blocks)
    top = jnp.max(maxima, axis=1, keepdims=True)
    block = _first_true(maxima == top)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    inside = jnp.where(jnp.isnan(inside), -jnp.inf, inside)
    index = block * blocks.shape[2] + _first_true(inside == top)
    if shards.count == 1:
        return index
    best = shards.max(top[:, 0])
    # The lowest index of those devices that hold the best value: the largest of the negated ones.
    found = jnp.where(top[:, 0] == best, index + shards.start(values.shape[1]), jnp.iinfo(jnp.int32).max)
    return -shards.max(-found)


def top_values(
    values: Float[Array, "R V"], num_top: int, shards: Shards = WHOLE
) -> tuple[Float[Array, "R num_top"], Int[Array, "R num_top"]]:
    """The largest values and their indices, the lowest first among equals. No NaN; `num_top` is at most V.

    They stand in the `num_top` blocks of the largest maxima: each of these has an entry that beats any other block.
    Of several devices each sends only its best values.
    """
    top, places = _local_top(values, min(num_top, values.shape[1]))
    if shards.count == 1:
        return top, places
    top, places = shards.gather(top), shards.gather(places + shards.start(values.shape[1]))
    top, chosen = lax.top_k(top, num_top)  # devices stand in the order of their indices, so equals keep theirs
    return top, jnp.take_along_axis(places, chosen, axis=1)


def _local_top(values: Float[Array, "R V"], num_top: int) -> tuple[Float[Array, "R num_top"], Int[Array, "R num_top"]]:
    blocks = _blocks(values)
    num_blocks, size = blocks.shape[1:]
    _, chosen = lax.top_k(_block_maxima(blocks), min(num_top, num_blocks))
    chosen = jnp.sort(chosen, axis=1)  # equal values must stand in the order of their index
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)  # [R, num_top, size]
    top, places = lax.top_k(candidates.reshape(values.shape[0], -1), num_top)
    return top, jnp.take_along_axis(chosen, places // size, axis=1) * size + places % size


def _blocks(values: Float[Array, "R V"]) -> Float[Array, "R blocks size"]:
    size = max(n for n in range(1, _MAX_BLOCK + 1) if values.shape[1] % n == 0)
    return values.reshape(values.shape[0], -1, size)


def _block_maxima(blocks: Float[Array, "R blocks size"]) -> Float[Array, "R blocks"]:
    """NaN counts as -inf."""
    return lax.platform_dependent(blocks, cpu=_maxima_on_cpus, default=_maxima_of_numbers)


def _maxima_of_numbers(blocks: Float[Array, "R blocks size"]) -> Float[Array, "R blocks"]:
    """One pass on accelerators, where cleaning is part of the reduction."""
    return jnp.max(jnp.where(jnp.isnan(blocks), -jnp.inf, blocks), axis=2)


def _maxima_on_cpus(blocks: Float[Array, "R blocks size"]) -> Float[Array, "R blocks"]:
    found = jnp.max(blocks, axis=2)
    # The few maxima show any NaN in their blocks; cleaning first would write [R, V] once more in every step.
    return lax.cond(
        jnp.any(jnp.isnan(found)), lambda blocks, _: _maxima_of_numbers(blocks), lambda _, found: found, blocks, found
    )


def _first_true(hits: Bool[Array, "R N"]) -> Int[Array, " R"]:
    """Lowest index that is True. Each row has one."""
    return jnp.min(jnp.where(hits, jnp.arange(hits.shape[1]), hits.shape[1] - 1), axis=1)
