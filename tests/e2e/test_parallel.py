"""The whole engine on eight CPU devices: every cut of a model gives the tokens of one device.

Sizes that do not divide: a model with 6 query heads, 3 key/value heads, an ffn of 82 and a vocabulary of 131 must be
padded on 2, 4 and 8 devices, and its heads copied on 8.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from whole import build, run

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine

UNEVEN = {
    "architectures": ["Qwen2ForCausalLM"],  # has biases, which must be padded too
    "model_type": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 82,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 5,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
CUTS = {
    "tensor 2": {"parallel__tensor": 2},
    "tensor 4": {"parallel__tensor": 4},
    "tensor 8": {"parallel__tensor": 8},
    "pipeline 2 x tensor 4": {"parallel__pipeline": 2, "parallel__tensor": 4},
    "pipeline 3, 4 parts": {"parallel__pipeline": 3, "parallel__microbatches": 4},
}
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 131, n)] for i, n in enumerate((5, 90, 33, 1, 17))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uneven")
    (directory / "config.json").write_text(json.dumps(UNEVEN))
    return directory


def engine_of(checkpoint: Path, **overrides: object) -> Engine:
    # A wide spread of the random weights would be unlike any model, a narrow one gives logits that hardly differ.
    return build(
        checkpoint,
        model__random_weights=True,
        model__skip_tokenizer=True,
        model__max_len=256,
        cache__page_size=16,
        sched__max_step_tokens=64,
        runtime__token_buckets=[16, 64],
        runtime__row_buckets=[2, 8],
        **overrides,
    )


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
]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list:
    return run(engine_of(checkpoint), ASKED, stagger=2)


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_model_gives_the_tokens_of_one_device(cut: str, checkpoint: Path, expected: list) -> None:
    found = run(engine_of(checkpoint, **CUTS[cut]), ASKED, stagger=2)
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


def check_logprobs(want, got) -> None:
    assert (got.token_id, got.rank) == (want.token_id, want.rank)
    assert abs(got.logprob - want.logprob) < 1e-4
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-4)
