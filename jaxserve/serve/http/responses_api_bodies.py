"""The bodies of OpenAI's Responses API, in and out, and how a request becomes one of chat completions.

What this server does not have is refused or ignored as in `requests`. Tools that only a provider or its programs can
run (search, files, computers, free text), and the items of their calls, are left out of the prompt. The functions of a
namespace are functions whose names begin with its name; in items they have the two names apart.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pydantic_core

from jaxserve.api import sampling_ranges
from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.marks import REQUEST_MARKS, Place
from jaxserve.serve.http.requests import (
    AllowedTools,
    Body,
    ChatRequest,
    Foreign,
    ForeignTool,
    Function,
    FunctionCall,
    FunctionName,
    ImagePart,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Many,
    ManyTools,
    MaxTokens,
    Message,
    Metadata,
    NamedTool,
    NeutralFields,
    Null,
    Only,
    OtherThan,
    Temperature,
    TextFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolName,
    ToolSet,
    TopP,
    content_of,
    kind_of,
)

# ---- in --------------------------------------------------------------------------------------------------------------


class InputText(Body):
    """`output_text` comes back from an answer."""

    place = Place.PART
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """An answer that was a refusal: it is what the assistant said."""

    place = Place.PART
    type: Literal["refusal"]
    refusal: str


class InputImage(Body):
    """`image_url` is a data: URL."""

    place = Place.PART
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Null = None


InputPart = Annotated[InputText | RefusalPart | InputImage, pydantic.Field(discriminator="type")]


class _Item(Body):
    """`id`, `status` and the like come back from an answer, and are marks."""

    place = Place.ITEM


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[InputPart]


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[InputPart]


class SummaryText(Body):
    place = Place.PART
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    place = Place.PART
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(_Item):
    """Its `content` is passed to the template; without any, its `summary`. What is encrypted is passed over."""

    type: Literal["reasoning"]
    summary: Many[SummaryText] = pydantic.Field(default_factory=list)
    content: Many[ReasoningText] | None = None


_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")  # a message may leave its type out


class ForeignItem(Foreign):
    place = Place.ITEM


# Items of tools and services of a provider; its calls and their results have names with these ends.
_FOREIGN_ITEMS = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "configuration_update",
        "context_compaction",
        "ghost_snapshot",
        "item_reference",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "program",
    }
)
_FOREIGN_ENDS = ("_call", "_output")


def _is_foreign(kind: str, given: dict[str, Any]) -> bool:
    return kind in _FOREIGN_ITEMS or kind.endswith(_FOREIGN_ENDS)


InputItem = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[FunctionCallItem, pydantic.Tag("function_call")]
    | Annotated[FunctionCallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")]
    | Annotated[ForeignItem, OtherThan(*_ITEM_TYPES), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(_ITEM_TYPES, _is_foreign)),
]


class FunctionTool(Body):
    """`strict` as in chats."""

    place = Place.TOOL
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions under a common name."""

    place = Place.TOOL
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: ManyTools[
        Annotated[
            Annotated[FunctionTool, pydantic.Tag("function")]
            | Annotated[ForeignTool, OtherThan("function"), pydantic.Tag("foreign")],
            pydantic.Discriminator(kind_of(("function",), lambda kind, given: True)),
        ]
    ]

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools if isinstance(tool, FunctionTool)]


AnyResponsesTool = Annotated[
    Annotated[FunctionTool, pydantic.Tag("function")]
    | Annotated[NamespaceTool, pydantic.Tag("namespace")]
    | Annotated[ForeignTool, OtherThan("function", "namespace"), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(("function", "namespace"), lambda kind, given: True)),
]


class ChosenFunction(Body):
    """A function by its name, with that of its namespace where it has one."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class ChosenNamespace(Body):
    """All functions of a namespace."""

    type: Literal["namespace"]
    name: str


class ChosenForeignTool(ForeignTool):
    """A tool of a provider, of which there are none: refused by name where it is demanded."""


_CHOICES = kind_of(("function", "namespace"), lambda kind, given: True)


class AllowedFunctions(Body):
    """Only these of the tools exist for this answer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ManyTools[
        Annotated[
            Annotated[ChosenFunction, pydantic.Tag("function")]
            | Annotated[ChosenNamespace, pydantic.Tag("namespace")]
            | Annotated[ChosenForeignTool, OtherThan("function", "namespace"), pydantic.Tag("foreign")],
            pydantic.Discriminator(_CHOICES),
        ]
    ]


ToolChoice = Annotated[
    Annotated[ChosenFunction, pydantic.Tag("function")]
    | Annotated[AllowedFunctions, pydantic.Tag("allowed_tools")]
    | Annotated[ChosenForeignTool, OtherThan("function", "allowed_tools"), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(("function", "allowed_tools"), lambda kind, given: True)),
]


class NamedSchemaFormat(JsonSchema):
    """A format of `text`: the fields of `json_schema` beside its type."""

    type: Literal["json_schema"]


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, pydantic.Field(discriminator="type")] | None
    ) = None
    marks = frozenset({"verbosity"})


class Reasoning(Body):
    """`effort` is `reasoning_effort` of a chat. Reasoning is told in full, and never summed up: the rest is ignored."""

    place = Place.PART
    effort: str | None = None


class ResponsesStreamOptions(Body):
    marks = frozenset({"include_obfuscation"})


_LOGPROBS = "message.output_text.logprobs"


