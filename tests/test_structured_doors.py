"""Constrained output, embeddings and scores through every door but HTTP, on the fake device."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from fake_parts import Fakes
from serve_parts import WAIT_S, connect, serve_bytes, served

from jaxserve import LLM, AsyncLLM, SamplingParams, StructuredOutput
from jaxserve.client import RequestFailed
from jaxserve.errors import InvalidRequest, PromptTooLong, Status, UnsupportedOption
from jaxserve.run import main

BOUND = SamplingParams(temperature=0.0, max_tokens=30, structured=StructuredOutput(regex="[0-9]{3}[x-z]"))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes().install(monkeypatch.setattr)


def embedding(prompt: str) -> list[float]:
    """What the fake device pools: token, position and 1, summed and divided by the length."""
    ids = [256, *prompt.encode()]
    total = (sum(ids), sum(range(len(ids))), len(ids))
    return [value / math.hypot(*total) for value in total]


def test_llm(fakes: Fakes) -> None:
    llm = LLM()
    outputs = llm.generate(["ab", "cd"], BOUND, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["012x", "012x"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "stop"]
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: the regex cannot be compiled"):
        llm.generate(["a", "b"], [BOUND, SamplingParams(structured={"regex": "("})], use_tqdm=False)
    prompts = ["abc", "x" * 40, [256, 97]]
    found = llm.embed(prompts, use_tqdm=False)
    assert [o.outputs.embedding for o in found] == [pytest.approx(embedding(text)) for text in ("abc", "x" * 40, "a")]
    assert found[2].prompt_token_ids == [256, 97] and found[0].finished
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(PromptTooLong, match=r"prompts\[1\]"):
        llm.embed(["a", "x" * 99], use_tqdm=False)
    assert llm.embed("x" * 99, truncate_prompt_tokens=5, use_tqdm=False)[0].prompt_token_ids == [120] * 5


async def test_async_llm(fakes: Fakes) -> None:
    llm = AsyncLLM()
    try:
        async with asyncio.timeout(WAIT_S):
            text = "".join([update.text async for update in llm.generate("a", BOUND)])
            assert text == "012x"
            found = await asyncio.gather(llm.embed("abc"), llm.embed("abcd", truncate_prompt_tokens=2))
            assert found[0] == pytest.approx(embedding("abc")) and math.hypot(*found[1]) == pytest.approx(1)
    finally:
        await llm.shutdown(0.0)


POOLS_LAST = {"model.pooling": "last", "model.overrides": {"matryoshka_dimensions": [2]}}
# The fake draws the letter after an x, whose probability it then gives to both answers, and else n or y.
JUDGES = {"rerank.template": "{query} {document}", "rerank.positive": "y", "rerank.negative": "n"}
LOW = 1 / (1 + math.exp(ord("y") - ord("n")))


async def test_llm_as_the_config_has_it(fakes: Fakes) -> None:
    llm = LLM.from_config(None, {**POOLS_LAST, **JUDGES})
    whole, cut, unscaled = (
        llm.embed("abc", **form, use_tqdm=False)[0].outputs.embedding
        for form in ({}, {"dimensions": 2}, {"normalize": False})
    )
    assert unscaled == [99.0, 3.0, 1.0], "the last token, its position, and one of them"
    assert whole == pytest.approx([value / math.hypot(*unscaled) for value in unscaled])
    assert cut == pytest.approx([99 / math.hypot(99, 3), 3 / math.hypot(99, 3)])
    with pytest.raises(UnsupportedOption, match="dimensions is 1, but .* may be cut to 2"):
        llm.embed("abc", dimensions=1, use_tqdm=False)
    outputs = llm.score("q", ["x", "m", "x"], use_tqdm=False)
    assert [o.outputs.score for o in outputs] == pytest.approx([0.5, LOW, 0.5])
    assert [bytes(o.prompt_token_ids) for o in outputs] == [b"q x", b"q m", b"q x"]
    assert len({o.request_id for o in outputs}) == 3
    with pytest.raises(PromptTooLong, match=r"documents\[1\]: template, query and document have 102 tokens"):
        llm.score("q", ["x", "x" * 100], use_tqdm=False)
    with pytest.raises(UnsupportedOption, match="not known to judge"):
        LLM().score("q", "x")


async def test_async_llm_as_the_config_has_it(fakes: Fakes) -> None:
    llm = AsyncLLM.from_config(None, {**POOLS_LAST, **JUDGES})
    try:
        async with asyncio.timeout(WAIT_S):
            assert await llm.score(["p", "q"], ["x", "m"], request_id="r") == pytest.approx([0.5, LOW])
            assert await llm.score("p", "x" * 99 + "m", max_tokens_per_doc=3) == [pytest.approx(0.5)]
            assert await llm.embed("abc", dimensions=2, normalize=False) == [99.0, 3.0]
    finally:
        await llm.shutdown(0.0)
    assert llm._engine.num_live == 0


async def test_a_cancelled_embedding_frees_its_pages(fakes: Fakes) -> None:
    llm = AsyncLLM()
    try:
        task = asyncio.create_task(llm.embed("x" * 50, request_id="gone"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(llm.embed("abc"), WAIT_S) == pytest.approx(embedding("abc"))
    finally:
        await llm.shutdown(0.0)
    assert llm._engine.num_live == 0


def test_replicas_share_a_compiled_grammar(fakes: Fakes) -> None:
    llm = LLM(data_parallel_size=2)
    outputs = llm.generate([chr(97 + i) for i in range(8)], BOUND, use_tqdm=False)
    assert {o.outputs[0].text for o in outputs} == {"012x"}
    assert llm.embed("abc", use_tqdm=False)[0].outputs.embedding == pytest.approx(embedding("abc"))


def test_grpc() -> None:
    with served(serve_bytes()) as parts, connect(parts) as client:
        replies = list(client.generate("a", BOUND, timeout_s=WAIT_S))
        assert "".join(reply.text for reply in replies) == "012x"
        bad = SamplingParams(structured={"json_schema": {"type": "nothing"}})
        with pytest.raises(RequestFailed, match="json_schema cannot be compiled") as caught:
            list(client.generate("a", bad, timeout_s=WAIT_S))
        assert caught.value.status is Status.INVALID


def test_a_file_of_prompts(fakes: Fakes, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "structured": {"choice": ["left", "right"]}},
        {"prompt": "b", "structured": {"choices": ["left"]}},
        {"prompt": "c", "structured": {"json_schema": {"const": 5}}, "max_tokens": 4},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["--input", str(source), "--output", str(target)])
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert found[0]["text"] in ("left", "right")
    assert "structured.choices is not supported" in found[1]["error"]
    assert found[2]["text"] == "5"
