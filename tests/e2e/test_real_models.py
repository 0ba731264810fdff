"""Published files give a request the same bits alone, in a crowd, in pieces and after a hit in the prefix cache."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from whole import build, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import Prompt

pytestmark = pytest.mark.real
NUM = 20
START = "Once upon a time, in a village by the sea, there lived a fisherman who mended nets for all his neighbours. "
WORDS = "boat storm the of lantern a gull and harbour we had rope until morning but never silver door"
ROOM = {
    "model__max_len": 256,
    "cache__page_size": 16,
    "cache__num_pages": 200,
    "runtime__token_buckets": [11, 40],
    "runtime__row_buckets": [1, 8],
    "runtime__background_buckets": False,
    "runtime__batch_invariant": True,
    "kernels__matmul": "numba_cpu",
}


@pytest.fixture(scope="module", autouse=True)
def quick_engines() -> None:
    """None: without optimisations the last bits of a log-probability follow the shape of the step."""


def requests() -> list[tuple[Prompt, SamplingParams]]:
    """Half of them begin alike; a third draw."""
    rng, asked = random.Random(0), []
    for number in range(NUM):
        text = (START if number % 2 else "") + " ".join(rng.choices(WORDS.split(), k=rng.randint(4, 60)))
        temperature = 0.8 if number % 3 == 0 else 0.0
        sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=24, ignore_eos=True, logprobs=2)
        asked.append(({"prompt": text}, sampling))
    return asked


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b"])
def test_a_request_has_the_same_bits_alone_and_in_a_crowd(real_model: Callable[[str], Path], name: str) -> None:
    path, asked = real_model(name), requests()
    # No prefix is kept: each request by itself computes all of its prompt.
    bare = build(path, cache__prefix_caching=False, **ROOM)
    alone = [run(bare, [one])[0][0] for one in asked]
    assert len({tuple(result.token_ids) for result in alone}) > NUM // 2, "too alike to show anything"
    bits = [(result.token_ids, result.logprobs) for result in alone]
    crowd = [result for [result] in run(bare, asked)]
    assert [(result.token_ids, result.logprobs) for result in crowd] == bits
    again = build(path, **(ROOM | {"sched__max_step_tokens": 11, "runtime__token_buckets": [11]}))  # prompts in pieces
    for stagger in (2, 0):
        found = [result for [result] in run(again, asked, stagger=stagger)]
        assert [(result.token_ids, result.logprobs) for result in found] == bits
    assert scheduler(again).memory.num_hit_tokens > 0
