"""The conversion between protocol buffers and the values of `jaxserve.api`, in both directions.

Values are checked by `SamplingParams` itself, so that each error has one wording. Fields are converted by name, so an
option added to both sides needs no line here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.api import (
    FinishReason,
    Known,
    PromptInfo,
    Resume,
    ResumeReason,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.gen import inference_pb2 as pb

FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}

_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}

RESUME_REASONS: dict[ResumeReason, pb.ResumeReason] = {
    ResumeReason.CLIENT: pb.RESUME_REASON_CLIENT,
    ResumeReason.DIED: pb.RESUME_REASON_DIED,
    ResumeReason.DRAINED: pb.RESUME_REASON_DRAINED,
}

ClientPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt of a client: text, token ids, or chat messages `{"role": text, "content": text}`.

A message with pictures has "pictures", too: a list of the bytes of files.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of a call beside its prompt and its sampling.

    Attributes:
      request_id: unique among live requests; empty: the server chooses.
      priority: smaller first; needs a policy that reads it, others refuse all but 0.
      cache_salt: prompts share cached pages only with those of the same salt.
      tenant: to whom policies such as `fair` count the request.
      ttft_target_s, tpot_target_s: seconds to the first token and for each after it, for policies that mind, as `slo`
        does; None: the server's own.
      echo: the text begins with the prompt.
      chunk_tokens: tokens of a message at least, but for the first and the last of a sequence; 0: every token alone.
      timeout_s: seconds from the arrival at the server until it ends the request; None: no such limit.
      pictures: files of the pictures that placeholders in a prompt of text or ids stand for, in their order.
      model: the model's name, or that of a LoRA adapter beside it; empty: the model.
    """

    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    echo: bool = False
    chunk_tokens: int = 0
    timeout_s: float | None = None
    pictures: Sequence[bytes] = ()
    model: str = ""


NO_OPTIONS = CallOptions()

# Ids of one Abort. Millions of them fit into one message, and each is work for the event loop and for the engine's.
MAX_ABORT_IDS = 4096
_DEFAULTS = SamplingParams()


def refuse_unknown_fields(message: Message) -> None:
    """Raises UnsupportedOption when the sender set a field that this version does not have."""
    numbers = [field.field_number for field in UnknownFieldSet(message)]
    if numbers:
        raise UnsupportedOption(
            f"{message.DESCRIPTOR.full_name} has no field {', '.join(map(str, numbers))} on this server; "
            "the client is newer: leave the option out, or update the server"
        )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Options that are not set keep their defaults. Raises InvalidRequest or UnsupportedOption."""
    for part in (message, message.allowed_token_ids):
        refuse_unknown_fields(part)
    options: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if options.pop("no_max_tokens", False):
        options["max_tokens"] = None
    if "allowed_token_ids" in options:
        options["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    if "logit_bias" in options:
        options["logit_bias"] = dict(message.logit_bias)
    for name in ("stop", "stop_token_ids", "bad_words"):
        if name in options:
            options[name] = tuple(options[name])
    if "structured" in options:
        options["structured"] = _structured_from_proto(message.structured)
    return SamplingParams(**options)


def resume_from_proto(message: pb.Resume) -> Resume:
    """Raises UnsupportedOption, also for a reason that this version does not know."""
    for part in (message, *message.sequences):
        refuse_unknown_fields(part)
    if message.reason not in RESUME_REASONS.values():
        raise UnsupportedOption(f"resume has the reason {message.reason}, which this server does not know")
    return Resume(
        sequences=tuple(Known(tuple(one.token_ids), one.text_len, one.finished) for one in message.sequences),
        reason=next(reason for reason, number in RESUME_REASONS.items() if number == message.reason),
        age_s=message.age_s,
    )


def resume_to_proto(resume: Resume) -> pb.Resume:
    sequences = [
        pb.KnownSequence(token_ids=known.token_ids, text_len=known.text_len, finished=known.finished)
        for known in resume.sequences
    ]
    return pb.Resume(sequences=sequences, reason=RESUME_REASONS[resume.reason], age_s=resume.age_s)


def finish_reason_from_proto(number: pb.FinishReason) -> FinishReason:
    """Of the last message of a sequence."""
    return _REASONS[number]


def abort_from_proto(message: pb.AbortRequest) -> tuple[str, ...]:
    """The ids, each once. Raises InvalidRequest or UnsupportedOption."""
    refuse_unknown_fields(message)
    if len(message.request_ids) > MAX_ABORT_IDS:
        raise InvalidRequest(
            f"one call aborts at most {MAX_ABORT_IDS} requests, this one names {len(message.request_ids)}; send several"
        )
    return tuple(dict.fromkeys(message.request_ids))


def _structured_from_proto(message: pb.StructuredOutput) -> StructuredOutput:
    for part in (message, message.choice):
        refuse_unknown_fields(part)
    kind = message.WhichOneof("form")
    if kind is None:
        return StructuredOutput()  # which raises the error
    form: dict[str, Any] = {kind: tuple(message.choice.texts) if kind == "choice" else getattr(message, kind)}
    return StructuredOutput(**form)


def _structured_to_proto(structured: StructuredOutput) -> pb.StructuredOutput:
    if structured.choice:
        return pb.StructuredOutput(choice=pb.Choices(texts=structured.choice))
    if structured.json_object:
        return pb.StructuredOutput(json_object=True)
    return pb.StructuredOutput(json_schema=structured.json_schema, regex=structured.regex, grammar=structured.grammar)


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Sets only what differs from the default, so that an older server takes every request that it can serve.

    Raises InvalidRequest for a value that the wire format cannot carry.
    """
    message = pb.SamplingParams()
    for field in dataclasses.fields(sampling):
        name, value = field.name, getattr(sampling, field.name)
        if value == getattr(_DEFAULTS, name):
            continue
        try:
            if name == "max_tokens" and value is None:
                message.no_max_tokens = True
            elif name == "allowed_token_ids":
                message.allowed_token_ids.ids.extend(value)
            elif name == "logit_bias":
                message.logit_bias.update(value)
            elif name == "structured":
                message.structured.CopyFrom(_structured_to_proto(value))
            elif name in ("stop", "stop_token_ids", "bad_words"):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (ValueError, TypeError, UnicodeError) as error:
            raise InvalidRequest(f"{name} cannot be sent: {error}") from error
    return message


