"""The bodies that clients send: OpenAI's fields, and vLLM's further sampling options beside them.

Names and types are declared here. Ranges and combinations of fields are checked by `SamplingParams`, so that each error
has one wording; the document has them, too (`InRange`). An unknown option is refused by name, since a client that
believes it had been obeyed is worse off than one that is told. Options of either API that this server does not have are
known for the values that change nothing (`Only`): clients send them unasked. `marks` says which fields are no options,
and are ignored. Null is the same as absent everywhere.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import pydantic.json_schema
import pydantic_core
from pydantic_core import core_schema

from jaxserve.api import sampling_ranges
from jaxserve.serve.http.marks import REQUEST_MARKS, Mark, Place
from jaxserve.serve.http.whole_numbers import WholeNumbers

T = TypeVar("T")


class _Bounded:
    """On a list: the number of items is bounded, and is looked at before the first of them; then only the first wrong
    item is reported.

    By default pydantic makes as many items as it may have before it counts them, reports all that are wrong, and a
    union tries each of its members on all: a body of four megabytes took minutes, in which no client was served. The
    limit is no part of the document, which knows no sizes of bodies either.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_before_validator_function(
            self._check,
            {**handler(source), "fail_fast": True},  # pyright: ignore[reportArgumentType]
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema["schema"])

    def _check(self, given: Any) -> Any:
        if isinstance(given, list) and len(given) > self._most:
            counts = {"count": len(given), "most": self._most}
            text = "List should have at most {most} items, not {count}"
            raise pydantic_core.PydanticCustomError("too_long", text, counts)
        return given


class _InSlices:
    """On a list of whole numbers, which may be a million: they are looked at in slices, between which other threads
    have their turn, and only the first wrong one is reported."""

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_wrap_validator_function(
            self._check,
            {**handler(source), "fail_fast": True},  # pyright: ignore[reportArgumentType]
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema["schema"])

    def _check(self, given: Any, check: Callable[[Any], list[int]]) -> list[int]:
        if not isinstance(given, list) or len(given) <= _NUMBERS_AT_ONCE:
            return check(given)
        found: list[int] = []
        for start in range(0, len(given), _NUMBERS_AT_ONCE):
            try:
                found += check(given[start : start + _NUMBERS_AT_ONCE])
            except pydantic.ValidationError as error:
                [wrong] = error.errors(include_url=False, include_context=False)
                told = pydantic_core.PydanticCustomError(wrong["type"], wrong["msg"])  # pyright: ignore[reportArgumentType]
                [number] = wrong["loc"]
                assert isinstance(number, int), wrong
                place = pydantic_core.InitErrorDetails(type=told, loc=(start + number,), input=wrong["input"])
                raise pydantic_core.ValidationError.from_exception_data("Ids", [place]) from None
        return found


class InRange:
    """On a number: the range for the document. Another part of the engine checks it."""

    def __init__(self, low: float, high: float | None = None) -> None:
        self._limits = {"minimum": low} if high is None else {"minimum": low, "maximum": high}

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self._limits}


_RANGES = {name: InRange(*limits) for name, limits in sampling_ranges().items()}
Temperature = Annotated[float, _RANGES["temperature"]]
TopP = Annotated[float, _RANGES["top_p"]]
TopK = Annotated[int, _RANGES["top_k"]]
Penalty = Annotated[float, _RANGES["presence_penalty"]]
MaxTokens = Annotated[int, _RANGES["max_tokens"]]
MaxPromptTokens = Annotated[int, _RANGES["truncate_prompt_tokens"]]
NumLogprobs = Annotated[int, _RANGES["logprobs"]]
Priority = Annotated[int, InRange(-(2**31), 2**31 - 1)]
TargetSeconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]

_MOST_ITEMS = 2**14  # items that cost more than a number
_MOST_TOOLS = 2**11  # each is several objects, checked one by one, and text of the prompt
_MOST_FIELDS = 100
_NUMBERS_AT_ONCE = 2**14  # a millisecond
Ids = Annotated[list[Annotated[int, InRange(0)]], _InSlices()]
Many = Annotated[list[T], _Bounded(_MOST_ITEMS)]
ManyTools = Annotated[list[T], _Bounded(_MOST_TOOLS)]


