"""The bodies of OpenAI's Responses API, in and out, and how a request becomes one of chat completions.

As in `requests`, an unknown field is refused by name, and fields that this server does not have are known for the
values that change nothing. Tools and items that only a provider can run (search, files, computers) are no members of
the unions, so they are refused with the list of those that are.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from jaxserve.api import sampling_ranges
from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.requests import (
    AllowedTools,
    Body,
    ChatRequest,
    Function,
    FunctionCall,
    FunctionName,
    ImagePart,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Many,
    MaxTokens,
    Message,
    NamedTool,
    NeutralFields,
    Null,
    Only,
    Temperature,
    TextFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolSet,
    TopP,
    content_of,
)

# ---- in --------------------------------------------------------------------------------------------------------------


class InputText(Body):
    """`output_text` comes back from an answer, with what is about its text."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Many[dict[str, Any]] | None = None
    logprobs: Many[dict[str, Any]] | None = None


class InputImage(Body):
    """`image_url` is a data: URL. `detail` other than auto would change the size of the picture."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Null = None
    detail: Annotated[Any, Only("auto")] = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


InputPart = Annotated[InputText | InputImage, pydantic.Field(discriminator="type")]


class _Item(Body):
    """`id` and `status` come back from an answer, and are not shown to templates."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[InputPart]
    phase: str | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Null = None
    caller: dict[str, Any] | None = None


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[InputPart]
    name: str | None = None
    namespace: Null = None
    caller: dict[str, Any] | None = None


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Its `content` is passed to the template; without any, its `summary`. Nothing is ever encrypted here."""

    type: Literal["reasoning"]
    summary: Many[SummaryText] = pydantic.Field(default_factory=list)
    content: Many[ReasoningText] | None = None
    encrypted_content: Null = None


def _kind(item: Any) -> str | None:
    """The type of an item; a message may leave it out."""
    if isinstance(item, dict):
        kind = item.get("type")
        return "message" if kind is None else kind if isinstance(kind, str) else None
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[FunctionCallItem, pydantic.Tag("function_call")]
    | Annotated[FunctionCallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")],
    pydantic.Discriminator(_kind),
]


class FunctionTool(Body):
    """`strict` as in chats."""

    type: Literal["function"]
    name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """Only these of the tools exist for this answer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[ChosenFunction]


class NamedSchemaFormat(JsonSchema):
    """A format of `text`: the fields of `json_schema` beside its type."""

    type: Literal["json_schema"]


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, pydantic.Field(discriminator="type")] | None
    ) = None
    verbosity: Annotated[Any, Only("medium")] = None


class Reasoning(Body):
    """`effort` is `reasoning_effort` of a chat. Reasoning is told in full, and never summed up."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Annotated[Any, Only(False)] = None


class ResponsesRequest(NeutralFields):
    """`POST /v1/responses`. `store`: keep the answer for `previous_response_id` and for GET; true unless given."""

    model: str | None = None
    input: str | Many[InputItem]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None = None
    tools: Many[FunctionTool] | None = None
    top_p: TopP | None = None
    user: str | None = None

    background: Annotated[Any, Only(False)] = None
    context_management: Annotated[Any, Only([])] = None
    conversation: Null = None
    include: Many[Literal["reasoning.encrypted_content"]] | None = None  # nothing is encrypted: it is told anyway
    max_tool_calls: int | None = None  # of tools that the server runs, of which there are none
    prompt: Null = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: Annotated[Any, Only(0)] = None
    truncation: Annotated[Any, Only("disabled")] = None


# ---- out -------------------------------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(pydantic.BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class OutputMessage(pydantic.BaseModel):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputThought(pydantic.BaseModel):
    """`content` has the thought; there is never a summary of it."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputCall(pydantic.BaseModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputThought | OutputCall, pydantic.Field(discriminator="type")]


