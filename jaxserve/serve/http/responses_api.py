"""`/v1/responses`: OpenAI's Responses API, whose answers are lists of items and whose streams have typed events.

The request becomes one of chat completions (`responses_api_bodies`), and its answer is made of the same pieces as
there. An answer in one piece is the object that the last event of the stream has, so that the two cannot differ.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pydantic
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import FinishReason
from jaxserve.engine import Update
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.conversation import Chat, Part, PartKind, Parts, Turn, prepare_chat
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, trace_of
from jaxserve.serve.http.errors import HttpRefusal, describe
from jaxserve.serve.http.formats import Piece
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.pieces import json_answer, json_pieces, write_parts
from jaxserve.serve.http.requests import ForeignTool, Message
from jaxserve.serve.http.responses import as_fields
from jaxserve.serve.http.responses_api_bodies import (
    DeletedResponse,
    FunctionTool,
    IncompleteDetails,
    InputTokensDetails,
    NamespaceTool,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThought,
    OutputTokensDetails,
    ReasoningText,
    ResponseObject,
    ResponsesError,
    ResponsesRequest,
    ResponsesUsage,
    Status,
    assistant_message,
    chat_of,
    functions_of,
    messages_of,
)
from jaxserve.serve.http.stored_responses import Stored, StoredResponses
from jaxserve.serve.http.streaming import Event, EventStream, UsageCounter, named_event
from jaxserve.serve.owners import Owner
from jaxserve.serve.turns import Turns

PATH = "/v1/responses"
_MESSAGES = pydantic.TypeAdapter(list[Message])
_MESSAGES_AT_ONCE = 256


class _Kind(NamedTuple):
    """`event`: the beginning of the names of its events; `prefix`: of its ids."""

    event: str
    prefix: str


_KINDS = {
    PartKind.TEXT: _Kind("response.output_text", "msg"),
    PartKind.THOUGHT: _Kind("response.reasoning_text", "rs"),
    PartKind.CALL: _Kind("response.function_call_arguments", "fc"),
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its events, the last of which has the answer.",
        "content": {"text/event-stream": {}},
    }
}


def responses_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["OpenAI"])
    http = door.config
    stored = StoredResponses(http.stored_responses, http.stored_responses_bytes, http.stored_responses_s)

    @router.post(PATH, response_model=ResponseObject, response_model_exclude_unset=True, responses=_EVENTS)
    async def create_response(body: ResponsesRequest, call: HttpRequest) -> Response:
        """Answers a conversation, which may be one that the server has kept."""
        door.check_model(body.model)
        if body.store and not stored.keeps:
            raise UnsupportedOption(
                "store is true, but this server keeps no answers (serve.http.stored_responses is 0); set it to false"
            )
        owner, before = owner_of(call), None
        if body.previous_response_id is not None:
            before = _find(stored, owner.digest, body.previous_response_id, "previous_response_id")
        answer_id = new_id(None, call)
        keeps = stored.keeps and body.store is not False
        work = functools.partial(_prepare, door, body, before, answer_id, trace_of(call), owner, keeps=keeps)
        messages, chat = await door.engine.run(work, prompts=1, tenant=body.user or "", owner=owner.id)
        keeping = _Keeping(door.turns, stored if keeps else None, owner.digest, messages)
        answer = _Answer(door, body, chat, answer_id, keeping)
        if body.stream:
            return EventStream(door, [chat.request], answer, answer_id)
        return await json_answer(door.turns, await answer.whole(door), {"x-request-id": answer_id})

    @router.get(f"{PATH}/{{response_id}}", response_model=ResponseObject)
    async def retrieve_response(response_id: str, call: HttpRequest, stream: bool = False) -> Response:
        """An answer that was kept, which is never a stream of events."""
        found = _find(stored, owner_of(call).digest, response_id, "response_id")
        if stream:
            text = "only the events of an answer with background true are kept, which this server does not have"
            raise HttpRefusal(400, f"stream is true, but {text}; leave it out", param="stream")
        return Response(found.response, media_type="application/json")

    @router.delete(f"{PATH}/{{response_id}}")
    async def delete_response(response_id: str, call: HttpRequest) -> DeletedResponse:
        """Forgets an answer that was kept."""
        _find(stored, owner_of(call).digest, response_id, "response_id")
        stored.remove(owner_of(call).digest, response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    @router.post(f"{PATH}/{{response_id}}/cancel", response_model=ResponseObject)
    async def cancel_response(response_id: str, call: HttpRequest) -> Response:
        """Only answers in the background can be cancelled by their id, and there are none."""
        _find(stored, owner_of(call).digest, response_id, "response_id")
        raise HttpRefusal(
            400,
            f"the answer {response_id!r:.200} is complete: only one with background true could be cancelled, which "
            "this server does not have; close the connection to end an answer",
            param="response_id",
        )

    return router


def _find(stored: StoredResponses, owner: bytes, response_id: str, param: str) -> Stored:
    """Raises HttpRefusal with 404."""
    if (found := stored.get(owner, response_id)) is None:
        why = (
            f"there is no answer {response_id!r:.200}: it was not stored, its time (serve.http.stored_responses_s) is "
            "over, it had to make room, or it belongs to another key"
        )
        if not stored.keeps:
            why = "this server keeps no answers (serve.http.stored_responses is 0)"
        raise HttpRefusal(404, f"{why}; send the whole conversation as input", param=param, kind="response_not_found")
    return found


def _prepare(
    door: Door,
    body: ResponsesRequest,
    before: Stored | None,
    answer_id: str,
    traceparent: str,
    owner: Owner,
    *,
    keeps: bool,
) -> tuple[bytes, Chat]:
    """The conversation so far as it is kept, empty without `keeps`, and the request for it. Any thread."""
    asked = messages_of(body)
    if before is None and not asked:
        raise InvalidRequest("input has no message; give one")
    chat = prepare_chat(door, chat_of(body, _messages(before), asked), answer_id, traceparent, owner)
    return _written(before, asked) if keeps else b"", chat


def _messages(before: Stored | None) -> list[Message]:
    return [] if before is None else _MESSAGES.validate_json(before.messages)


def _written(before: Stored | None, asked: Sequence[Message]) -> bytes:
    """JSON of a conversation, without its last bracket. In slices, between which other threads have their turn."""
    lists = [] if before is None else [before.messages]
    for start in range(0, len(asked), _MESSAGES_AT_ONCE):
        lists.append(_MESSAGES.dump_json([*asked[start : start + _MESSAGES_AT_ONCE]], exclude_unset=True))
    return b"[" + b",".join(each[1:-1] for each in lists)


class _Keeping:
    """Puts one answer away when it is complete. `stored` None: it is not kept. `messages`: as of `_written`."""

    def __init__(self, turns: Turns, stored: StoredResponses | None, owner: bytes, messages: bytes) -> None:
        self._turns = turns
        self._stored = stored
        self._owner = owner
        self._messages = messages

    @property
    def keeps(self) -> bool:
        return self._stored is not None

    async def put(self, response: ResponseObject, answer: Message) -> None:
        """What the answer repeats of its request may be as long as a body: it is written in turns."""
        if self._stored is None:
            return
        parts = await write_parts(self._turns, json_pieces(response))
        messages = self._messages + b"," + _MESSAGES.dump_json([answer], exclude_unset=True)[1:]
        stored = Stored(response_id=response.id, response=b"".join(parts), messages=messages)
        self._stored.put(self._owner, stored)


class _Answer:
    """Builds one answer. Used by its call alone."""

    def __init__(self, door: Door, body: ResponsesRequest, chat: Chat, answer_id: str, keeping: _Keeping) -> None:
        self._request = chat.request
        self._counter = UsageCounter([chat.request])
        self._turn = Turn(chat)
        self._parts = Parts(door)
        self._keeping = keeping
        self._functions = functions_of(body)
        self._sequence_number = 0
        self._response = ResponseObject(
            id=f"resp_{answer_id}",
            object="response",
            created_at=int(time.time()),
            completed_at=None,
            status="in_progress",
            error=None,
            incomplete_details=None,
            model=body.model or door.model_name,
            output=[],
            usage=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            store=keeping.keeps,
            temperature=chat.sampling.temperature,
            text={"format": _format_of(body)},
            tool_choice=_choice_of(body),
            tools=[_tool_of(tool) for tool in body.tools or ()],
            top_p=chat.sampling.top_p,
            truncation="disabled",
            background=False,
            service_tier="default",
            user=body.user,
        )

    async def whole(self, door: Door) -> ResponseObject:
        async with follow(door, [self._request]) as updates:
            async for update in updates:
                check_answered(update)
                self._take(update)
        await self._end()
        return self._response

    async def events(self, update: Update) -> list[Event]:
        events: list[Event] = []
        if not self._sequence_number:
            for kind in ("response.created", "response.in_progress"):
                events.append(self._event(kind, response=as_fields(self._response)))
        events += self._take(update)
        return events

    async def last_events(self, error: Exception | None) -> str:
        if error is not None:
            self._response.status = "failed"
            self._response.error = ResponsesError(code="server_error", message=describe(error)[1].error.message)
            return self._event("response.failed", response=as_fields(self._response))
        events = await self._end()
        events.append(self._event(f"response.{self._response.status}", response=as_fields(self._response)))
        return "".join(events)

    def _take(self, update: Update) -> list[str]:
        """The events of an update."""
        self._counter.take(update)
        events: list[str] = []
        for piece in self._turn.read(update):
            added = self._parts.add(piece)
            if added.is_new:
                events += self._end_of_item(len(self._parts.all) - 2)
                events += self._begin_item()
            if added.text:
                kind, place = _KINDS[added.part.kind].event, self._place(len(self._parts.all) - 1)
                events.append(self._event(f"{kind}.delta", **place, delta=added.text))
        if update.finish_reason is not None:
            cut = update.finish_reason is FinishReason.LENGTH
            self._response.status = "incomplete" if cut else "completed"
            if cut:
                self._response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        return events

    async def _end(self) -> list[str]:
        """Completes the object, and keeps it where that was asked for; returns the events of its last item."""
        events: list[str] = []
        if not self._parts.all:  # an answer without any text still has a message
            self._parts.add(Piece())
            events += self._begin_item()
        events += self._end_of_item(len(self._parts.all) - 1)
        response = self._response
        response.completed_at = int(time.time())
        response.usage = self._usage()
        parts = self._parts.all
        texts, thoughts = (
            [part.text for part in parts if part.kind is kind] for kind in (PartKind.TEXT, PartKind.THOUGHT)
        )
        calls = [(part.call_id, part.name, part.text) for part in parts if part.kind is PartKind.CALL]
        await self._keeping.put(response, assistant_message(texts, thoughts, calls))
        return events

    def _begin_item(self) -> list[str]:
        """The events with which the last part begins."""
        index, part = len(self._parts.all) - 1, self._parts.all[-1]
        events = [self._event("response.output_item.added", output_index=index, item=self._item(part, None))]
        if part.kind is not PartKind.CALL:
            content = as_fields(_content(part, ""))
            events.append(self._event("response.content_part.added", **self._place(index), part=content))
        return events

    def _end_of_item(self, index: int) -> list[str]:
        """Puts the part to the output; returns the events with which it ends."""
        if index < 0:
            return []
        part, place = self._parts.all[index], self._place(index)
        # The last item of an answer that was cut is cut; those before it are whole.
        is_last = index == len(self._parts.all) - 1 and self._response.status == "incomplete"
        status: Status = "incomplete" if is_last else "completed"
        self._response.output.append(self._output(part, status))
        done = f"{_KINDS[part.kind].event}.done"
        if part.kind is PartKind.CALL:
            events = [self._event(done, **place, name=self._name(part)[1], arguments=part.text)]
        else:
            content = as_fields(_content(part, part.text))
            events = [
                self._event(done, **place, text=part.text),
                self._event("response.content_part.done", **place, part=content),
            ]
        return [*events, self._event("response.output_item.done", output_index=index, item=self._item(part, status))]

    def _place(self, index: int) -> dict[str, Any]:
        part = self._parts.all[index]
        place: dict[str, Any] = {"item_id": _item_id(part), "output_index": index}
        return place if part.kind is PartKind.CALL else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        if kind.startswith("response.output_text."):
            fields["logprobs"] = []
        return named_event(kind, sequence_number=number, **fields)

    def _usage(self) -> ResponsesUsage:
        usage = self._counter.usage
        num_cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=num_cached, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._turn.num_thought_tokens),
            total_tokens=usage.total_tokens,
        )

    def _name(self, part: Part) -> tuple[str | None, str]:
        """The namespace and the name of the function that was called."""
        found = self._functions.get(part.name)
        return (None, part.name) if found is None else (found.namespace, found.tool.name)

    def _output(self, part: Part, status: Status) -> OutputItem:
        item_id, content = _item_id(part), _content(part, part.text)
        if part.kind is PartKind.CALL:
            namespace, name = self._name(part)
            call = OutputCall(
                id=item_id,
                type="function_call",
                status=status,
                call_id=part.call_id,
                name=name,
                arguments=part.text,
            )
            if namespace is not None:
                call.namespace = namespace
            return call
        if isinstance(content, ReasoningText):
            return OutputThought(id=item_id, type="reasoning", status=status, summary=[], content=[content])
        return OutputMessage(id=item_id, type="message", status=status, role="assistant", content=[content])

    def _item(self, part: Part, status: Status | None) -> dict[str, Any]:
        """The item as an event has it; when it begins (`status` None), without its content."""
        fields = as_fields(self._output(part, status or "in_progress"))
        if status is None:
            name, nothing = ("arguments", "") if part.kind is PartKind.CALL else ("content", [])
            fields[name] = nothing
        return fields


def _item_id(part: Part) -> str:
    return f"{_KINDS[part.kind].prefix}_{part.id}"


def _content(part: Part, text: str) -> OutputText | ReasoningText:
    if part.kind is PartKind.THOUGHT:
        return ReasoningText(type="reasoning_text", text=text)
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def _format_of(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(exclude_unset=True, by_alias=True)


def _choice_of(body: ResponsesRequest) -> str | dict[str, Any]:
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return body.tool_choice or "auto"
    return as_fields(body.tool_choice)


def _tool_of(tool: FunctionTool | NamespaceTool | ForeignTool) -> dict[str, Any]:
    if not isinstance(tool, FunctionTool):
        return as_fields(tool)
    return {"description": None, "strict": None, "parameters": None, **as_fields(tool)}
