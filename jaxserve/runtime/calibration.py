"""Calibration of a cache of eight bits: how large the keys and values of each head become on some text.

A forward pass without an engine. Every layer attends to whole prompts, whose keys and values live as long as the layer
takes; what stays of them is the largest magnitudes of each head, as many as the quantile needs, so the quantile is
exact however long the text is. It is taken where the cache takes its numbers: after norms and rotation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, PagedAttention
from jaxserve.models.cache_scales import CacheRanges
from jaxserve.models.decoder import CachePlace
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import TENSOR_PARALLEL, spec_for, specs_for
from jaxserve.runtime.mesh import on_mesh

STEP_TOKENS, _STEP_ROWS = 1024, 32  # of one step, and so the longest piece of a text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest magnitudes of one layer so far, in descending order."""

    keys: Float[Array, "K M"]
    values: Float[Array, "K M"]

    def with_more(self, k: Float[Array, "T K H"], v: Float[Array, "T K H"], real: Array) -> "Largest":
        """With those of tokens that are `real` [T], not padding."""
        return Largest(keys=_merged(self.keys, k, real), values=_merged(self.values, v, real))


def _merged(largest: Float[Array, "K M"], x: Float[Array, "T K H"], real: Array) -> Float[Array, "K M"]:
    magnitudes = jnp.where(real[:, None, None], jnp.abs(x.astype(jnp.float32)), 0.0)
    every = jnp.concatenate([largest, magnitudes.swapaxes(0, 1).reshape(largest.shape[0], -1)], axis=1)
    return jax.lax.top_k(every, largest.shape[1])[0]


def measure_ranges(
    model: LoadedModel,
    attention: PagedAttention,
    sequences: Sequence[Sequence[int]],
    *,
    quantile: float,
    page_size: int,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> CacheRanges:
    """The `quantile` of |k| and |v| of each layer and key/value head over all tokens of `sequences`.

    Each has at most `STEP_TOKENS` tokens; `model` is whole, on the devices of one mesh. `count(done, total)` hears of
    tokens. Raises CheckpointError where they are not finite.
    """
    config, padded = model.config, model.partition.padded
    total = sum(map(len, sequences))
    # The first number that is not above the quantile, in descending order.
    kept = math.floor(total * config.head_dim * (1 - quantile)) + 1
    by_heads = spec_for(("kv_heads", None), TENSOR_PARALLEL)
    empty = jax.device_put(jnp.zeros((padded.num_kv_heads, kept)), NamedSharding(model.mesh, by_heads))
    largest = tuple(Largest(keys=empty, values=empty) for _ in range(config.num_layers))
    step = jax.jit(
        on_mesh(
            functools.partial(_forward, model.graphdef, recording(attention)),
            model.mesh,
            (specs_for(model.state), by_heads, PartitionSpec(), PartitionSpec()),
            by_heads,
        )
    )
    done = 0
    for batch, tokens in whole_batches(sequences, page_size):
        largest = step(model.state, largest, tokens, batch)
        done += int(batch.q_starts[-1])
        count(done, total)
    keys, values = (
        np.stack([_of_checkpoint(model, np.asarray(getattr(layer, side))[:, -1], side) for layer in largest])
        for side in ("keys", "values")
    )
    return CacheRanges(keys=keys, values=values)


def _forward(
    graphdef: nnx.GraphDef,
    attention: PagedAttention,
    state: nnx.State,
    largest: Any,
    tokens: Array,
    batch: AttentionBatch,
):
    decoder = nnx.merge(graphdef, state)
    places = [CachePlace(group=0, slot=layer) for layer in range(len(decoder.layers))]
    return decoder(tokens, largest, (batch,), places, attention)[1]


def recording(attention: PagedAttention) -> PagedAttention:
    """`attention` whose "cache" of a layer is a `Largest`; the pages are new in each call, which has whole prompts."""

    def attend(
        q: Array, k: Array, v: Array, largest: Largest, batch: AttentionBatch, spec: AttentionSpec, *rest: Any
    ) -> tuple[Array, Largest]:
        num_pages = STEP_TOKENS // batch.page_size + _STEP_ROWS  # the last page of each row is partly used
        pages = attention.init_cache(num_pages, batch.page_size, spec.num_kv_heads, spec.head_dim, q.dtype)
        out, _ = attention.attend(q, k, v, pages, batch, spec, *rest)
        return out, largest.with_more(k, v, batch.token_rows < batch.context_lens.shape[0])

    return dataclasses.replace(attention, attend=attend)


def whole_batches(sequences: Sequence[Sequence[int]], page_size: int) -> Iterator[tuple[AttentionBatch, Array]]:
    """Steps of whole sequences, all of one shape."""
    waiting: list[Sequence[int]] = []
    for sequence in sequences:
        if len(waiting) == _STEP_ROWS or sum(map(len, waiting)) + len(sequence) > STEP_TOKENS:
            yield _batch(waiting, page_size)
            waiting = []
        waiting.append(sequence)
    if waiting:
        yield _batch(waiting, page_size)


def _batch(rows: Sequence[Sequence[int]], page_size: int) -> tuple[AttentionBatch, Array]:
    lens = np.array([len(row) for row in rows] + [0] * (_STEP_ROWS - len(rows)), np.int32)
    columns = -(-STEP_TOKENS // page_size)
    tables = np.zeros((_STEP_ROWS, columns), np.int32)
    first = 1
    for row, size in enumerate(lens):
        used = -(-int(size) // page_size)
        tables[row, :used] = np.arange(first, first + used)
        first += used
    padding = STEP_TOKENS - int(lens.sum())
    batch = AttentionBatch(
        positions=jnp.asarray(np.concatenate([*(np.arange(n) for n in lens), np.zeros(padding)]), jnp.int32),
        token_rows=jnp.asarray(np.append(np.repeat(np.arange(_STEP_ROWS), lens), [_STEP_ROWS] * padding), jnp.int32),
        q_starts=jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32),
        context_lens=jnp.asarray(lens),
        block_tables=jnp.asarray(tables),
        page_size=page_size,
        decode_only=False,
    )
    return batch, jnp.asarray(np.concatenate([*rows, np.zeros(padding)]), jnp.int32)


def _of_checkpoint(model: LoadedModel, ranges: np.ndarray, side: str) -> np.ndarray:
    """The ranges of the checkpoint's heads [K], without copies and padding. A head that is always 0 gets 1."""
    whole = np.zeros(model.config.num_kv_heads, np.float32)
    for ((to, start, size),) in model.partition.blocks(("kv_heads",), whole.shape):
        whole[start : start + size] = ranges[to : to + size]
    if not np.isfinite(whole).all():
        raise CheckpointError(
            f"{model.checkpoint.path}: {side} of head {int(np.argmin(np.isfinite(whole)))} are not finite on the given "
            "text, so there is no range for them; try model.dtype float32, and look for NaN in the checkpoint"
        )
    return np.where(whole == 0, np.float32(1), whole)
