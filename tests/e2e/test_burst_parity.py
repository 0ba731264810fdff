"""Bursts on the compiled step: the same tokens as one step a launch, and log-probabilities but for the last bits.

Equal bits are not to be had: inside of a loop XLA may add up a product in another order.
"""

import dataclasses
import itertools
import random

import jax
import pytest
from whole import FIXTURES, Result, build, run, scheduler

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, MissingBucket
from jaxserve.runtime.hlo import all_bytes, parse_hlo, shape_bytes
from jaxserve.sched.burst import Bursts
from jaxserve.sched.plan import StepPlan
from jaxserve.testing import ByteTokenizer

BURST = 5  # no divisor of a page


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = build(
        FIXTURES / "qwen3",
        model__skip_tokenizer=True,
        model__max_len=64,
        cache__page_size=4,
        cache__num_pages=400,
        cache__prefix_caching=False,
        sched__burst=BURST,
    )
    assert isinstance(made, Engine)
    made.tokenizer = ByteTokenizer()  # for stop strings and bad words; the checkpoint has none
    return made


def _requests() -> list[tuple[list[int], SamplingParams]]:
    """Every option that has state on the device or ends a row there. Some run into the end of the context."""
    rng = random.Random(11)
    prompts = [[rng.randrange(128) for _ in range(length)] for length in (9, 17, 5, 1, 50)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "logprobs": 2},
        {"temperature": 1.1, "min_p": 0.02, "logprobs": 0},
        {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 1.0, "logit_bias": {3: 2.0, 40: -3.0}},
        {"temperature": 1.0, "allowed_token_ids": list(range(20, 90))},
        {"temperature": 1.2, "bad_words": ["b", "c", "de", "f"]},
        {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(30, 60))},
        {"temperature": 1.0, "stop_token_ids": list(range(30, 38))},
        {"temperature": 1.0, "stop_token_ids": list(range(60, 76)), "logprobs": 1, "presence_penalty": 0.5},
        {"temperature": 1.0, "stop_token_ids": list(range(90, 106)), "min_tokens": 3, "top_k": 60},
        {"temperature": 1.0, "stop": ["e", "X", "A"]},
        {"temperature": 1.0, "n": 2, "ignore_eos": True, "prompt_logprobs": 1},
    ]
    return [
        (prompts[i % 5], SamplingParams(max_tokens=rng.choice([9, 13, None]), seed=i, **kinds[i % len(kinds)]))
        for i in range(3 * len(kinds))
    ]


def _run(engine: Engine, max_burst: int) -> tuple[list[list[Result]], set[int]]:
    """The results, and the numbers of steps that launches had."""
    made = scheduler(engine)
    made._bursts = Bursts(max_burst, made.memory, made.policy)
    before = engine.stats[0].totals().steps
    results = run(engine, _requests())
    num_steps = engine.stats[0].totals().steps - before
    return results, {s.num_steps for s in engine.stats[0].steps()[-num_steps:]}


def _numbers(result: Result) -> list[float]:
    """Everything about the tokens that it was given."""
    given = [*result.logprobs, *(p for p in (result.prompt and result.prompt.logprobs) or () if p is not None)]
    return [x for p in given for x in (p.token_id, p.logprob, p.rank, *p.top_ids, *p.top_logprobs)]


def test_tokens_and_logprobs_are_those_of_single_steps(engine: Engine) -> None:
    single, of_single = _run(engine, 1)
    burst, of_burst = _run(engine, BURST)
    assert of_single == {1}
    assert {2, 3, 4, BURST} & of_burst, of_burst
    for one, other in zip(itertools.chain(*single), itertools.chain(*burst), strict=True):
        bare = [dataclasses.replace(r, logprobs=[], prompt=None) for r in (one, other)]
        assert bare[0] == bare[1]
        assert _numbers(one) == pytest.approx(_numbers(other), abs=1e-5)
    ends = [r.finish_reason for results in burst for r in results]
    assert ends.count(FinishReason.STOP) > 8 and ends.count(FinishReason.LENGTH) > 8, "both kinds of ends"


def test_more_steps_than_compiled_are_refused_by_name(engine: Engine) -> None:
    plan = StepPlan(step_id=10**9, decode_rows=(0,), decode_positions=(3,), num_steps=BURST + 1)
    with pytest.raises(MissingBucket, match=f"at most {BURST} times"):
        engine._runner.dispatch(plan)


def test_a_pipeline_refuses_bursts_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sched.burst is 4 and parallel.pipeline is 2"):
        build(FIXTURES / "qwen3", model__skip_tokenizer=True, sched__burst=4, parallel__pipeline=2)


def test_a_pipeline_refuses_shapes_that_come_later() -> None:
    with pytest.raises(ConfigError, match="background_buckets is true, but the stages of a pipeline"):
        build(FIXTURES / "qwen3", model__skip_tokenizer=True, runtime__background_buckets=True, parallel__pipeline=2)


def test_the_loop_copies_no_cache(engine: Engine) -> None:
    """All arrays as large as a layer's pages, or as the counts of all rows, are updated where they lie."""
    runner = engine._runner
    [stage] = runner._stages
    [(bucket, compiled)] = stage.executables.bursts.items()
    module = parse_hlo(compiled.as_text())
    cache_bytes = min(leaf.nbytes for cache in stage.state.caches for leaf in jax.tree.leaves(cache))
    assert cache_bytes > 100_000, bucket
    copies = [
        (name, i.name, i.shape)
        for name, instructions in module.computations.items()
        for i in instructions
        if i.op in ("copy", "copy-start") and max(shape_bytes(i.shape), default=0) >= cache_bytes
    ]
    assert not copies, copies
    assert any(i.op == "while" and all_bytes(i.shape) > cache_bytes for i in module.computations[module.entry])
