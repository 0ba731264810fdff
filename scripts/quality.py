"""What fewer bits cost the demo model: divergence from float32, and answers that are still right.

    python scripts/quality.py [--items 200] [--weights int8 int4 ...] [--caches int8 ...]

For each scheme of weights and each type of cache: the Kullback-Leibler divergence of the next token from that of the
float32 model, over the answers to held-out questions, with the share of positions whose likeliest token is the same;
and, through the engine, the share of answers that are right to the letter. Writes benchmarks/quality.json and the table
of docs/quantisation.md. Some ten minutes on two cores.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_tasks import TASKS, held_out_items
from eval_demo import evaluate
from flax import nnx
from kernel_runs import write_between
from record import write_record

from jaxserve import LLM
from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import load_model, resolve_model_path
from jaxserve.models.decoder import CachePlace
from jaxserve.models.quantised import Quantisation
from jaxserve.text import ChatTemplate, encode_chat, load_tokenizer

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- quality: written by scripts/quality.py -->", "<!-- end of quality -->"
WEIGHTS = ("none", "int8", "int8-a8", "int4", "int4-a8", "fp8")
CACHES = ("int8", "float8_e4m3fn", "float8_e5m2")
PAGE, TOKENS = 16, 256  # tokens of a page, and of a text with its answer


def main() -> None:
    parser = argparse.ArgumentParser(description="What fewer bits cost the demo model.")
    parser.add_argument("--items", type=int, default=200, help="questions of each task that the engine answers")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=list(CACHES))
    args = parser.parse_args()
    texts = list(answered_questions(12))
    exact = log_probabilities(texts, "none", "float32")
    results = []
    for weights, cache in [*((w, "float32") for w in args.weights), *(("none", c) for c in args.caches)]:
        found = log_probabilities(texts, weights, cache)
        divergence = (np.exp(exact) * (exact - found)).sum(-1)
        settings = {"model.path": "demo", "model.quantization": weights, "cache.dtype": cache}
        accuracy = evaluate(LLM.from_config(None, overrides=settings), args.items, seed=1)
        results.append(
            {
                "weights": weights,
                "cache": cache,
                "kl_mean": float(divergence.mean()),
                "kl_p99": float(np.quantile(divergence, 0.99)),
                "kl_max": float(divergence.max()),
                "same_top": float((exact.argmax(-1) == found.argmax(-1)).mean()),
                "right": sum(accuracy.values()) / len(accuracy),
                "by_task": accuracy,
            }
        )
        print(results[-1], flush=True)
    write_record(ROOT / "benchmarks/quality.json", results, positions=len(exact), items=args.items, seed=1)
    write_between(ROOT / "docs/quantisation.md", BEGIN, END, table(results))


def answered_questions(num_items: int) -> Iterator[tuple[list[int], int]]:
    """Tokens of a question with its right answer, and where the answer begins."""
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    template = ChatTemplate.of(tokenizer)
    for task in TASKS:
        for item in held_out_items(task, num_items, 1):
            question = encode_chat(tokenizer, template, item.messages)
            messages = [*item.messages, {"role": "assistant", "content": item.answer}]
            whole = encode_chat(tokenizer, template, messages, add_generation_prompt=False)
            assert whole[: len(question)] == question, item
            if len(whole) <= TOKENS:
                yield whole, len(question)


def log_probabilities(texts: list[tuple[list[int], int]], weights: str, cache: str) -> np.ndarray:
    """float64 [positions of all answers, vocabulary], of a forward pass without an engine."""
    wanted = Quantisation(scheme=weights)
    model = load_model("demo", dtype="float32", quantisation=wanted, cache_dtype=cache)
    config, pages = model.config, TOKENS // PAGE
    sizes = (config.num_kv_heads, config.head_dim)
    caches = [XLA_ATTENTION.init_cache(pages, PAGE, *sizes, jnp.dtype(cache)) for _ in config.layers]

    @jax.jit
    def forward(state: nnx.State, tokens: jax.Array, length: jax.Array) -> jax.Array:
        decoder = nnx.merge(model.graphdef, state)
        at = jnp.arange(TOKENS)
        batch = AttentionBatch(
            positions=at,
            token_rows=jnp.where(at < length, 0, 1),
            q_starts=jnp.stack([jnp.int32(0), length]),
            context_lens=length[None],
            block_tables=jnp.arange(1, pages + 1)[None],
            page_size=PAGE,
            decode_only=False,
        )
        places = [CachePlace(group=0, slot=layer) for layer in range(config.num_layers)]
        hidden, _ = decoder(tokens, caches, [batch], places, XLA_ATTENTION)
        return jax.nn.log_softmax(decoder.logits(hidden))

    found = []
    for tokens, begin in texts:
        padded = np.zeros(TOKENS, np.int32)
        padded[: len(tokens)] = tokens
        logits = forward(model.state, jnp.asarray(padded), jnp.int32(len(tokens)))
        found.append(np.asarray(logits[begin - 1 : len(tokens) - 1], np.float64))
    return np.concatenate(found)


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| weights | cache | KL, mean | 99 % | largest | same likeliest token | right answers |"
    yield "|---|---|---|---|---|---|---|"
    for r in results:
        bits = "float32" if r["weights"] == "none" else r["weights"]
        yield (
            f"| {bits} | {r['cache']} | {r['kl_mean']:.1e} | {r['kl_p99']:.1e} | {r['kl_max']:.1e} "
            f"| {100 * r['same_top']:.1f} % | {100 * r['right']:.1f} % |"
        )


if __name__ == "__main__":
    main()