class InputTokensDetails(pydantic.BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(pydantic.BaseModel):
    reasoning_tokens: int


class ResponsesUsage(pydantic.BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesError(pydantic.BaseModel):
    code: str
    message: str


class IncompleteDetails(pydantic.BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(pydantic.BaseModel):
    """An answer, beside the fields of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    background: Literal[False]
    service_tier: Literal["default"]
    user: str | None = None


class DeletedResponse(pydantic.BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True]


# ---- as a chat -------------------------------------------------------------------------------------------------------


def chat_of(body: ResponsesRequest, before: Sequence[Message], given: Sequence[Message]) -> ChatRequest:
    """The same request as one of chat completions.

    `before`: the conversation to go on with, `given`: the messages of `body.input`. Raises InvalidRequest.
    """
    low, high = sampling_ranges()["max_tokens"]
    if body.max_output_tokens is not None and not low <= body.max_output_tokens <= high:
        raise InvalidRequest(
            f"max_output_tokens is {body.max_output_tokens}, but must be {low:.0f} to {high:.0f}, or null for all the "
            "context holds"
        )
    messages = [*before, *given]
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    options: dict[str, Any] = {
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tool_choice": _choice(body),
        "response_format": None if body.text is None else _format(body.text),
    }
    if body.tools:
        options["tools"] = [_tool(tool) for tool in body.tools]
    return ChatRequest(messages=messages, **{name: value for name, value in options.items() if value is not None})


def messages_of(body: ResponsesRequest) -> list[Message]:
    """The input as messages. The items of one answer (thoughts, text, calls) are one message of a chat."""
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    messages: list[Message] = []
    answer: list[MessageItem | FunctionCallItem | ReasoningItem] = []
    for number, item in enumerate(body.input):
        where = f"input[{number}]"
        if isinstance(item, FunctionCallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        ):
            if isinstance(item, MessageItem) and any(isinstance(part, InputImage) for part in item.content):
                raise InvalidRequest(f"{where} is the assistant's, and has a picture; only text comes from a model")
            answer.append(item)
            continue
        messages += _answer(answer)
        answer = []
        if isinstance(item, MessageItem):
            messages.append(Message(role=item.role, content=_content(item.content, f"{where}.content")))
        else:
            output = _content(item.output, f"{where}.output")
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
    return messages + _answer(answer)


def _answer(items: Sequence[MessageItem | FunctionCallItem | ReasoningItem]) -> list[Message]:
    texts = [_text(item.content) for item in items if isinstance(item, MessageItem)]  # no pictures: see messages_of
    thoughts = [
        part.text for item in items if isinstance(item, ReasoningItem) for part in (item.content or item.summary)
    ]
    calls = [(item.call_id, item.name, item.arguments) for item in items if isinstance(item, FunctionCallItem)]
    return [assistant_message(texts, thoughts, calls)] if texts or calls else []


def assistant_message(texts: Sequence[str], thoughts: Sequence[str], calls: Sequence[tuple[str, str, str]]) -> Message:
    """An answer as a message. `calls`: id, name and arguments of each."""
    fields: dict[str, Any] = {"content": "\n".join(texts)}
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    if calls:
        fields["tool_calls"] = [
            ToolCall(id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments))
            for call_id, name, arguments in calls
        ]
    return Message(role="assistant", **fields)


def _text(content: str | Sequence[InputText | InputImage]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, InputText))


def _content(content: str | Sequence[InputText | InputImage], where: str) -> str | list[TextPart | ImagePart]:
    """The content of a message. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return content_of([_part(part, f"{where}[{at}]") for at, part in enumerate(content)])


def _part(part: InputText | InputImage, where: str) -> TextPart | ImagePart:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    if part.image_url is None:
        raise InvalidRequest(f"{where} is a picture without image_url, which has it: 'data:image/png;base64,...'")
    return ImagePart.at(where, part.image_url)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude_none=True, exclude={"type"})))


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, ChosenFunction):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = [NamedTool(type="function", function=FunctionName(name=tool.name)) for tool in choice.tools]
        return AllowedTools(type="allowed_tools", allowed_tools=ToolSet(mode=choice.mode, tools=tools))
    return choice


def _format(text: TextConfig) -> Any:
    if isinstance(text.format, NamedSchemaFormat):
        fields = {"name": text.format.name, "schema": text.format.schema_}
        return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(**fields))
    return text.format
