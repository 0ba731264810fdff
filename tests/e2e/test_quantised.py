"""The whole engine with weights as codes: one stream, a crowd and every cut of the model give the same tokens."""

import pytest
from whole import DEMO, FIXTURES, POOL, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import AnyEngine

pytestmark = pytest.mark.slow  # quick, without an engine: tests/models/test_quantised_models.py

PROMPTS = ["What is 683+784?", 'Spell "wagon" backwards.', "Count from 7 to 19.", "Say a word. " * 12]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
CUTS = {"tensor 8": {"parallel__tensor": 8}, "pipeline 3": {"parallel__pipeline": 3}}


def engine_of(scheme: str, **overrides: object) -> AnyEngine:
    engine = build(
        "demo",
        model__quantization=scheme,
        **DEMO,
        sched__watermark=0.0,
        sched__growth=0.0,
        **overrides,
    )
    return narrow(engine, 20)


@pytest.mark.parametrize("scheme", ["int4", "int8-a8", "int4-a8", "fp8"])
def test_a_crowd_is_what_its_requests_are_alone(scheme: str) -> None:
    engine = engine_of(scheme)
    alone = [run(engine, [(prompt, GREEDY)])[0][0].token_ids for prompt in PROMPTS]
    crowd = run(engine, [(prompt, GREEDY) for prompt in PROMPTS * 3], stagger=1)
    assert [result.token_ids for [result] in crowd] == alone * 3
    assert scheduler(engine).num_preemptions > 0 and scheduler(engine).memory.num_hit_tokens > 0


@pytest.mark.parametrize(
    ("scheme", "cut"),  # fp8 has the scales of int8, and stages divide no weight
    [("int4", "tensor 8"), ("int8", "tensor 8"), ("int4-a8", "pipeline 3")],
)
def test_a_cut_model_gives_the_tokens_of_one_device(scheme: str, cut: str) -> None:
    asked = [(prompt, GREEDY) for prompt in PROMPTS]
    whole, parts = (run(engine_of(scheme, **sizes), asked) for sizes in ({}, CUTS[cut]))
    assert [result.token_ids for [result] in parts] == [result.token_ids for [result] in whole]


@pytest.mark.parametrize(
    ("scheme", "cut"),
    [("int8-a8", {}), ("int8", {"parallel__tensor": 4, "parallel__expert": 2})],
    ids=["int8-a8", "int8 cut"],
)
def test_experts_of_codes(scheme: str, cut: dict[str, int]) -> None:
    """A crowd has the tokens of its requests alone; experts dealt out and cut have those of one device."""
    settings = POOL | {"model__quantization": scheme}
    engine = build(FIXTURES / "qwen2_moe", **settings)
    prompts = [list(range(3 + n, 12 + 3 * n)) for n in range(5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    alone = [run(engine, [(prompt, greedy)])[0][0].token_ids for prompt in prompts]
    other = build(FIXTURES / "qwen2_moe", **settings, **cut) if cut else engine
    crowd = run(other, [(prompt, greedy) for prompt in prompts * 2], stagger=1)
    assert [result.token_ids for [result] in crowd] == alone * 2
