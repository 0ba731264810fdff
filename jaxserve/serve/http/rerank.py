"""Scores of documents for a query: `/rerank` as Jina and Cohere have it, `/score` as vLLM has it.

Each document is a request; see `engine.scoring` for what the model is asked and what a score is.
"""

import time
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import RequestOptions
from jaxserve.engine import Judgement, encode_pairs, make_pairs, need_reranker
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.door import Door, in_time, new_id, trace_of
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.pieces import json_answer
from jaxserve.serve.http.requests import DocumentFields, RerankRequest, ScoreRequest
from jaxserve.serve.http.responses import (
    RankedDocument,
    RankedResult,
    RerankResponse,
    Score,
    ScoreResponse,
    Usage,
)
from jaxserve.text import SpecialText


def rerank_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["Documents"])

    @router.post("/rerank", response_model=RerankResponse)
    @router.post("/v1/rerank", response_model=RerankResponse)
    @router.post("/v2/rerank", response_model=RerankResponse)
    async def rerank(body: RerankRequest, call: HttpRequest) -> Response:
        """Documents in the order of their relevance to a query."""
        answer_id = new_id(None, call)
        texts = [given if isinstance(given, str) else given.text for given in body.documents]
        judgements = await _judge_all(
            door, body, call, answer_id, queries={"query": [body.query]}, documents={"documents": texts}
        )
        found = sorted(enumerate(judgement.score for judgement in judgements), key=lambda pair: (-pair[1], pair[0]))
        # Cohere's second version has no such field and sends no documents back; Jina and vLLM do.
        shows = call.url.path != "/v2/rerank" if body.return_documents is None else body.return_documents
        results = [
            RankedResult(index=index, relevance_score=score, document=RankedDocument(text=texts[index]))
            if shows
            else RankedResult(index=index, relevance_score=score)
            for index, score in found[: body.top_n or None]
        ]
        answer = RerankResponse(
            id=answer_id, object="list", model=door.model_name, results=results, usage=_usage(judgements)
        )
        return await json_answer(door.turns, answer, {"x-request-id": answer_id})

    @router.post("/score", response_model=ScoreResponse)
    @router.post("/v1/score", response_model=ScoreResponse)
    async def score(body: ScoreRequest, call: HttpRequest) -> Response:
        """A score for each pair of texts, in their order."""
        answer_id = new_id(None, call)
        queries, texts = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
        judgements = await _judge_all(
            door, body, call, answer_id, queries={"text_1": queries}, documents={"text_2": texts}
        )
        answer = ScoreResponse(
            id=answer_id,
            object="list",
            created=int(time.time()),
            model=door.model_name,
            data=[
                Score(object="score", index=index, score=judgement.score) for index, judgement in enumerate(judgements)
            ],
            usage=_usage(judgements),
        )
        return await json_answer(door.turns, answer, {"x-request-id": answer_id})

    return router


async def _judge_all(
    door: Door,
    body: DocumentFields,
    call: HttpRequest,
    answer_id: str,
    *,
    queries: Mapping[str, Sequence[str]],
    documents: Mapping[str, Sequence[str]],
) -> list[Judgement]:
    """The model's answers about all documents. Both lists come under their names, for errors that say what is wrong."""
    door.check_model(body.model, adapters=False)
    engine = door.engine.engine
    reranker, tokenizer = need_reranker(engine.model.reranker), door.need_tokenizer()
    [(query_name, query_texts)], [(name, texts)] = queries.items(), documents.items()
    pairs = make_pairs(query_texts, texts)
    if body.max_tokens_per_doc is not None:
        door.engine.check_text(*texts)

    def encode() -> list[Judgement]:
        if door.config.refuse_special_text:
            named = {f"{name}[{index}]": text for index, text in enumerate(texts)}
            SpecialText.of(tokenizer).check({query_name: list(query_texts), "instruction": body.instruction, **named})
        return encode_pairs(
            reranker,
            tokenizer,
            pairs,
            name,
            max_model_len=engine.model.max_model_len,
            instruction=body.instruction,
            max_document_tokens=body.max_tokens_per_doc,
        )

    owner = owner_of(call)
    options = owner.sign(
        RequestOptions(
            request_id=answer_id, priority=body.priority or 0, tenant=body.user or "", traceparent=trace_of(call)
        )
    )
    async with in_time(door):
        judgements = await door.engine.run(encode, prompts=len(pairs), tenant=options.tenant, owner=owner.id)
        await door.engine.judge(judgements, options)
    return judgements


def _usage(judgements: Sequence[Judgement]) -> Usage:
    num_tokens = sum(len(judgement.prompt_ids) for judgement in judgements)
    return Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
