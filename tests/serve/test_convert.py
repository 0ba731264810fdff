"""The wire format: every option of `SamplingParams` goes there and back, and nothing is lost in silence."""

import dataclasses

import pytest
from google.protobuf.message import Message

from jaxserve.api import MAX_LOGPROBS, FinishReason, SamplingParams, StructuredOutput, TokenLogprobs
from jaxserve.client import collect_replies
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.serve.convert import (
    CallOptions,
    logprobs_from_proto,
    logprobs_to_proto,
    refuse_unknown_fields,
    request_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from jaxserve.serve.gen import inference_pb2 as pb

# One value per option that differs from its default; falsy ones where the default is truthy.
NOT_DEFAULT = {
    "n": 3,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "logit_bias": {0: -100.0, 17: 1.5},
    "allowed_token_ids": (0, 5, 6),
    "bad_words": ("one", "ёж"),
    "min_tokens": 2,
    "max_tokens": 77,
    "stop": ("\n\n", "END"),
    "stop_token_ids": (0, 9),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "seed": 2**63 - 1,
    "logprobs": MAX_LOGPROBS,
    "prompt_logprobs": 0,
    "skip_special_tokens": False,
    "detokenize": False,
    "truncate_prompt_tokens": 12,
    "structured": StructuredOutput(regex="a+"),
}


def test_a_field_of_the_future_is_refused_in_parts_too() -> None:
    newer = pb.TokenIds.FromString(b"\x98\x06\x01")  # field 99
    with pytest.raises(UnsupportedOption, match=r"jaxserve\.v1\.TokenIds has no field 99"):
        sampling_from_proto(pb.SamplingParams(allowed_token_ids=newer))


def test_the_message_has_exactly_the_options_of_the_api() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == names | {"no_max_tokens"}
    assert set(NOT_DEFAULT) == names, "the cases below must cover every option"


@pytest.mark.parametrize("name", sorted(NOT_DEFAULT))
def test_each_option_survives_the_wire_alone(name: str) -> None:
    options = {name: NOT_DEFAULT[name]}
    if name == "detokenize":
        options["stop"] = ()
    sampling = SamplingParams(**options)
    assert getattr(sampling, name) != getattr(SamplingParams(), name)
    message = pb.SamplingParams.FromString(sampling_to_proto(sampling).SerializeToString())
    assert sampling_from_proto(message) == sampling


def test_unset_means_default_and_null_max_tokens_is_not_unset() -> None:
    assert sampling_from_proto(pb.SamplingParams()) == SamplingParams()
    unlimited = SamplingParams(max_tokens=None)
    assert sampling_from_proto(sampling_to_proto(unlimited)).max_tokens is None
    assert sampling_from_proto(pb.SamplingParams(no_max_tokens=False)).max_tokens == SamplingParams().max_tokens


def test_zero_is_a_value() -> None:
    assert sampling_from_proto(pb.SamplingParams(temperature=0.0)).temperature == 0.0
    assert sampling_from_proto(pb.SamplingParams(logprobs=0)).logprobs == 0
    assert sampling_from_proto(pb.SamplingParams(seed=0)).seed == 0


def test_doubles_are_exact() -> None:
    assert sampling_from_proto(sampling_to_proto(SamplingParams(temperature=0.1))).temperature == 0.1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.SamplingParams(temperature=float("nan")), "temperature"),
        (pb.SamplingParams(max_tokens=0), "max_tokens is 0"),
        (pb.SamplingParams(n=0), "n is 0"),
        (pb.SamplingParams(top_p=1.5), "top_p"),
        (pb.SamplingParams(allowed_token_ids=pb.TokenIds()), "allowed_token_ids is empty"),
        (pb.SamplingParams(stop=[""]), "stop"),
        (pb.SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
    ],
)
def test_bad_values_are_refused_in_the_words_of_the_api(message: pb.SamplingParams, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        sampling_from_proto(message)


def _with_unknown_field(message: Message) -> bytes:
    return message.SerializeToString() + bytes([0xF8, 0x3E, 0x01])  # field 1007, varint 1


@pytest.mark.parametrize("kind", [pb.SamplingParams, pb.GenerateRequest, pb.ChatMessage])
def test_fields_of_a_newer_client_are_refused(kind: type[Message]) -> None:
    refuse_unknown_fields(kind())
    with pytest.raises(UnsupportedOption, match="1007"):
        refuse_unknown_fields(kind.FromString(_with_unknown_field(kind())))


def test_a_prompt_is_text_ids_or_messages() -> None:
    sampling = SamplingParams()
    assert request_to_proto("hi", sampling).WhichOneof("prompt") == "text"
    assert list(request_to_proto((1, 2), sampling).token_ids.ids) == [1, 2]
    assert request_to_proto([], sampling).WhichOneof("prompt") == "token_ids"
    chat = request_to_proto([{"role": "user", "content": "hi"}], sampling).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi")]


def test_every_option_of_a_call_is_sent() -> None:
    options = CallOptions(
        request_id="r",
        priority=-3,
        cache_salt="s",
        tenant="t",
        ttft_target_s=0.5,
        tpot_target_s=0.25,
        echo=True,
        chunk_tokens=4,
        timeout_s=2.5,
        model="m",
    )
    message = request_to_proto("hi", SamplingParams(), options)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "pictures":
            assert not message.pictures and not value  # tests of pictures send some
            continue
        assert getattr(message, field.name) == value != field.default


@pytest.mark.parametrize(
    "prompt",
    [
        [2**31],
        ["a"],
        "\ud800",
        [{"role": "user"}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "x"}, 7],
    ],
)
def test_what_cannot_be_sent_is_a_typed_error(prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        request_to_proto(prompt, SamplingParams())


def test_an_option_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        sampling_to_proto(SamplingParams(stop_token_ids=(2**31,)))


def test_logprobs_go_there_and_back() -> None:
    entries = (TokenLogprobs(3, -0.5, 1, (3, 4), (-0.5, -1.25)), TokenLogprobs(9, -8.0, 40, (), ()))
    assert logprobs_from_proto(logprobs_to_proto(entries)) == entries


def test_replies_are_joined_by_sequence() -> None:
    completion = collect_replies(
        [
            pb.GenerateResponse(index=1, text="x", token_ids=[7], prompt=pb.PromptInfo(num_prompt_tokens=4)),
            pb.GenerateResponse(index=0, text="a", token_ids=[1]),
            pb.GenerateResponse(index=1, text="y", token_ids=[8, 9], finish_reason=pb.FINISH_REASON_LENGTH),
            pb.GenerateResponse(
                request_id="r",
                index=0,
                text="b",
                token_ids=[2],
                finish_reason=pb.FINISH_REASON_STOP,
                stop_token_id=0,
                usage=pb.Usage(num_prompt_tokens=4, num_generated_tokens=5),
            ),
        ]
    )
    first, second = completion.outputs
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", (1, 2), FinishReason.STOP)
    assert first.stop_reason == 0, "id 0 is a reason, not the absence of one"
    assert (second.text, second.token_ids, second.stop_reason) == ("xy", (7, 8, 9), None)
    assert (completion.request_id, completion.text, completion.num_generated_tokens) == ("r", "ab", 5)
