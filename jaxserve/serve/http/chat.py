"""`/v1/chat/completions`: a conversation in, the assistant's turn out.

The same pieces make a stream and an answer in one piece, tool calls included: both are read by one parser (see
`tool_parsers`).
"""

import dataclasses
import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import Request, RequestOptions, SamplingParams
from jaxserve.engine import Update
from jaxserve.errors import UnsupportedOption
from jaxserve.serve.http.bodies import EVENTS, REFUSALS, JsonRoute
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, trace_of
from jaxserve.serve.http.errors import json_response
from jaxserve.serve.http.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.serve.http.requests import ChatRequest, Message, Tool
from jaxserve.serve.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    FinishWord,
    FunctionPart,
    ToolCallPart,
    as_fields,
)
from jaxserve.serve.http.sampling import chat_sampling, resume_of
from jaxserve.serve.http.streaming import EventStream, UsageCounter, event, is_known, usage_at_end, usage_in_all
from jaxserve.serve.http.tool_parsers import Piece
from jaxserve.serve.http.tools import ToolUse, plan_tools
from jaxserve.text import ChatTemplate, check_special_text

# Fields of a message that are about its text, and never part of a prompt.
_UNSEEN: Any = {
    "annotations": True,
    "parsed": True,
    "tool_calls": {"__all__": {"index": True, "function": {"parsed_arguments"}}},
}


def chat_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions", response_model=ChatResponse, response_model_exclude_unset=True, responses=EVENTS
    )
    async def create_chat_completion(body: ChatRequest, call: HttpRequest) -> Response:
        """Answers a conversation."""
        door.check_model(body.model)
        answer_id = new_id(body.request_id, call)
        work = functools.partial(_prepare, door, body, answer_id, trace_of(call))
        chat = await door.engine.run(work, prompts=1, n=body.n or 1)
        answer = _Answer(door, body, chat, answer_id)
        if body.stream:
            return EventStream(door, [chat.request], answer, answer_id)
        return json_response(await answer.whole(door), headers={"x-request-id": answer_id})

    return router


def render_chat(
    door: Door,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None,
    variables: dict[str, Any] | None,
    add_generation_prompt: bool,
) -> str:
    """The prompt text. Raises InvalidRequest, also for a text that spells a special token where that is refused."""
    engine = door.engine.engine
    plain = [_shown(message) for message in messages]
    if door.config.refuse_special_text:
        beside = {"tools": tools, "chat_template_kwargs": variables}
        check_special_text(door.need_tokenizer(), plain, {n: v for n, v in beside.items() if v is not None})
    return engine.chat_template().render(
        plain, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
    )


def _shown(message: Message) -> dict[str, Any]:
    """What a template may read of a message. Many look for `tool_calls`, and take them for a list that is not empty."""
    fields = message.model_dump(exclude_unset=True, exclude_none=True, exclude=_UNSEEN)
    return {name: value for name, value in fields.items() if name != "tool_calls" or value}


