"""Families, windows and rope scalings through the whole engine: the tokens and log-probabilities of HF transformers.

One engine per fixture, with a pool that holds three long sequences and steps of 40 tokens, so that prompts are cut,
rows are preempted, and prefixes are hit; each of these is asserted to have happened.
"""

import numpy as np
import pytest
from whole import FIXTURES, POOL, build, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine

# What the engine does otherwise: pages that are given back behind a window; groups of pages, since some layers have a
# window, with sinks and experts; angles that grow with the length.
KINDS = ("mistral_window", "gpt_oss", "llama_dynamic")
# They differ in the model alone, which tests/models/test_parity.py compares, cut and through pages.
FAMILIES = (
    *("bloom", "falcon_71_heads", "falcon_mqa", "falcon_new", "falcon_rw", "gemma", "gemma2", "gemma3", "gpt2"),
    *("mixtral", "mpt", "olmo2", "opt", "opt_350m", "phi", "phi3", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)
# The whole engine over devices: devices of a layer, and parts of its experts.
CUT = {"olmo2": (4, 1), "qwen2_moe": (8, 8)}
# Every layer has a window of 20 or 24 tokens, so that a sequence holds few pages, and the pool must be small.
WINDOWED = ("mistral_window", "phi3", "starcoder2")
# Other scalings and windows run in the model alone: tests/models/test_parity.py.
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def _engine(name: str, page_size: int) -> Engine:
    """Its pool holds two or three sequences of full length, and admission does not look ahead."""
    columns = -(-POOL["model__max_len"] // page_size)
    sizes = {
        "cache__page_size": page_size,
        "cache__num_pages": min(10, 3 * columns) if name in WINDOWED else 3 * columns,
    }
    devices, parts = CUT.get(name, (1, 1))
    sizes |= {"parallel__tensor": devices, "parallel__expert": parts, "sched__watermark": 0.0, "sched__growth": 0.0}
    return build(FIXTURES / name, **{**POOL, **sizes})


def _answers(name: str) -> list[tuple[list[int], np.ndarray, list[int]]]:
    with np.load(FIXTURES / name / "oracle.npz") as file:
        count = sum(key.startswith("prompt_") for key in file.files)
        return [(file[f"prompt_{i}"].tolist(), file[f"logits_{i}"], file[f"greedy_{i}"].tolist()) for i in range(count)]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", ["llama", *_SLOW])
def test_tokens_and_logprobs_equal_transformers(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_differ_in_the_model_alone(name: str) -> None:
    check(name)


def check(name: str) -> None:
    engine = _engine(name, page_size=16)
    answers = _answers(name)

    # alone, with log-probabilities of the prompt and of the first token
    asked = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, prompt_logprobs=5, logprobs=5)
    for prompt, logits, greedy in answers:
        [[result]] = run(engine, [(prompt, asked)])
        assert result.token_ids == greedy
        assert result.prompt is not None
        truth = _log_softmax(logits)
        entries = [*(result.prompt.logprobs or ()), result.logprobs[0]]
        following = [*prompt[1:], greedy[0]]
        assert [e.token_id for e in entries] == following
        for line, entry in zip(truth, entries, strict=True):
            assert entry.logprob == pytest.approx(line[entry.token_id], abs=1e-4)
            assert entry.top_logprobs == pytest.approx(sorted(line, reverse=True)[:5], abs=1e-4)
            lower, upper = (1 + int((line > line[entry.token_id] + slack).sum()) for slack in (1e-4, -1e-4))
            assert lower <= entry.rank <= upper, "beyond what near ties explain"

    # Mixed requests at once, each prompt several times: chunked, preempted, hit by prefix, in a crowd
    crowd = [answers[i % len(answers)] for i in range(16)]
    results = run(engine, [(prompt, GREEDY) for prompt, _, _ in crowd], stagger=1)
    for (prompt, _, greedy), [result] in zip(crowd, results, strict=True):
        assert result.token_ids == greedy, len(prompt)
    assert scheduler(engine).num_preemptions > 0
    assert scheduler(engine).memory.num_hit_tokens > 0


@pytest.mark.slow  # of the model alone, quick, and pages of 128: tests/models/test_parity.py
def test_pages_of_one_token() -> None:
    engine, answers = _engine("llama", 1), _answers("llama")
    results = run(engine, [(prompt, GREEDY) for prompt, _, _ in answers * 2])
    for (_, _, greedy), [result] in zip(answers * 2, results, strict=True):
        assert result.token_ids == greedy
