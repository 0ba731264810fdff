"""Sparse attention: decode steps that read only some pages of a context, around any implementation of paged attention.

A `Selector` says which pages the next token of a row reads, for each key/value head by itself. All else is here, and
the same for every selector and every implementation:

  * `PageSummaries`, the least and the largest key of each page, are more leaves of the cache. So whatever moves pages
    moves them: copies, host slots, stores; heads are cut over devices as those of the pages are.
  * A head's pages become a block table of its own. Leaves of a cache are [pages, K, ...], so page p of head k is page
    p * K + k of a cache with one head, without moving a byte, and the R rows of a decode step are R * K rows of one
    head for the implementation, which needs no support for selection. Keys carry their rotation, so that a page may
    stand at any place.
  * Chosen pages keep their order, and the newest is always among them: it is the last one, where the step writes.

With all pages chosen each head reads what it would read without a selector, in that order: the same bits, where the
implementation's do not depend on the batch (`PagedAttention.row_invariant`).

A token reads fewer pages if its request has generated it, and all if it is of the prompt, whatever the shape of the
step is: a prompt's last chunk of one token is a prompt, and a preempted sequence's answer is computed again as it was.
Summaries that a selector sees are those of full pages, and the least of some numbers does not depend on their order;
so tokens depend neither on chunks nor on neighbours. Tokens that do not stay would widen a summary for good: steps with
drafts are refused (`runtime.resolve`), and no page is copied before it is full (`SchedulerOptions.sparse`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import (
    LARGEST,
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    KVScales,
    LayerCache,
    PagedAttention,
    stored,
)
from jaxserve.kernels.xla_attention import slots_of
from jaxserve.values.registry import Registry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageSummaries:
    """Bounds of the keys of each page and key/value head, float32, of keys as the cache keeps them.

    Those of a page that is not full are of the tokens that it has; those of a page that no sequence has mean nothing.
    """

    least: Float[Array, "pages K H"]
    largest: Float[Array, "pages K H"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectorOptions:
    """What selectors are made from. `num_pages`: `attention.pages`, None where it is not set."""

    num_pages: int | None
    page_size: int


class Selector(Protocol):
    """Chooses pages. A frozen value whose `repr` tells it from all others; `select` is traced into the steps."""

    def select(
        self,
        query: Float[Array, "R N H"],
        summaries: PageSummaries,
        tables: Int[Array, "R P"],
        lengths: Int[Array, " R"],
    ) -> Bool[Array, "R K P"]:
        """Whether each key/value head of a row reads the page of each column of its block table.

        `query` is that of the token at position lengths - 1, of which query head n reads key/value head n // (N // K).
        `tables` name the pages in `summaries`; columns behind the newest page name any. What is said of those columns
        and of the newest page is not used: the former are never read, the latter always. A row's choice must follow
        from that row alone, to the last bit, and from the summaries of the pages before the newest: that one's may
        count tokens that come after. K, N: of this device.
        """
        ...


SELECTORS: Registry[Callable[[SelectorOptions], Selector]] = Registry(
    "attention selector", "jaxserve.selectors", {"quest": "jaxserve.kernels.quest:make_quest"}
)
NONE = "none"  # of `attention.select`: dense attention


def find_selector(name: str, options: SelectorOptions) -> Selector | None:
    """The selector of that name; None for dense attention. Raises ConfigError where there is none, or it cannot run."""
    if name != NONE:
        return SELECTORS.get(name)(options)
    if options.num_pages is not None:
        raise ConfigError(
            f"attention.pages is {options.num_pages}, but without attention.select all pages are read; set that, for "
            "example to quest, or leave this out"
        )
    return None


def single_head(use: AttentionUse) -> AttentionUse:
    """The use of an implementation by one key/value head of `use` alone."""
    group = use.spec.num_query_heads // use.spec.num_kv_heads
    return dataclasses.replace(use, spec=dataclasses.replace(use.spec, num_query_heads=group, num_kv_heads=1))


def with_selector(attention: PagedAttention, selector: Selector, uses: Sequence[AttentionUse]) -> PagedAttention:
    """`attention` that reads the pages that `selector` chooses, in all layers of a model.

    Raises ConfigError where a layer cannot: the message names the reason.
    """
    wrapped = _Selecting(base=attention, selector=selector)
    if refusals := [reason for use in dict.fromkeys(uses) if (reason := wrapped.refuses(use)) is not None]:
        raise ConfigError(
            f"attention.select names {selector!r}, which cannot run this model: {'; '.join(dict.fromkeys(refusals))}"
        )
    return PagedAttention(
        name=f"{attention.name} with {selector!r}",
        attend=wrapped.attend,
        write=wrapped.write,
        init_cache=wrapped.init_cache,
        copy_pages=wrapped.copy_pages,
        refuses=wrapped.refuses,
        prepare=attention.prepare,
        row_invariant=attention.row_invariant,
        selects=True,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SummarisedPages:
    """The cache of one layer. `dtype`: name of the type of its numbers."""

    pages: LayerCache
    summaries: PageSummaries
    dtype: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Selecting:
    """The functions of the implementation that `with_selector` makes."""

    base: PagedAttention
    selector: Selector

    def refuses(self, use: AttentionUse) -> str | None:
        """`PagedAttention.refuses`."""
        if use.spec.window is not None:
            return (
                f"a layer has a window of {use.spec.window} tokens, whose pages are given back and not chosen; "
                "leave attention.select out for models with windows"
            )
        if use.sinks or use.alibi:
            kind = "sinks" if use.sinks else "ALiBi slopes, which need the place of each key"
            return f"a layer has attention {kind}; leave attention.select out for this model"
        if use.cache_dtype in LARGEST:
            return (
                f"pages are in {use.cache_dtype}, whose scales are numbers of all heads at once; set cache.dtype to "
                "auto, float32 or bfloat16"
            )
        return self.base.refuses(use) or self.base.refuses(single_head(use))

    def init_cache(
        self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> SummarisedPages:
        """`PagedAttention.init_cache`."""
        shape = (num_pages + 1, num_kv_heads, head_dim)
        return SummarisedPages(
            pages=self.base.init_cache(num_pages, page_size, num_kv_heads, head_dim, dtype),
            summaries=PageSummaries(least=jnp.zeros(shape), largest=jnp.zeros(shape)),
            dtype=jnp.dtype(dtype).name,
        )

    def copy_pages(
        self, cache: SummarisedPages, sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> SummarisedPages:
        """`PagedAttention.copy_pages`."""
        return dataclasses.replace(
            cache,
            pages=self.base.copy_pages(cache.pages, sources, targets),
            summaries=jax.tree.map(lambda leaf: leaf.at[targets].set(leaf[sources]), cache.summaries),
        )

    def write(
        self, k: Array, v: Array, cache: SummarisedPages, batch: AttentionBatch, scales: KVScales | None = None
    ) -> SummarisedPages:
        """`PagedAttention.write`."""
        return dataclasses.replace(
            cache,
            pages=self.base.write(k, v, cache.pages, batch, scales),
            summaries=_widened(cache.summaries, k, cache.dtype, batch),
        )

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: SummarisedPages,
        batch: AttentionBatch,
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
        alibi_slopes: Float[Array, " N"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T N H"], SummarisedPages]:
        """`PagedAttention.attend`, over all pages where `batch` does not say how long prompts are."""
        assert sinks is None and alibi_slopes is None and scales is None, "refused at the start"
        with jax.named_scope("summaries"):
            summaries = _widened(cache.summaries, k, cache.dtype, batch)
        if batch.prompt_lens is None:
            out, pages = self.base.attend(q, k, v, cache.pages, batch, spec)
            return out, dataclasses.replace(cache, pages=pages, summaries=summaries)
        if batch.decode_only:  # no token of a prompt is in such a step
            chosen = _Tokens(q=q, k=k, v=v, tables=batch.block_tables, lengths=batch.context_lens)
            out, pages = self._attend_chosen(chosen, cache.pages, summaries, batch.page_size, spec)
            return out, dataclasses.replace(cache, pages=pages, summaries=summaries)

        num_tokens, num_rows = q.shape[0], batch.context_lens.shape[0]
        rows = jnp.minimum(batch.token_rows, num_rows - 1)
        generated = (batch.token_rows < num_rows) & (batch.positions >= batch.prompt_lens[rows])
        # All keys and values are written here, and prompts attend. The tokens of decode rows see their newest page
        # alone, so that this costs little.
        dense = _within_newest_page(batch, generated)
        out, pages = self.base.attend(q, k, v, cache.pages, dense, spec)
        # Most often there are as many as decode rows, and so one turn; a preempted answer that is computed again has
        # more.
        order = jnp.argsort(~generated, stable=True)  # the generated ones first
        order = jnp.pad(order, (0, -num_tokens % num_rows))
        count = jnp.sum(generated)

        def turn(number: Array, carry: tuple[Array, LayerCache]) -> tuple[Array, LayerCache]:
            out, pages = carry
            places = jax.lax.dynamic_slice_in_dim(order, number * num_rows, num_rows)  # [R]
            taken = number * num_rows + jnp.arange(num_rows) < count
            chosen = _Tokens(
                q=q[places],
                k=k[places],
                v=v[places],
                tables=batch.block_tables[rows[places]],
                lengths=jnp.where(taken, batch.positions[places] + 1, 0),
            )
            found, pages = self._attend_chosen(chosen, pages, summaries, batch.page_size, spec)
            return out.at[jnp.where(taken, places, num_tokens)].set(found, mode="drop"), pages

        out, pages = jax.lax.fori_loop(0, -(-count // num_rows), turn, (out, pages))
        return out, dataclasses.replace(cache, pages=pages, summaries=summaries)

    def _attend_chosen(
        self, tokens: "_Tokens", pages: LayerCache, summaries: PageSummaries, page_size: int, spec: AttentionSpec
    ) -> tuple[Float[Array, "R N H"], LayerCache]:
        """Attention of generated tokens to chosen pages, of which the newest is written."""
        kv_heads, group = spec.num_kv_heads, spec.num_query_heads // spec.num_kv_heads
        with jax.named_scope("select"):
            chosen = self.selector.select(tokens.q, summaries, tokens.tables, tokens.lengths)
        tables, lengths = chosen_tables(chosen, tokens.tables, tokens.lengths, page_size)
        num_rows, _, num_columns = tables.shape
        folded = num_rows * kv_heads
        lengths = lengths.reshape(folded)
        real = lengths > 0
        batch = AttentionBatch(
            positions=jnp.maximum(lengths - 1, 0),
            token_rows=jnp.where(real, jnp.arange(folded, dtype=jnp.int32), folded),
            q_starts=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(real, dtype=jnp.int32)]),
            context_lens=lengths,
            # Pages of one head each: the dummy's are 0 to K - 1.
            block_tables=(tables * kv_heads + jnp.arange(kv_heads)[:, None]).reshape(folded, num_columns),
            page_size=page_size,
            decode_only=True,
        )
        out, written = self.base.attend(
            tokens.q.reshape(folded, group, -1),
            tokens.k.reshape(folded, 1, -1),
            tokens.v.reshape(folded, 1, -1),
            jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), pages),
            batch,
            dataclasses.replace(spec, num_query_heads=group, num_kv_heads=1),
        )
        pages = jax.tree.map(lambda leaf, whole: leaf.reshape(whole.shape), written, pages)
        return out.reshape(tokens.q.shape), pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Tokens that see `lengths` positions each, themselves the last; 0: padding, behind all others."""

    q: Float[Array, "R N H"]
    k: Float[Array, "R K H"]
    v: Float[Array, "R K H"]
    tables: Int[Array, "R P"]
    lengths: Int[Array, " R"]