def _bounded(given: Any, most: int) -> Any:
    if isinstance(given, dict) and len(given) > most:
        counts = {"count": len(given), "most": most}
        raise pydantic_core.PydanticCustomError("too_many_fields", "{count} fields; at most {most} work", counts)
    return given


def _check_metadata(given: dict[str, Any]) -> dict[str, Any]:
    """As much as OpenAI keeps. What is kept is read again with every answer or list, so it must be small."""
    limits = {"pairs": _MOST_PAIRS, "name": _MOST_NAME, "value": _MOST_VALUE}
    is_small = len(given) <= _MOST_PAIRS and all(
        len(name) <= _MOST_NAME and len(value if isinstance(value, str) else json.dumps(value)) <= _MOST_VALUE
        for name, value in given.items()
    )
    if not is_small:
        text = "at most {pairs} pairs are kept, with names of {name} and values of {value} characters; send less"
        raise pydantic_core.PydanticCustomError("metadata", text, limits)
    return given


_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512
Metadata = Annotated[dict[str, Any], pydantic.AfterValidator(_check_metadata)]
Bias = Annotated[float, InRange(-100, 100)]
Biases = Annotated[dict[str, Bias], pydantic.BeforeValidator(lambda given: _bounded(given, _MOST_ITEMS))]


