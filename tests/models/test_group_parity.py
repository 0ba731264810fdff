"""Layers that share cache arrays, and rows that give back pages: logits and tokens still equal transformers'.

Each step packs its grants and reads its block tables as the engine's does. Nothing is sent for pages that a row gives
back; they are filled with infinite numbers until another row, or another group of layers, gets them.
"""

from collections.abc import Sequence
from functools import partial

import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import LoadedModel
from jaxserve.runtime.attention_batches import attention_batches
from jaxserve.runtime.pack import Layout, pack, split_grants, unpack
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.sched.plan import Bucket, Chunk, Limits, PageGrant, StepPlan

PAGE, MAX_LEN, ROWS = 4, 256, 4
MIXED, DECODE = Bucket(64, ROWS, False), Bucket(ROWS, ROWS, True)
CHUNK, NUM_DECODED = 13, 24
NOWHERE = 1 << 30  # a page that does not exist: writing to it does nothing


class Rows:
    """Rows of a model that hold the pages that they can see, and no others. There are just enough for `lens`."""

    def __init__(self, model: LoadedModel, lens: Sequence[int]) -> None:
        config = model.partition.padded
        self.groups = PageGroups.of(config.windows, MAX_LEN)
        self.limits = Limits(
            max_rows=ROWS,
            num_pages=0,
            page_size=PAGE,
            max_model_len=MAX_LEN,
            buckets=(DECODE, MIXED),
            page_groups=self.groups.groups,
        )
        num_groups, num_pages = len(self.groups.groups), sum(self.limits.pages_of(n, CHUNK) for n in lens)
        self.free = (np.random.default_rng(0).permutation(num_pages) + 1).tolist()
        self.held: list[list[dict[int, int]]] = [[{} for _ in range(num_groups)] for _ in range(ROWS)]
        caches = tuple(
            XLA_ATTENTION.init_cache(num_pages, PAGE, config.num_kv_heads, config.head_dim, model.dtype)
            for _ in range(self.groups.num_slots(range(config.num_layers)))
        )
        tables = jnp.zeros((num_groups * (ROWS + 1), MAX_LEN // PAGE), jnp.int32)
        self.num_given_back = 0
        self._weights, self._arrays = model.state, (caches, tables, jnp.zeros(ROWS + 1, jnp.int32))
        self._layouts = {
            bucket: Layout.of(bucket, max_rows=ROWS, num_params=1, page_size=PAGE, num_groups=num_groups)
            for bucket in (MIXED, DECODE)
        }
        self._steps = {
            bucket: jax.jit(
                partial(step, model.graphdef, self.groups, layout),
                donate_argnums=1,
                compiler_options={"xla_backend_optimization_level": 0},
            )
            for bucket, layout in self._layouts.items()
        }

    def run(self, fed: dict[int, tuple[int, Sequence[int]]], *, decode: bool = False) -> dict[int, np.ndarray]:
        """Logits [len, V] of some rows, of each the position of the first token and the tokens."""
        spans = {row: (start, start + len(tokens)) for row, (start, tokens) in fed.items()}
        stale = [page_id for row, (start, _) in spans.items() for page_id in self._give_back(row, start)]
        grants = tuple(grant for row, span in spans.items() for grant in self._hold(row, *span))
        plan = StepPlan(
            step_id=0,
            decode_rows=tuple(fed) if decode else (),
            decode_positions=tuple(start for start, _ in fed.values()) if decode else (),
            chunks=() if decode else tuple(Chunk(row, start, tuple(ids), True) for row, (start, ids) in fed.items()),
            grants=grants,
        )
        bucket = DECODE if decode else MIXED
        fitting, rest = split_grants(grants, self._layouts[bucket].max_grants, ROWS)
        assert not rest
        buffer = pack(
            plan, self._layouts[bucket], np.zeros((ROWS + 1, 1), np.int32), np.zeros((ROWS + 1, 4)), {}, fitting
        )
        tokens = np.zeros(bucket.tokens, np.int32)
        flat = [token for _, ids in fed.values() for token in ids]
        tokens[: len(flat)] = flat
        stale += [NOWHERE] * (4 * MIXED.tokens - len(stale))
        logits, self._arrays = self._steps[bucket](self._weights, self._arrays, buffer, tokens, np.asarray(stale))
        ends = np.cumsum([len(ids) for _, ids in fed.values()])
        return dict(zip(fed, np.split(np.asarray(logits)[: ends[-1]], ends[:-1]), strict=True))

    def _give_back(self, row: int, start: int) -> list[int]:
        """The pages that no token from `start` on can see."""
        pages = [
            held.pop(column)
            for group, held in zip(self.groups.groups, self.held[row], strict=True)
            for column in [c for c in held if c < group.first_column(start, PAGE)]
        ]
        self.free += pages
        self.num_given_back += len(pages)
        return pages

    def _hold(self, row: int, start: int, end: int) -> list[PageGrant]:
        """Pages for the tokens at [start, end)."""
        grants = []
        for number, held in enumerate(self.held[row]):
            for column in range(start // PAGE, -(-end // PAGE)):
                if column not in held:
                    held[column] = self.free.pop(0)
                    grants.append(PageGrant(row, column, (held[column],), number))
        return grants


def step(graphdef, groups: PageGroups, layout: Layout, weights, arrays, buffer, tokens, stale):
    """The middle of the engine's step: from the packed buffer to the logits of all tokens."""
    caches, tables, length = arrays
    caches = jax.tree.map(lambda pages: pages.at[stale].set(jnp.inf, mode="drop"), caches)
    inputs = unpack(buffer, layout, length)
    tables = tables.at[inputs.grants[:, 0], inputs.grants[:, 1]].set(inputs.grants[:, 2])
    length = length.at[inputs.rows].set(inputs.context_lens)
    decoder = nnx.merge(graphdef, weights)
    batches = attention_batches(inputs, tables, layout, PAGE, groups.groups, None)
    hidden, caches = decoder(tokens, caches, batches, groups.places(range(len(decoder.layers))), XLA_ATTENTION)
    return decoder.logits(hidden), (caches, tables, length)


@pytest.mark.slow
def test_rows_that_give_back_pages_equal_transformers() -> None:
    truth = hf_oracle.answers("gemma3")
    lens = [len(answer.prompt) for answer in truth]
    rows = Rows(hf_oracle.load("gemma3"), [n + NUM_DECODED for n in lens])
    assert [group.window for group in rows.groups.groups] == [None, 20, 20], "three groups that share one array"
    got: list[list[np.ndarray]] = [[] for _ in truth]
    for start in range(0, max(lens), CHUNK):
        pieces = {row: (start, answer.prompt[start : start + CHUNK].tolist()) for row, answer in enumerate(truth)}
        for row, logits in rows.run({row: piece for row, piece in pieces.items() if piece[1]}).items():
            got[row].append(logits)
    for answer, logits in zip(truth, got, strict=True):
        assert np.abs(np.concatenate(logits) - answer.logits).max() < 1e-4, len(answer.prompt)
    for at in range(NUM_DECODED):
        fed = {row: (lens[row] + at, [answer.greedy[at]]) for row, answer in enumerate(truth)}
        for row, logits in rows.run(fed, decode=True).items():
            assert logits[0].argmax() == truth[row].greedy[at + 1], (row, at)
    assert rows.num_given_back > 2 * 150 // PAGE, "that is more pages than one group of them has in the end"
