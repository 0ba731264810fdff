"""What rounding activations costs a GGUF model: perplexity and likeliest tokens, beside float32 of the same file.

    python scripts/bench_gguf_quality.py MODEL.gguf [--tokens 20000] [--chunk 512] [--json PATH]

The text is this project's own documentation, in pieces that each begin a context. Both precisions see the same pieces
in turns: 'none' widens the file's weights to float32, 'auto' multiplies its codes as an engine on this CPU would. The
error of the change of perplexity is that of the mean of the tokens' differences. Each piece is a line, so that a run
that is ended early has shown something.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from record import write_record

from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.implementation import make_attention
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.models import plan_model
from jaxserve.models.decoder import CachePlace
from jaxserve.models.quantised import Quantisation
from jaxserve.runtime.convert_weights import Forms, converted
from jaxserve.text import load_tokenizer

ROOT, PAGE, DEVICE = Path(__file__).parents[1], 16, Device(backend="cpu", kind="cpu")
Scored = tuple[np.ndarray, np.ndarray]  # of each token but the first: -log of its probability, and the likeliest one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a context")
    parser.add_argument("--cache", type=Path, help="keep machine code here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.cache:
        machine_code.keep_machine_code(args.cache)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokenizer = load_tokenizer(args.file)
    ids, begins = tokenizer.encode(text)[: args.tokens], tokenizer.encode("")  # what a text begins with, such as <bos>
    size = args.chunk - len(begins)
    scorers = [make_scorer(args.file, precision, args.chunk) for precision in ("none", "auto")]
    scored: list[list[Scored]] = [[], []]
    result: dict[str, float] = {}
    for begin in range(len(begins), len(ids) - size + 1, size):
        for own, scorer in zip(scored, scorers, strict=True):
            own.append(scorer(np.asarray([*begins, *ids[begin : begin + size]], np.int32)))
        result = compared(*scored)
        print(result, flush=True)
    if args.json:
        write_record(args.json, result, model=args.file.name, chunk=args.chunk)


def make_scorer(file: Path, precision: str, chunk: int) -> Callable[[np.ndarray], Scored]:
    """A forward pass without an engine, with an engine's weights and kernels."""
    planned = plan_model(file, dtype="float32", quantisation=Quantisation(scheme=precision))
    model = converted(planned, Forms(matmul=make_matmul(DEVICE))).load()
    print(f"{precision}: {model.num_bytes / 1e6:.0f} MB of weights", flush=True)
    config, pages, attention = model.config, -(-chunk // PAGE), make_attention(DEVICE)
    sizes = (config.num_kv_heads, config.head_dim)
    caches = [attention.init_cache(pages, PAGE, *sizes, jnp.dtype("float32")) for _ in config.layers]
    batch = AttentionBatch(
        positions=jnp.arange(chunk),
        token_rows=jnp.zeros(chunk, jnp.int32),
        q_starts=jnp.asarray([0, chunk], jnp.int32),
        context_lens=jnp.asarray([chunk], jnp.int32),
        block_tables=jnp.arange(1, pages + 1)[None],
        page_size=PAGE,
        decode_only=False,
    )
    places = [CachePlace(group=0, slot=layer) for layer in range(config.num_layers)]

    def forward(state: nnx.State, tokens: jax.Array, batch: AttentionBatch) -> tuple[jax.Array, jax.Array]:
        decoder = nnx.merge(model.graphdef, state)
        hidden, _ = decoder(tokens, caches, [batch], places, attention)
        logits = decoder.logits(hidden)
        own = jnp.take_along_axis(logits[:-1], tokens[1:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits[:-1], axis=1) - own, jnp.argmax(logits[:-1], axis=1)

    compiled = jax.jit(forward, compiler_options={"xla_backend_optimization_level": 0})

    def score(tokens: np.ndarray) -> Scored:
        losses, likeliest = compiled(model.state, jnp.asarray(tokens), batch)
        return np.asarray(losses, np.float64), np.asarray(likeliest)

    return score


def compared(exact: list[Scored], rounded: list[Scored]) -> dict[str, float]:
    """Of all pieces so far."""
    losses, likeliest = ([np.concatenate(part) for part in zip(*own, strict=True)] for own in (exact, rounded))
    (of_exact, top), (of_rounded, other) = losses, likeliest
    difference = of_rounded - of_exact
    return {
        "tokens": len(difference),
        "perplexity_float32": round(math.exp(of_exact.mean()), 4),
        "perplexity_auto": round(math.exp(of_rounded.mean()), 4),
        "change_percent": round(100 * math.expm1(difference.mean()), 4),
        "error_percent": round(100 * float(difference.std()) / math.sqrt(len(difference)), 4),
        "same_likeliest_percent": round(100 * float((top == other).mean()), 2),
    }


if __name__ == "__main__":
    main()