def request_to_proto(
    prompt: ClientPrompt, sampling: SamplingParams, options: CallOptions = NO_OPTIONS
) -> pb.GenerateRequest:
    """The message of one request. Raises InvalidRequest for values that the wire format cannot carry."""
    try:
        request = pb.GenerateRequest(
            request_id=options.request_id,
            sampling=sampling_to_proto(sampling),
            priority=options.priority,
            cache_salt=options.cache_salt,
            tenant=options.tenant,
            ttft_target_s=options.ttft_target_s,
            tpot_target_s=options.tpot_target_s,
            echo=options.echo,
            chunk_tokens=options.chunk_tokens,
            timeout_s=options.timeout_s,
            pictures=options.pictures,
            model=options.model,
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif is_chat(prompt):
            request.chat.CopyFrom(chat_to_proto(prompt))
        else:
            request.token_ids.SetInParent()  # an empty list is still a prompt, for the server to refuse
            request.token_ids.ids.extend(cast(Sequence[int], prompt))
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return request


def is_chat(prompt: ClientPrompt) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether the prompt is messages, rather than text or ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_to_proto(messages: Sequence[Mapping[str, Any]]) -> pb.ChatMessages:
    """The messages of a chat. Raises InvalidRequest for a value that is no message."""
    return pb.ChatMessages(messages=[_chat_message(message) for message in messages])


def tokenize_to_proto(prompt: str | Sequence[Mapping[str, Any]], add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """Raises InvalidRequest for what the wire format cannot carry."""
    try:
        request = pb.TokenizeRequest()
        if add_special_tokens is not None:
            request.add_special_tokens = add_special_tokens
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(chat_to_proto(prompt))
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return request


def detokenize_to_proto(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Raises InvalidRequest for what the wire format cannot carry."""
    try:
        return pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error


def _chat_message(message: Any) -> pb.ChatMessage:
    pictures = message.get("pictures", ()) if isinstance(message, Mapping) else ()
    if (
        not isinstance(message, Mapping)
        or set(message) - {"pictures"} != {"role", "content"}
        or not all(isinstance(message[name], str) for name in ("role", "content"))
        or not isinstance(pictures, list | tuple)
        or not all(isinstance(data, bytes) for data in pictures)
    ):
        raise InvalidRequest(
            f"a chat message is {{'role': text, 'content': text}}, if need be with 'pictures': a list of bytes, got "
            f"{message!r:.200}"
        )
    return pb.ChatMessage(role=message["role"], content=message["content"], pictures=pictures)


def logprobs_to_proto(entries: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=e.token_id, logprob=e.logprob, rank=e.rank, top_ids=e.top_ids, top_logprobs=e.top_logprobs
        )
        for e in entries
    ]


def logprobs_from_proto(entries: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(e.token_id, e.logprob, e.rank, tuple(e.top_ids), tuple(e.top_logprobs)) for e in entries)


def prompt_info_to_proto(prompt_token_ids: Sequence[int], info: PromptInfo | None, echo: bool) -> pb.PromptInfo:
    """Leaves out log-probabilities, which may be many. `info` None: the request ended before its prompt ran."""
    message = pb.PromptInfo(num_prompt_tokens=len(prompt_token_ids))
    if echo:
        message.token_ids.extend(prompt_token_ids)
    if info is not None:
        message.num_cached_tokens = info.num_cached_tokens
    return message
