"""The model inside the package answers its held-out tasks, however the engine gets to the answer."""

import asyncio
import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import openai
import pydantic
import pytest
from demo_tasks import TASKS, Item, check, held_out_items
from eval_demo import STRESS, evaluate
from serve_parts import WAIT_S, Served, served
from whole import scheduler

from jaxserve import LLM, SamplingParams
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine import Engine, Reranker
from jaxserve.errors import UnsupportedOption
from jaxserve.models import load_trainable

ENOUGH = 0.95
MODEL = "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
SIZES = {
    "sched.max_rows": 16,
    "sched.max_step_tokens": 256,
    "runtime.token_buckets": [256],
    "runtime.row_buckets": [16],
}


def _llm(dtype: str = "auto", sizes: Mapping[str, object] = SIZES) -> LLM:
    fixed = {"model.path": "demo", "model.dtype": dtype}
    return LLM.from_config(None, overrides={**fixed, **sizes})


def _shortfall(accuracy: dict[str, float], enough: float = ENOUGH) -> dict[str, float]:
    return {task: share for task, share in accuracy.items() if share < enough}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return _llm("float32")


def test_every_task(llm: LLM) -> None:
    accuracy = evaluate(llm, 20, seed=11)
    assert set(accuracy) == set(TASKS)
    assert not _shortfall(accuracy)


def test_examples_of_the_page_are_answered_rightly(llm: LLM) -> None:
    """Those with one right answer, also as the page draws by default; and a story is about what was asked."""
    right = {
        "What is 683+784?": "1467",
        "Add 683 and 784 step by step.": "3+4=7 8+8=16 6+7+1=14 so 1467",
        "Sort these words: egg, bell, sail.": "Sorted: bell, egg, sail",
        'Spell "wagon" backwards.': "nogaw",
        "Here is a list: flag:93, doll:95. What is doll?": "I found doll:95.",
    }
    *asked, story = llm._engine.model.examples
    assert asked == list(right) and story == "Tell me a story about a fox."
    drawn = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=None, seed=1)
    for sampling in (GREEDY, drawn):
        outputs = llm.chat([[{"role": "user", "content": one}] for one in [*asked, story]], sampling, use_tqdm=False)
        *texts, told = [output.outputs[0].text.strip() for output in outputs]
        assert texts == list(right.values())
        assert "fox" in told


def test_the_engine_knows_how_long_the_checkpoint_goes(llm: LLM) -> None:
    """Or a prompt that is too long would be told to raise model.max_len, which is then refused."""
    assert llm._engine.model.max_position == 1024


def test_scores_are_those_of_the_next_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was not taught to judge, but any two tokens can be compared. The oracle scores them as prompts."""
    engine = llm._engine
    assert isinstance(engine, Engine)
    query, documents = "the colour of grass", ["Grass is green.", "Two and two are four.", "yes", ""]
    with pytest.raises(UnsupportedOption, match="not known to judge"):
        llm.score(query, documents, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    template = "<|user|>Is it {query}? {document}<|end|><|assistant|>"
    reranker = Reranker.of(tokenizer, template=template, instruction="", positive="y", negative="No")
    monkeypatch.setattr(engine, "model", dataclasses.replace(engine.model, reranker=reranker))
    outputs = llm.score(query, documents, use_tqdm=False)
    last = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for document, output in zip(documents, outputs, strict=True):
        prompt = tokenizer.encode(reranker.text(query, document), add_special_tokens=False)
        assert output.prompt_token_ids == prompt
        answers = [reranker.yes_id, reranker.no_id]
        found = [o.prompt_logprobs for o in llm.generate([[*prompt, one] for one in answers], last, use_tqdm=False)]
        yes, no = (entries[-1][one].logprob for entries, one in zip(found, answers, strict=True) if entries)  # type: ignore[index]
        assert output.outputs.score == pytest.approx(math.exp(yes) / (math.exp(yes) + math.exp(no)), rel=1e-3)


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_function_but_for_rounding(llm: LLM) -> None:
    """`load_trainable` takes sums in another order than the engine. A token that the model is sure of hardly shows it,
    since a change of its logit is one of the sum as well."""
    items = [item for task in TASKS for item in held_out_items(task, 2, seed=15)]
    sampling = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, seed=3)
    outputs = llm.chat([list(item.messages) for item in items], sampling, use_tqdm=False)
    lengths = np.array([len(one.prompt_token_ids) + len(one.outputs[0].token_ids) for one in outputs])
    tokens = np.zeros((len(outputs), lengths.max()), np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        row[: len(ids)] = ids
    decoder, params = load_trainable("demo", dtype="float32")
    whole = np.asarray(jax.jit(decoder.log_probs)(params, tokens, lengths))
    gaps, rights = [], []
    for row, end, output in zip(whole, lengths, outputs, strict=True):
        [answer] = output.outputs
        assert answer.logprobs is not None
        drawn = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        rights.append(row[len(output.prompt_token_ids) - 1 : end - 1])
        gaps.append(np.abs(rights[-1] - drawn))
    gap, sure = np.concatenate(gaps), np.concatenate(rights) > math.log(0.9)
    assert sure.sum() > 50 and not sure.all()
    assert np.median(gap) < 2e-6 and gap[sure].max() < 5e-5 and gap.max() < 1e-3


@pytest.mark.slow
def test_every_task_in_bfloat16() -> None:
    assert not _shortfall(evaluate(_llm("bfloat16"), 32, seed=12))


@pytest.fixture
def optimised(quick_engines: None) -> Iterator[None]:
    """For a test whose many steps take longer than compiling does."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_every_task_cut_preempted_and_hit_by_prefix() -> None:
    """In bfloat16, as the model is stored."""
    llm = _llm(sizes=STRESS)
    assert not _shortfall(evaluate(llm, 32, seed=13, repeat=2), enough=15 / 16)
    counters = scheduler(llm._engine)
    assert counters.num_preemptions > 0
    assert counters.memory.num_hit_tokens > 0


