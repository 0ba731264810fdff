"""Options that change the logits themselves, before anything is drawn: masks, bias and penalties.

They are allowed_token_ids, bad_words, min_tokens, logit_bias and the three penalties, in the order in which vLLM
applies them. Options that only limit a draw are in `sampling_draw`, since greedy rows must not pay for them.

Each rule stands behind `lax.cond`: a batch of which no row uses a rule does not compute it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.api import MAX_BAD_WORD_LEN
from jaxserve.models.sharding import WHOLE, Shards
from jaxserve.runtime.row_state import MAX_COUNT, NO_TOKEN, Field, Flag, SamplingState

Logits = Float[Array, "R V"]


def float_field(params: Int[Array, "R F"], field: Field) -> Float[Array, " R"]:
    """One column of the packed parameters, as the float32 that it holds."""
    return lax.bitcast_convert_type(params[:, field], jnp.float32)


def effective_flags(
    params: Int[Array, "R F"], context_lens: Int[Array, " R"], should_sample: Bool[Array, " R"]
) -> Int[Array, " R"]:
    """The flags that matter in this step: none for rows that yield no token, no MIN_TOKENS once there are enough."""
    flags = jnp.where(should_sample, params[:, Field.FLAGS], 0)
    enough = context_lens - params[:, Field.PROMPT_LEN] >= params[:, Field.MIN_TOKENS]
    return jnp.where(enough, flags & ~int(Flag.MIN_TOKENS), flags)


def apply_rules(
    logits: Logits,
    rows: Int[Array, " R"],
    context_lens: Int[Array, " R"],
    params: Int[Array, "R F"],
    flags: Int[Array, " R"],
    state: SamplingState,
    shards: Shards = WHOLE,
    ahead: Int[Array, "R ahead"] | None = None,
    mask_places: Int[Array, " R"] | int = 0,
) -> Logits:
    """The processed logits: masks, then bias, then penalties. Of this device's part of the vocabulary.

    A token that is masked has -inf. When bad words and min_tokens leave a row without any token, they are waived for
    this token: allowed_token_ids always holds. `flags` are those of `effective_flags`, `ahead` and
    `mask_places` those of `sampling.choose_tokens`.
    """

    def any_row(wanted: Flag) -> Bool[Array, ""]:
        return jnp.any(flags & int(wanted) != 0)

    def has(wanted: Flag) -> Bool[Array, "R 1"]:
        return (flags & int(wanted) != 0)[:, None]

    def changed(logits: Logits) -> Logits:
        """Masks, then bias: one pass over the logits, and scatters of a few entries in place."""
        mask = state.allowed_mask[rows * state.num_places + mask_places]
        allowed = _unpack_bits(mask, logits.shape[1]) | ~has(Flag.ALLOWED)
        kept = jnp.where(allowed, logits, -jnp.inf)
        num_output = context_lens - params[:, Field.PROMPT_LEN]
        recent = _with_ahead(state.recent[rows], ahead)
        banned = jnp.concatenate(
            [
                jnp.where(has(Flag.MIN_TOKENS), state.stop_ids[rows], NO_TOKEN),
                _banned_word_ends(state.bad_words[rows], recent, num_output, has(Flag.BAD_WORDS)),
            ],
            axis=1,
        )
        banned = shards.local_ids(banned, logits.shape[1])
        lines = jnp.arange(logits.shape[0])[:, None]
        left = kept.at[lines, banned].set(-jnp.inf, mode="drop")
        has_any = shards.max(jnp.any(left > -jnp.inf, axis=1, keepdims=True).astype(jnp.int32)) > 0
        # What was there comes from the logits: reading `kept` again would keep the scatter from writing in its place.
        was_allowed = allowed.at[lines, banned].get(mode="fill", fill_value=False)
        before = jnp.where(was_allowed, logits.at[lines, banned].get(mode="fill", fill_value=-jnp.inf), -jnp.inf)
        left = left.at[lines, banned].set(jnp.where(has_any, -jnp.inf, before), mode="drop")
        ids = shards.local_ids(jnp.where(has(Flag.BIAS), state.bias_ids[rows], NO_TOKEN), logits.shape[1])
        return left.at[lines, ids].add(state.bias_values[rows], mode="drop")

    def penalised(logits: Logits) -> Logits:
        return jnp.where(has(Flag.PENALTY), _penalise(logits, rows, params, state, shards, ahead), logits)

    masks = Flag.ALLOWED | Flag.BAD_WORDS | Flag.MIN_TOKENS
    # Masks and bias stand behind one condition: a branch that returns its operand costs a copy of the logits.
    logits = lax.cond(any_row(masks | Flag.BIAS), changed, lambda logits: logits, logits)
    return lax.cond(any_row(Flag.PENALTY), penalised, lambda logits: logits, logits)


def _penalise(
    logits: Logits,
    rows: Int[Array, " R"],
    params: Int[Array, "R F"],
    state: SamplingState,
    shards: Shards,
    ahead: Int[Array, "R ahead"] | None,
) -> Logits:
    """Repetition divides (positive logits) or multiplies; then frequency * count and presence are subtracted."""
    counts = state.counts[rows].astype(jnp.float32)  # [R, V]
    if ahead is not None:
        lines = jnp.arange(logits.shape[0])[:, None]
        counts = counts.at[lines, shards.local_ids(ahead, counts.shape[1])].add(1.0, mode="drop")
        counts = jnp.minimum(counts, MAX_COUNT)
    seen = (counts > 0) | _unpack_bits(state.prompt_mask[rows], logits.shape[1])
    repetition = float_field(params, Field.REPETITION)[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - float_field(params, Field.FREQUENCY)[:, None] * counts
    return logits - float_field(params, Field.PRESENCE)[:, None] * (counts > 0)


def _with_ahead(recent: Int[Array, "R recent"], ahead: Int[Array, "R ahead"] | None) -> Int[Array, "R recent"]:
    """The last tokens of each line, newest at the end, with those `ahead` of it."""
    if ahead is None:
        return recent
    num_ahead = jnp.sum(ahead != NO_TOKEN, axis=1, dtype=jnp.int32)
    place = num_ahead[:, None] + jnp.arange(recent.shape[1])
    return jnp.take_along_axis(jnp.concatenate([recent, ahead], axis=1), place, axis=1)


def _banned_word_ends(
    words: Int[Array, "R words length"],
    recent: Int[Array, "R recent"],
    num_output: Int[Array, " R"],
    has_words: Bool[Array, "R 1"],
) -> Int[Array, "R words"]:
    """Last tokens of those bad words whose beginning has just been generated. Only output counts, never the prompt."""
    begin, end = words[:, :, :-1], words[:, :, -1]
    place = jnp.arange(MAX_BAD_WORD_LEN - 1, 0, -1)  # 1 is the newest token
    generated = place[None, :] <= num_output[:, None]
    equal = (begin == recent[:, None, :]) & generated[:, None, :]
    match = jnp.all((begin < 0) | equal, axis=2)
    return jnp.where(match & has_words, end, NO_TOKEN)


def _unpack_bits(words: Int[Array, "R W"], vocab_size: int) -> Bool[Array, "R V"]:
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0
