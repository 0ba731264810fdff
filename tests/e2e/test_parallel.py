"""The whole engine on eight CPU devices: every cut of a model gives the tokens of one device.

Sizes that do not divide: a model with 6 query heads, 3 key/value heads, an ffn of 82 and a vocabulary of 131 must be
padded on 2, 4 and 8 devices, and its heads copied on 8.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from whole import UNEVEN, build, run, travels

from jaxserve.api import SamplingParams
from jaxserve.engine import AnyEngine, Engine, EngineGroup
from jaxserve.testing import ByteTokenizer

pytestmark = pytest.mark.slow  # of models alone, quick: tests/models

CUTS = {
    "tensor 8": {"parallel__tensor": 8},
    "pipeline 2 x tensor 4": {"parallel__pipeline": 2, "parallel__tensor": 4},
    "data 2 x tensor 4": {"parallel__data": 2, "parallel__tensor": 4, "route__policy": "round_robin"},
    "pipeline 3, 4 parts": {"parallel__pipeline": 3, "parallel__microbatches": 4},
}
BOTH = CUTS["pipeline 2 x tensor 4"]
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 131, n)] for i, n in enumerate((5, 90, 33, 1, 17))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uneven")
    (directory / "config.json").write_text(json.dumps(UNEVEN | {"eos_token_id": 2}))
    return directory


def engine_of(checkpoint: Path, **overrides: object) -> AnyEngine:
    # A wide spread of the random weights would be unlike any model, a narrow one gives logits that hardly differ.
    engine = build(
        checkpoint,
        model__random_weights=True,
        model__skip_tokenizer=True,
        model__max_len=256,
        cache__page_size=16,
        sched__max_step_tokens=64,
        runtime__token_buckets=[64],
        **{"cache__num_pages": 200, **overrides},
    )
    for replica in engine.replicas:
        replica.tokenizer = ByteTokenizer()  # for a form
    return engine


ASKED = [
    *((prompt, SamplingParams(temperature=0, max_tokens=64, logprobs=5, prompt_logprobs=3)) for prompt in PROMPTS),
    # Every kind of state that is cut with the vocabulary: counts, masks, bias, thresholds, noise.
    (PROMPTS[0], SamplingParams(temperature=0.9, seed=7, max_tokens=40, top_p=0.9, top_k=40, logprobs=2)),
    (PROMPTS[1], SamplingParams(temperature=1.3, seed=8, max_tokens=40, min_p=0.02, presence_penalty=0.5)),
    (PROMPTS[2], SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.3, logit_bias={130: 0.2, 3: -1})),
    (
        PROMPTS[3],
        SamplingParams(
            temperature=1.0,
            seed=9,
            max_tokens=40,
            allowed_token_ids=(0, 17, 64, 65, 128, 130),
            frequency_penalty=0.3,
            n=2,
        ),
    ),
    (PROMPTS[4], SamplingParams(temperature=0, max_tokens=40, min_tokens=20, stop_token_ids=(5, 70, 130))),
    (PROMPTS[0], SamplingParams(temperature=1.5, seed=10, max_tokens=40, structured={"regex": "[!-z]+"})),
]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list:
    return run(engine_of(checkpoint), ASKED, stagger=2)


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_model_gives_the_tokens_of_one_device(cut: str, checkpoint: Path, expected: list) -> None:
    engine = engine_of(checkpoint, **CUTS[cut])
    found = run(engine, ASKED, stagger=2)
    if isinstance(engine, EngineGroup):
        assert all(replica._scheduler.memory.num_queried_tokens for replica in engine.replicas), "one had all the work"
    for one, other in zip(expected, found, strict=True):
        for want, got in zip(one, other, strict=True):
            assert got.error is None
            assert got.token_ids == want.token_ids
            assert got.finish_reason is want.finish_reason
            for a, b in zip(want.logprobs, got.logprobs, strict=True):
                check_logprobs(a, b)
            for a, b in zip(want.prompt.logprobs or (), got.prompt.logprobs or (), strict=True):
                check_logprobs(a, b)
    assert len(found[0][0].token_ids) == 64
    assert re.fullmatch("[!-z]{40}", found[-1][0].text)


def check_logprobs(want, got) -> None:
    assert (got.token_id, got.rank) == (want.token_id, want.rank)
    assert abs(got.logprob - want.logprob) < 1e-4
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-4)


def compiled_texts(engine: AnyEngine) -> Iterator[tuple[str, str]]:
    """Names and optimised HLO of the executables of every stage."""
    assert isinstance(engine, Engine)
    for stage in engine._runner._stages:
        executables = stage.executables
        yield from ((f"{b.tokens}x{b.rows}", step.as_text()) for b, step in executables.steps.items())
        yield "copy_pages", executables.copy_pages.as_text()
        if executables.configure_row is not None:
            yield "configure_row", executables.configure_row.as_text()


def test_no_gathered_logits_and_no_copied_cache(checkpoint: Path) -> None:
    """What travels within a stage are hidden states and numbers per row; the cache is updated in place."""
    num_pages, kv_heads_per_device, devices = 200, 1, BOTH["parallel__tensor"]
    cache_size = (num_pages + 1) * kv_heads_per_device * 16 * 8  # of keys, or of values, on one device
    num_reduced: Counter[str] = Counter()
    for name, text in compiled_texts(engine_of(checkpoint, **BOTH)):
        assert "input_output_alias" in text, name
        for kind, sizes in travels(text):
            if kind == "copy":
                assert max(sizes) < cache_size, (name, sizes)
            elif kind == "all-gather":  # the best 20 of each device; logits have 256 columns
                best = {rows * 20 * devices for rows in (8, 64)}
                assert set(sizes) <= best, f"{name} gathers more than candidates: {sizes}"
            else:
                assert kind == "all-reduce", (name, kind, sizes)
                num_reduced[name] += max(sizes) >= 8 * 48
    # One sum for the embedding and two per layer; XLA may join some, and never adds any.
    assert 2 <= num_reduced["8x8"] <= 1 + 2 * UNEVEN["num_hidden_layers"], num_reduced
    assert not num_reduced["copy_pages"] and not num_reduced["configure_row"]
