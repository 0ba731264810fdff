"""What a draft head is trained for, and how well its guesses would have been taken.

The loss of a guess is the cross entropy to the target's own distribution of that token, times decay ** place (EAGLE-3,
HASS). Guesses of later places start from the right tokens before them: the chain is worth continuing only where those
were taken.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.lab.training.batches import Rows
from jaxserve.models.decoder import CachePlace, Decoder
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.models.packed_attention import Drafting, packed_attention, packed_batch

Head = EagleHead | MedusaHead


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """`num_places`: guesses of a draft. `decay`: weight of each place beside the one before. `feature_dropout`: share
    of features that are zeros, as they are behind pages found in the prefix cache."""

    num_places: int = 3
    decay: float = 0.8
    feature_dropout: float = 0.02


class Guesses(NamedTuple):
    """Logits of each place over the head's vocabulary, for the M = B * S drafts that begin at the `starts` of a batch.

    The draft of start t is made when the token t has been drawn: place j guesses token t + 1 + j.
    """

    logits: tuple[Float[Array, "M W"], ...]
    teacher: tuple[Float[Array, "M V"], ...]  # the target's logits of the same tokens
    weights: tuple[Float[Array, " M"], ...]  # of each guess; 0 where the sequence has ended


def make_guesses(
    head: Head,
    target: Decoder,
    rows: Rows,
    starts: Int[Array, "B S"],
    options: LossOptions,
    key: jax.Array | None,
) -> Guesses:
    """One pass of the frozen target over the rows, then all places of the head. `key` None: no feature is dropped."""
    batch = packed_batch(jnp.asarray(rows.segments), jnp.asarray(rows.positions), rows.num_segments)
    attention = packed_attention(rows.row_len)
    places = [CachePlace(group=0, slot=layer) for layer in range(len(target.layers))]
    nothing = (None,) * len(places)
    tokens = jnp.asarray(rows.tokens)
    hidden, _, taps = target.with_taps(tokens, nothing, (batch,), places, attention, taps=head.config.taps)
    hidden, taps = jax.lax.stop_gradient((hidden, taps))
    row_starts, starts = starts, jnp.asarray(starts).reshape(-1)
    if isinstance(head, EagleHead):
        logits = _eagle_logits(head, target, rows, row_starts, hidden, taps, options, key)
    else:
        logits = _medusa_logits(head, target, rows, starts, hidden)
    teacher, weights = [], []
    for place in range(len(logits)):
        before, guessed = _behind(starts, place, rows), _behind(starts, place + 1, rows)
        teacher.append(jax.lax.stop_gradient(target.logits(hidden[before])))
        segments = jnp.asarray(rows.segments)
        same = (segments[guessed] == segments[starts]) & (guessed == starts + place + 1)
        weights.append(jnp.where(same, jnp.asarray(rows.weights)[guessed], 0.0))
    return Guesses(tuple(logits), tuple(teacher), tuple(weights))


def _behind(starts: Int[Array, " M"], distance: int, rows: Rows) -> Int[Array, " M"]:
    return jnp.minimum(starts + distance, rows.tokens.shape[0] - 1)


def _shifted(x: Float[Array, "T D"], first: Array) -> Float[Array, "T D"]:
    """Each token's x is that of the token before it; zeros for the `first` tokens of sequences."""
    return jnp.where(first[:, None], 0, jnp.roll(x, 1, axis=0))


def _eagle_logits(
    head: EagleHead,
    target: Decoder,
    rows: Rows,
    row_starts: Int[Array, "B S"],
    hidden: Float[Array, "T D"],
    taps: tuple[Float[Array, "T D"], ...],
    options: LossOptions,
    key: jax.Array | None,
) -> list[Float[Array, "M W"]]:
    tokens, positions, segments = (jnp.asarray(a) for a in (rows.tokens, rows.positions, rows.segments))
    features = _shifted(head.first_features(hidden, taps), positions == 0)
    if key is not None:
        dropped = jax.random.bernoulli(key, options.feature_dropout, (tokens.shape[0], 1))
        features = jnp.where(dropped, 0, features)
    attention, starts = packed_attention(rows.row_len), jnp.asarray(row_starts).reshape(-1)
    cache: Any = Drafting(places=jnp.asarray(row_starts) % rows.row_len, segments=segments.reshape(-1, rows.row_len))
    batch = packed_batch(segments, positions, rows.num_segments)
    cache = head.write(head.token_embeddings(tokens, target), features, cache, batch, attention)
    features, logits = features[starts], []
    for place in range(options.num_places):
        batch = packed_batch(segments[starts], positions[starts] + place, rows.num_segments)
        embeddings = head.token_embeddings(tokens[_behind(starts, place, rows)], target)
        x, cache = head(embeddings, features, cache, batch, attention)
        logits.append(head.draft_logits(x) if head.lm_head is not None else target.logits(x))
        features = head.next_features(x)
    return logits


