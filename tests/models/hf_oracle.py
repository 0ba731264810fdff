"""The checked-in answers of Hugging Face transformers, and the smallest runtime that can be asked the same things.

`Driver` packs rows by hand and drives a decoder through a paged attention implementation: no engine, no scheduler, no
sampling, so that a wrong number here is a wrong model.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config.schema import ParallelConfig
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import AttentionBatch, PagedAttention
from jaxserve.models import LoadedModel, load_model
from jaxserve.models.decoder import CachePlace, PictureInputs
from jaxserve.models.layers import attention_use
from jaxserve.models.sharding import TENSOR_PARALLEL, spec_for, specs_for
from jaxserve.runtime.mesh import make_meshes, on_mesh

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(p.parent.name for p in FIXTURES.glob("*/oracle.npz"))
# Devices that a fixture is cut over, and parts of its experts: heads are padded and copied, experts padded.
CUT = {
    "bloom": (4, 1),
    "falcon_11b": (8, 1),
    "falcon_71_heads": (4, 1),
    "falcon_mqa": (3, 1),
    "falcon_new": (4, 1),
    "falcon_rw": (4, 1),
    "gemma": (3, 1),
    "gemma2": (4, 1),
    "gemma3": (2, 1),
    "gpt2": (3, 1),
    "gpt_oss": (4, 4),
    "mixtral": (4, 2),
    "mpt": (4, 1),
    "mpt_bias_max": (2, 1),
    "olmo2": (4, 1),
    "opt": (3, 1),
    "opt_350m": (2, 1),
    "phi": (8, 1),
    "phi3": (3, 1),
    "phi_tied": (4, 1),
    "qwen2_moe": (8, 8),
    "qwen3_moe": (2, 1),
    "starcoder2": (4, 1),
}
NUM_STEP_TOKENS = 200  # the four prompts of a fixture together, and a little padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What transformers said to one prompt."""

    prompt: np.ndarray  # [S]
    logits: np.ndarray  # [S, V]
    greedy: np.ndarray  # [64]


