"""A conversation as one request of the engine, and the pieces of its answer: for every API that has conversations.

Each API puts its body into a `ChatRequest`, which is what this module reads, and its own names around the pieces.
"""

import dataclasses
import enum
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.api import Request, RequestOptions, SamplingParams, StructuredOutput
from jaxserve.engine import (
    PictureSource,
    Update,
    chat_prompt,
    check_takes_pictures,
    split_chat,
    with_pictures,
)
from jaxserve.serve.http import marks
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.formats import ParserMaker, Piece, ThinkingParser
from jaxserve.serve.http.requests import (
    ChatRequest,
    ForeignTool,
    ImagePart,
    Message,
    TemplateFields,
    Tool,
    functions_of,
)
from jaxserve.serve.http.responses import as_fields
from jaxserve.serve.http.sampling import chat_sampling, resume_of, structured
from jaxserve.serve.http.thought_grammar import behind_thought
from jaxserve.serve.http.tools import ToolUse, plan_tools
from jaxserve.serve.owners import Owner
from jaxserve.text import ChatTemplate, PromptText, check_special_text

# Variables of templates that switch thinking on and off: Qwen's and GLM's name, and that of Granite and DeepSeek.
_SWITCHES = ("enable_thinking", "thinking")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation that the engine can answer.

    Attributes:
      make: a parser of the text of each sequence.
      only_one_call: further tool calls of an answer are left out.
      tells_thoughts: thoughts are told; else they are left out.
    """

    request: Request
    sampling: SamplingParams
    make: ParserMaker
    only_one_call: bool
    tells_thoughts: bool


def prepare_chat(door: Door, body: ChatRequest, answer_id: str, traceparent: str, owner: Owner) -> Chat:
    """Takes as long as encoding takes. Raises InvalidRequest and its kin."""
    engine = door.engine.engine
    tools = _plan(door, body)
    prompt, sources = _prompt(door, body, tools)
    if body.truncate_prompt_tokens is not None:
        door.engine.check_text(prompt.text)
    form = _form(door, body, tools, prompt.text)
    sampling = chat_sampling(body, form.constraint, keep_special_tokens=form.keep_special_tokens)
    request = engine.prepare(
        chat_prompt(prompt.for_engine(door.need_tokenizer(), _most_tokens(door, body)), sources),
        sampling,
        owner.sign(
            RequestOptions(
                request_id=answer_id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                tenant=body.user or "",
                ttft_target_s=body.ttft_target_s,
                tpot_target_s=body.tpot_target_s,
                add_special_tokens=False,  # the template has written them
                traceparent=traceparent,
                resume=resume_of(body),
                adapter=body.model,
            )
        ),
    )
    return Chat(
        request=request,
        sampling=sampling,
        make=form.make,
        only_one_call=body.parallel_tool_calls is False,
        tells_thoughts=body.include_reasoning is not False,
    )


class _Form(NamedTuple):
    """The form of an answer: its constraint, if any, and a parser of it."""

    constraint: StructuredOutput | None
    make: ParserMaker
    keep_special_tokens: bool


def _form(door: Door, body: ChatRequest, tools: ToolUse, prompt: str) -> _Form:
    """Where the whole output is constrained, a thought becomes a part of the constraint, or is not possible."""
    constraint = structured(body) if tools.forced is None else tools.forced
    without = _Form(constraint, tools.make, tools.keep_special_tokens)
    thinking, tokenizer = door.thinking_format, door.need_tokenizer()
    if thinking is None or door.tool_format.has_channels:
        return without
    has_begun = thinking.has_begun(prompt)
    specials = {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids}
    has_special_tags = not specials.isdisjoint((thinking.open, thinking.close))
    if constraint is not None and not (tools.is_free and constraint is tools.forced):
        is_ours = constraint is tools.forced
        if has_special_tags:  # a grammar is of text
            return without
        constraint = behind_thought(constraint, thinking, has_begun=has_begun, is_ours=is_ours)
        if constraint is None:
            return without
    return _Form(
        constraint,
        lambda: ThinkingParser(thinking, tools.make(), has_begun=has_begun),
        tools.keep_special_tokens or has_special_tags,
    )


def _most_tokens(door: Door, body: ChatRequest) -> int | None:
    """Of a prompt that could be taken; None: of any, since its beginning is cut."""
    return door.engine.engine.model.max_model_len if body.truncate_prompt_tokens is None else None


def count_prompt_tokens(door: Door, body: ChatRequest) -> int:
    """Tokens of the prompt that `prepare_chat` makes. Raises as it does, but takes prompts of any length up to
    `serve.max_text_chars`."""
    prompt, sources = _prompt(door, body, _plan(door, body))
    door.engine.check_text(prompt.text)
    token_ids = prompt.encode(door.need_tokenizer())
    return len(with_pictures(door.engine.engine.model.pictures, token_ids, sources)[0])


def _plan(door: Door, body: ChatRequest) -> ToolUse:
    return plan_tools(body, door.tool_format, door.engine.engine.chat_template(), door.need_tokenizer())


def _prompt(door: Door, body: ChatRequest, tools: ToolUse) -> tuple[PromptText, list[PictureSource]]:
    template = door.engine.engine.chat_template()
    variables = template_variables(body, template, with_tools=bool(tools.shown))
    if body.reasoning_effort is not None and variables == (body.chat_template_kwargs or {}):
        marks.note(door.counts, "conversation", [marks.Mark(marks.Place.REQUEST, "reasoning_effort")])
    return render_chat(door, body.messages, body, tools=tools.shown, variables=variables)


def render_chat(
    door: Door,
    messages: Sequence[Message],
    body: TemplateFields,
    *,
    tools: Sequence[Any] | None,
    variables: dict[str, Any] | None,
) -> tuple[PromptText, list[PictureSource]]:
    """The prompt, and its pictures. Raises InvalidRequest, also for a text that spells a special token where that
    is refused, and UnsupportedOption for pictures that the model does not take."""
    engine = door.engine.engine
    contents = [message.content for message in messages if isinstance(message.content, list)]
    places = [part.where for content in contents for part in content if isinstance(part, ImagePart)]
    plain, sources = split_chat([_shown(message) for message in messages], places=places)
    check_takes_pictures(engine.model.pictures, sources)
    if door.config.refuse_special_text:
        beside = {"tools": tools, "chat_template_kwargs": variables}
        check_special_text(door.need_tokenizer(), plain, {n: v for n, v in beside.items() if v is not None})
    prompt = engine.chat_template().prompt(
        plain, add_generation_prompt=body.add_generation_prompt is not False, tools=tools, variables=variables
    )
    return prompt, sources


def _shown(message: Message) -> dict[str, Any]:
    """What a template may read of a message. Many look for `tool_calls`, and take them for a list that is not empty."""
    fields = message.model_dump(exclude_unset=True, exclude_none=True)
    return {name: value for name, value in fields.items() if name != "tool_calls" or value}


def shown_tools(tools: Sequence[Tool | ForeignTool] | None) -> list[dict[str, Any]] | None:
    """Tools as a template gets them."""
    return [as_fields(tool) for tool in functions_of(tools)] or None


def thinking_switch(template: ChatTemplate, on: bool, *, with_tools: bool) -> dict[str, Any]:
    """The variables that switch thinking on or off, as far as the template reads one."""
    return {name: on for name in _SWITCHES if template.reads(name, with_tools=with_tools)}


def template_variables(body: ChatRequest, template: ChatTemplate, *, with_tools: bool = False) -> dict[str, Any]:
    """What the template gets beside messages and tools. An effort is a hint: it is for templates that read it, and
    `none` also switches thinking off."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    if effort is None:
        return given
    reads_effort = template.reads("reasoning_effort", with_tools=with_tools)
    hints: dict[str, Any] = {"reasoning_effort": effort} if reads_effort else {}
    if effort == "none":
        hints |= thinking_switch(template, False, with_tools=with_tools)
    return {**hints, **given}


