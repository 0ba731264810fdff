"""Requests that pool their prompt, on a fake device whose hidden state of token t at position p is (t, p, 1)."""

import asyncio
import dataclasses
import math
import random

import pytest
from test_structured import FREE, Parts

from jaxserve.api import FinishReason, Pooling, PromptInfo, RequestOptions, SamplingParams
from jaxserve.engine import AsyncEngine, EmbeddingForm, EmbeddingRules, Update, embedding_of, pooling_params
from jaxserve.errors import InvalidRequest, JaxserveError, PromptTooLong, UnsupportedOption


def expected(prompt: str, pooling: Pooling = Pooling.MEAN) -> list[float]:
    ids = [256, *prompt.encode()]
    positions = {Pooling.MEAN: range(len(ids)), Pooling.LAST: [len(ids) - 1], Pooling.FIRST: [0]}[pooling]
    total = [sum(ids[i] for i in positions), sum(positions), len(positions)]
    return [value / math.sqrt(sum(v * v for v in total)) for value in total]


def pool_by(parts: Parts, pooling: Pooling) -> None:
    parts.engine.model = dataclasses.replace(parts.engine.model, embedding=EmbeddingRules(pooling=pooling))


def submit(parts: Parts, prompt: str, **options) -> str:
    return parts.submit(prompt, pooling_params(), pooling=True, **options)


def answer(parts: Parts, name: str) -> list[float]:
    [update] = parts.updates[name]
    assert (update.token_ids, update.text, update.finish_reason, update.last) == ((), "", FinishReason.STOP, True)
    return embedding_of(update.prompt)


def test_one_update_with_the_mean_direction() -> None:
    parts = Parts()
    name = submit(parts, "abc")
    parts.run()
    assert answer(parts, name) == pytest.approx(expected("abc"))
    assert math.hypot(*answer(parts, name)) == pytest.approx(1)
    assert len(parts.runner.plans) == 1 and not parts.runner.plans[0].sampled_rows, "nothing is drawn"


def test_a_prompt_in_many_chunks_and_one_as_long_as_the_context() -> None:
    parts = Parts(token_buckets=(8,))
    long, longest = submit(parts, "x" * 50), submit(parts, "y" * 63)
    parts.run()
    assert answer(parts, long) == pytest.approx(expected("x" * 50))
    assert answer(parts, longest) == pytest.approx(expected("y" * 63))
    with pytest.raises(PromptTooLong, match="65 tokens"):
        submit(parts, "z" * 64)
    cut = parts.submit("z" * 64, pooling_params(10), pooling=True)
    parts.run()
    assert len(parts.updates[cut]) == 1


def test_no_token_is_skipped_for_a_cached_prefix_but_pages_are_left_to_others() -> None:
    parts = Parts()
    first = parts.submit("abcdefghijkl", FREE)
    parts.run()
    name = submit(parts, "abcdefghijkl")
    parts.run()
    assert answer(parts, name) == pytest.approx(expected("abcdefghijkl"))
    other = submit(parts, "mnopqrstuvw")
    parts.run()
    again = parts.submit("mnopqrstuvw", FREE)
    parts.run()
    prompt = parts.updates[again][0].prompt
    assert prompt is not None and prompt.num_cached_tokens == 8 and parts.updates[first] and answer(parts, other)


def test_the_last_token_alone_needs_no_cached_prefix_again() -> None:
    parts = Parts()
    pool_by(parts, Pooling.LAST)
    names = []
    for prompt in ("abcdefghijkl", "abcdefghijkm"):
        names.append(submit(parts, prompt))
        parts.run()
        assert answer(parts, names[-1]) == pytest.approx(expected(prompt, Pooling.LAST))
    prompts = [parts.updates[name][0].prompt for name in names]
    assert [prompt.num_cached_tokens for prompt in prompts if prompt is not None] == [0, 12]