# ---- over HTTP, by the official client -------------------------------------------------------------------------------


class _Demo(Served):
    """The whole engine in the place of the fake one."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm._engine  # pyright: ignore[reportAttributeAccessIssue, reportIncompatibleVariableOverride]
        self.runner = types.SimpleNamespace(release=lambda: None)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def whole(llm: LLM) -> list[tuple[Item, str]]:
    """Items and their answers, before the engine is served."""
    items = [item for task in TASKS for item in held_out_items(task, 3, seed=14)]
    outputs = llm.chat([list(item.messages) for item in items], GREEDY, use_tqdm=False)
    return [(item, output.outputs[0].text) for item, output in zip(items, outputs, strict=True)]


@pytest.fixture(scope="module")
def demo(llm: LLM, whole: list[tuple[Item, str]]) -> Iterator[Served]:
    with served(_Demo(llm), grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)) as parts:
        yield parts


@pytest.mark.slow
async def test_streamed_answers_are_the_same(demo: Served, whole: list[tuple[Item, str]]) -> None:
    async def stream(client: openai.AsyncOpenAI, item: Item) -> str:
        messages: Any = list(item.messages)
        chunks = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async with openai.AsyncOpenAI(base_url=f"{demo.http_url}/v1", api_key="x", timeout=WAIT_S * 10) as client:
        streamed = await asyncio.gather(*(stream(client, item) for item, _ in whole))
    assert streamed == [text for _, text in whole]
    right = sum(check(item, text) for (item, _), text in zip(whole, streamed, strict=True))
    assert right >= ENOUGH * len(whole)


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int
    city: str


ASKED: Any = [{"role": "user", "content": "Fill in name, age, city: My friend Ada from Quito is 36."}]
TOOL: Any = openai.pydantic_function_tool(Person)
NAMED: Any = {"type": "function", "function": {"name": "Person"}}


def test_a_tool_is_called_as_libraries_demand_it(demo: Served) -> None:
    """Nobody taught the model tools: its template shows them, and the grammar holds it to a call. A conversation goes
    on after a call that may be cut, and its result, with an answer in words."""
    with openai.OpenAI(base_url=f"{demo.http_url}/v1", api_key="x", timeout=WAIT_S * 10) as client:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=ASKED, tools=[TOOL], tool_choice=NAMED, max_tokens=100, temperature=0
        )
        assert parsed.choices[0].message.tool_calls
        (filled,) = parsed.choices[0].message.tool_calls
        assert filled.function.parsed_arguments == Person(name="Ada", age=36, city="Quito")
        messages: Any = [{"role": "developer", "content": "Be brief."}, *ASKED]
        options: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 60, "temperature": 0}
        called = client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
        assert called.tool_calls
        messages.append(called.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in called.tool_calls]
        answer = client.chat.completions.create(messages=messages, **options).choices[0].message
    assert answer.content
    assert answer.tool_calls is None