class Only:
    """On a field that this server does not have: null and `values` change nothing; other values are refused."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        return pydantic_core.core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.values]}

    def _check(self, given: Any) -> Any:
        # True is not 1.
        if given is None or any(given == v and isinstance(given, bool) is isinstance(v, bool) for v in self.values):
            return given
        words = " or ".join(json.dumps(value) for value in (None, *self.values))
        raise pydantic_core.PydanticCustomError("only", "only {words} works here", {"words": words})


Null = Annotated[Any, Only()]


class Body(WholeNumbers):
    """Nothing is converted: "5" is no number, and 1 is not true. But 8.0 is a whole number.

    `place` and `marks` say which further fields are ignored (see `marks`). Those of a request are put into the
    validation's context, where it is a set.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    place: ClassVar[Place] = Place.OPTION
    marks: ClassVar[frozenset[str]] = frozenset()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sort_fields(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        """Each unknown field is an error of its own; see above. Those that are null ask for nothing."""
        if given.__class__ is not dict:
            return given
        if len(given) > _MOST_FIELDS:  # asked here, as each of thousands of messages comes by
            return _bounded(given, _MOST_FIELDS)
        unknown = given.keys() - field_names(cls)
        if not unknown:
            return given
        marks = unknown if cls.place.takes_any else unknown & cls.marks
        _note(info, *(Mark(cls.place, name) for name in marks if given[name] is not None))
        return {
            name: value
            for name, value in given.items()
            if name not in unknown or (value is not None and name not in marks)
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: pydantic.GetJsonSchemaHandler
    ) -> pydantic.json_schema.JsonSchemaValue:
        """The document says what is ignored, too."""
        document = handler.resolve_ref_schema(handler(core_schema))
        if cls.place.takes_any:
            document.pop("additionalProperties", None)
        elif cls.marks:
            ignored = {"description": "Ignored."}
            document["properties"].update(dict.fromkeys(sorted(cls.marks - field_names(cls)), ignored))
        return document


def _note(info: pydantic.ValidationInfo, *marks: Mark) -> None:
    if isinstance(info.context, set):
        info.context.update(marks)


class Foreign(Body):
    """A tool, item or block that belongs to a provider, and is left out of the prompt. `name` is a tool's."""

    type: str
    name: str | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _keep_type(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        if given.__class__ is not dict:
            return given
        if isinstance(kind := given.get("type"), str):
            _note(info, Mark(cls.place, kind))
        name = given.get("name")
        return {"type": kind, "name": name if isinstance(name, str) else None}


class OtherThan:
    """On the `Foreign` member of a union: for the document, any object whose type is none of `kinds` may be one.

    They are those of the union, and those that its discriminator refuses.
    """

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        kind = {"type": "string", "not": {"enum": [*self.kinds]}}
        words = "Belongs to a provider: left out of the prompt."
        return {"type": "object", "description": words, "properties": {"type": kind}, "required": ["type"]}


class ForeignTool(Foreign):
    place = Place.TOOL


def kind_of(known: Sequence[str], foreign: Callable[[str, dict[str, Any]], bool]) -> Callable[[Any], str | None]:
    """The discriminator of a union with a `Foreign` member, whose tag is `foreign`, by the field `type`. `foreign`
    says whether an object of an unknown type is one."""

    def kind(given: Any) -> str | None:
        if not isinstance(given, dict):
            found = getattr(given, "type", None)
            return "foreign" if isinstance(given, Foreign) else found
        found = given.get("type")
        if found is None:
            found = known[0]
        if not isinstance(found, str):
            return None
        return "foreign" if found not in known and foreign(found, given) else found

    return kind


@functools.cache
def field_names(body: type[Body]) -> frozenset[str]:
    """The fields of a body as clients write them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


class StreamOptions(Body):
    """Options of a stream beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    marks = frozenset({"include_obfuscation"})


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
    structural_tag: Null = None
    whitespace_pattern: Null = None
    disable_any_whitespace: Annotated[Any, Only(False)] = None
    disable_additional_properties: Annotated[Any, Only(False)] = None


class ResumedChoice(Body):
    """What the client has of one choice: the `token_ids` of its events. `finished`: it has its `finish_reason`."""

    token_ids: Ids
    finished: bool | None = None


class NeutralFields(Body):
    """Options that OpenAI and vLLM have and this server has not, with the values that are accepted."""

    place = Place.REQUEST
    moderation: Null = None

    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    logits_processors: Null = None
    kv_transfer_params: Null = None
    vllm_xargs: Null = None
    thinking_token_budget: Null = None


class SamplingFields(NeutralFields):
    """The fields that completions and chats share. Absent, as null, is the default of `SamplingParams`."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    n: Annotated[int, _RANGES["n"]] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, _RANGES["seed"]] | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: TopK | None = None
    min_p: Annotated[float, _RANGES["min_p"]] | None = None
    repetition_penalty: Annotated[float, _RANGES["repetition_penalty"]] | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Many[str] | None = None
    min_tokens: Annotated[int, _RANGES["min_tokens"]] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: MaxPromptTokens | None = None
    prompt_logprobs: NumLogprobs | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    resume: Many[ResumedChoice] | None = None
    priority: Priority | None = None
    ttft_target_s: TargetSeconds | None = None
    tpot_target_s: TargetSeconds | None = None
    cache_salt: str | None = None
    request_id: str | None = pydantic.Field(default=None, pattern=r"^[!-~]{1,256}$")  # is sent back in a header


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. `max_tokens` 0 with `echo` only scores the prompt."""

    marks = REQUEST_MARKS["completions"]
    prompt: str | Many[str] | Ids | Many[Ids]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Annotated[int, InRange(0, 2**31 - 1)] | None = None  # 0: see above
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Annotated[Any, Only("")] = None
    prompt_embeds: Null = None


class TextPart(Body):
    place = Place.PART
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """`url` is a data: URL; see docs/pictures.md. `detail` is a mark: the model's processor sets the size."""

    place = Place.PART
    url: str


class ImagePart(Body):
    place = Place.PART
    type: Literal["image_url"]
    image_url: ImageUrl
    _where: str = ""

    @classmethod
    def at(cls, where: str, url: str) -> "ImagePart":
        """The picture of a request of another API, which has it at `where`."""
        part = cls(type="image_url", image_url=ImageUrl(url=url))
        part._where = where
        return part

    @property
    def where(self) -> str:
        """Its place in the request, for errors; empty: that of this part."""
        return self._where


Part = Annotated[TextPart | ImagePart, pydantic.Field(discriminator="type")]


def content_of(parts: Sequence[TextPart | ImagePart]) -> str | list[TextPart | ImagePart]:
    """The content of a message: a text alone is a text, as most templates want it."""
    [only] = parts if len(parts) == 1 else [None]
    return only.text if isinstance(only, TextPart) else list(parts)


class FunctionCall(Body):
    """`arguments` is JSON text, as OpenAI has it, or what the model wrote in its place."""

    place = Place.CALL
    name: str
    arguments: str


class ToolCall(Body):
    place = Place.CALL
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a conversation. What clients add to it (`annotations`, `parsed`, ...) is not shown to templates."""

    place = Place.MESSAGE
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: Null = None
    function_call: Null = None


# Anthropic's length, twice OpenAI's: names of servers stand before those of their tools.
ToolName = Annotated[str, pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """`parameters` is the JSON schema of its arguments; absent, it takes none.

    `strict` asks that arguments fit the schema. `tool_choice: required` or a named function sees to that with or
    without it; with `auto` the model writes as it likes, and arguments are passed on as written.
    """

    place = Place.TOOL
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    place = Place.TOOL
    type: Literal["function"]
    function: Function


AnyTool = Annotated[
    Annotated[Tool, pydantic.Tag("function")] | Annotated[ForeignTool, OtherThan("function"), pydantic.Tag("foreign")],
    pydantic.Discriminator(kind_of(("function",), lambda kind, given: True)),
]


def functions_of(tools: Sequence[Tool | ForeignTool] | None) -> list[Tool]:
    """The tools that a model here can call."""
    return [tool for tool in tools or () if isinstance(tool, Tool)]


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ToolSet(Body):
    mode: Literal["auto", "required"]
    tools: ManyTools[NamedTool]


class AllowedTools(Body):
    """Only these of the tools exist for this answer: the others are not shown to the model either."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


class TemplateFields(Body):
    """Fields of a chat's prompt beside its messages. By default it ends with the opening of the answer."""

    tools: ManyTools[AnyTool] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Null = None
    continue_final_message: Annotated[Any, Only(False)] = None
    documents: Annotated[Any, Only([])] = None
    media_io_kwargs: Annotated[Any, Only({})] = None
    mm_processor_kwargs: Annotated[Any, Only({})] = None


class ChatRequest(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`.

    `reasoning_effort` is for templates that read it; see `conversation`.
    """

    marks = REQUEST_MARKS["chat"]
    messages: Many[Message] = pydantic.Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedTools, pydantic.Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    add_special_tokens: Annotated[Any, Only(False)] = None
    audio: Null = None
    echo: Annotated[Any, Only(False)] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None  # there are no functions
    modalities: Annotated[Any, Only(["text"])] = None
    best_of: Annotated[Any, Only(1)] = None
    web_search_options: Null = None


class EmbeddingRequest(NeutralFields):
    """`POST /v1/embeddings`."""

    marks = REQUEST_MARKS["embeddings"]
    model: str | None = None
    input: str | Many[str] | Ids | Many[Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, InRange(1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: MaxPromptTokens | None = None
    normalize: bool | None = None

    add_special_tokens: Annotated[Any, Only(True)] = None
    priority: Annotated[Any, Only(0)] = None
    embed_dtype: Annotated[Any, Only("float32")] = None
    endianness: Annotated[Any, Only("native", "little")] = None


class DocumentFields(NeutralFields):
    """The fields that rerank and score share. `instruction` replaces `rerank.instruction`."""

    marks = REQUEST_MARKS["documents"]
    model: str | None = None
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, InRange(1)] | None = None
    user: str | None = None
    priority: Priority | None = None

    truncate_prompt_tokens: Null = None  # would cut the template
    mm_processor_kwargs: Annotated[Any, Only({})] = None
    activation: Annotated[Any, Only(True)] = None
    use_activation: Annotated[Any, Only(True)] = None


class RerankDocument(Body):
    text: str


class RerankRequest(DocumentFields):
    """`POST /rerank`, `/v1/rerank` and `/v2/rerank`, as Jina and Cohere have it. `top_n` 0 means all."""

    query: str
    documents: Many[str | RerankDocument]
    top_n: int | None = pydantic.Field(default=None, ge=0)
    return_documents: bool | None = None

    max_chunks_per_doc: Null = None
    rank_fields: Annotated[Any, Only(["text"])] = None


class ScoreRequest(DocumentFields):
    """`POST /score` and `/v1/score`, as vLLM has it: one query for all documents, or one for each."""

    text_1: str | Many[str]
    text_2: str | Many[str]


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: `prompt` or `messages`, not both."""

    place = Place.REQUEST
    marks = REQUEST_MARKS["tokenize"]
    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = pydantic.Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