def answers(name: str) -> list[Answer]:
    """The answers of one fixture, shortest prompt first."""
    with np.load(FIXTURES / name / "oracle.npz") as file:
        count = sum(key.startswith("prompt_") for key in file.files)
        return [
            Answer(prompt=file[f"prompt_{i}"], logits=file[f"logits_{i}"], greedy=file[f"greedy_{i}"])
            for i in range(count)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one row in one step; they follow `start` tokens that the cache holds."""

    row: int
    start: int
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPictures:
    """The pictures of a row's prompt.

    Attributes:
      pool: embeddings [M, D] of all rows.
      slots: of each token of the prompt its line of `pool`, or -1.
      positions: [3, S], and the number that is added to later ones; None: tokens are counted.
    """

    pool: np.ndarray
    slots: np.ndarray
    positions: tuple[np.ndarray, int] | None

    def of(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions [3, length] of the tokens from `start` on, drawn ones among them."""
        at = np.arange(start, start + length)
        slots = np.append(self.slots, -1)[np.minimum(at, len(self.slots))]
        if self.positions is None:
            return slots, np.tile(at, (3, 1))
        known, delta = self.positions
        inside = at < known.shape[1]
        return slots, np.where(inside, known[:, np.minimum(at, known.shape[1] - 1)], at + delta)


class Driver:
    """Owns the caches of a few rows of at most `max_len` tokens; each row has its own scattered pages.

    `decode_buckets`: whether steps of one token of each row have a bucket of their own, as an engine's have.

    `cache_dtype`: the one that the model was loaded for; None: that of its weights. `pictures`: of each row, for models
    that take some.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_rows: int,
        max_len: int,
        page_size: int,
        cache_dtype: str | None = None,
        pictures: Sequence[RowPictures] | None = None,
        decode_buckets: bool = True,
    ) -> None:
        self.pictures, self.decode_buckets = pictures, decode_buckets
        kept = model.dtype if cache_dtype is None else jnp.dtype(cache_dtype)
        self.model, self.num_rows, self.page_size = model, num_rows, page_size
        pages = -(-max_len // page_size)
        ids = np.random.default_rng(page_size).permutation(num_rows * pages) + 1
        self.block_tables = ids.reshape(num_rows, pages).astype(np.int32)
        config = model.partition.padded
        attention = PAGED_ATTENTION.resolve(
            device=Device(backend="cpu", kind="cpu"),
            uses=[
                attention_use(config, layer, page_size=page_size, query_dtype=model.dtype, cache_dtype=kept)
                for layer in dict.fromkeys(config.layers)
            ],
        )
        # Placed like the weights: left uncommitted, the first step would compile for other inputs than all later ones.
        by_heads = spec_for((None, "kv_heads"), TENSOR_PARALLEL)
        self.caches = tuple(
            jax.device_put(
                attention.init_cache(num_rows * pages, page_size, config.num_kv_heads, config.head_dim, kept),
                NamedSharding(model.mesh, by_heads),
            )
            for _ in range(config.num_layers)
        )
        # Compiling is nearly all of the cost, and a lower level of LLVM saves 40 % of it.
        options = {"xla_backend_optimization_level": 0}
        step = on_mesh(
            partial(forward, model.graphdef, attention),
            model.mesh,
            (specs_for(model.state), by_heads, P(), P(), P(), P()),
            (P(), by_heads),
        )
        self._jitted = jax.jit(step, donate_argnums=1, compiler_options=options)

    def step(self, chunks: Sequence[Chunk], rope_lengths: Sequence[int] | None = None) -> list[np.ndarray]:
        """Logits [len, V] of each chunk. `rope_lengths` is per row of the driver."""
        order = sorted(chunks, key=lambda c: len(c.tokens) != 1)  # decode rows first
        decode_only = self.decode_buckets and all(len(c.tokens) == 1 for c in order) and len(order) == self.num_rows
        num_tokens = self.num_rows if decode_only else NUM_STEP_TOKENS
        tokens, positions = (np.zeros(num_tokens, np.int32) for _ in range(2))
        token_rows = np.full(num_tokens, self.num_rows, np.int32)
        q_starts = np.zeros(self.num_rows + 1, np.int32)
        context_lens, lengths = (np.zeros(self.num_rows, np.int32) for _ in range(2))
        tables = np.zeros_like(self.block_tables)
        at = 0
        for r, chunk in enumerate(order):
            end = at + len(chunk.tokens)
            tokens[at:end], token_rows[at:end] = chunk.tokens, r
            positions[at:end] = chunk.start + np.arange(len(chunk.tokens))
            context_lens[r], tables[r] = chunk.start + len(chunk.tokens), self.block_tables[chunk.row]
            lengths[r] = 0 if rope_lengths is None else rope_lengths[chunk.row]
            q_starts[r + 1 :] = at = end
        batch = AttentionBatch(
            positions=jnp.asarray(positions),
            token_rows=jnp.asarray(token_rows),
            q_starts=jnp.asarray(q_starts),
            context_lens=jnp.asarray(context_lens),
            block_tables=jnp.asarray(tables),
            page_size=self.page_size,
            decode_only=decode_only,
        )
        given = None if rope_lengths is None else jnp.asarray(lengths)
        logits, self.caches = self._jitted(
            self.model.state, self.caches, jnp.asarray(tokens), batch, given, self._picture_inputs(order, num_tokens)
        )
        logits = np.asarray(logits)
        by_chunk = {id(c): logits[q_starts[r] : q_starts[r + 1]] for r, c in enumerate(order)}
        return [by_chunk[id(c)] for c in chunks]

    def _picture_inputs(self, order: Sequence[Chunk], num_tokens: int) -> PictureInputs | None:
        if self.pictures is None:
            return None
        slots, positions = np.full(num_tokens, -1, np.int32), np.zeros((3, num_tokens), np.int32)
        at = 0
        for chunk in order:
            end = at + len(chunk.tokens)
            slots[at:end], positions[:, at:end] = self.pictures[chunk.row].of(chunk.start, len(chunk.tokens))
            at = end
        turns = jnp.asarray(positions) if self.model.config.has_sections else None
        return PictureInputs(pool=jnp.asarray(self.pictures[0].pool), slots=jnp.asarray(slots), positions=turns)

    def prefill(
        self, prompts: Sequence[np.ndarray], cuts: Sequence[Sequence[int]], rope_lengths: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Logits [S, V] of every prompt, prompt r run in pieces that end at `cuts[r]` (and at its end)."""
        ends = [
            [*(c for c in sorted(set(cut)) if 0 < c < len(p)), len(p)] for cut, p in zip(cuts, prompts, strict=True)
        ]
        collected: list[list[np.ndarray]] = [[] for _ in prompts]
        for i in range(max(map(len, ends))):
            chunks = []
            for row, (row_ends, prompt) in enumerate(zip(ends, prompts, strict=True)):
                if i < len(row_ends):
                    start = row_ends[i - 1] if i else 0
                    chunks.append(Chunk(row=row, start=start, tokens=prompt[start : row_ends[i]]))
            for chunk, logits in zip(chunks, self.step(chunks, rope_lengths), strict=True):
                collected[chunk.row].append(logits)
        return [np.concatenate(parts) for parts in collected]

    def greedy(
        self, lens: Sequence[int], first: Sequence[int], num_tokens: int, rope_lengths: Sequence[int] | None = None
    ) -> np.ndarray:
        """[rows, num_tokens] tokens chosen greedily after prompts of `lens` tokens, `first` being the first ones."""
        out = np.zeros((len(lens), num_tokens), np.int32)
        out[:, 0] = first
        for i in range(1, num_tokens):
            chunks = [Chunk(row=r, start=n + i - 1, tokens=out[r, i - 1 : i]) for r, n in enumerate(lens)]
            out[:, i] = [logits[0].argmax() for logits in self.step(chunks, rope_lengths)]
        return out


def forward(graphdef, attention: PagedAttention, state, caches, tokens, batch, rope_lengths, pictures):
    """The whole step: hidden states of the batch and logits of every token."""
    decoder = nnx.merge(graphdef, state)
    places = [CachePlace(group=0, slot=layer) for layer in range(len(decoder.layers))]
    hidden, caches = decoder(tokens, caches, (batch,), places, attention, rope_lengths, pictures)
    return decoder.placement.shards.gather(decoder.logits(hidden))[:, : decoder.placement.num_tokens], caches


def load(name: str, *, cut: bool = False) -> LoadedModel:
    """A fixture on one device, or as `CUT` says."""
    tensor, parts = CUT.get(name, (1, 1)) if cut else (1, 1)
    mesh = make_meshes(ParallelConfig(tensor=tensor, expert=parts), jax.devices())[0][0]
    return load_model(FIXTURES / name, dtype="float32", mesh=mesh)
