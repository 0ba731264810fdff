"""Documents judged on a fake device: the tokens it may answer with are n and y, and it tells of those that follow one.

What a prompt ends with decides the answer, since the fake draws the token after the last one, or else one of the two.
"""

import asyncio
import math

import pytest
from test_structured import Parts

from jaxserve.api import RequestOptions
from jaxserve.engine import AsyncEngine, Judgement, Reranker, encode_pairs, make_pairs, need_reranker
from jaxserve.errors import ConfigError, EngineStopped, InvalidRequest, JaxserveError, PromptTooLong, UnsupportedOption
from jaxserve.testing import ByteTokenizer

NO, YES = b"ny"
TEMPLATE = "{instruction}: {query}? {document}"
RERANKER = Reranker(template=TEMPLATE, instruction="judge", yes_id=YES, no_id=NO)


def make(template: str = TEMPLATE, positive: str = "y", negative: str = "n") -> Reranker:
    return Reranker.of(ByteTokenizer(), template=template, instruction="judge", positive=positive, negative=negative)


def encode(pairs: list[tuple[str, str]], **options) -> list[Judgement]:
    return encode_pairs(RERANKER, ByteTokenizer(), pairs, "documents", max_model_len=64, **options)


def test_a_prompt_of_a_template() -> None:
    assert make() == RERANKER
    assert RERANKER.text("q {document}", "d {query}") == "judge: q {document}? d {query}", "texts are no templates"
    assert RERANKER.text("q", "d", "find") == "find: q? d"
    [one] = encode([("q", "d")])
    assert bytes(one.prompt_ids) == b"judge: q? d", "no token is added"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"template": "{query}"}, r"rerank.template has \{document\} 0 times"),
        ({"template": "{query} {query} {document}"}, r"has \{query\} 2 times"),
        ({"positive": "yes"}, "rerank.positive is 'yes', which is not a single token"),
        ({"negative": ""}, "rerank.negative is '', which is not a single token"),
        ({"negative": "y"}, "are the same token"),
    ],
)
def test_a_reranker_that_cannot_be(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(**given)
    with pytest.raises(UnsupportedOption, match="not known to judge"):
        need_reranker(None)


def test_pairs() -> None:
    assert make_pairs("q", ["a", "b"]) == [("q", "a"), ("q", "b")]
    assert make_pairs(["p", "q"], ["a", "b"]) == [("p", "a"), ("q", "b")]
    assert make_pairs(["q"], "a") == [("q", "a")]
    for queries, documents in ((["p", "q"], ["a"]), (["p", "q"], ["a", "b", "c"]), ([], ["a"]), ("q", [])):
        with pytest.raises(InvalidRequest, match=f"{len(queries)} queries and {len(documents)} documents"):
            make_pairs(queries, documents)
    with pytest.raises(InvalidRequest, match="must be texts"):
        make_pairs("q", ["a", 7])  # type: ignore[list-item]


def test_a_document_that_does_not_fit_is_named_or_cut() -> None:
    pairs = [("q", "short"), ("q", "long" * 20)]
    with pytest.raises(
        PromptTooLong, match=r"documents\[1\]: template, query and document have 90 tokens, .* takes 63"
    ):
        encode(pairs)
    short, long = encode(pairs, max_document_tokens=6)
    assert (bytes(short.prompt_ids), bytes(long.prompt_ids)) == (b"judge: q? short", b"judge: q? longlo")
    [cut] = encode([("q", "né")], max_document_tokens=2)
    assert bytes(cut.prompt_ids) == b"judge: q? n", "half a character goes, too"
    with pytest.raises(InvalidRequest, match=r"documents\[0\]: max_tokens_per_doc is 0"):
        encode(pairs, max_document_tokens=0)


def test_the_score_of_an_answer() -> None:
    [one] = encode([("q", "d")])
    assert one.sampling is not None and set(one.sampling.allowed_token_ids or ()) == {NO, YES}
    one.take({YES: -1.0, 5: -0.5})
    assert one.sampling is not None and [*(one.sampling.allowed_token_ids or ())] == [NO], "what is not known yet"
    one.take({NO: -3.0})
    assert one.sampling is None
    assert one.score == pytest.approx(math.exp(-1) / (math.exp(-1) + math.exp(-3)))
    [one] = encode([("q", "d")])
    one.take({YES: -9999.0, NO: -0.1})
    assert one.score == 0.0
    [one] = encode([("q", "d")])
    one.take({YES: -0.1, NO: -math.inf})
    assert one.score == 1.0
    [one] = encode([("q", "d")])
    one.take({YES: -math.inf, NO: -math.inf})
    with pytest.raises(JaxserveError, match="not finite"):
        _ = one.score


async def test_documents_are_requests_and_only_unlikely_answers_are_asked_for_again() -> None:
    """After an x comes yes, and no is not among the twenty that follow; after an m comes no, and yes is."""
    parts = Parts(mode="count")
    parts.engine.start()
    streams = AsyncEngine(parts.engine)
    likely = 1 / (1 + math.exp(YES - NO))  # the fake gives each next token a nat less
    try:
        judgements = encode([("q", text) for text in ("x", "m", "x", "m")])
        await asyncio.wait_for(streams.judge(judgements, RequestOptions(request_id="r")), 30)
        assert [one.score for one in judgements] == pytest.approx([0.5, likely, 0.5, likely])
        await asyncio.wait_for(streams.judge(judgements), 30)  # all is known
        parts.engine.stop()
        [stats] = parts.engine.stats
        assert stats.totals().new_tokens == 6
        assert sum(request.cached_tokens for request in stats.requests()) > 0, "the documents of a query share pages"
        with pytest.raises(EngineStopped):
            await streams.judge(encode([("q", "x")]))
    finally:
        streams.close()
        parts.engine.stop()
