"""`/v1/embeddings`: texts in, vectors out. Each input is a request that generates nothing."""

import base64
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from jaxserve.api import RequestOptions
from jaxserve.engine import EmbeddingForm, Prompt, embedding_of, pooling_params
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.completions import check_texts, list_prompts
from jaxserve.serve.http.door import Door, check_answered, follow, prepare, trace_of
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.pieces import WrittenList, json_answer
from jaxserve.serve.http.requests import EmbeddingRequest
from jaxserve.serve.http.responses import Embedding, EmbeddingResponse, Usage, as_fields
from jaxserve.serve.owners import Owner

_WRITTEN_AT_ONCE = 16  # vectors; of 4096 numbers each, a few milliseconds


def embeddings_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS)

    @router.post("/v1/embeddings", response_model=EmbeddingResponse, tags=["OpenAI"])
    async def create_embeddings(body: EmbeddingRequest, call: Request) -> Response:
        """A vector for each input, pooled as the model's files say."""
        name = door.check_model(body.model)
        vectors = await _embed(
            door,
            list_prompts(body.input, "input"),
            door.engine.engine.model.embedding.form(body.dimensions, body.normalize),
            body.truncate_prompt_tokens,
            tenant=body.user or "",
            owner=owner_of(call),
            traceparent=trace_of(call),
            adapter=name,
        )
        data = WrittenList()
        for index, vector in enumerate(vectors):
            if index and index % _WRITTEN_AT_ONCE == 0:
                await door.turns.next()
            values = vector.values
            packed = _base64(values) if body.encoding_format == "base64" else list(values)
            data.add([Embedding(object="embedding", index=index, embedding=packed)])
        num_tokens = sum(vector.num_prompt_tokens for vector in vectors)
        usage = Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
        answer = as_fields(EmbeddingResponse(object="list", data=[], model=name, usage=usage))
        return await json_answer(door.turns, {**answer, "data": data})

    return router


class _Vector(NamedTuple):
    """An embedding: `values` [D], or fewer."""

    values: list[float]
    num_prompt_tokens: int


async def _embed(
    door: Door,
    prompts: Sequence[Prompt],
    form: EmbeddingForm,
    truncate_prompt_tokens: int | None,
    *,
    tenant: str,
    owner: Owner,
    traceparent: str,
    adapter: str | None,
) -> list[_Vector]:
    """One vector in that form for each prompt. Raises as `AsyncEngine.stream` and `AnyEngine.prepare` do."""
    sampling = pooling_params(truncate_prompt_tokens)
    if truncate_prompt_tokens is not None:
        check_texts(door, prompts)
    options = owner.sign(RequestOptions(tenant=tenant, traceparent=traceparent, pooling=True, adapter=adapter))
    make = functools.partial(door.engine.engine.prepare, sampling=sampling, options=options)
    requests = await prepare(door, [functools.partial(make, prompt) for prompt in prompts], tenant=tenant, owner=owner)
    found: dict[str, list[float]] = {}
    async with follow(door, requests) as updates:
        async for update in updates:
            check_answered(update)
            found[update.request_id] = embedding_of(update.prompt, form)
    return [_Vector(found[request.request_id], len(request.prompt_token_ids)) for request in requests]


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
