"""Every field of OpenAI's, Anthropic's and vLLM's schemas is used, ignored as a mark, or refused by name; and nothing
that changes what is sampled is ever ignored."""

import dataclasses
import logging
from typing import Any

import pydantic
import pytest
from anthropic.types import beta as anthropic_types
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat as chat_types
from openai.types import completion_create_params, embedding_create_params, responses
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_item_param

from jaxserve.api import SamplingParams
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http import messages_bodies, requests, responses_api_bodies
from jaxserve.serve.http.marks import Mark, Place, note

MESSAGES = [{"role": "user", "content": "hi"}]
MINIMAL: dict[type[requests.Body], dict[str, Any]] = {
    requests.ChatRequest: {"messages": MESSAGES},
    requests.CompletionRequest: {"prompt": "a"},
    requests.EmbeddingRequest: {"input": "a"},
    requests.TokenizeRequest: {"prompt": "a"},
    messages_bodies.MessagesRequest: {"model": "m", "messages": MESSAGES, "max_tokens": 1},
    messages_bodies.PromptFields: {"model": "m", "messages": MESSAGES},
    responses_api_bodies.ResponsesRequest: {"input": "a"},
}
# Of vLLM's chat and completions requests, what OpenAI's have not.
VLLM = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "max_repetition_pattern_size",
    "media_io_kwargs",
    "min_p",
    "min_repetition_pattern_size",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_min_count",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "structural_tag",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
]
# Names under which engines and APIs have options of sampling and of the answer's form, beside those of this engine.
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} | {
    "best_of",
    "dry_multiplier",
    "dynatemp_range",
    "echo",
    "frequency_penalty",
    "functions",
    "grammar",
    "guided_json",
    "ignore_eos",
    "json_schema",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "max_tokens_to_sample",
    "min_p",
    "min_tokens",
    "mirostat",
    "modalities",
    "n",
    "n_predict",
    "num_beams",
    "options",
    "output_config",
    "presence_penalty",
    "repeat_penalty",
    "repetition_penalty",
    "response_format",
    "samplers",
    "seed",
    "stop",
    "stop_sequences",
    "suffix",
    "temperature",
    "text",
    "thinking_token_budget",
    "top_a",
    "top_k",
    "top_logprobs",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "use_beam_search",
    "vllm_xargs",
    "xtc_probability",
}
VALUES: list[Any] = [True, False, 0, 1, 7.5, "x", [], ["x"], {}, {"x": 1}]
THEIRS: list[tuple[Any, type[requests.Body]]] = [
    (chat_create_params.CompletionCreateParamsStreaming, requests.ChatRequest),
    (completion_create_params.CompletionCreateParamsStreaming, requests.CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, requests.EmbeddingRequest),
    (response_create_params.ResponseCreateParamsStreaming, responses_api_bodies.ResponsesRequest),
    (message_create_params.MessageCreateParamsStreaming, messages_bodies.MessagesRequest),
    (beta_create_params.MessageCreateParamsStreaming, messages_bodies.MessagesRequest),
]


def names_of(theirs: Any) -> set[str]:
    """The fields of a typed dictionary, with those of its bases."""
    return set(theirs.__annotations__)


def outcome(kind: type[requests.Body], given: Any) -> set[Mark] | str:
    """The marks, or what is said of a body that is refused."""
    marks: set[Mark] = set()
    try:
        kind.model_validate(given, context=marks)
    except pydantic.ValidationError as error:
        return " ".join(".".join(map(str, each["loc"])) for each in error.errors())
    return marks


@pytest.mark.parametrize(("theirs", "ours"), THEIRS)
def test_every_option_of_a_request_is_decided_about(theirs: Any, ours: type[requests.Body]) -> None:
    names = names_of(theirs)
    assert len(names) >= 5
    known = {field.alias or name for name, field in ours.model_fields.items()} | ours.marks
    assert not names - known, "a newer client has a field that nothing is decided about"


@pytest.mark.parametrize("ours", MINIMAL, ids=lambda kind: kind.__name__)
def test_a_field_is_used_a_mark_or_refused_by_name(ours: type[requests.Body]) -> None:
    names = {name for theirs, kind in THEIRS if kind is ours for name in names_of(theirs)}
    for name in sorted(names | set(VLLM) | SAMPLING | {"use_beans"}):
        for value in VALUES:
            found = outcome(ours, {**MINIMAL[ours], name: value})
            if isinstance(found, str):
                assert name in found, (name, value, found)
            elif name not in ours.model_fields:
                assert found == {(Place.REQUEST, name)}, (name, value)
                assert name not in SAMPLING and name in ours.marks


def test_no_option_is_in_the_table() -> None:
    for ours in MINIMAL:
        assert not ours.marks & SAMPLING
        assert not {name for name in ours.marks if "penalty" in name or "logprob" in name or "token" in name} - {
            "spaces_between_special_tokens",
            "fallback_credit_token",
        }


CONTENT: list[tuple[type[requests.Body], dict[str, Any], str, Any]] = [
    (requests.Message, {"role": "assistant", "content": "a"}, "audio", {"id": "x"}),
    (requests.Message, {"role": "assistant", "content": "a"}, "function_call", {"name": "f", "arguments": "{}"}),
    (responses_api_bodies.InputImage, {"type": "input_image", "image_url": "data:"}, "file_id", "x"),
    (
        messages_bodies.ImageBlock,
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        "transformations",
        {"crop": 1},
    ),
]


