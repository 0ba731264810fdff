"""Nothing compiles after start, counted by JAX's own events; and a step without a bucket is an error."""

import dataclasses
import random

import jax
import pytest
from whole import FIXTURES, POOL, build, run

from jaxserve.api import SamplingParams
from jaxserve.errors import MissingBucket
from jaxserve.sched.plan import Chunk, StepPlan
from jaxserve.testing import ByteTokenizer


class CompileCounter:
    """Counts what JAX traces and compiles from now on."""

    def __init__(self) -> None:
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration: float, **details: object) -> None:
        if "compile" in event or "trace" in event:
            self.events.append(event)


def _mixed_requests(num: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Every option turns up."""
    rng = random.Random(3)
    asked = []
    for i in range(num):
        options: dict[str, object] = {"max_tokens": rng.randint(1, 12)}
        if i % 2:
            options |= {"temperature": 0.8, "seed": i}
        if i % 5 == 1:
            options |= {"top_k": 7, "top_p": 0.9, "min_p": 0.01}
        if i % 7 == 1:
            options |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
        if i % 11 == 1:
            options |= {"logit_bias": {3: 2.0}, "allowed_token_ids": list(range(50))}
        if i % 13 == 1:
            options |= {"logprobs": 4, "prompt_logprobs": 2}
        if i % 17 == 1:
            options |= {"n": 3, "min_tokens": 1, "stop_token_ids": [5]}
        if i % 19 == 1:
            options |= {"truncate_prompt_tokens": 40, "ignore_eos": True, "skip_special_tokens": False}
        if i % 23 == 1:
            options |= {"bad_words": ["no", "x"], "stop": ["e", "st"], "include_stop_str_in_output": bool(i % 2)}
        if i % 23 == 2:
            options |= {"detokenize": False}
        if i % 23 == 3 and not options.get("ignore_eos"):
            options |= {"structured": {"regex": "[!-z]+"}, "allowed_token_ids": None}
        asked.append(([rng.randrange(vocab_size) for _ in range(rng.randint(1, 90))], SamplingParams(**options)))
    return asked


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_500_mixed_requests_compile_nothing(name: str) -> None:
    """Of experts, too, whichever of them the tokens choose."""
    engine = build(FIXTURES / name, **POOL)
    engine.tokenizer = ByteTokenizer()  # for stop strings and bad words; the checkpoint has none
    asked = _mixed_requests(500, engine.model.vocab_size)
    options = [f.name for f in dataclasses.fields(SamplingParams)]
    assert not [name for name in options if len({repr(getattr(s, name)) for _, s in asked}) < 2], "never turns up"
    counter = CompileCounter()
    jax.jit(lambda x: x * 3 + 1)(2.0)
    assert counter.events, "the counter sees nothing, so it would prove nothing"
    counter.events.clear()
    results = run(engine, asked, stagger=1)
    assert counter.events == []
    assert all(result.token_ids and result.error is None for request in results for result in request)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculation.method": "ngram", "speculation.width": 3},
        pytest.param({"parallel.pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps_of_padding_before_the_first_request_compile_nothing_and_change_nothing(settings: dict) -> None:
    """As on GPUs and TPUs, whose first runs of a program are slow."""
    engines = [build(FIXTURES / "llama", **POOL, **settings) for _ in range(2)]
    for engine in engines:
        engine.tokenizer = ByteTokenizer()
    asked = _mixed_requests(48, engines[0].model.vocab_size)
    counter = CompileCounter()
    engines[1]._runner.warm_up()
    assert counter.events == []
    cold, warm = (
        [[(result.token_ids, result.error) for result in request] for request in run(engine, asked, stagger=1)]
        for engine in engines
    )
    assert warm == cold and all(tokens and error is None for request in warm for tokens, error in request)


def test_a_step_without_a_bucket_raises() -> None:
    engine = build(FIXTURES / "llama", **POOL)
    plan = StepPlan(step_id=0, chunks=(Chunk(0, 0, tuple(range(41)), True),))
    with pytest.raises(MissingBucket, match="41 tokens of 1 rows"):
        engine._runner.dispatch(plan)