def chosen_tables(
    chosen: Bool[Array, "R K P"], tables: Int[Array, "R P"], lengths: Int[Array, " R"], page_size: int
) -> tuple[Int[Array, "R K P"], Int[Array, "R K"]]:
    """The block table of each head, of chosen pages in their order, and the tokens in it.

    The newest page of a row is always the last one, and no page behind it is any. Rows of length 0 have none.
    """
    num_columns = tables.shape[1]
    columns = jnp.arange(num_columns, dtype=jnp.int32)
    newest = (lengths[:, None, None] - 1) // page_size  # [R, 1, 1]; -1 for padding
    kept = (chosen & (columns < newest)) | (columns == newest)
    count = jnp.sum(kept, axis=2, dtype=jnp.int32)  # [R, K]
    order = jnp.argsort(~kept, axis=2, stable=True)
    found = jnp.take_along_axis(jnp.broadcast_to(tables[:, None], kept.shape), order, axis=2)
    in_newest = (lengths[:, None] - 1) % page_size + 1
    return (
        jnp.where(columns < count[:, :, None], found, 0),
        jnp.where(lengths[:, None] > 0, (count - 1) * page_size + in_newest, 0),
    )


def _within_newest_page(batch: AttentionBatch, generated: Bool[Array, " T"]) -> AttentionBatch:
    """`batch`, whose rows of one generated token have their newest page alone. They write where they would."""
    num_rows = batch.context_lens.shape[0]
    first = jnp.minimum(batch.q_starts[:-1], batch.positions.shape[0] - 1)
    single = (batch.q_starts[1:] - batch.q_starts[:-1] == 1) & generated[first]  # [R]
    newest = jnp.maximum(batch.context_lens - 1, 0) // batch.page_size
    pages = jnp.take_along_axis(batch.block_tables, newest[:, None], axis=1)  # [R, 1]
    columns = jnp.arange(batch.block_tables.shape[1])
    before = jnp.where(single, newest * batch.page_size, 0)  # positions that are left out
    rows = jnp.minimum(batch.token_rows, num_rows - 1)
    return dataclasses.replace(
        batch,
        positions=batch.positions - jnp.where(batch.token_rows < num_rows, before[rows], 0),
        context_lens=batch.context_lens - before,
        block_tables=jnp.where(single[:, None], jnp.where(columns == 0, pages, 0), batch.block_tables),
        prompt_lens=None,
    )


def _widened(summaries: PageSummaries, k: Float[Array, "T K H"], dtype: str, batch: AttentionBatch) -> PageSummaries:
    """The summaries with the keys of a step. A page that gets its first token begins anew."""
    page_ids, slots = slots_of(batch)
    kept = stored(k, None, jnp.dtype(dtype)).astype(jnp.float32)
    begun = jnp.where(slots == 0, page_ids, 0)  # padding, and what begins no page, is the dummy page's
    return PageSummaries(
        least=summaries.least.at[begun].set(jnp.inf).at[page_ids].min(kept),
        largest=summaries.largest.at[begun].set(-jnp.inf).at[page_ids].max(kept),
    )
