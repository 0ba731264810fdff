"""The bodies of Anthropic's Messages API, in and out, and how a request becomes one of chat completions.

What this server does not have is refused or ignored as in `requests`. Tools that a provider runs, and blocks that came
from them, are left out of the prompt; documents of text are text. Other documents are refused, since no model here
could read them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic

from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.marks import REQUEST_MARKS, Place
from jaxserve.serve.http.requests import (
    Body,
    ChatRequest,
    Foreign,
    ForeignTool,
    Function,
    FunctionCall,
    FunctionName,
    ImagePart,
    JsonSchema,
    JsonSchemaFormat,
    Many,
    ManyTools,
    MaxTokens,
    Message,
    NamedTool,
    Null,
    Only,
    OtherThan,
    Temperature,
    TextPart,
    Tool,
    ToolCall,
    ToolName,
    TopK,
    TopP,
    content_of,
    kind_of,
)

# ---- in --------------------------------------------------------------------------------------------------------------


class _Block(Body):
    place = Place.PART


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class Base64Source(Body):
    """A picture itself."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class ElsewhereSource(Body):
    """A picture that would have to be fetched, or kept before: refused with the remedy."""

    type: Literal["url", "file"]
    url: str | None = None
    file_id: str | None = None


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | ElsewhereSource, pydantic.Field(discriminator="type")]
    transformations: Annotated[Any, Only({})] = None


class TextSource(Body):
    """The text of a document."""

    place = Place.PART
    type: Literal["text"]
    data: str


class BlocksSource(Body):
    """A document in parts."""

    place = Place.PART
    type: Literal["content"]
    content: str | Many[Annotated[TextBlock | ImageBlock, pydantic.Field(discriminator="type")]]


class FileSource(Body):
    """A file that would have to be read, fetched or kept before: refused with the remedy."""

    place = Place.PART
    type: Literal["base64", "url", "file"]


class DocumentBlock(_Block):
    """Text, under its title."""

    type: Literal["document"]
    source: Annotated[TextSource | BlocksSource | FileSource, pydantic.Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block):
    """What a client's own search found: text, under its title and source."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Many[TextBlock]


class ToolReferenceBlock(_Block):
    """A tool that a client's own search found. The model has seen all tools, so it is told the name."""

    type: Literal["tool_reference"]
    tool_name: str


_RESULT_TYPES = ("text", "image", "document", "search_result", "tool_reference")
_BLOCK_TYPES = (*_RESULT_TYPES[:4], "tool_use", "tool_result", "thinking", "tool_addition", "tool_removal")


class ForeignBlock(Foreign):
    place = Place.PART


ResultBlock = Annotated[
    Annotated[TextBlock, pydantic.Tag("text")]
    | Annotated[ImageBlock, pydantic.Tag("image")]
    | Annotated[DocumentBlock, pydantic.Tag("document")]
    | Annotated[SearchResultBlock, pydantic.Tag("search_result")]
    | Annotated[ToolReferenceBlock, pydantic.Tag("tool_reference")]
    | Annotated[ForeignBlock, OtherThan(*_RESULT_TYPES), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(_RESULT_TYPES, lambda kind, given: kind == "browser_state")),
]


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """`is_error` is a mark, since templates have no place for it: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[ResultBlock] | None = None


class ThinkingBlock(_Block):
    """Is passed to the template. `signature` is Anthropic's own and means nothing here."""

    type: Literal["thinking"]
    thinking: str


class ToolChange(Body):
    """A tool that comes or goes: one of `tools` by its name, or a new one by its definition."""

    place = Place.TOOL
    type: str
    name: str | None = None
    definition: "AnyMessagesTool | None" = None


