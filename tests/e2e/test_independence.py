"""A request's tokens do not depend on its neighbours, on cuts, preemption, prefix hits or the shape of a step; nor do
the bits of its log-probabilities.

The demo model, greedy and seeded sampling with penalties, each request alone in a roomy engine first; then the same
requests through engines that disturb them in one way each. In bfloat16, where another order of additions shows soonest;
in float32 `test_speculation` has the bits of steps of many shapes.
"""

import random

import pytest
from whole import FIXTURES, POOL, Result, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError

pytestmark = pytest.mark.slow  # quick, in steps of fewer shapes: test_host_tier.py

PAGE = 16
LONGEST = 200
NUM = 12  # requests
# With two decode buckets a request alone runs in another compiled step than one in a crowd, and moves between them as
# its neighbours come and go; so it is with prompts. All are there from the start, or the larger one would stand in for
# the other at first. Products left to `auto` may become XLA's, by the rates of the machine, which do not keep the bits.
ROOMY = {
    "model__dtype": "bfloat16",
    "model__max_len": LONGEST,
    "cache__page_size": PAGE,
    "cache__num_pages": 200,
    "runtime__token_buckets": [11, 40],
    "runtime__row_buckets": [1, 8],
    "runtime__background_buckets": False,
    "runtime__batch_invariant": True,
    "kernels__matmul": "numba_cpu",
}


def _requests(num: int = NUM) -> list[tuple[str, SamplingParams]]:
    rng = random.Random(7)
    opening = "Once upon a time there was a little fox who lived near a river. "
    prompts = [
        opening + "Every morning the fox",
        opening + "One day",
        "The bird and the cat",
        "12 + 7 is",
        opening * 3 + "Then",
        "A",
    ]
    asked = []
    for i in range(num):
        options = {"temperature": 0.0} if i % 3 == 0 else {"temperature": 0.9, "seed": i}
        if i % 3 == 2:
            options |= {"top_p": 0.9, "top_k": 40, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        length = rng.randint(8, 60)
        asked.append((prompts[i % 6], SamplingParams(max_tokens=length, logprobs=3, **options)))
    return asked


@pytest.fixture(scope="module", autouse=True)
def quick_engines() -> None:
    """None: without optimisations the last bits of a log-probability follow the shape of the step."""


@pytest.fixture(scope="module")
def roomy() -> Engine:
    return build("demo", **ROOMY)


@pytest.fixture(scope="module")
def alone_results(roomy: Engine) -> list[Result]:
    """Each request by itself, with nothing in the prefix cache that it could hit."""
    return [run(roomy, [({"prompt": prompt}, sampling)])[0][0] for prompt, sampling in _requests()]


@pytest.fixture(scope="module")
def alone(alone_results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in alone_results]


def _results(engine: Engine, order: list[int] | None = None, stagger: int = 0) -> list[Result]:
    asked = _requests()
    order = order if order is not None else list(range(len(asked)))
    results = run(engine, [asked[i] for i in order], stagger=stagger)
    by_request = {i: result for i, [result] in zip(order, results, strict=True)}
    return [by_request[i] for i in range(len(asked))]


def _bits(results: list[Result]) -> list[tuple]:
    return [(result.token_ids, result.logprobs) for result in results]


def test_sampled_requests_differ_from_greedy_ones(alone: list[list[int]]) -> None:
    assert len({tuple(t) for t in alone}) > 8, "the requests are too alike to show anything"


def test_in_a_crowd_that_arrives_at_once(roomy: Engine, alone_results: list[Result]) -> None:
    assert _bits(_results(roomy)) == _bits(alone_results)
    assert {step.slots for step in roomy.stats[0].steps()} >= {1, 8}, "both decode buckets ran"


def test_in_a_crowd_that_trickles_in_another_order(roomy: Engine, alone_results: list[Result]) -> None:
    order = random.Random(1).sample(range(NUM), NUM)
    assert _bits(_results(roomy, order, stagger=2)) == _bits(alone_results)
    assert scheduler(roomy).memory.num_hit_tokens > 0


def test_cut_preempted_and_hit_by_prefix(alone_results: list[Result]) -> None:
    # The steps of the roomy engine, of which it has no others.
    few = {"runtime__token_buckets": [11], "sched__max_step_tokens": 11, "sched__watermark": 0.0, "sched__growth": 0.0}
    engine = narrow(build("demo", **(ROOMY | few)), LONGEST // PAGE + 2)
    assert _bits(_results(engine)) == _bits(alone_results)
    assert scheduler(engine).num_preemptions > 0


def test_without_prefix_cache(alone_results: list[Result]) -> None:
    engine = build("demo", **ROOMY, cache__prefix_caching=False)
    assert _bits(_results(engine)) == _bits(alone_results)
    assert scheduler(engine).memory.num_hit_tokens == 0


def test_n_sequences_equal_their_seeds(roomy: Engine) -> None:
    sampling = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=24)
    [together] = run(roomy, [("Once upon a time", sampling)])
    [crowded] = run(roomy, [("Once upon a time", sampling), *_requests(6)])[:1]
    assert [r.token_ids for r in together] == [r.token_ids for r in crowded]
    assert len({tuple(r.token_ids) for r in together}) == 4
    [[first]] = run(roomy, [("Once upon a time", SamplingParams(temperature=1.0, seed=11, max_tokens=24))])
    assert first.token_ids == together[0].token_ids


def test_prompt_logprobs_do_not_change_tokens(roomy: Engine, alone: list[list[int]]) -> None:
    prompt, sampling = _requests()[4]
    options = {"temperature": sampling.temperature, "seed": sampling.seed, "max_tokens": sampling.max_tokens}
    [[result]] = run(roomy, [(prompt, SamplingParams(prompt_logprobs=3, logprobs=2, **options))])
    assert result.token_ids == alone[4]
    assert len(result.logprobs) == len(result.token_ids)


def test_an_engine_that_cannot_keep_the_bits_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"runtime.batch_invariant is true, but kernels.paged_attention: xla .* xla"):
        build("demo", runtime__batch_invariant=True, kernels__matmul="xla", kernels__paged_attention="xla")


def test_experts_give_a_row_the_same_bits_alone_and_in_a_crowd() -> None:
    """The crowd decides which rows an expert has beside it. Steps of other sizes: tests/models/test_experts.py."""
    engine = build(FIXTURES / "qwen3_moe", **POOL)
    rng = random.Random(5)
    asked = []
    for seed in range(8):
        options = {"temperature": 0.9, "seed": seed} if seed % 2 else {"temperature": 0.0}
        prompt = [rng.randrange(engine.model.vocab_size) for _ in range(rng.randint(1, 60))]
        asked.append((prompt, SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True, **options)))
    alone = [run(engine, [one])[0][0] for one in asked]
    assert _bits([result for [result] in run(engine, asked)]) == _bits(alone)