def _check_include(names: list[str]) -> list[str]:
    """What belongs to tools of a provider, or is told anyway, asks for nothing here."""
    if _LOGPROBS in names:
        text = "{name} is not told by this API here; use logprobs of chat completions"
        raise pydantic_core.PydanticCustomError("include", text, {"name": _LOGPROBS})
    return names


class ResponsesRequest(NeutralFields):
    """`POST /v1/responses`. `store`: keep the answer for `previous_response_id` and for GET; true unless given."""

    marks = REQUEST_MARKS["responses"]
    metadata: Metadata | None = None
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
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tools: ManyTools[AnyResponsesTool] | None = None
    top_p: TopP | None = None
    user: str | None = None

    background: Annotated[Any, Only(False)] = None
    conversation: Null = None
    include: Annotated[Many[str], pydantic.AfterValidator(_check_include)] | None = None
    prompt: Null = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: Annotated[Any, Only(0)] = None


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
    namespace: str | None = None


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
    tools = functions_of(body)
    options: dict[str, Any] = {
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tool_choice": _choice(body, tools),
        "response_format": None if body.text is None else _format(body.text),
    }
    if body.tools:
        shown = [_tool(name, function.tool) for name, function in tools.items()]
        options["tools"] = [*shown, *(tool for tool in body.tools if isinstance(tool, ForeignTool))]
    return ChatRequest(messages=messages, **{name: value for name, value in options.items() if value is not None})


class Named(NamedTuple):
    """A function, and the namespace that it is in."""

    namespace: str | None
    tool: FunctionTool


def functions_of(body: ResponsesRequest) -> dict[str, Named]:
    """The functions by the names that the model sees. Raises InvalidRequest for two of one name."""
    found: dict[str, Named] = {}
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            named = [Named(None, tool)]
        else:
            named = [Named(tool.name, each) for each in tool.functions] if isinstance(tool, NamespaceTool) else []
        for each in named:
            name = _flat(each.namespace, each.tool.name)
            if name in found:
                raise InvalidRequest(f"tools has two functions that are called {name!r:.200}; rename one")
            found[name] = each
    return found


def _flat(namespace: str | None, name: str) -> str:
    """The name that the model sees: `namespace__name`, as names of tools of MCP servers are."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def messages_of(body: ResponsesRequest) -> list[Message]:
    """The input as messages. The items of one answer (thoughts, text, calls) are one message of a chat."""
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    messages: list[Message] = []
    answer: list[MessageItem | FunctionCallItem | ReasoningItem] = []
    for number, item in enumerate(body.input):
        where = f"input[{number}]"
        if isinstance(item, ForeignItem):
            continue
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
    calls = [
        (item.call_id, _flat(item.namespace, item.name), item.arguments)
        for item in items
        if isinstance(item, FunctionCallItem)
    ]
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


def _text(content: str | Sequence[InputText | RefusalPart | InputImage]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_words(part) for part in content if not isinstance(part, InputImage))


def _words(part: InputText | RefusalPart) -> str:
    return part.text if isinstance(part, InputText) else part.refusal


def _content(
    content: str | Sequence[InputText | RefusalPart | InputImage], where: str
) -> str | list[TextPart | ImagePart]:
    """The content of a message. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return content_of([_part(part, f"{where}[{at}]") for at, part in enumerate(content)])


def _part(part: InputText | RefusalPart | InputImage, where: str) -> TextPart | ImagePart:
    if not isinstance(part, InputImage):
        return TextPart(type="text", text=_words(part))
    if part.image_url is None:
        raise InvalidRequest(f"{where} is a picture without image_url, which has it: 'data:image/png;base64,...'")
    return ImagePart.at(where, part.image_url)


def _tool(name: str, tool: FunctionTool) -> Tool:
    fields = tool.model_dump(exclude_none=True, exclude={"type", "name"})
    return Tool(type="function", function=Function(name=name, **fields))


def _choice(body: ResponsesRequest, tools: Mapping[str, Named]) -> Any:
    """Raises InvalidRequest for a tool that is not a function."""
    choice = body.tool_choice
    if isinstance(choice, ChosenForeignTool):
        raise _foreign(choice)
    if isinstance(choice, ChosenFunction):
        return _named(_flat(choice.namespace, choice.name))
    if isinstance(choice, AllowedFunctions):
        names: list[str] = []
        for one in choice.tools:
            if isinstance(one, ChosenFunction):
                names.append(_flat(one.namespace, one.name))
            elif isinstance(one, ChosenNamespace):
                names += [name for name, function in tools.items() if function.namespace == one.name]
        foreign = next((one for one in choice.tools if isinstance(one, ChosenForeignTool)), None)
        if foreign is not None and not names:
            if choice.mode == "required":
                raise _foreign(foreign)
            return "none"
        return AllowedTools(
            type="allowed_tools", allowed_tools=ToolSet(mode=choice.mode, tools=[_named(name) for name in names])
        )
    return choice


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))


def _foreign(choice: ChosenForeignTool) -> InvalidRequest:
    name = "" if choice.name is None else f" called {choice.name!r:.80}"
    return InvalidRequest(
        f"tool_choice demands a tool of the type {choice.type!r:.80}{name}, which this server does not run; choose a "
        "function"
    )


def _format(text: TextConfig) -> Any:
    if isinstance(text.format, NamedSchemaFormat):
        fields = {"name": text.format.name, "schema": text.format.schema_}
        return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(**fields))
    return text.format
