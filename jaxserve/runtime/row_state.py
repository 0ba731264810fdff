"""The sampling state of each row on the device, and its encoding on the host.

There are two encodings of a `RowSetup`: the scalars that travel with every step (`encode_row`), and the heavy state
that is sent once, only for rows that need it (`encode_row_state` -> `configure_row`). They are used by `sampling_rules`
and `sampling_draw`.

Why two: nearly all requests need twelve numbers, and sending those each step costs less than remembering them. A row
reused by a plain request keeps the old heavy state; its flags say that it is not read.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.api import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxserve.models.sharding import WHOLE, Shards
from jaxserve.sched.plan import RowSetup, reads_history

FROM_DEVICE = -1  # follows from `last_token[row]` and `length[row]`, which only the device knows so far
NO_TOKEN = 2**31 - 1  # fills unused slots: as an index it is out of every range, so scatters drop it
ANY_TOKEN = -1  # fills the front of a bad word: matches any token
MAX_COUNT = 2**15 - 1  # counts of output tokens saturate here
NUM_RECENT = MAX_BAD_WORD_LEN - 1
_MASK_BITS = 32


class Field(enum.IntEnum):
    """Columns of `params [R, NUM_ROW_FIELDS]`. Floats are stored as the bits of a float32.

    ADAPTER, the slot of the row's adapter, is a further column of engines that take adapters, and of no others.
    """

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    PRESENCE = 4
    FREQUENCY = 5
    REPETITION = 6
    SEED_LOW = 7
    SEED_HIGH = 8
    PROMPT_LEN = 9
    MIN_TOKENS = 10
    FLAGS = 11
    ADAPTER = 12


NUM_ROW_FIELDS = Field.ADAPTER.value


class Flag(enum.IntFlag):
    """Bits of `Field.FLAGS`: what a row uses beyond its scalars."""

    PENALTY = 1
    BIAS = 2
    ALLOWED = 4
    BAD_WORDS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


HEAVY = Flag.PENALTY | Flag.BIAS | Flag.ALLOWED | Flag.BAD_WORDS | Flag.MIN_TOKENS


PER_TOKEN = ("counts", "prompt_mask", "allowed_mask")  # fields of the state whose last axis is the vocabulary's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingState:
    """Per-row state on the device; R + 1 rows, of which the last is for padding. Donated to every step.

    Attributes:
      last_token: the token sampled last; what a decode row feeds next.
      recent: the last tokens of the sequence, newest at the end; NO_TOKEN where there is none.
      counts: how often each token was generated; saturates at MAX_COUNT.
      prompt_mask: one bit per token, 32 in an int32, lowest first.
      allowed_mask: the same, of P places of each row: the next token and those behind drafts of the host. Only rows
        with a grammar have more than the first. P is the largest width of a step; line r * P + p is place p of row r.
      bias_ids, bias_values: logit_bias in slots.
      stop_ids: ids that min_tokens holds back.
      bad_words: one word per line, right-aligned, ANY_TOKEN before it; NO_TOKEN at the end of an unused line.
    """

    last_token: Int[Array, " R+1"]
    recent: Int[Array, "R+1 recent"]
    counts: Int[Array, "R+1 V"]
    prompt_mask: Int[Array, "R+1 V/32"]
    allowed_mask: Int[Array, "(R+1)*P V/32"]
    bias_ids: Int[Array, "R+1 bias"]
    bias_values: Float[Array, "R+1 bias"]
    stop_ids: Int[Array, "R+1 stops"]
    bad_words: Int[Array, "R+1 words length"]

    @property
    def num_places(self) -> int:
        """P: masks of each row."""
        return self.allowed_mask.shape[0] // self.last_token.shape[0]


def init_sampling_state(max_rows: int, vocab_size: int, num_places: int = 1) -> SamplingState:
    """State for `max_rows` rows and the padding row. (2.125 + P / 8) V + 5 KB bytes a row."""
    rows, words = max_rows + 1, mask_words(vocab_size)
    return SamplingState(
        last_token=jnp.zeros((rows,), jnp.int32),
        recent=jnp.full((rows, NUM_RECENT), NO_TOKEN, jnp.int32),
        counts=jnp.zeros((rows, vocab_size), jnp.int16),
        prompt_mask=jnp.zeros((rows, words), jnp.int32),
        allowed_mask=jnp.zeros((rows * num_places, words), jnp.int32),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, jnp.int32),
        bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NO_TOKEN, jnp.int32),
    )


def encode_row(setup: RowSetup) -> np.ndarray:
    """The scalars of one row, int32 [NUM_ROW_FIELDS]. A line of zeros is a plain greedy row: use it for padding."""
    sampling, line = setup.sampling, np.zeros(NUM_ROW_FIELDS, np.int32)
    floats = line.view(np.float32)
    floats[Field.TEMPERATURE] = sampling.temperature
    floats[Field.TOP_P] = sampling.top_p
    floats[Field.MIN_P] = sampling.min_p
    floats[Field.PRESENCE] = sampling.presence_penalty
    floats[Field.FREQUENCY] = sampling.frequency_penalty
    floats[Field.REPETITION] = sampling.repetition_penalty
    line[Field.TOP_K] = sampling.top_k
    line[Field.SEED_LOW : Field.SEED_HIGH + 1] = np.array([setup.seed], "<u8").view("<i4")
    line[Field.PROMPT_LEN] = setup.prompt_len
    line[Field.MIN_TOKENS] = sampling.min_tokens
    line[Field.FLAGS] = _flags(setup)
    return line


def encode_stops(setup: RowSetup) -> np.ndarray:
    """The ids that end a row, int32 [MAX_STOP_TOKEN_IDS]; NO_TOKEN in unused slots."""
    return _slots(sorted(setup.stop_token_ids), MAX_STOP_TOKEN_IDS, np.int32(NO_TOKEN))


def needs_row_state(setup: RowSetup) -> bool:
    """Whether `configure_row` must run before the first step of this row."""
    needed = _flags(setup) & HEAVY
    if setup.sampling.structured is not None:
        needed &= ~Flag.ALLOWED  # `write_masks` comes before each of its draws
    return bool(needed)


def row_state_size(vocab_size: int) -> int:
    """int32 entries of one `encode_row_state` payload."""
    return sum(size for _, size in _layout(vocab_size))


def encode_row_state(setup: RowSetup, vocab_size: int) -> np.ndarray:
    """The heavy state of one row, int32 [row_state_size(vocab_size)], for `configure_row`.

    Tokens from `prompt_len` on count as output, so a sequence computed again after a preemption goes on as before.
    Slots and ids have been checked by `api.check_request`.
    """
    sampling = setup.sampling
    whole = reads_history(sampling, setup.bad_word_ids)
    assert not whole or len(setup.token_ids) == setup.num_tokens, (len(setup.token_ids), setup.num_tokens)
    tokens = np.asarray(setup.token_ids, np.int64)  # where sampling does not read them, perhaps not all
    counts = np.minimum(np.bincount(tokens[setup.prompt_len :], minlength=vocab_size), MAX_COUNT)
    recent = tokens[-NUM_RECENT:]
    bias = sampling.logit_bias or {}
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NO_TOKEN, np.int32)
    for line, word in enumerate(setup.bad_word_ids):
        words[line] = (ANY_TOKEN,) * (MAX_BAD_WORD_LEN - len(word)) + word
    parts = {
        "recent": np.concatenate([np.full(NUM_RECENT - len(recent), NO_TOKEN), recent]).astype(np.int32),
        "counts": counts.astype(np.int32),  # two to a word would halve this and take XLA:TPU 10 s to compile
        "prompt_mask": _bit_mask(tokens[: setup.prompt_len], vocab_size),
        "allowed_mask": _bit_mask(np.asarray(sampling.allowed_token_ids or (), np.int64), vocab_size),
        "bias_ids": _slots(bias.keys(), MAX_LOGIT_BIAS, np.int32(NO_TOKEN)),
        "bias_values": _slots(bias.values(), MAX_LOGIT_BIAS, np.float32(0)).view(np.int32),
        "stop_ids": encode_stops(setup),
        "bad_words": words.reshape(-1),
    }
    return np.concatenate([parts[name] for name, _ in _layout(vocab_size)])


def configure_row(
    state: SamplingState, row: Int[Array, ""], payload: Int[Array, " size"], shards: Shards = WHOLE
) -> SamplingState:
    """Writes the heavy state of one row. To be jitted with `state` donated; `last_token` is left alone.

    The payload is that of the whole vocabulary; each device keeps its part of the counts and masks.
    """
    vocab_size = state.counts.shape[1] * shards.count
    assert payload.shape == (row_state_size(vocab_size),), (payload.shape, vocab_size)
    parts, start = {}, 0
    for name, size in _layout(vocab_size):
        parts[name] = payload[start : start + size]
        start += size
    parts["counts"] = parts["counts"].astype(jnp.int16)
    parts["bias_values"] = lax.bitcast_convert_type(parts["bias_values"], jnp.float32)
    parts["bad_words"] = parts["bad_words"].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
    for name in PER_TOKEN:
        size = getattr(state, name).shape[1]
        parts[name] = lax.dynamic_slice_in_dim(parts[name], shards.start(size), size)
    lines = dict.fromkeys(parts, row) | {"allowed_mask": row * state.num_places}
    written = {
        name: lax.dynamic_update_index_in_dim(getattr(state, name), value, lines[name], axis=0)
        for name, value in parts.items()
    }
    return dataclasses.replace(state, **written)


def write_masks(
    state: SamplingState, lines: Int[Array, " M"], masks: Int[Array, "M V/32"], shards: Shards = WHOLE
) -> SamplingState:
    """Replaces some lines of `allowed_mask`. To be jitted with `state` donated. Masks are of the whole vocabulary."""
    size = state.allowed_mask.shape[1]
    part = lax.dynamic_slice_in_dim(masks, shards.start(size), size, axis=1)
    return dataclasses.replace(state, allowed_mask=state.allowed_mask.at[lines].set(part))


def mask_words(vocab_size: int) -> int:
    """Words of 32 tokens each."""
    return -(-vocab_size // _MASK_BITS)


def _layout(vocab_size: int) -> tuple[tuple[str, int], ...]:
    """Order and int32 sizes of the parts of a payload; the names are fields of SamplingState."""
    words = mask_words(vocab_size)
    return (
        ("recent", NUM_RECENT),
        ("counts", vocab_size),
        ("prompt_mask", words),
        ("allowed_mask", words),
        ("bias_ids", MAX_LOGIT_BIAS),
        ("bias_values", MAX_LOGIT_BIAS),
        ("stop_ids", MAX_STOP_TOKEN_IDS),
        ("bad_words", MAX_BAD_WORDS * MAX_BAD_WORD_LEN),
    )


def _flags(setup: RowSetup) -> Flag:
    sampling, flags = setup.sampling, Flag(0)
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        flags |= Flag.PENALTY
    if sampling.logit_bias:
        flags |= Flag.BIAS
    if sampling.allowed_token_ids is not None or sampling.structured is not None:
        flags |= Flag.ALLOWED
    if setup.bad_word_ids:
        flags |= Flag.BAD_WORDS
    if sampling.min_tokens and setup.stop_token_ids:
        flags |= Flag.MIN_TOKENS
    if sampling.logprobs is not None:
        flags |= Flag.LOGPROBS
    return flags


def _bit_mask(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    bits = np.zeros(mask_words(vocab_size) * _MASK_BITS, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def _slots(values, size: int, fill: np.generic) -> np.ndarray:
    slots = np.full(size, fill, fill.dtype)
    slots[: len(values)] = list(values)
    return slots