@pytest.mark.parametrize(("kind", "given", "name", "value"), CONTENT)
def test_content_that_no_model_here_reads_is_refused(
    kind: type[requests.Body], given: dict[str, Any], name: str, value: Any
) -> None:
    assert outcome(kind, given) == set()
    assert name in outcome(kind, {**given, name: value})


TEXT = {"type": "text", "text": "a"}
WITHIN: list[tuple[type[requests.Body], dict[str, Any], Any]] = [
    (requests.Message, {"role": "user", "content": "a"}, chat_types.ChatCompletionAssistantMessageParam),
    (requests.Message, {"role": "user", "content": "a"}, chat_types.ChatCompletionUserMessageParam),
    (requests.Message, {"role": "user", "content": "a"}, chat_types.ChatCompletionToolMessageParam),
    (requests.TextPart, TEXT, chat_types.ChatCompletionContentPartTextParam),
    (requests.ImageUrl, {"url": "data:"}, chat_types.chat_completion_content_part_image_param.ImageURL),
    (
        requests.ToolCall,
        {"function": {"name": "f", "arguments": ""}},
        chat_types.ChatCompletionMessageFunctionToolCallParam,
    ),
    (requests.FunctionCall, {"name": "f", "arguments": ""}, None),
    (requests.Function, {"name": "f"}, None),
    (requests.Tool, {"type": "function", "function": {"name": "f"}}, chat_types.ChatCompletionFunctionToolParam),
    (messages_bodies.InputMessage, {"role": "user", "content": "a"}, anthropic_types.BetaUserMessageParam),
    (messages_bodies.TextBlock, TEXT, anthropic_types.BetaTextBlockParam),
    (messages_bodies.ThinkingBlock, {"type": "thinking", "thinking": ""}, anthropic_types.BetaThinkingBlockParam),
    (
        messages_bodies.ToolUseBlock,
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        anthropic_types.BetaToolUseBlockParam,
    ),
    (
        messages_bodies.ToolResultBlock,
        {"type": "tool_result", "tool_use_id": "a"},
        anthropic_types.BetaToolResultBlockParam,
    ),
    (messages_bodies.MessagesTool, {"name": "f", "input_schema": {}}, anthropic_types.BetaToolParam),
    (
        responses_api_bodies.MessageItem,
        {"role": "user", "content": "a"},
        responses.ResponseOutputMessageParam,
    ),
    (
        responses_api_bodies.FunctionCallItem,
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
        responses.ResponseFunctionToolCallParam,
    ),
    (
        responses_api_bodies.FunctionCallOutputItem,
        {"type": "function_call_output", "call_id": "a", "output": ""},
        response_input_item_param.FunctionCallOutput,
    ),
    (responses_api_bodies.ReasoningItem, {"type": "reasoning"}, responses.ResponseReasoningItemParam),
    (responses_api_bodies.FunctionTool, {"type": "function", "name": "f"}, responses.FunctionToolParam),
]


@pytest.mark.parametrize(("kind", "given", "theirs"), WITHIN)
def test_marks_within_messages_parts_tools_and_items(
    kind: type[requests.Body], given: dict[str, Any], theirs: Any
) -> None:
    """Those of the schemas, those of proxies and engines, and one that nobody has yet."""
    names = set() if theirs is None else names_of(theirs)
    names |= {"cache_control", "extra_content", "id", "newest", "opts", "reasoning_details", "thinking_blocks"}
    for name in names - set(kind.model_fields):
        assert outcome(kind, {**given, name: {"x": [1]}}) == {(kind.place, name)}
        assert outcome(kind, {**given, name: None}) == set(), "null asks for nothing"
        assert name not in kind.model_validate({**given, name: 1}).model_dump()


@pytest.mark.parametrize("name", ["response_format", "structured_outputs", "stream_options", "tool_choice"])
def test_objects_of_options_stay_strict(name: str) -> None:
    given = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "stream_options": {},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    body = {**MINIMAL[requests.ChatRequest], name: given[name]}
    assert outcome(requests.ChatRequest, body) == set()
    assert "newest" in outcome(requests.ChatRequest, {**body, name: {**given[name], "newest": 1}})


def test_a_mark_is_named_once_and_counted_under_a_closed_list(caplog: pytest.LogCaptureFixture) -> None:
    counts = DoorCounts()
    with caplog.at_level(logging.INFO):
        for number in range(3000):
            marks = {Mark(Place.MESSAGE, f"made up {number}"), Mark(Place.PART, "cache_control")}
            note(counts, "/v1/chat/completions", marks)
    assert counts.ignored == {
        ("/v1/chat/completions", "message", "other"): 3000,
        ("/v1/chat/completions", "part", "cache_control"): 3000,
    }
    assert [record.getMessage().partition(":")[2] for record in caplog.records] == [
        " a field that this server does not know of a message is ignored: no answer depends on it here (said once)",
        " 'cache_control' of a part is ignored: no answer depends on it here (said once)",
    ], "a client's own words are in no line of a log"