def _medusa_logits(
    head: MedusaHead, target: Decoder, rows: Rows, starts: Int[Array, " M"], hidden: Float[Array, "T D"]
) -> list[Float[Array, "M W"]]:
    outputs = head.outputs(hidden[jnp.maximum(starts - 1, 0)])
    return [head.draft_logits(place, x) if len(head.lm_heads) else target.logits(x) for place, x in enumerate(outputs)]


def draft_ids(head: Head) -> Array | None:
    """The target's id of each of the head's, where its vocabulary is another."""
    ids = head.vocabulary.ids
    return None if ids is None else jax.lax.stop_gradient(ids[...])


def draft_loss(head: Head, guesses: Guesses, options: LossOptions) -> tuple[Array, tuple[Array, Array]]:
    """(mean loss of a guess of the first place, (drafts that begin, drafts taken up to each place)), all weighted."""
    ids = draft_ids(head)
    size = None if ids is not None else guesses.logits[0].shape[1]
    total, reached, so_far, alive = jnp.float32(0), [], [], None
    for place, (logits, teacher, weights) in enumerate(zip(*guesses, strict=True)):
        wanted = teacher[:, :size] if ids is None else teacher[:, ids]
        shares = jax.nn.softmax(wanted, axis=-1)
        losses = -jnp.sum(shares * jax.nn.log_softmax(_finite(logits), axis=-1), axis=-1)
        total = total + options.decay**place * jnp.sum(weights * losses)
        best = jnp.argmax(logits, axis=-1)
        matched = (best if ids is None else ids[best]) == jnp.argmax(teacher, axis=-1)
        alive = matched if alive is None else alive & matched
        reached.append(jnp.sum(weights))
        so_far.append(jnp.sum(weights * alive))
    return total / jnp.maximum(reached[0], 1e-6), (jnp.stack(reached), jnp.stack(so_far))


def _finite(logits: Array) -> Array:
    """Padding of the vocabulary has -inf, whose product with a share of 0 would be NaN."""
    return jnp.maximum(logits, -1e9)


def starts_of(rows: Rows, per_row: int) -> np.ndarray:
    """[B, per_row] places where a draft begins, tokens of all rows counted through: before each token that has a
    weight. Padded with the last place of the row, whose draft has none. Of more than fit, as many as do, spread over
    the row."""
    weights = rows.weights.reshape(-1, rows.row_len)
    starts = np.full((len(weights), per_row), rows.row_len - 1, np.int32)
    for row, line in enumerate(weights):
        found = np.flatnonzero(line[1:])
        if len(found) > per_row:
            found = found[np.linspace(0, len(found) - 1, per_row).astype(np.int64)]
        starts[row, : len(found)] = found
    return starts + np.arange(len(weights), dtype=np.int32)[:, None] * rows.row_len


def first_matches(
    head: Head, target: Decoder, rows: Rows, row_starts: Int[Array, "B S"], options: LossOptions
) -> Int[Array, " M"]:
    """How many guesses of each draft are the very tokens of the rows, up to the first that is not."""
    guesses = make_guesses(head, target, rows, row_starts, options, None)
    starts = jnp.asarray(row_starts).reshape(-1)
    ids, tokens, segments = draft_ids(head), jnp.asarray(rows.tokens), jnp.asarray(rows.segments)
    alive, count = jnp.ones(starts.shape[0], bool), jnp.zeros(starts.shape[0], jnp.int32)
    for place, logits in enumerate(guesses.logits):
        at = _behind(starts, place + 1, rows)
        best = jnp.argmax(logits, axis=-1)
        best = best if ids is None else ids[best]
        alive &= (best == tokens[at]) & (segments[at] == segments[starts]) & (at == starts + place + 1)
        count = count + alive
    return count
