"""Sparse attention around every implementation, against Quest and attention written as loops in float64."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels import oracle
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse, PagedAttention
from jaxserve.kernels.quest import Quest
from jaxserve.kernels.selection import SelectorOptions, find_selector, with_selector
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from tests.kernels.cpu_implementations import IMPLEMENTATIONS, runs

PAGE, COLUMNS, NUM_PAGES, ROWS, TOKENS = 16, 12, 60, 4, 40
SPEC = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
USE = AttentionUse(spec=SPEC, page_size=PAGE, query_dtype="float32", cache_dtype="float32")
CHECKED = [implementation for implementation in IMPLEMENTATIONS if runs(implementation, SPEC, PAGE)]
# XLA's gives a token other last bits in a chunk than by itself, with selection as without.
INVARIANT = [implementation for implementation in CHECKED if implementation.row_invariant]
QUEST = Quest(num_pages=3, page_size=PAGE)
ALL = Quest(num_pages=COLUMNS, page_size=PAGE)


@dataclasses.dataclass(eq=False)
class Text:
    """A sequence: all that its tokens will be, of which `num_fed` were."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    prompt_len: int
    page_ids: list[int]
    num_fed: int = 0

    def expected(self, position: int, num_pages: int | None) -> np.ndarray:
        """[N, H]: attention of the token there; `num_pages`: that Quest leaves, None: all."""
        if num_pages is None or position < self.prompt_len:
            return oracle.attend_row(self.q[[position]], self.k[: position + 1], self.v[: position + 1], SPEC)[0]
        out, group = np.zeros((SPEC.num_query_heads, SPEC.head_dim)), SPEC.num_query_heads // SPEC.num_kv_heads
        single = dataclasses.replace(SPEC, num_query_heads=group, num_kv_heads=1)
        for head, pages in enumerate(quest(self.q[position], self.k[: position + 1], num_pages)):
            seen = [s for s in range(position + 1) if s // PAGE in pages]
            heads = slice(head * group, (head + 1) * group)
            of_head = (x[seen][:, [head]] for x in (self.k, self.v))
            out[heads] = oracle.attend_row(self.q[[position], heads], *of_head, single)[0]
        return out


def quest(query: np.ndarray, keys: np.ndarray, num_pages: int) -> list[set[int]]:
    """For each key/value head the columns that it reads, from the paper's text: `query` [N, H] is of the last key."""
    newest, chosen = (len(keys) - 1) // PAGE, []
    group = SPEC.num_query_heads // SPEC.num_kv_heads
    for head in range(SPEC.num_kv_heads):
        bounds = []
        for column in range(newest):
            page = keys[column * PAGE : (column + 1) * PAGE, head].astype(np.float64)
            of_heads = []
            for n in range(head * group, (head + 1) * group):
                bound = 0.0
                for h, number in enumerate(query[n].astype(np.float64)):
                    bound += max(number * page[:, h].min(), number * page[:, h].max())
                of_heads.append(bound)
            bounds.append((-max(of_heads), column))
        chosen.append({newest, *(column for _, column in sorted(bounds)[: num_pages - 1])})
    return chosen


class World:
    """An implementation, its cache with NaN wherever nothing was written, and pages in no order."""

    def __init__(self, attention: PagedAttention) -> None:
        self.rng = np.random.default_rng(7)
        self.free = [int(page) for page in self.rng.permutation(np.arange(1, NUM_PAGES + 1))]
        self.attention = attention
        cache = attention.init_cache(NUM_PAGES, PAGE, SPEC.num_kv_heads, SPEC.head_dim, jnp.dtype("float32"))
        self.cache = jax.tree.map(lambda leaf: leaf.at[1:].set(jnp.nan), cache)
        self.attend = jax.jit(functools.partial(attention.attend, spec=SPEC), donate_argnums=3)

    def text(self, prompt_len: int, length: int, *, scale: float = 1.0) -> Text:
        def numbers(heads: int) -> np.ndarray:
            return (scale * self.rng.standard_normal((length, heads, SPEC.head_dim))).astype(np.float32)

        k, v = numbers(SPEC.num_kv_heads), numbers(SPEC.num_kv_heads)
        page_ids = [self.free.pop() for _ in range(-(-length // PAGE))]
        return Text(numbers(SPEC.num_query_heads), k, v, prompt_len, page_ids)

    def step(self, fed: Sequence[tuple[Text, int]], *, decode_only: bool = False) -> list[np.ndarray]:
        """Feeds some tokens of each text, those with one first; the outputs of each [count, N, H]."""
        num_tokens = ROWS if decode_only else TOKENS
        q, k, v = (np.zeros((num_tokens, heads, SPEC.head_dim), np.float32) for heads in (4, 2, 2))
        rows, positions = np.full(num_tokens, ROWS), np.zeros(num_tokens)
        starts, lens, prompts = np.zeros(ROWS + 1), np.zeros(ROWS), np.zeros(ROWS)
        tables, end = np.zeros((ROWS, COLUMNS)), 0
        for row, (text, count) in enumerate(fed):
            begin, end = end, end + count
            at = slice(text.num_fed, text.num_fed + count)
            q[begin:end], k[begin:end], v[begin:end] = text.q[at], text.k[at], text.v[at]
            rows[begin:end], positions[begin:end] = row, range(at.start, at.stop)
            text.num_fed = at.stop
            lens[row], prompts[row] = text.num_fed, text.prompt_len
            tables[row, : len(text.page_ids)] = text.page_ids
            starts[row + 1] = end
        starts[len(fed) :] = end
        batch = AttentionBatch(
            positions=jnp.asarray(positions, jnp.int32),
            token_rows=jnp.asarray(rows, jnp.int32),
            q_starts=jnp.asarray(starts, jnp.int32),
            context_lens=jnp.asarray(lens, jnp.int32),
            block_tables=jnp.asarray(tables, jnp.int32),
            page_size=PAGE,
            decode_only=decode_only,
            prompt_lens=jnp.asarray(prompts, jnp.int32) if self.attention.selects else None,
        )
        out, self.cache = self.attend(q, k, v, self.cache, batch)
        out = np.asarray(out)
        assert np.isfinite(out[:end]).all()
        counts = np.cumsum([count for _, count in fed])
        return np.split(out[:end], counts[:-1])

    def feed(self, text: Text, cuts: Sequence[int]) -> None:
        for count in cuts:
            self.step([(text, count)])


def story(world: World, *, preempts: bool = True) -> list[tuple[Text, int, np.ndarray]]:
    """Steps of every kind; each output [N, H] with the text and the position that it is of."""
    found: list[tuple[Text, int, np.ndarray]] = []

    def step(*fed: tuple[Text, int], decode_only: bool = False) -> None:
        begins = [text.num_fed for text, _ in fed]
        outs = world.step(fed, decode_only=decode_only)
        for (text, count), begin, out in zip(fed, begins, outs, strict=True):
            found.extend((text, begin + i, out[i]) for i in range(count))

    gone = world.text(100, 101, scale=50.0)  # whose pages the next ones get: their bounds would win
    world.feed(gone, (40, 40, 20, 1))
    world.free += gone.page_ids
    first, second, third = world.text(91, 130), world.text(33, 60), world.text(150, 192)
    step((first, 40))
    step((second, 33))
    step((second, 1), (first, 39))
    step((first, 11), (second, 1))  # a chunk beside a decode row that is not in front of it
    step((first, 1), (second, 1))  # the last token of a prompt by itself
    step((first, 1), (second, 1), decode_only=True)
    for count in (37, 38, 39, 36):
        step((first, 1), (third, count))
    for _ in range(18):  # over the end of a page
        step((second, 1), (third, 1), (first, 1), decode_only=True)
    if not preempts:
        return found
    # Preempted: computed again in other pages, in chunks of prompt and answer, beside rows that go on.
    again = dataclasses.replace(first, page_ids=[world.free.pop() for _ in first.page_ids], num_fed=0)
    step((again, 40))
    step((third, 1), (second, 1), (again, 38))
    step((third, 1), (again, 30))
    step((third, 1), (again, 1), decode_only=True)
    return found


@pytest.mark.parametrize(
    "attention",
    [pytest.param(each, marks=() if each.row_invariant else pytest.mark.slow) for each in CHECKED],
    ids=lambda attention: attention.name,
)
def test_quest_chooses_the_pages_and_gives_the_numbers_of_the_loops(attention: PagedAttention) -> None:
    found = story(World(with_selector(attention, QUEST, [USE])))
    assert sum(position >= text.prompt_len for text, position, _ in found) > 60
    differences = 0
    for text, position, out in found:
        expected = text.expected(position, QUEST.num_pages)
        assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max(), (text.prompt_len, position)
        differences += np.abs(expected - text.expected(position, None)).max() > 0.01
    assert differences > 40, "pages were left out"


@pytest.mark.slow
@pytest.mark.parametrize("attention", [*INVARIANT, XLA_ATTENTION], ids=lambda attention: attention.name)
def test_all_pages_give_the_bits_of_the_implementation(attention: PagedAttention) -> None:
    dense, chosen = (
        story(World(implementation), preempts=attention.row_invariant)
        for implementation in (attention, with_selector(attention, ALL, [USE]))
    )
    assert all((a == b).all() for (_, _, a), (_, _, b) in zip(dense, chosen, strict=True))


@pytest.mark.parametrize("attention", INVARIANT, ids=lambda attention: attention.name)
def test_a_generated_token_has_the_same_bits_however_it_is_computed(attention: PagedAttention) -> None:
    bits: dict[tuple[int, int], set[bytes]] = {}
    for text, position, out in story(World(with_selector(attention, QUEST, [USE]))):
        bits.setdefault((text.prompt_len, position), set()).add(out.tobytes())
    assert sum(position >= prompt_len for prompt_len, position in bits) > 40
    assert {len(each) for each in bits.values()} == {1}


@dataclasses.dataclass(frozen=True)
class EveryOther:
    """A selector of somebody else, which asks for columns that are not there, too."""

    options: SelectorOptions

    def select(self, query, summaries, tables, lengths):
        shape = (tables.shape[0], summaries.least.shape[1], tables.shape[1])
        return jnp.broadcast_to(jnp.arange(shape[2]) % 2 == 1, shape)


@pytest.mark.slow
def test_a_selector_by_its_path_always_has_the_newest_page_and_none_behind_it() -> None:
    selector = find_selector(f"{__name__}:EveryOther", SelectorOptions(num_pages=None, page_size=PAGE))
    assert selector is not None
    world = World(with_selector(XLA_ATTENTION, selector, [USE]))
    text = world.text(70, 72)
    world.feed(text, (40, 30))
    for _ in range(2):
        [out] = world.step([(text, 1)], decode_only=True)
    seen = [s for s in range(72) if s // PAGE in {1, 3, 4}]
    expected = oracle.attend_row(text.q[[71]], text.k[seen], text.v[seen], SPEC)
    assert np.abs(out - expected).max() <= 1e-5


@pytest.mark.slow
def test_copied_pages_have_their_summaries() -> None:
    attention = with_selector(XLA_ATTENTION, QUEST, [USE])
    world = World(attention)
    text = world.text(75, 80)
    world.feed(text, (40, 35))
    fork = dataclasses.replace(text, page_ids=[world.free.pop() for _ in text.page_ids])
    world.cache = attention.copy_pages(world.cache, jnp.asarray(text.page_ids), jnp.asarray(fork.page_ids))
    world.step([(text, 1)])  # the original goes on, and its last page changes
    [out] = world.step([(fork, 1)], decode_only=True)
    assert np.abs(out[0] - text.expected(75, QUEST.num_pages)).max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": dataclasses.replace(SPEC, window=64)}, "window of 64 tokens"),
        ({"sinks": True}, "sinks"),
        ({"alibi": True}, "ALiBi"),
        ({"cache_dtype": "int8"}, "int8.*cache.dtype"),
    ],
)
def test_layers_that_cannot_choose_are_refused_by_name(change: dict, message: str) -> None:
    use = dataclasses.replace(USE, **change)
    with pytest.raises(ConfigError, match=f"attention.select names Quest.*{message}"):
        with_selector(XLA_ATTENTION, QUEST, [USE, use])


def test_an_implementation_must_run_one_head_alone() -> None:
    picky = dataclasses.replace(
        XLA_ATTENTION, refuses=lambda use: "one head is too few" if use.spec.num_kv_heads == 1 else None
    )
    with pytest.raises(ConfigError, match="one head is too few"):
        with_selector(picky, QUEST, [USE])