def shown_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as a template gets them."""
    return [as_fields(tool) for tool in tools] if tools else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    request: Request
    sampling: SamplingParams
    tools: ToolUse


def _prepare(door: Door, body: ChatRequest, answer_id: str, traceparent: str) -> _Chat:
    """Takes as long as encoding takes."""
    engine, tokenizer = door.engine.engine, door.need_tokenizer()
    tools = plan_tools(body, door.tool_parser, engine.chat_template(), tokenizer)
    sampling = chat_sampling(body, tools.forced, keep_special_tokens=tools.keep_special_tokens)
    text = render_chat(
        door,
        body.messages,
        tools=tools.shown,
        variables=_variables(body, engine.chat_template()),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    request = engine.prepare(
        text,
        sampling,
        RequestOptions(
            request_id=answer_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=body.user or "",
            add_special_tokens=False,  # the template has written them
            traceparent=traceparent,
            resume=resume_of(body),
        ),
    )
    return _Chat(request=request, sampling=sampling, tools=tools)


def _variables(body: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """What the template gets beside messages and tools. Raises UnsupportedOption for effort that it cannot ask for."""
    given = body.chat_template_kwargs or {}
    if body.reasoning_effort is None:
        return given
    if template.reads("reasoning_effort"):
        return {"reasoning_effort": body.reasoning_effort, **given}
    if body.reasoning_effort == "medium":  # the default of OpenAI's models
        return given
    raise UnsupportedOption(
        "reasoning_effort changes nothing here, since this model's chat template does not read it; leave it out"
    )


class _Sequence:
    """One of the n answers on its way: its parser, and the names of its calls. Used by its answer alone."""

    def __init__(self, tools: ToolUse, only_one_call: bool) -> None:
        self._parser = tools.make()
        self._only_one_call = only_one_call
        self.num_calls = 0

    def read(self, update: Update) -> list[ChatMessage]:
        """The deltas of an update."""
        pieces = self._parser.push(update.text)
        if update.finish_reason is not None:
            pieces += self._parser.finish()
        return [self._delta(piece) for piece in pieces if not (self._only_one_call and piece.call)]

    def _delta(self, piece: Piece) -> ChatMessage:
        if piece.call is None:
            return ChatMessage(content=piece.content)
        if piece.name is None:
            part = ToolCallPart(index=piece.call, function=FunctionPart(arguments=piece.arguments))
        else:
            self.num_calls += 1
            part = ToolCallPart(
                index=piece.call,
                id=f"call_{uuid.uuid4().hex[:24]}",
                type="function",
                function=FunctionPart(name=piece.name, arguments=piece.arguments),
            )
        return ChatMessage(tool_calls=[part])


class _Answer:
    """Builds the pieces of one answer. Used by its call alone."""

    def __init__(self, door: Door, body: ChatRequest, chat: _Chat, answer_id: str) -> None:
        self._tokenizer = door.engine.engine.tokenizer
        self._body = body
        self._request = chat.request
        self._counter = UsageCounter([chat.request])
        only_one = body.parallel_tool_calls is False
        self._sequences = [_Sequence(chat.tools, only_one) for _ in range(chat.sampling.n)]
        # Sequences whose role the client has been told.
        self._begun = {index for index in range(chat.sampling.n) if chat.request.known(index).token_ids}
        self._id = f"chatcmpl-{answer_id}"
        self._created_s = int(time.time())
        self._model = door.model_name

    async def whole(self, door: Door) -> ChatResponse:
        chunks: list[list[ChatChunkChoice]] = [[] for _ in self._sequences]
        response = ChatResponse(
            id=self._id,
            object="chat.completion",
            created=self._created_s,
            model=self._model,
            choices=[],
            usage=self._counter.usage,
        )
        async with follow(door, [self._request]) as updates:
            async for update in updates:
                check_answered(update)
                chunks[update.index] += self._choices(update)
                prompt = update.prompt
                if prompt is not None and prompt.logprobs is not None and update.index == 0:
                    response.prompt_logprobs = prompt_logprobs(self._tokenizer, prompt.logprobs)
        response.choices = [_join(each) for each in chunks]
        response.usage = self._counter.usage
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self._request.prompt_token_ids)
        return response

    def events(self, update: Update) -> str:
        if is_known(update):
            self._sequences[update.index].read(update)
            return ""
        usage = usage_in_all(self._body.stream_options)
        events: list[str] = []
        if update.index not in self._begun:
            self._begun.add(update.index)
            first = ChatMessage(role="assistant", content="")
            choice = ChatChunkChoice(index=update.index, delta=first, finish_reason=None)
            events.append(event(self._chunk([choice], usage=usage)))
        events += [event(self._chunk([choice], usage=usage)) for choice in self._choices(update)]
        return "".join(events)

    def last_events(self) -> str:
        return event(self._chunk([], usage=True)) if usage_at_end(self._body.stream_options) else ""

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: bool) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id, object="chat.completion.chunk", created=self._created_s, model=self._model, choices=choices
        )
        if usage:
            chunk.usage = self._counter.usage
        return chunk

    def _choices(self, update: Update) -> list[ChatChunkChoice]:
        """One choice for each delta; the last of them carries what belongs to the whole update."""
        self._counter.take(update)
        sequence = self._sequences[update.index]
        deltas = sequence.read(update) or [ChatMessage()]
        choices = [ChatChunkChoice(index=update.index, delta=delta, finish_reason=None) for delta in deltas]
        last = choices[-1]
        if update.logprobs is not None:
            count, as_ids = self._body.top_logprobs or 0, bool(self._body.return_tokens_as_token_ids)
            last.logprobs = chat_logprobs(self._tokenizer, update.logprobs, count, as_ids=as_ids)
        if self._body.return_token_ids:
            last.token_ids = list(update.token_ids)
        if update.finish_reason is not None:
            word: FinishWord = update.finish_reason.value  # pyright: ignore[reportAssignmentType]
            last.finish_reason = "tool_calls" if word == "stop" and sequence.num_calls else word
            last.stop_reason = update.stop_reason
        empty = not last.delta.model_fields_set and not last.model_fields_set & {"logprobs", "token_ids"}
        return [] if empty and last.finish_reason is None else choices


def _join(chunks: Sequence[ChatChunkChoice]) -> ChatChoice:
    """The chunks of one sequence as one message."""
    last = chunks[-1]
    assert last.finish_reason is not None, last
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    calls: dict[int, ToolCallPart] = {}
    for part in (part for chunk in chunks for part in chunk.delta.tool_calls or ()):
        assert part.index is not None, part
        if part.index not in calls:
            calls[part.index] = ToolCallPart(id=part.id, type="function", function=part.function.model_copy())
        else:
            calls[part.index].function.arguments += part.function.arguments
    message = ChatMessage(role="assistant", content=content or (None if calls else ""), refusal=None)
    if calls:
        message.tool_calls = [calls[number] for number in sorted(calls)]
    choice = ChatChoice(
        index=last.index, message=message, logprobs=None, finish_reason=last.finish_reason, stop_reason=last.stop_reason
    )
    entries = [entry for chunk in chunks if chunk.logprobs is not None for entry in chunk.logprobs.content]
    if entries:
        choice.logprobs = ChatLogprobs(content=entries)
    if any(chunk.token_ids is not None for chunk in chunks):
        choice.token_ids = [i for chunk in chunks for i in chunk.token_ids or ()]
    return choice
