"""The bodies that go back, as the OpenAI API describes them.

Their names and types make the OpenAPI document, which is why even a field that is always the same stands here. Routes
fill the values; a field that was not set is not sent.
"""

from collections.abc import Sequence
from typing import Any, Literal

import pydantic

from jaxserve.engine import DrawnBy

FinishWord = Literal["stop", "length", "tool_calls"]


class CachedTokens(pydantic.BaseModel):
    cached_tokens: int


class CompletionTokensDetails(pydantic.BaseModel):
    """Tokens of the outputs.

    `reasoning_tokens`: of thoughts. Of drafts: those that the model drew after they had been drafted, and those that it
    did not draw.
    """

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(pydantic.BaseModel):
    """Tokens of all prompts and of all outputs. The details of outputs only where there were thoughts or drafts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(pydantic.BaseModel):
    """One entry per token. The first token of an echoed prompt has no log-probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(pydantic.BaseModel):
    logprob: float
    rank: int | None = None
    decoded_token: str


class DrawnByPart(pydantic.BaseModel):
    """`version` of the weights that drew the tokens from number `first_token` on."""

    first_token: int
    version: str


def drawn_by(parts: Sequence[DrawnBy]) -> list[DrawnByPart]:
    return [DrawnByPart(first_token=part.first_token, version=part.version) for part in parts]


class CompletionChoice(pydantic.BaseModel):
    """`stop_reason`: the stop string or token id that ended it. Lists of ids only when asked for. `weights`: with the
    end of a choice; only where the engine has been given other weights than those of its start."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: str | int | None = None
    weights: list[DrawnByPart] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(pydantic.BaseModel):
    """An answer, or with `stream` one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(pydantic.BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(pydantic.BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(pydantic.BaseModel):
    content: list[ChatLogprob]


class FunctionPart(pydantic.BaseModel):
    """In a stream: the name once, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallPart(pydantic.BaseModel):
    """`index` in streams only."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPart


class ChatMessage(pydantic.BaseModel):
    """A message, or with `stream` what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChoice(pydantic.BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord
    stop_reason: str | int | None = None
    weights: list[DrawnByPart] | None = None
    token_ids: list[int] | None = None


class ChatResponse(pydantic.BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(pydantic.BaseModel):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: str | int | None = None
    weights: list[DrawnByPart] | None = None
    token_ids: list[int] | None = None


class ChatChunk(pydantic.BaseModel):
    """One event of a stream. What was asked for about the prompt is in the first."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Embedding(pydantic.BaseModel):
    """`embedding`: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class RankedDocument(pydantic.BaseModel):
    text: str


class RankedResult(pydantic.BaseModel):
    """`index`: of the document in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankResponse(pydantic.BaseModel):
    """The most relevant first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedResult]
    usage: Usage


class Score(pydantic.BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(pydantic.BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class ModelCard(pydantic.BaseModel):
    """`root`: the directory of an adapter; `parent`: the model that it changes."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    root: str | None = None
    parent: str | None = None


class ModelList(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(pydantic.BaseModel):
    count: int
    max_model_len: int
    tokens: pydantic.SkipValidation[list[int]]  # the tokenizer's own, and perhaps a million
    token_strs: list[str] | None = None


class TokenizerInfo(pydantic.BaseModel):
    """Special tokens by their text, the template in Jinja; null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int


class DetokenizeResponse(pydantic.BaseModel):
    prompt: str


class ProbeResponse(pydantic.BaseModel):
    """`reason` says why it is not "ok"."""

    status: Literal["ok", "degraded", "unavailable"]
    reason: str | None = None


class VersionResponse(pydantic.BaseModel):
    version: str


class LoadResponse(pydantic.BaseModel):
    """`server_load`: requests that have not ended; the rest as in `engine.Load`."""

    server_load: int
    accepting: bool
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_waiting: int
    max_waiting_tokens: int


def as_fields(value: pydantic.BaseModel) -> dict[str, Any]:
    """The fields that were set."""
    return value.model_dump(exclude_unset=True)
