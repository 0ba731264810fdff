"""The bodies of Anthropic's Messages API, in and out, and how a request becomes one of chat completions.

As in `requests`, an unknown field is refused by name, and fields that this server does not have are known for the
values that change nothing. Blocks of a conversation that no model here could read (documents, results of tools that a
provider runs) are no members of the unions, so they are refused with the list of those that are.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.requests import (
    Body,
    ChatRequest,
    Function,
    FunctionCall,
    FunctionName,
    ImagePart,
    JsonSchema,
    JsonSchemaFormat,
    Many,
    MaxTokens,
    Message,
    NamedTool,
    Null,
    Only,
    Temperature,
    TextPart,
    Tool,
    ToolCall,
    TopK,
    TopP,
    content_of,
)

# ---- in --------------------------------------------------------------------------------------------------------------


class _Block(Body):
    cache_control: dict[str, Any] | None = None  # every prefix is cached here, asked or not


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, Only([])] = None


class Base64Source(Body):
    """A picture itself."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp"]
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


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Block):
    """`is_error` is not shown to templates, which have no place for it: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[TextBlock | ImageBlock, pydantic.Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """Is passed to the template. `signature` is Anthropic's own and means nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


InputBlock = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    pydantic.Field(discriminator="type"),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[InputBlock]


class MessagesTool(Body):
    """A function. Tools of other types run at a provider, and there is none."""

    type: Literal["custom"] | None = None
    name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always told as they come
    input_examples: Annotated[Any, Only([])] = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None


class MessagesToolChoice(Body):
    """`name` with the type `tool` alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Sets the variable `enable_thinking` of chat templates that read it.

    `budget_tokens` is a target of Anthropic's models; here only `max_tokens` bounds thinking and answer together.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class OutputConfig(Body):
    """`effort` is `reasoning_effort` of a chat; `high` is Anthropic's default and asks for nothing."""

    effort: str | None = None
    format: JsonOutputFormat | None = None


class MessagesMetadata(Body):
    user_id: str | None = None


class PromptFields(Body):
    """What makes the prompt: `POST /v1/messages/count_tokens` has these alone."""

    model: str
    messages: Many[InputMessage] = pydantic.Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: Many[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: Null = None
    mcp_servers: Annotated[Any, Only([])] = None
    speed: Annotated[Any, Only("standard")] = None


class MessagesRequest(PromptFields):
    """`POST /v1/messages`. The user of `metadata` is the tenant."""

    max_tokens: MaxTokens
    metadata: MessagesMetadata | None = None
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    service_tier: Annotated[Any, Only("auto", "standard_only")] = None
    container: Null = None
    inference_geo: Null = None


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


def chat_of(body: PromptFields, sampling: dict[str, Any], enable_thinking: bool) -> ChatRequest:
    """The same request as one of chat completions, with further fields of it.

    `enable_thinking`: the template reads that variable. Raises InvalidRequest.
    """
    messages = [] if body.system is None else [Message(role="system", content=_text(body.system))]
    for number, message in enumerate(body.messages):
        messages += _turns(message, f"messages[{number}]")
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's, and this server cannot go on within a message; end with a user's"
        )
    options: dict[str, Any] = {"model": body.model, **sampling, **_tool_options(body)}
    if body.output_config is not None:
        if body.output_config.effort not in (None, "high"):
            options["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = JsonSchema(name="answer", schema=body.output_config.format.schema_)
            options["response_format"] = JsonSchemaFormat(type="json_schema", json_schema=schema)
    if enable_thinking and body.thinking is not None and body.thinking.type != "adaptive":
        options["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    return ChatRequest(messages=messages, **options)


def _tool_options(body: PromptFields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.tools:
        options["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is None:
        return options
    if (choice.name is None) == (choice.type == "tool"):
        raise InvalidRequest("tool_choice has a name if its type is 'tool', and with that alone")
    if choice.name is not None:
        options["tool_choice"] = NamedTool(type="function", function=FunctionName(name=choice.name))
    else:
        options["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def _tool(tool: MessagesTool) -> Tool:
    fields: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        fields["description"] = tool.description
    if tool.strict is not None:
        fields["strict"] = tool.strict
    return Tool(type="function", function=Function(**fields))


def _turns(message: InputMessage, where: str) -> list[Message]:
    """One message here may be several there: each result of a tool is a turn of its own."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    turns: list[Message] = []
    parts: list[TextPart | ImagePart] = []
    for at, block in enumerate(message.content):
        place = f"{where}.content[{at}]"
        if isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and message.role == "user"):
            parts.append(_part(block, place))
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            turns += _user(message.role, parts)
            parts = []
            result = block.content or ""
            if not isinstance(result, str):
                result = content_of([_part(one, f"{place}.content[{n}]") for n, one in enumerate(result)])
            turns.append(Message(role="tool", tool_call_id=block.tool_use_id, content=result))
        else:
            raise InvalidRequest(f"{where} is the {message.role}'s, and has a block of type {block.type!r}")
    turns += _user(message.role, parts)
    if not turns:
        raise InvalidRequest(f"{where} has no content; give it a block, or leave it out")
    return turns


def _part(block: TextBlock | ImageBlock, where: str) -> TextPart | ImagePart:
    if isinstance(block, TextBlock):
        return TextPart(type="text", text=block.text)
    source = block.source
    if isinstance(source, ElsewhereSource):
        raise InvalidRequest(
            f"{where} is a picture with a source of type {source.type!r}, but this server fetches nothing and keeps no "
            "pictures; send it as {type: 'base64', media_type: 'image/png', data: ...}"
        )
    return ImagePart.at(where, f"data:{source.media_type};base64,{source.data}")


def _user(role: Literal["user", "system"], parts: Sequence[TextPart | ImagePart]) -> list[Message]:
    return [Message(role=role, content=content_of(parts))] if parts else []


def _assistant(blocks: Sequence[InputBlock], where: str) -> Message:
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
        else:
            raise InvalidRequest(f"{where} is the assistant's, and has a block of type {block.type!r}")
    fields: dict[str, Any] = {"content": "\n".join(texts)}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    return Message(role="assistant", **fields)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
