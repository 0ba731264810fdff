"""Embeddings of the whole engine against a plain forward of the bare decoder, for every cut of a prompt."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_no_compile import CompileCounter
from whole import FIXTURES, POOL, build, scheduler

from jaxserve.api import Pooling, RequestOptions, SamplingParams
from jaxserve.engine import EmbeddingRules, Engine, Update, embedding_of, pooling_params
from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import load_model
from jaxserve.models.decoder import CachePlace

PATH = FIXTURES / "llama"
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 100, n)] for i, n in enumerate((1, 33, 100, 100))]
PROMPTS.append(PROMPTS[2])  # twice, so that a prefix could be found
PAGE = POOL["cache__page_size"]


def options(**more: object) -> dict[str, object]:
    return {**POOL, **more}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(PATH, **options())


@pytest.fixture(scope="module")
def hidden_states() -> list[np.ndarray]:
    """[T, D] of one prompt at a time, in one piece, through the model and nothing else of the engine."""
    loaded = load_model(PATH, dtype="float32")
    decoder, config = nnx.merge(loaded.graphdef, loaded.state), loaded.config
    places = [CachePlace(group=0, slot=layer) for layer in range(config.num_layers)]
    run = jax.jit(lambda d, c, t, b: d(t, c, (b,), places, XLA_ATTENTION))
    found = []
    for prompt in PROMPTS:
        num_tokens, num_pages = len(prompt), -(-len(prompt) // PAGE)
        caches = tuple(
            XLA_ATTENTION.init_cache(num_pages, PAGE, config.num_kv_heads, config.head_dim, jnp.float32)
            for _ in range(config.num_layers)
        )
        batch = AttentionBatch(
            positions=jnp.arange(num_tokens),
            token_rows=jnp.zeros(num_tokens, jnp.int32),
            q_starts=jnp.array([0, num_tokens]),
            context_lens=jnp.array([num_tokens]),
            block_tables=jnp.arange(1, num_pages + 1)[None, :],
            page_size=PAGE,
            decode_only=False,
        )
        hidden, _ = run(decoder, caches, jnp.asarray(prompt), batch)
        found.append(np.asarray(hidden, np.float64))
    return found


def pooled(hidden_states: list[np.ndarray], pooling: Pooling) -> list[np.ndarray]:
    means = [hidden[slice(*taken)].mean(axis=0) for hidden in hidden_states for taken in [_TAKEN[pooling]]]
    return [mean / np.linalg.norm(mean) for mean in means]


_TAKEN = {Pooling.MEAN: (None, None), Pooling.LAST: (-1, None), Pooling.FIRST: (0, 1)}


def embed(engine: Engine, *, stagger: int = 0) -> list[list[float]]:
    """All prompts at once, beside requests that generate."""
    news: list[list[Update]] = []
    for i, prompt in enumerate(PROMPTS):
        news.append([])
        engine.submit(
            engine.prepare({"prompt_token_ids": prompt}, pooling_params(), RequestOptions(pooling=True)),
            news[-1].append,
        )
        sampling = SamplingParams(max_tokens=9, seed=i, logprobs=1)
        engine.submit(engine.prepare({"prompt_token_ids": prompt}, sampling), lambda update: None)
        for _ in range(stagger):
            engine.step()
    engine.run_until_idle()
    scheduler(engine).check()
    assert scheduler(engine).num_held_pages == 0
    assert all(len(updates) == 1 for updates in news)
    return [embedding_of(updates[0].prompt) for updates in news]


def check(found: list[list[float]], expected: list[np.ndarray]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert len(got) == len(want)
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert math.hypot(*got) == pytest.approx(1)
    assert np.abs(expected[1] - expected[2]).max() > 0.05, "the prompts are too alike to show anything"


@pytest.mark.slow
@pytest.mark.parametrize("pooling", Pooling)
def test_equals_a_plain_forward_and_nothing_compiles(
    engine: Engine, hidden_states: list[np.ndarray], pooling: Pooling
) -> None:
    engine.model = dataclasses.replace(engine.model, embedding=EmbeddingRules(pooling=pooling))
    expected = pooled(hidden_states, pooling)
    counter = CompileCounter()
    check(embed(engine), expected)
    check(embed(engine, stagger=2), expected)
    assert counter.events == []
    assert scheduler(engine).memory.num_hit_tokens > 0, "the requests that generate still share pages"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        {"sched__max_step_tokens": 12, "runtime__token_buckets": [12], "cache__num_pages": 15},
        {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__microbatches": 3, "sched__max_step_tokens": 128,
         "runtime__token_buckets": [128]},
    ],
    ids=["chunks", "devices"],
)  # fmt: skip
def test_does_not_depend_on_cuts(cut: dict[str, object], hidden_states: list[np.ndarray]) -> None:
    engine = build(PATH, **options(**cut, model__pooling="last"))
    for pooling in (Pooling.LAST, Pooling.MEAN):
        check(embed(engine, stagger=1), pooled(hidden_states, pooling))
        engine.model = dataclasses.replace(engine.model, embedding=EmbeddingRules())