class Turn:
    """One sequence of an answer on its way from text to pieces. Used by its answer alone.

    Attributes:
      num_calls: tool calls so far, with those that are left out.
      num_thought_tokens: tokens of the updates that told thoughts and nothing else.
    """

    def __init__(self, chat: Chat) -> None:
        self._parser = chat.make()
        self._only_one_call = chat.only_one_call
        self._tells_thoughts = chat.tells_thoughts
        self._num_pending_tokens = 0  # of updates that told nothing yet
        self.num_calls = 0
        self.num_thought_tokens = 0

    def read(self, update: Update) -> list[Piece]:
        """What an update adds. The pieces of one call follow each other, the first of them with its name."""
        pieces = self._parser.push(update.text)
        if update.finish_reason is not None:
            pieces += self._parser.finish()
        self.num_calls += sum(piece.name is not None for piece in pieces)
        self._num_pending_tokens += len(update.token_ids)
        if pieces:
            if all(piece.reasoning for piece in pieces):
                self.num_thought_tokens += self._num_pending_tokens
            self._num_pending_tokens = 0
        return [piece for piece in pieces if self._is_told(piece)]

    def _is_told(self, piece: Piece) -> bool:
        if piece.call:
            return not self._only_one_call
        return self._tells_thoughts or not piece.reasoning


class PartKind(enum.Enum):
    """What a stretch of an answer is."""

    TEXT = enum.auto()
    THOUGHT = enum.auto()
    CALL = enum.auto()


@dataclasses.dataclass(slots=True, kw_only=True)
class Part:
    """A stretch of one answer. Grows while it is the last of its answer.

    Attributes:
      name: of the function, for a call.
      texts: what it has so far; of a call, its arguments.
      id: unique; APIs put prefixes of their own before it.
      call_id: for a call, in the form that the model's template accepts.
    """

    kind: PartKind
    name: str = ""
    texts: list[str] = dataclasses.field(default_factory=list)
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:24])
    call_id: str = ""

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)


class Added(NamedTuple):
    """`text` was added to `part`, which `is_new` or was there."""

    part: Part
    text: str
    is_new: bool


class Parts:
    """One answer as its parts, in their order. Mutated by its answer through `add`."""

    def __init__(self, door: Door) -> None:
        self._new_call_id = door.tool_format.new_call_id
        self.all: list[Part] = []

    def add(self, piece: Piece) -> Added:
        """Puts the next piece to them."""
        if piece.call is not None:
            kind, text = PartKind.CALL, piece.arguments
        elif piece.reasoning:
            kind, text = PartKind.THOUGHT, piece.reasoning
        else:
            kind, text = PartKind.TEXT, piece.content
        is_new = not self.all or piece.name is not None or self.all[-1].kind is not kind
        if is_new:
            call_id = self._new_call_id() if piece.call is not None else ""
            self.all.append(Part(kind=kind, name=piece.name or "", call_id=call_id))
        self.all[-1].texts.append(text)
        return Added(self.all[-1], text, is_new)
