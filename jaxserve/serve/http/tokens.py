"""The routes that generate nothing: models, embeddings, and text to ids and back.

Work on text runs on the engine's threads, as for every other route.
"""

import base64
import functools
import struct
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from jaxserve.engine import check_token_ids
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.chat import render_chat, shown_tools
from jaxserve.serve.http.completions import list_prompts
from jaxserve.serve.http.door import Door, embed_prompts, trace_of
from jaxserve.serve.http.errors import json_response
from jaxserve.serve.http.requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from jaxserve.serve.http.responses import (
    DetokenizeResponse,
    Embedding,
    EmbeddingResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    Usage,
)


def tokens_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS)

    @router.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> ModelList:
        """The one model that is served."""
        return ModelList(object="list", data=[_card(door)])

    @router.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def retrieve_model(model: str) -> ModelCard:
        """The served model, by name."""
        door.check_model(model)
        return _card(door)

    @router.post("/v1/embeddings", response_model=EmbeddingResponse, tags=["OpenAI"])
    async def create_embeddings(body: EmbeddingRequest, call: Request) -> Response:
        """A vector for each input, pooled as the model's files say."""
        door.check_model(body.model)
        vectors = await embed_prompts(
            door,
            list_prompts(body.input, "input"),
            door.engine.engine.model.embedding.form(body.dimensions, body.normalize),
            body.truncate_prompt_tokens,
            tenant=body.user or "",
            traceparent=trace_of(call),
        )
        data = []
        for index, vector in enumerate(vectors):
            values = vector.values
            packed = _base64(values) if body.encoding_format == "base64" else list(values)
            data.append(Embedding(object="embedding", index=index, embedding=packed))
        num_tokens = sum(vector.num_prompt_tokens for vector in vectors)
        usage = Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
        return json_response(EmbeddingResponse(object="list", data=data, model=door.model_name, usage=usage))

    @router.post("/tokenize", response_model=TokenizeResponse, tags=["Text"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """The ids of a prompt or of a conversation."""
        door.check_model(body.model)
        return json_response(await door.engine.run(functools.partial(_tokenize, door, body)))

    @router.post("/detokenize", response_model=DetokenizeResponse, tags=["Text"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of ids, special tokens spelled out."""
        door.check_model(body.model)
        return json_response(await door.engine.run(functools.partial(_detokenize, door, body)))

    return router


def _card(door: Door) -> ModelCard:
    model = door.engine.engine.model
    return ModelCard(
        id=model.name,
        object="model",
        created=door.started_s,
        owned_by="jaxserve",
        max_model_len=model.max_model_len,
    )


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _tokenize(door: Door, body: TokenizeRequest) -> TokenizeResponse:
    tokenizer = door.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give prompt or messages, one of the two")
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        assert body.messages is not None
        text = render_chat(
            door,
            body.messages,
            tools=shown_tools(body.tools),
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
    response = TokenizeResponse(count=len(ids), max_model_len=door.engine.engine.model.max_model_len, tokens=ids)
    if body.return_token_strs:
        response.token_strs = [tokenizer.token_text(token_id) for token_id in ids]
    return response


def _detokenize(door: Door, body: DetokenizeRequest) -> DetokenizeResponse:
    model = door.engine.engine.model
    if len(body.tokens) > model.max_model_len:
        raise PromptTooLong(f"{len(body.tokens)} tokens; a sequence holds {model.max_model_len}; send them in parts")
    check_token_ids(body.tokens, model.vocab_size)
    return DetokenizeResponse(prompt=door.need_tokenizer().decode(body.tokens, skip_special_tokens=False))
