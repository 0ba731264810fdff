"""Logits within 1e-4 of Hugging Face transformers at every position, and 64 greedy tokens equal.

For every family and rope scaling, most families cut over several devices; whole prompts and prompts cut into chunks,
pages of 1, 16 and 128 tokens.
"""

import hf_oracle
import numpy as np
import pytest

TOLERANCE = 1e-4
MAX_LEN = 256
# The fixtures that differ in what a page could break: windows on all or some layers. A model without any meets other
# pages in tests/e2e/test_engine_parity.py.
_PAGE_SENSITIVE = ("mistral_window", "qwen3_window_yarn")
# The first has a compile for each length, and is quick in tests/e2e/test_engine_parity.py; of the others a relative is
# quick.
_SLOW = {"llama_dynamic", "falcon_71_heads", "falcon_11b", "falcon_new", "gemma", "mpt_bias_max", "opt", "phi_tied"}
_SLOW |= {"gpt_oss", "qwen2_moe", "starcoder2", "falcon_rw", "gemma2", "llama_linear", "llama_llama3", "llama_yarn"}
_SLOW |= {"llama_yarn_mscale", "llama_mha_tied_bias", "mistral_full", "mixtral", "opt_350m", "phi", "qwen2_window"}
# Steps of decode rows alone have a bucket of their own, which is compiled apart: for one of each kind of attention.
# Of the others tests/e2e/test_engine_parity.py has steps in such buckets.
_DECODE_BUCKETS = {"gpt2", "gpt_oss", "llama", "mistral_window", "mpt", "gemma2", "qwen3_moe"}


def _cases():
    for name in hf_oracle.NAMES:
        for page_size in (16, 1, 128) if name in _PAGE_SENSITIVE else (16,):
            slow = name in _SLOW or page_size != 16
            yield pytest.param(name, page_size, marks=pytest.mark.slow if slow else ())


def _cuts(scheme: str, lens: list[int]) -> list[list[int]]:
    if scheme == "whole":
        return [[] for _ in lens]
    if scheme == "every_13":
        return [list(range(13, n, 13)) for n in lens]
    if scheme == "single_tokens_then_rest":
        return [[1, 2, 3, 4, 17] for _ in lens]
    rng = np.random.default_rng(len(scheme))
    return [rng.integers(1, n + 1, 6).tolist() for n in lens]


def _tolerance(answer: hf_oracle.Answer) -> float:
    """1e-4 for logits up to 8; float32 errors grow with larger ones."""
    return TOLERANCE * max(1.0, float(np.abs(answer.logits).max()) / 8)


@pytest.mark.parametrize(("name", "page_size"), list(_cases()))
def test_logits_and_greedy_tokens_equal_transformers(name: str, page_size: int) -> None:
    truth = hf_oracle.answers(name)
    prompts, lens = [a.prompt for a in truth], [len(a.prompt) for a in truth]
    driver = hf_oracle.Driver(
        hf_oracle.load(name, cut=True),
        num_rows=len(truth),
        max_len=MAX_LEN,
        page_size=page_size,
        decode_buckets=name in _DECODE_BUCKETS and page_size == 16,
    )
    for scheme in ("every_13", "single_tokens_then_rest", "random", "whole"):
        got = driver.prefill(prompts, _cuts(scheme, lens), rope_lengths=lens)
        for answer, logits in zip(truth, got, strict=True):
            assert np.abs(logits - answer.logits).max() < _tolerance(answer), (scheme, len(answer.prompt))
    first = [int(logits[-1].argmax()) for logits in got]
    tokens = driver.greedy(lens, first, len(truth[0].greedy), rope_lengths=lens)
    for answer, row in zip(truth, tokens, strict=True):
        np.testing.assert_array_equal(row, answer.greedy)


def test_dynamic_rope_without_lengths_equals_transformers_up_to_the_trained_length() -> None:
    """By default a token turns by its own position, so cuts change nothing and prompts up to 64 tokens are HF's."""
    truth = hf_oracle.answers("llama_dynamic")
    model = hf_oracle.load("llama_dynamic")
    trained = model.config.ropes[0].original_max_position
    prompts, lens = [a.prompt for a in truth], [len(a.prompt) for a in truth]
    assert max(lens) > trained > sorted(lens)[-2], lens
    driver = hf_oracle.Driver(model, num_rows=len(truth), max_len=MAX_LEN, page_size=16)
    whole = driver.prefill(prompts, _cuts("whole", lens))
    cut = driver.prefill(prompts, _cuts("every_13", lens))
    first = [int(logits[-1].argmax()) for logits in cut]
    tokens = driver.greedy(lens, first, len(truth[0].greedy))
    for answer, a, b, row in zip(truth, whole, cut, tokens, strict=True):
        assert np.abs(a - b).max() < TOLERANCE
        if len(answer.prompt) <= trained:
            assert np.abs(b - answer.logits).max() < TOLERANCE
            np.testing.assert_array_equal(row, answer.greedy)
        else:
            assert np.abs(b - answer.logits).max() > 0.01, "the scaling does nothing beyond the trained length"


def test_bfloat16_follows_float32_roughly() -> None:
    """A bound that a lost bias or norm breaks by far; bfloat16 keeps 8 bits."""
    truth = hf_oracle.answers("llama_llama3")
    model = hf_oracle.load_model(hf_oracle.FIXTURES / "llama_llama3", dtype="bfloat16")
    assert model.dtype == "bfloat16"
    driver = hf_oracle.Driver(model, num_rows=len(truth), max_len=MAX_LEN, page_size=16)
    got = driver.prefill([a.prompt for a in truth], [[] for _ in truth])
    for answer, logits in zip(truth, got, strict=True):
        spread = answer.logits.std()
        assert np.sqrt(np.mean((logits - answer.logits) ** 2)) < 0.05 * spread
        assert logits.dtype == np.float32