@pytest.mark.slow
def test_random_crowds_with_little_memory() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        edge = rng.choice([5, 8, 16])
        parts = Parts(num_pages=17, page_size=4, max_rows=rng.randint(1, 5), token_buckets=(edge,))
        pooling = rng.choice([Pooling.MEAN, *Pooling])
        pool_by(parts, pooling)
        asked, others = {}, []
        for i in range(12):
            prompt = "".join(rng.choices("ab", k=rng.randint(1, 30)))
            if rng.random() < 0.5:
                asked[submit(parts, prompt, request_id=f"e{i}")] = prompt
            else:
                form = {"structured": {"regex": "[a-z]{4}"}} if rng.random() < 0.5 else {}
                others.append(parts.submit(prompt, SamplingParams(max_tokens=9, **form), request_id=f"g{i}"))
            for _ in range(rng.randint(0, 2)):
                parts.engine.step()
        parts.run()
        for name, prompt in asked.items():
            assert answer(parts, name) == pytest.approx(expected(prompt, pooling))
        assert all(parts.updates[name][-1].last for name in others)


def test_an_abort_and_what_is_refused() -> None:
    parts = Parts(token_buckets=(4,), max_rows=2)
    gone = submit(parts, "x" * 40)
    for _ in range(3):
        parts.engine.step()
    parts.engine.abort(gone)
    parts.run()
    assert [u.finish_reason for u in parts.updates[gone]] == [FinishReason.ABORT]
    for options in ({"n": 2}, {"logprobs": 1}, {"structured": {"regex": "a"}}):
        with pytest.raises(InvalidRequest, match="embedding generates nothing"):
            parts.engine.prepare("x", SamplingParams(**options), RequestOptions(pooling=True))


def test_statistics_count_no_token() -> None:
    parts = Parts()
    submit(parts, "abc")
    parts.run()
    [stats] = parts.engine.stats
    [ended] = stats.requests()
    assert (ended.prompt_tokens, ended.new_tokens, ended.finish_reason) == (4, 0, FinishReason.STOP)
    assert ended.ttft_s is not None and stats.totals().new_tokens == 0 and stats.totals().prompt_tokens == 4


def test_sums_that_are_no_numbers_are_an_error() -> None:
    assert embedding_of(PromptInfo(0, None, (0.0, 0.0))) == [0.0, 0.0]
    assert embedding_of(PromptInfo(0, None, (3e300, 4e300))) == pytest.approx([0.6, 0.8])
    with pytest.raises(JaxserveError, match="not finite"):
        embedding_of(PromptInfo(0, None, (math.nan, 1.0)))


def test_an_embedding_is_cut_before_it_is_normalised() -> None:
    prompt = PromptInfo(0, None, (3.0, 4.0, 12.0))
    rules = EmbeddingRules(size=3, sizes=(1, 2))
    assert embedding_of(prompt, rules.form(3)) == embedding_of(prompt) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert embedding_of(prompt, rules.form(2)) == pytest.approx([0.6, 0.8])
    assert embedding_of(prompt, rules.form(2, normalize=False)) == [3.0, 4.0]
    unscaled = EmbeddingRules(size=3, normalize=False)
    assert unscaled.form() == EmbeddingForm(normalize=False)
    assert unscaled.form(normalize=True) == EmbeddingForm()


@pytest.mark.parametrize(
    ("sizes", "dimensions", "problem"),
    [
        ((), 2, "its config.json does not say .* matryoshka_dimensions of model.overrides"),
        ((2,), 1, "have 3 numbers and may be cut to 2; ask"),
        (range(1, 3), 4, "may be cut to 1 to 2"),
        (range(1, 3), 0, "dimensions is 0"),
    ],
)
def test_a_size_that_is_refused(sizes: range | tuple[int, ...], dimensions: int, problem: str) -> None:
    with pytest.raises(UnsupportedOption, match=problem):
        EmbeddingRules(size=3, sizes=sizes).form(dimensions)


async def test_the_async_engine_embeds() -> None:
    parts = Parts()
    parts.engine.start()
    streams = AsyncEngine(parts.engine)
    try:
        found = await asyncio.wait_for(
            asyncio.gather(*(streams.embed(f"prompt {i}", RequestOptions(request_id=f"e{i}")) for i in range(8))), 30
        )
        assert found == [pytest.approx(expected(f"prompt {i}")) for i in range(8)]
        whole = await streams.embed("ab", normalize=False)
        assert whole == pytest.approx([(256 + 97 + 98) / 3, 1.0, 1.0]), "a mean, not a sum"
        with pytest.raises(PromptTooLong):
            await streams.embed("x" * 99)
        with pytest.raises(UnsupportedOption):
            await streams.embed("x", dimensions=2)
        updates: list[Update] = [u async for u in streams.stream(parts.engine.prepare("q", FREE))]
        assert updates[-1].last
    finally:
        streams.close()
        parts.engine.stop()
