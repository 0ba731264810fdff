"""The bodies that clients send: OpenAI's fields, and vLLM's further sampling options beside them.

Owns names and types. Refuses ranges and everything that two fields say together: `SamplingParams` checks itself, and
this file must not say the same in other words. An unknown field is refused by name, since a client that believes it
had been obeyed is worse off than one that is told.
"""

from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core

T = TypeVar("T")


class _Bounded:
    """On a list: the first wrong item is the only one told, and there is an end to the number of items.

    By default pydantic tells of all, and a union tries each of its members on all: a body of four megabytes took
    minutes, in which nobody was served. The limit is no part of the document, which knows no sizes of bodies either.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        limit = {} if self._most is None else {"max_length": self._most}
        return {**handler(source), "fail_fast": True, **limit}

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        document = handler(core_schema)
        document.pop("maxItems", None)
        return document


_MOST_ITEMS = 2**14  # of what costs more than a number
_MOST_FIELDS = 100
Ids = Annotated[list[int], _Bounded()]
Many = Annotated[list[T], _Bounded(_MOST_ITEMS)]


def _bounded(given: Any, most: int) -> Any:
    if isinstance(given, dict) and len(given) > most:
        counts = {"count": len(given), "most": most}
        raise pydantic_core.PydanticCustomError("too_many_fields", "{count} fields; at most {most} work", counts)
    return given


Biases = Annotated[dict[str, float], pydantic.BeforeValidator(lambda given: _bounded(given, _MOST_ITEMS))]


class Body(pydantic.BaseModel):
    """Nothing is converted: "5" is no number, and 1 is not true."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _count_fields(cls, given: Any) -> Any:
        """Each unknown field is an error of its own; see above."""
        return _bounded(given, _MOST_FIELDS)


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """`schema` is the JSON schema of the answer. `strict` changes nothing: it always holds here."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = pydantic.Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, pydantic.Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's way to constrain the output: exactly one of these."""

    json_: dict[str, Any] | str | None = pydantic.Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None


class SamplingFields(Body):
    """What completions and chats share. Absent, as null, is the default of `SamplingParams`."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Many[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = pydantic.Field(default=None, pattern=r"^[!-~]{1,256}$")  # is sent back in a header


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. `max_tokens` 0 with `echo` only scores the prompt."""

    prompt: str | Many[str] | Ids | Many[Ids]
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """`arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class Function(Body):
    """`parameters` is the JSON schema of its arguments; absent, it takes none.

    `strict` asks that arguments fit the schema. `tool_choice: required` or a named function sees to that with or
    without it; with `auto` the model writes as it likes, and arguments are passed on as written.
    """

    name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatFields(Body):
    """What becomes the prompt of a chat."""

    messages: Many[Message] = pydantic.Field(min_length=1)
    tools: Many[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, ChatFields):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class EmbeddingRequest(Body):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: str | Many[str] | Ids | Many[Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: `prompt` or `messages`, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = pydantic.Field(default=None, min_length=1)
    tools: Many[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
