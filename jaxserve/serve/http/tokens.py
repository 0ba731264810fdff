"""The routes of models and of the tokenizer: names, and text to ids and back.

Work on text runs on the engine's threads, as for every other route.
"""

import functools

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.engine import check_token_ids, with_pictures
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.conversation import render_chat, shown_tools
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.pieces import json_answer
from jaxserve.serve.http.requests import DetokenizeRequest, TokenizeRequest
from jaxserve.serve.http.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
)


def tokens_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS)

    @router.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> ModelList:
        """The model that is served, and the adapters that are loaded beside it."""
        return ModelList(object="list", data=_cards(door))

    @router.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def retrieve_model(model: str) -> ModelCard:
        """The served model or an adapter, by name."""
        name = door.check_model(model, adapters=not door.any_model)
        return next((card for card in _cards(door) if card.id == name), _card(door))

    @router.post("/tokenize", response_model=TokenizeResponse, tags=["Text"])
    async def tokenize(body: TokenizeRequest, call: HttpRequest) -> Response:
        """The ids of a prompt or of a conversation."""
        door.check_model(body.model)
        tokens = await door.engine.run(functools.partial(_tokenize, door, body), owner=owner_of(call).id)
        return await json_answer(door.turns, tokens)

    @router.post("/detokenize", response_model=DetokenizeResponse, tags=["Text"])
    async def detokenize(body: DetokenizeRequest, call: HttpRequest) -> Response:
        """The text of ids, special tokens spelled out."""
        door.check_model(body.model)
        text = await door.engine.run(functools.partial(_detokenize, door, body), owner=owner_of(call).id)
        return await json_answer(door.turns, text)

    @router.get("/tokenizer_info", tags=["Text"])
    async def tokenizer_info() -> TokenizerInfo:
        """What a client needs to know who uses the routes above instead of a tokenizer of its own."""
        tokenizer = door.need_tokenizer()

        def spelled(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        return TokenizerInfo(
            bos_token=spelled(tokenizer.bos_token_id),
            eos_token=spelled(tokenizer.eos_token_id),
            pad_token=None,  # nothing is padded with a token here
            chat_template=tokenizer.chat_template,
            model_max_length=door.engine.engine.model.max_model_len,
            vocab_size=tokenizer.vocab_size,
        )

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


def _cards(door: Door) -> list[ModelCard]:
    card, loaded = _card(door), door.engine.engine.model.adapters
    adapters = [] if loaded is None else loaded.all
    return [
        card,
        *(
            card.model_copy(
                update={
                    "id": info.name,
                    "created": int(info.loaded_s),
                    "root": info.path,
                    "parent": card.id,
                }
            )
            for info in adapters
        ),
    ]


def _tokenize(door: Door, body: TokenizeRequest) -> TokenizeResponse:
    tokenizer = door.need_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give prompt or messages, one of the two")
    if body.prompt is not None:
        door.engine.check_text(body.prompt)
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        assert body.messages is not None
        prompt, sources = render_chat(
            door,
            body.messages,
            body,
            tools=shown_tools(body.tools),
            variables=body.chat_template_kwargs,
        )
        door.engine.check_text(prompt.text)
        ids = prompt.encode(tokenizer)
        ids = list(with_pictures(door.engine.engine.model.pictures, ids, sources)[0])
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
