"""One draw per row: the thresholds of min_p, top_k and top_p, and the noise.

This is the way from processed logits to a token id; the logits are processed in `sampling_rules`.

Thresholds take the place of a sort: all three options keep the tokens at or above some logit, so one number per row is
enough. It is found by bisection over the bit patterns of float32, exact after at most 32 passes over [R, V] and most
often after about 20; sorting [16, 32000] on a CPU takes a hundred times as long as a pass, and under tensor
parallelism a sort would gather the whole vocabulary while sums stay where the logits are.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.kernels.row_sum import row_sum
from jaxserve.models.sharding import WHOLE, Shards
from jaxserve.runtime.row_state import Field
from jaxserve.runtime.sampling_reduce import first_argmax, row_max
from jaxserve.runtime.sampling_rules import float_field

Logits = Float[Array, "R V"]
PerRow = Float[Array, " R"]

MIN_TEMPERATURE = 1e-5  # below this a row is greedy, as in vLLM: dividing by less overflows
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_NUM_GROUPS = 5  # of four rounds each


def draw(
    logits: Logits,
    positions: Int[Array, " R"],
    params: Int[Array, "R F"],
    drawing: Bool[Array, " R"],
    shards: Shards = WHOLE,
) -> Int[Array, " R"]:
    """Draws one token per row from softmax(logits / temperature), limited by min_p, then top_k, then top_p.

    Ties at a threshold are all kept. NaN counts as -inf, +inf takes all; a row of -inf gives token 0. Rows outside of
    `drawing` return noise.

    The draw is a race: token i arrives after E_i / p_i, with E_i exponential, and the first wins with probability
    p_i / sum(p) (the Gumbel-max trick with one logarithm less). E_i depends on (seed, position, i) alone, so the same
    request draws the same tokens in any row, batch or bucket, alone or resumed.
    """
    temperature = jnp.where(drawing, float_field(params, Field.TEMPERATURE), 1.0)
    top = row_max(logits, shards)
    threshold = keep_threshold(logits, top, temperature, params, drawing, shards)
    first, size = shards.start(logits.shape[1]), logits.shape[1]
    exponential = -jnp.log1p(-uniform(params[:, Field.SEED_LOW], params[:, Field.SEED_HIGH], positions, size, first))
    arrival = exponential * jnp.exp(_depth(logits, top) / temperature[:, None])
    return first_argmax(jnp.where(logits >= threshold[:, None], -arrival, -jnp.inf), shards)


def uniform(
    seed_low: Int[Array, " R"],
    seed_high: Int[Array, " R"],
    positions: Int[Array, " R"],
    num_tokens: int,
    first_token: int | Int[Array, ""] = 0,
) -> Float[Array, "R V"]:
    """Numbers in (0, 1), fine near 0 (steps of 2**-32): `threefry` of key seed and counter (token, position)."""
    token = lax.broadcasted_iota(jnp.uint32, (positions.shape[0], num_tokens), 1) + jnp.uint32(first_token)
    key = (seed_low.astype(jnp.uint32)[:, None], seed_high.astype(jnp.uint32)[:, None])
    first, second = threefry(key, (token, positions.astype(jnp.uint32)[:, None]))
    return jnp.minimum((first ^ second).astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


def threefry(
    key: tuple[UInt32[Array, "..."], UInt32[Array, "..."]], counter: tuple[UInt32[Array, "..."], UInt32[Array, "..."]]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Written out here because it must fuse with the draw: 0.7 ms for [16, 32000] on two CPU cores, where
    `jax.random.gumbel` takes 2.3 ms and cannot have a key per row without a batch of loops.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(_NUM_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def keep_threshold(
    logits: Logits,
    top: PerRow,
    temperature: PerRow,
    params: Int[Array, "R F"],
    drawing: Bool[Array, " R"],
    shards: Shards = WHOLE,
) -> PerRow:
    """The smallest logit of each row that may still be drawn; -inf for rows without a limit, or not in `drawing`.

    min_p keeps p >= min_p * max(p). top_k keeps the k largest of those; top_p, the smallest set of largest ones whose
    probability among those kept so far reaches it. Ties at a threshold are all kept. `top` is `row_max(logits)`.
    """
    min_p, top_p = float_field(params, Field.MIN_P), float_field(params, Field.TOP_P)
    top_k = params[:, Field.TOP_K]
    limits_p = drawing & (top_p < 1)
    limits_k = drawing & (top_k > 0) & (top_k < logits.shape[1] * shards.count)
    floor = jnp.where(drawing & (min_p > 0), top + temperature * jnp.log(min_p), -jnp.inf)

    def count(kept: Bool[Array, "R V"]) -> PerRow:
        return shards.sum(jnp.sum(kept, axis=1, dtype=jnp.int32)).astype(jnp.float32)

    def limit_p(floor: PerRow) -> PerRow:
        weights = jnp.exp(-_depth(logits, top) / temperature[:, None])
        weights = jnp.where(logits >= floor[:, None], weights, 0.0)

        def mass(kept: Bool[Array, "R V"]) -> PerRow:
            return shards.sum(row_sum(jnp.where(kept, weights, 0.0)))

        target = top_p * shards.sum(row_sum(weights))
        return largest_threshold(logits, mass, target, floor, top, limits_p, shards)

    floor = lax.cond(
        jnp.any(limits_k),
        lambda floor: largest_threshold(logits, count, top_k.astype(jnp.float32), floor, top, limits_k, shards),
        lambda floor: floor,
        floor,
    )
    return lax.cond(jnp.any(limits_p), limit_p, lambda floor: floor, floor)


def largest_threshold(
    logits: Logits,
    measure: Callable[[Bool[Array, "R V"]], PerRow],
    target: PerRow,
    floor: PerRow,
    top: PerRow,
    active: Bool[Array, " R"],
    shards: Shards = WHOLE,
) -> PerRow:
    """The largest t in [floor, top] for which measure(logits >= t) >= target, up to a t that keeps the same tokens.

    `measure` sums over all devices. `floor` when there is none, and for rows that are not `active`. `measure` must not
    grow with t. Stops early once the set cannot shrink: it has exactly the target, or one token more than a set that
    has too little.
    """
    num_tokens = jnp.full(floor.shape, logits.shape[1] * shards.count, jnp.int32)
    low = _to_ordered(floor)
    high = jnp.where(active, jnp.maximum(_to_ordered(top), low), low)

    def is_open(low, high, exact, count_low, count_high):
        return (low < high) & ~exact & (count_low - count_high > 1)

    def step(carry):
        low, high, exact, count_low, count_high = carry
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and without overflow
        kept = logits >= _from_ordered(middle)[:, None]
        measured, count = measure(kept), shards.sum(jnp.sum(kept, axis=1, dtype=jnp.int32))
        open_rows = is_open(*carry)
        enough, too_little = open_rows & (measured >= target), open_rows & (measured < target)
        return (
            jnp.where(enough, middle, low),
            jnp.where(too_little, middle - 1, high),
            exact | (enough & (measured == target)),
            jnp.where(enough, count, count_low),
            jnp.where(too_little, count, count_high),
        )

    start = (low, high, jnp.zeros_like(active), num_tokens, jnp.zeros_like(num_tokens))
    low, *_ = lax.while_loop(lambda carry: jnp.any(is_open(*carry)), step, start)
    return _from_ordered(low)


def _depth(logits: Logits, top: PerRow) -> Logits:
    """The distance of each logit from the largest of its row, also when that is infinite; NaN stays NaN."""
    at_top = jnp.where(top > -jnp.inf, 0.0, jnp.inf)[:, None]
    return jnp.where(logits == top[:, None], at_top, top[:, None] - logits)


def _to_ordered(value: PerRow) -> Int[Array, " R"]:
    """Integers in the order of the floats; its own inverse on bit patterns."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_ordered(ordered: Int[Array, " R"]) -> PerRow:
    return lax.bitcast_convert_type(jnp.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF), jnp.float32)
