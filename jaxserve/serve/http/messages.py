"""`/v1/messages`: Anthropic's Messages API, and the count of tokens of a prompt of it.

The request becomes one of chat completions (`messages_bodies`), and its answer is made of the same pieces as there. A
stream has events of Anthropic's kinds: a message begins, its blocks begin, grow and end one after the other, and then
the message ends with the reason and the usage.
"""

import functools
from typing import Any

import pydantic_core
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import FinishReason
from jaxserve.engine import Update
from jaxserve.serve.http.bodies import JsonRoute
from jaxserve.serve.http.conversation import (
    Chat,
    Part,
    PartKind,
    Parts,
    Turn,
    count_prompt_tokens,
    prepare_chat,
    thinking_switch,
)
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, trace_of
from jaxserve.serve.http.errors import MESSAGES, MessagesErrorResponse, describe, messages_error
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.messages_bodies import (
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    OutputBlock,
    PromptFields,
    StopReason,
    TextOut,
    ThinkingOut,
    TokenCount,
    ToolUseOut,
    chat_of,
)
from jaxserve.serve.http.pieces import json_answer
from jaxserve.serve.http.requests import ChatRequest
from jaxserve.serve.http.responses import as_fields
from jaxserve.serve.http.streaming import Event, EventStream, UsageCounter, named_event
from jaxserve.serve.owners import Owner

_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesErrorResponse, "description": "Refused; the message says why."},
    503: {"model": MessagesErrorResponse, "description": "The engine is stopping or has died."},
}
_DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.THOUGHT: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its events, the last of which is `message_stop`.",
        "content": {"text/event-stream": {}},
    }
}


def messages_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=_REFUSALS, tags=["Anthropic"])

    @router.post(MESSAGES, response_model=MessagesResponse, response_model_exclude_unset=True, responses=_EVENTS)
    async def create_message(body: MessagesRequest, call: HttpRequest) -> Response:
        """Answers a conversation."""
        door.check_model(body.model)
        answer_id, owner = new_id(None, call), owner_of(call)
        work = functools.partial(_prepare, door, body, answer_id, trace_of(call), owner)
        tenant = (None if body.metadata is None else body.metadata.user_id) or ""
        chat = await door.engine.run(work, prompts=1, tenant=tenant, owner=owner.id)
        answer = _Answer(door, body.model, chat, answer_id)
        if body.stream:
            response = EventStream(door, [chat.request], answer, answer_id)
        else:
            response = await json_answer(door.turns, await answer.whole(door), {"x-request-id": answer_id})
        response.headers["request-id"] = answer_id  # where Anthropic's clients look for it
        return response

    @router.post(f"{MESSAGES}/count_tokens", response_model=TokenCount)
    async def count_tokens(body: PromptFields, call: HttpRequest) -> Response:
        """The tokens that the prompt of this conversation has."""
        door.check_model(body.model)
        count = await door.engine.run(functools.partial(_count, door, body), owner=owner_of(call).id)
        return await json_answer(door.turns, count)

    return router


def _chat_of(door: Door, body: PromptFields, sampling: dict[str, Any]) -> ChatRequest:
    template = door.engine.engine.chat_template()
    return chat_of(body, sampling, functools.partial(thinking_switch, template, with_tools=bool(body.tools)))


def _prepare(door: Door, body: MessagesRequest, answer_id: str, traceparent: str, owner: Owner) -> Chat:
    given = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "user": None if body.metadata is None else body.metadata.user_id,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    return prepare_chat(door, _chat_of(door, body, sampling), answer_id, traceparent, owner)


def _count(door: Door, body: PromptFields) -> TokenCount:
    return TokenCount(input_tokens=count_prompt_tokens(door, _chat_of(door, body, {})))


class _Answer:
    """Builds one message. Used by its call alone."""

    def __init__(self, door: Door, model: str | None, chat: Chat, answer_id: str) -> None:
        self._request = chat.request
        self._counter = UsageCounter([chat.request])
        self._turn = Turn(chat)
        self._parts = Parts(door)
        self._begun = False
        self._message = MessagesResponse(
            id=f"msg_{answer_id}",
            type="message",
            role="assistant",
            model=model or door.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )

    async def whole(self, door: Door) -> MessagesResponse:
        async with follow(door, [self._request]) as updates:
            async for update in updates:
                check_answered(update)
                self._counter.take(update)
                for piece in self._turn.read(update):
                    self._parts.add(piece)
                self._take_end(update)
        self._message.content = [_block(part) for part in self._parts.all]
        self._message.usage = self._usage()
        return self._message

    async def events(self, update: Update) -> list[Event]:
        self._counter.take(update)
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            self._message.usage = self._usage()
            events.append(named_event("message_start", message=as_fields(self._message)))
        for piece in self._turn.read(update):
            added = self._parts.add(piece)
            if added.is_new:
                events += self._end_of_block(len(self._parts.all) - 2)
                block = as_fields(_begun(added.part))
                events.append(named_event("content_block_start", index=len(self._parts.all) - 1, content_block=block))
            if added.text:
                kind, field = _DELTAS[added.part.kind]
                delta = {"type": kind, field: added.text}
                events.append(named_event("content_block_delta", index=len(self._parts.all) - 1, delta=delta))
        self._take_end(update)
        return events

    async def last_events(self, error: Exception | None) -> str:
        if error is not None:
            return named_event("error", error=as_fields(messages_error(*describe(error)).error))
        message = self._message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        events = self._end_of_block(len(self._parts.all) - 1)
        events.append(named_event("message_delta", delta=delta, usage=as_fields(self._usage())))
        return "".join([*events, named_event("message_stop")])

    def _end_of_block(self, index: int) -> list[str]:
        return [named_event("content_block_stop", index=index)] if index >= 0 else []

    def _take_end(self, update: Update) -> None:
        if update.finish_reason is None:
            return
        reason: StopReason = "max_tokens" if update.finish_reason is FinishReason.LENGTH else "end_turn"
        if reason == "end_turn" and self._turn.num_calls:
            reason = "tool_use"
        elif isinstance(update.stop_reason, str):
            reason = "stop_sequence"
            self._message.stop_sequence = update.stop_reason
        self._message.stop_reason = reason

    def _usage(self) -> MessagesUsage:
        usage = self._counter.usage
        num_cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )


def _begun(part: Part) -> OutputBlock:
    match part.kind:
        case PartKind.TEXT:
            return TextOut(type="text", text="")
        case PartKind.THOUGHT:
            return ThinkingOut(type="thinking", thinking="", signature="")
        case PartKind.CALL:
            return ToolUseOut(type="tool_use", id=part.call_id, name=part.name, input={})


def _block(part: Part) -> OutputBlock:
    block = _begun(part)
    match block:
        case TextOut():
            block.text = part.text
        case ThinkingOut():
            block.thinking = part.text
        case ToolUseOut():
            block.input = _arguments(part.text)
    return block


def _arguments(text: str) -> dict[str, Any]:
    """An object, as the API has it. Of arguments that were cut by their length, what is whole, as the SDK has it of a
    stream; and what is no JSON is wrapped as Anthropic's documentation does."""
    try:
        found = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
