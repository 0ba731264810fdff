"""`/v1/chat/completions`: a conversation in, the assistant's turn out.

The same pieces make a stream and an answer in one piece, thoughts and tool calls included: both are read by one parser
(see `formats`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.engine import Update
from jaxserve.serve.http.bodies import EVENTS, REFUSALS, JsonRoute
from jaxserve.serve.http.conversation import Chat, Turn, prepare_chat
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, trace_of
from jaxserve.serve.http.errors import error_event
from jaxserve.serve.http.formats import Piece
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.logprobs import chat_logprobs, write_prompt_logprobs
from jaxserve.serve.http.pieces import WrittenList, json_answer
from jaxserve.serve.http.requests import ChatRequest
from jaxserve.serve.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessage,
    ChatResponse,
    FinishWord,
    FunctionPart,
    ToolCallPart,
    as_fields,
    drawn_by,
)
from jaxserve.serve.http.sampling import caller_of
from jaxserve.serve.http.streaming import (
    DONE,
    Event,
    EventStream,
    UsageCounter,
    event,
    is_known,
    large_event,
    usage_at_end,
    usage_in_all,
)


def chat_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions", response_model=ChatResponse, response_model_exclude_unset=True, responses=EVENTS
    )
    async def create_chat_completion(body: ChatRequest, call: HttpRequest) -> Response:
        """Answers a conversation."""
        door.check_model(body.model)
        answer_id, owner = new_id(body.request_id, call), owner_of(call)
        work = functools.partial(prepare_chat, door, body, answer_id, trace_of(call), owner)
        chat = await door.engine.run(work, prompts=1, n=body.n or 1, tenant=caller_of(body), owner=owner.id)
        answer = _Answer(door, body, chat, answer_id)
        if body.stream:
            return EventStream(door, [chat.request], answer, answer_id, resumable=True)
        return await json_answer(door.turns, await answer.whole(door), {"x-request-id": answer_id})

    return router


def _delta(piece: Piece, new_call_id: Callable[[], str]) -> ChatMessage:
    if piece.reasoning:
        return ChatMessage(reasoning_content=piece.reasoning)
    if piece.call is None:
        return ChatMessage(content=piece.content)
    if piece.name is None:
        part = ToolCallPart(index=piece.call, function=FunctionPart(arguments=piece.arguments))
    else:
        part = ToolCallPart(
            index=piece.call,
            id=new_call_id(),
            type="function",
            function=FunctionPart(name=piece.name, arguments=piece.arguments),
        )
    return ChatMessage(tool_calls=[part])


class _Answer:
    """Builds the pieces of one answer. Used by its call alone."""

    def __init__(self, door: Door, body: ChatRequest, chat: Chat, answer_id: str) -> None:
        self._tokenizer = door.engine.engine.tokenizer
        self._pace = door.turns
        self._new_call_id = door.tool_format.new_call_id
        self._body = body
        self._request = chat.request
        self._counter = UsageCounter([chat.request])
        self._turns = [Turn(chat) for _ in range(chat.sampling.n)]
        # Sequences whose role the client has been told.
        self._begun = {index for index in range(chat.sampling.n) if chat.request.known(index).token_ids}
        self._id = f"chatcmpl-{answer_id}"
        self._created_s = int(time.time())
        self._model = body.model or door.model_name

    async def whole(self, door: Door) -> dict[str, Any]:
        """The answer in one piece, as `json_pieces` takes it."""
        chunks: list[list[ChatChunkChoice]] = [[] for _ in self._turns]
        written: list[WrittenList | None] = [None for _ in chunks]  # log-probabilities, which the chunks then lack
        prompt: WrittenList | None = None
        async with follow(door, [self._request]) as updates:
            async for update in updates:
                check_answered(update)
                for choice in self._choices(update):
                    if choice.logprobs is not None and choice.logprobs.content:
                        entries = written[update.index] or WrittenList()
                        entries.add(choice.logprobs.content)
                        written[update.index], choice.logprobs = entries, None
                    chunks[update.index].append(choice)
                if update.prompt is not None and update.prompt.logprobs is not None and update.index == 0:
                    prompt = await write_prompt_logprobs(self._tokenizer, update.prompt.logprobs, self._pace)
        response = ChatResponse(
            id=self._id,
            object="chat.completion",
            created=self._created_s,
            model=self._model,
            choices=[],
            usage=self._counter.usage,
        )
        if prompt is not None:
            response.prompt_logprobs = []  # its place among the fields
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self._request.prompt_token_ids)
        answer = as_fields(response)
        answer["choices"] = [_join(each, entries) for each, entries in zip(chunks, written, strict=True)]
        return answer if prompt is None else {**answer, "prompt_logprobs": prompt}

    async def events(self, update: Update) -> list[Event]:
        if is_known(update):
            self._turns[update.index].read(update)
            return []
        usage = usage_in_all(self._body.stream_options)
        events: list[Event] = []
        if update.index not in self._begun:
            first = ChatMessage(role="assistant", content="")
            choice = ChatChunkChoice(index=update.index, delta=first, finish_reason=None)
            chunk = self._chunk([choice], usage=usage)
            if not self._begun and self._body.return_token_ids:
                chunk.prompt_token_ids = list(self._request.prompt_token_ids)
            self._begun.add(update.index)
            if update.prompt is not None and update.prompt.logprobs is not None:
                chunk.prompt_logprobs = []  # its place among the fields
                prompt = await write_prompt_logprobs(self._tokenizer, update.prompt.logprobs, self._pace)
                events.append(await large_event(self._pace, {**as_fields(chunk), "prompt_logprobs": prompt}))
            else:
                events.append(event(chunk))
        events += [event(self._chunk([choice], usage=usage)) for choice in self._choices(update)]
        return events

    async def last_events(self, error: Exception | None) -> str:
        if error is not None:
            return error_event(error) + DONE
        return (event(self._chunk([], usage=True)) if usage_at_end(self._body.stream_options) else "") + DONE

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
        turn = self._turns[update.index]
        deltas = [_delta(piece, self._new_call_id) for piece in turn.read(update)] or [ChatMessage()]
        self._counter.num_thought_tokens = sum(each.num_thought_tokens for each in self._turns)
        choices = [ChatChunkChoice(index=update.index, delta=delta, finish_reason=None) for delta in deltas]
        last = choices[-1]
        if update.logprobs is not None:
            count, as_ids = self._body.top_logprobs or 0, bool(self._body.return_tokens_as_token_ids)
            last.logprobs = chat_logprobs(self._tokenizer, update.logprobs, count, as_ids=as_ids)
        if self._body.return_token_ids:
            last.token_ids = list(update.token_ids)
        if update.finish_reason is not None:
            word: FinishWord = update.finish_reason.value  # pyright: ignore[reportAssignmentType]
            last.finish_reason = "tool_calls" if word == "stop" and turn.num_calls else word
            last.stop_reason = update.stop_reason
            if update.weights:
                last.weights = drawn_by(update.weights)
        empty = not last.delta.model_fields_set and not last.model_fields_set & {"logprobs", "token_ids"}
        return [] if empty and last.finish_reason is None else choices


def _join(chunks: Sequence[ChatChunkChoice], logprobs: WrittenList | None) -> dict[str, Any]:
    """The chunks of one sequence as one message, as `json_pieces` takes it. `logprobs`: those of its tokens."""
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
    thoughts = "".join(chunk.delta.reasoning_content or "" for chunk in chunks)
    message = ChatMessage(role="assistant", content=content or (None if calls else ""), refusal=None)
    if thoughts:
        message.reasoning_content = thoughts
    if calls:
        message.tool_calls = [calls[number] for number in sorted(calls)]
    choice = ChatChoice(
        index=last.index, message=message, logprobs=None, finish_reason=last.finish_reason, stop_reason=last.stop_reason
    )
    if last.weights is not None:
        choice.weights = last.weights
    if any(chunk.token_ids is not None for chunk in chunks):
        choice.token_ids = [i for chunk in chunks for i in chunk.token_ids or ()]
    fields = as_fields(choice)
    return fields if logprobs is None else {**fields, "logprobs": {"content": logprobs}}
