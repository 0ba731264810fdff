"""What sparse attention costs the demo model: divergence from dense attention over long chats.

    python scripts/sparse_quality.py [--chats 24]

Held-out chats of 750 to 960 tokens ask about a list at their beginning among other things. Their last 128 tokens are
fed as if they had been generated: they attend to some pages of 16 tokens, and the tokens before them, a prompt, to all.
For Quest, and for the same number of newest pages: the Kullback-Leibler divergence of the next token from that of dense
attention, with the share of positions whose likeliest token is the same. Writes benchmarks/sparse_quality.json and the
table of docs/sparse-attention.md. Three minutes on two cores.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_tasks import held_out_items
from flax import nnx
from kernel_runs import write_between
from record import write_record

from jaxserve.kernels.paged_attention import AttentionBatch, PagedAttention
from jaxserve.kernels.quest import Quest
from jaxserve.kernels.selection import PageSummaries, Selector, with_selector
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import load_model, resolve_model_path
from jaxserve.models.decoder import CachePlace
from jaxserve.models.layers import attention_use
from jaxserve.text import ChatTemplate, encode_chat, load_tokenizer

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- written by scripts/sparse_quality.py -->", "<!-- end of sparse_quality -->"
PAGE, SHORTEST, LONGEST, GENERATED = 16, 750, 960, 128  # tokens
PAGES = (40, 26, 13, 7, 3)


@dataclasses.dataclass(frozen=True)
class Newest:
    """A selector that reads the newest pages, whatever is in them."""

    num_pages: int

    def select(self, query: jax.Array, summaries: PageSummaries, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        columns, newest = jnp.arange(tables.shape[1]), (lengths[:, None, None] - 1) // PAGE
        heads = jnp.zeros((1, summaries.least.shape[1], 1), bool)
        return (columns > newest - self.num_pages) | heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=24)
    args = parser.parse_args()
    texts = list(long_chats(args.chats))
    dense = log_probabilities(texts, None)
    contexts = np.concatenate([np.arange(len(text) - GENERATED, len(text)) // PAGE + 1 for text in texts])
    results = []
    for num_pages in PAGES:
        selectors: dict[str, Selector] = {
            "quest": Quest(num_pages=num_pages, page_size=PAGE),
            "newest": Newest(num_pages),
        }
        for name, selector in selectors.items():
            found = log_probabilities(texts, selector)
            divergence = (np.exp(dense) * (dense - found)).sum(-1)
            results.append(
                {
                    "selector": name,
                    "pages": num_pages,
                    "share": float(np.minimum(1, num_pages / contexts).mean()),
                    "kl_mean": float(divergence.mean()),
                    "kl_p99": float(np.quantile(divergence, 0.99)),
                    "same_top": float((dense.argmax(-1) == found.argmax(-1)).mean()),
                }
            )
            print(results[-1], flush=True)
    record = ROOT / "benchmarks/sparse_quality.json"
    write_record(record, results, positions=len(dense), chats=len(texts), mean_pages=float(contexts.mean()))
    write_between(ROOT / "docs/sparse-attention.md", BEGIN, END, table(results))


def long_chats(count: int) -> Iterator[list[int]]:
    """Tokens of chats with their last answer."""
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    template = ChatTemplate.of(tokenizer)
    for item in held_out_items("lookup_long", 20 * count, 1):
        messages = [*item.messages, {"role": "assistant", "content": item.answer}]
        tokens = encode_chat(tokenizer, template, messages, add_generation_prompt=False)
        if SHORTEST <= len(tokens) <= LONGEST:
            yield tokens
            count -= 1
            if count == 0:
                return


def log_probabilities(texts: list[list[int]], selector: Selector | None) -> np.ndarray:
    """float64 [texts * GENERATED, vocabulary]: of what follows each of the last tokens, without an engine."""
    model = load_model("demo", dtype="float32")
    config, pages = model.config, LONGEST // PAGE
    uses = [
        attention_use(config, layer, page_size=PAGE, query_dtype=np.float32, cache_dtype=np.float32)
        for layer in config.layers
    ]
    attention: PagedAttention = XLA_ATTENTION if selector is None else with_selector(XLA_ATTENTION, selector, uses)

    @jax.jit
    def forward(state: nnx.State, tokens: jax.Array, length: jax.Array) -> jax.Array:
        decoder = nnx.merge(model.graphdef, state)
        caches = [
            attention.init_cache(pages, PAGE, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
            for _ in config.layers
        ]
        at = jnp.arange(LONGEST)
        batch = AttentionBatch(
            positions=at,
            token_rows=jnp.where(at < length, 0, 1),
            q_starts=jnp.stack([jnp.int32(0), length]),
            context_lens=length[None],
            block_tables=jnp.arange(1, pages + 1)[None],
            page_size=PAGE,
            decode_only=False,
            prompt_lens=None if selector is None else length[None] - GENERATED,
        )
        places = [CachePlace(group=0, slot=layer) for layer in range(config.num_layers)]
        hidden, _ = decoder(tokens, caches, [batch], places, attention)
        last = jax.lax.dynamic_slice_in_dim(hidden, length - GENERATED, GENERATED)
        return jax.nn.log_softmax(decoder.logits(last))

    found = []
    for tokens in texts:
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens)] = tokens
        found.append(np.asarray(forward(model.state, jnp.asarray(padded), jnp.int32(len(tokens))), np.float64))
    return np.concatenate(found)


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| pages | of the context | KL, mean | 99 % | same likeliest token | newest pages alone: KL, mean | same |"
    yield "|---|---|---|---|---|---|---|"
    for quest, newest in zip(results[::2], results[1::2], strict=True):
        yield (
            f"| {quest['pages']} | {100 * quest['share']:.0f} % | {quest['kl_mean']:.1e} | {quest['kl_p99']:.1e} "
            f"| {100 * quest['same_top']:.1f} % | {newest['kl_mean']:.1e} | {100 * newest['same_top']:.1f} % |"
        )


if __name__ == "__main__":
    main()
