"""From the fields of a body to `SamplingParams`.

The few places where names or meanings differ between OpenAI, vLLM and this engine are here. Values are checked by
`SamplingParams`, with the same words for every door.
"""

from typing import Any

from jaxserve.api import Known, Resume, SamplingParams, StructuredOutput
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
)
from jaxserve.text.json_schema import check_formats, named

_ANSWER = "schema of the answer"
# Fields that keep their name. Null means the default.
_SAME = (
    "frequency_penalty",
    "logit_bias",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)


def completion_sampling(body: CompletionRequest) -> SamplingParams:
    """Raises InvalidRequest or UnsupportedOption."""
    options = _shared(body)
    if body.best_of not in (None, body.n or 1):
        raise UnsupportedOption(
            f"best_of is {body.best_of} and n {body.n or 1}: all that is generated is sent back here; leave best_of out"
        )
    if body.max_tokens is not None:
        options["max_tokens"] = body.max_tokens
    if body.echo and body.max_tokens == 0:
        options["max_tokens"] = 1  # the prompt is scored by a step that cannot but sample; the token is left out
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        # The log-probabilities of an echoed prompt are part of the answer.
        if body.echo and (body.prompt_logprobs is None or 0 <= body.prompt_logprobs < body.logprobs):
            options["prompt_logprobs"] = body.logprobs
    return SamplingParams(**options, structured=structured(body))


def chat_sampling(
    body: ChatRequest, constraint: StructuredOutput | None, *, keep_special_tokens: bool = False
) -> SamplingParams:
    """`constraint`: the form of the output. `keep_special_tokens`: tags are special tokens, and must be in the text.

    Raises InvalidRequest or UnsupportedOption.
    """
    options = _shared(body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; they are two "
            "names of one limit: give one of them"
        )
    options["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, but logprobs is not true; set it")
    if keep_special_tokens:
        options["skip_special_tokens"] = False
    try:
        return SamplingParams(**options, structured=constraint)
    except InvalidRequest as error:
        said = str(error)
        names = {"logprobs": "top_logprobs"}
        if body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        own = next((own for own in names if said.startswith(f"{own} is ")), None)
        raise error if own is None else InvalidRequest(names[own] + said.removeprefix(own)) from None


def structured(body: SamplingFields) -> StructuredOutput | None:
    """The form to which the output is constrained. Raises InvalidRequest."""
    found: list[StructuredOutput] = []
    if isinstance(body.response_format, JsonObjectFormat):
        found.append(StructuredOutput(json_object=True))
    elif isinstance(body.response_format, JsonSchemaFormat):
        found.append(schema_output(answer_schema(body.response_format)))
    if body.structured_outputs is not None:
        given: Any = body.structured_outputs
        options = {"json_schema": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
        if given.json_object:
            options["json_object"] = True
        found.append(StructuredOutput.from_dict(options))
    if len(found) > 1:
        raise InvalidRequest("response_format and structured_outputs both constrain the output; give one of them")
    return found[0] if found else None


def caller_of(body: SamplingFields) -> str | None:
    """The tenant whose limits a call must keep; None for one that goes on with a stream that was accepted before."""
    return None if body.resume else body.user or ""


def resume_of(body: SamplingFields) -> Resume | None:
    """What a stream that was lost goes on behind. Raises InvalidRequest.

    The engine tells the text of the known tokens once more (`text_len` 0), since tool calls are read from all of it;
    the client is not told it again.
    """
    if body.resume is None:
        return None
    if not body.stream:
        raise InvalidRequest("resume is given, but stream is not true: only a stream can be lost in its middle")
    return Resume(sequences=tuple(Known(tuple(one.token_ids), 0, bool(one.finished)) for one in body.resume))


def answer_schema(form: JsonSchemaFormat) -> dict[str, Any]:
    """The schema of an answer. Raises UnsupportedOption for a format of texts that a strict one asks for in vain."""
    given = form.json_schema
    if given.strict:
        check_formats(given.schema_, _ANSWER)
    return named(given.schema_, _ANSWER)


def schema_output(schema: dict[str, Any]) -> StructuredOutput:
    """Text that is valid under a JSON schema."""
    return StructuredOutput.from_dict({"json_schema": schema})


def _shared(body: SamplingFields) -> dict[str, Any]:
    options = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true; leave it out, or set stream")
    return options