class ToolChangeBlock(_Block):
    """Says nothing to the model by itself: a tool that was added is among those that it sees, one that was removed is
    not."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ToolChange


# Blocks of tools that a provider runs, and of its services; their calls and results have names with these ends.
_FOREIGN_BLOCKS = ("redacted_thinking", "container_upload", "compaction", "mcp_tool_listing", "fallback")
_FOREIGN_ENDS = ("_tool_use", "_tool_result")


def _is_foreign(kind: str, given: dict[str, Any]) -> bool:
    return kind in _FOREIGN_BLOCKS or kind.endswith(_FOREIGN_ENDS)


InputBlock = Annotated[
    Annotated[TextBlock, pydantic.Tag("text")]
    | Annotated[ImageBlock, pydantic.Tag("image")]
    | Annotated[DocumentBlock, pydantic.Tag("document")]
    | Annotated[SearchResultBlock, pydantic.Tag("search_result")]
    | Annotated[ToolUseBlock, pydantic.Tag("tool_use")]
    | Annotated[ToolResultBlock, pydantic.Tag("tool_result")]
    | Annotated[ThinkingBlock, pydantic.Tag("thinking")]
    | Annotated[ToolChangeBlock, pydantic.Tag("tool_addition")]
    | Annotated[ToolChangeBlock, pydantic.Tag("tool_removal")]
    | Annotated[ForeignBlock, OtherThan(*_BLOCK_TYPES, "tool_reference"), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(_BLOCK_TYPES, _is_foreign)),
]


class InputMessage(Body):
    place = Place.MESSAGE
    role: Literal["user", "assistant", "system"]
    content: str | Many[InputBlock]


class MessagesTool(Body):
    """A function. `input_examples` become the examples of its schema. One that only a provider's programs may call
    (`allowed_callers`) is not shown to the model."""

    place = Place.TOOL
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: Many[dict[str, Any]] | None = None
    allowed_callers: Many[str] | None = None


AnyMessagesTool = Annotated[
    Annotated[MessagesTool, pydantic.Tag("custom")]
    | Annotated[ForeignTool, OtherThan("custom", "function"), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(("custom",), lambda kind, given: kind != "function")),
]
ToolChange.model_rebuild()


class MessagesToolChoice(Body):
    """`name` with the type `tool` alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Sets the variable of chat templates that switches thinking.

    `budget_tokens` is a target of Anthropic's models; here only `max_tokens` bounds thinking and answer together.
    """

    place = Place.PART  # what else it has is about how thoughts are signed and shown
    type: Literal["enabled", "disabled", "adaptive"]


class JsonOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class OutputConfig(Body):
    """`effort` is `reasoning_effort` of a chat."""

    marks = frozenset({"task_budget"})
    effort: str | None = None
    format: JsonOutputFormat | None = None


class MessagesMetadata(Body):
    place = Place.MESSAGE
    user_id: str | None = None


class PromptFields(Body):
    """What makes the prompt: `POST /v1/messages/count_tokens` has these alone."""

    place = Place.REQUEST
    marks = REQUEST_MARKS["messages"]
    model: str
    messages: Many[InputMessage] = pydantic.Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: ManyTools[AnyMessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(PromptFields):
    """`POST /v1/messages`. The user of `metadata` is the tenant."""

    max_tokens: MaxTokens
    metadata: MessagesMetadata | None = None
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    container: Null = None
    inference_geo: Null = None
    thread: Null = None


# ---- out -------------------------------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOut(pydantic.BaseModel):
    type: Literal["text"]
    text: str


class ThinkingOut(pydantic.BaseModel):
    """`signature` is always empty: thoughts come back unsigned here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOut(pydantic.BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = Annotated[TextOut | ThinkingOut | ToolUseOut, pydantic.Field(discriminator="type")]


class MessagesUsage(pydantic.BaseModel):
    """`input_tokens` were computed, `cache_read_input_tokens` were in the cache; the prompt has both."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(pydantic.BaseModel):
    """An answer; the first event of a stream has one without content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(pydantic.BaseModel):
    input_tokens: int


# ---- as a chat -------------------------------------------------------------------------------------------------------


def chat_of(body: PromptFields, sampling: dict[str, Any], switch: Callable[[bool], dict[str, Any]]) -> ChatRequest:
    """The same request as one of chat completions, with further fields of it.

    `switch`: the variables of the template for thinking that is on or off. Raises InvalidRequest.
    """
    messages = [] if body.system is None else [Message(role="system", content=_text(body.system))]
    for number, message in enumerate(body.messages):
        messages += _turns(message, f"messages[{number}]")
    if not messages:
        raise InvalidRequest("messages have nothing that a model here could read; give one a text")
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's, and this server cannot go on within a message; end with a user's"
        )
    options: dict[str, Any] = {"model": body.model, **sampling, **_tool_options(body)}
    if body.output_config is not None:
        if body.output_config.effort is not None:
            options["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = JsonSchema(name="answer", schema=body.output_config.format.schema_)
            options["response_format"] = JsonSchemaFormat(type="json_schema", json_schema=schema)
    if body.thinking is not None and body.thinking.type != "adaptive":
        options["chat_template_kwargs"] = switch(body.thinking.type == "enabled")
    return ChatRequest(messages=messages, **options)


def _tool_options(body: PromptFields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    given = _offered(body)
    if given:
        options["tools"] = [_tool(tool) if isinstance(tool, MessagesTool) else tool for tool in given]
    choice = body.tool_choice
    if choice is None:
        return options
    if (choice.name is None) == (choice.type == "tool"):
        raise InvalidRequest("tool_choice has a name if its type is 'tool', and with that alone")
    if choice.name is not None:
        for tool in given:
            if isinstance(tool, ForeignTool) and tool.name == choice.name:
                raise InvalidRequest(
                    f"tool_choice demands {choice.name!r:.80}, a tool of the type {tool.type!r:.80}, which a provider "
                    "runs and this server does not; choose a function"
                )
        options["tool_choice"] = NamedTool(type="function", function=FunctionName(name=choice.name))
    else:
        options["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def _offered(body: PromptFields) -> list[MessagesTool | ForeignTool]:
    """The tools, with those that messages add and without those that they remove."""
    tools = list(body.tools or ())
    removed: set[str | None] = set()
    blocks = (block for message in body.messages if not isinstance(message.content, str) for block in message.content)
    for block in blocks:
        if not isinstance(block, ToolChangeBlock):
            continue
        if block.type == "tool_removal":
            removed.add(block.tool.name)
            continue
        removed.discard(block.tool.name)
        if (new := block.tool.definition) is not None:
            removed.discard(new.name)
            tools = [*(tool for tool in tools if tool.name != new.name), new]
    found: list[MessagesTool | ForeignTool] = []
    for tool in tools:
        if isinstance(tool, MessagesTool) and "direct" not in (tool.allowed_callers or ["direct"]):
            tool = ForeignTool(type="programmatic", name=tool.name)
        if tool.name not in removed:
            found.append(tool)
    return found


def _tool(tool: MessagesTool) -> Tool:
    schema = tool.input_schema
    if tool.input_examples:
        schema = {**schema, "examples": tool.input_examples}
    fields: dict[str, Any] = {"name": tool.name, "parameters": schema}
    if tool.description is not None:
        fields["description"] = tool.description
    if tool.strict is not None:
        fields["strict"] = tool.strict
    return Tool(type="function", function=Function(**fields))


def _turns(message: InputMessage, where: str) -> list[Message]:
    """One message here may be several there: each result of a tool is a turn of its own. A message of blocks that are
    left out is none."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return _assistant(message.content, where)
    turns: list[Message] = []
    parts: list[TextPart | ImagePart] = []
    if not message.content:
        raise InvalidRequest(f"{where} has no content; give it a block, or leave it out")
    for at, block in enumerate(message.content):
        place = f"{where}.content[{at}]"
        if isinstance(block, ForeignBlock | ToolChangeBlock):
            continue
        if isinstance(block, ToolResultBlock) and message.role == "user":
            turns += _user(message.role, parts)
            parts = []
            result = block.content or ""
            if not isinstance(result, str):
                pieces = [_parts(one, f"{place}.content[{n}]") for n, one in enumerate(result)]
                result = content_of([part for piece in pieces for part in piece])
            turns.append(Message(role="tool", tool_call_id=block.tool_use_id, content=result))
        elif isinstance(block, ToolUseBlock | ToolResultBlock | ThinkingBlock) or (
            isinstance(block, ImageBlock) and message.role != "user"
        ):
            raise InvalidRequest(f"{where} is the {message.role}'s, and has a block of type {block.type!r}")
        else:
            parts += _parts(block, place)
    return turns + _user(message.role, parts)


def _parts(
    block: TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ForeignBlock, where: str
) -> list[TextPart | ImagePart]:
    """A block as parts of a chat's message. Raises InvalidRequest."""
    match block:
        case TextBlock():
            return [TextPart(type="text", text=block.text)]
        case ImageBlock():
            return [_picture(block, where)]
        case DocumentBlock():
            return _document(block, where)
        case SearchResultBlock():
            return [TextPart(type="text", text="\n".join([block.title, block.source, _text(block.content)]))]
        case ToolReferenceBlock():
            return [TextPart(type="text", text=block.tool_name)]
        case ForeignBlock():
            return []


def _document(block: DocumentBlock, where: str) -> list[TextPart | ImagePart]:
    source = block.source
    if isinstance(source, FileSource):
        raise InvalidRequest(
            f"{where} is a document with a source of type {source.type!r}, but this server reads no files and fetches "
            "nothing; send its text, as {type: 'text', media_type: 'text/plain', data: ...}"
        )
    head: list[TextPart | ImagePart] = [
        TextPart(type="text", text=text) for text in (block.title, block.context) if text
    ]
    if isinstance(source, TextSource):
        return [*head, TextPart(type="text", text=source.data)]
    if isinstance(source.content, str):
        return [*head, TextPart(type="text", text=source.content)]
    return head + [
        part for at, one in enumerate(source.content) for part in _parts(one, f"{where}.source.content[{at}]")
    ]


def _picture(block: ImageBlock, where: str) -> ImagePart:
    source = block.source
    if isinstance(source, ElsewhereSource):
        raise InvalidRequest(
            f"{where} is a picture with a source of type {source.type!r}, but this server fetches nothing and keeps no "
            "pictures; send it as {type: 'base64', media_type: 'image/png', data: ...}"
        )
    return ImagePart.at(where, f"data:{source.media_type};base64,{source.data}")


def _user(role: Literal["user", "system"], parts: Sequence[TextPart | ImagePart]) -> list[Message]:
    return [Message(role=role, content=content_of(parts))] if parts else []


def _assistant(blocks: Sequence[InputBlock], where: str) -> list[Message]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, type="function", function=function))
        elif not isinstance(block, ForeignBlock | ToolChangeBlock):
            raise InvalidRequest(f"{where} is the assistant's, and has a block of type {block.type!r}")
    if blocks and not (texts or thoughts or calls):
        return []  # all of them are left out
    fields: dict[str, Any] = {"content": "\n".join(texts)}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    return [Message(role="assistant", **fields)]


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
