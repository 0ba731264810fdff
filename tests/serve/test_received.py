"""What a router and a client make of messages that come twice, not at all, or from another server."""

import threading

import grpc
import pytest

from jaxserve.api import ResumeReason, SamplingParams
from jaxserve.client import RequestFailed
from jaxserve.client.resuming import Attempts, Retries
from jaxserve.errors import ConfigError, Draining, EngineStopped, QueueFull
from jaxserve.serve.convert import request_to_proto
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.received import Received
from jaxserve.serve.status import public_message
from jaxserve.serve.status_details import details_of, is_draining
from jaxserve.testing import ManualClock

UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


def received_of(n: int, *known: pb.KnownSequence) -> Received:
    return Received(pb.GenerateRequest(sampling=pb.SamplingParams(n=n), resume=pb.Resume(sequences=known)))


def broken(code: grpc.StatusCode, text: str = "refused", retry_after_s: float = 0.0) -> grpc.aio.AioRpcError:
    why = QueueFull(text, retry_after_s=retry_after_s or None)
    return broken_by(why, code)


def broken_by(why: Exception, code: grpc.StatusCode = UNAVAILABLE) -> grpc.aio.AioRpcError:
    """The failed call of a client whose server raised `why`."""
    text = str(why)
    trailers = grpc.aio.Metadata(*details_of(why, code, text))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=text)


def reply(token_offset: int, token_ids: list[int], text_offset: int, text: str, **fields) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        token_offset=token_offset, token_ids=token_ids, text_offset=text_offset, text=text, **fields
    )


def test_what_came_before_is_cut_off() -> None:
    received = received_of(2)
    received.take(reply(0, [5, 6], 0, "é日"))
    again = reply(1, [6, 7], 1, "日x", logprobs=[pb.TokenLogprobs(token_id=6), pb.TokenLogprobs(token_id=7)])
    received.take(again)
    assert (list(again.token_ids), again.text) == ([7], "x")
    assert [entry.token_id for entry in again.logprobs] == [7]
    assert (again.token_offset, again.text_offset) == (2, 2)
    received.take(reply(0, [9], 0, "y", index=1, finish_reason=pb.FINISH_REASON_STOP))
    assert received.num_tokens == 4
    assert not received.complete
    request = pb.GenerateRequest()
    received.go_on(request, ResumeReason.CLIENT)
    request.resume.ClearField("age_s")
    assert request.resume == pb.Resume(
        sequences=[
            pb.KnownSequence(token_ids=[5, 6, 7], text_len=3),
            pb.KnownSequence(token_ids=[9], text_len=1, finished=True),
        ]
    )


def test_what_is_missing_is_told() -> None:
    received = received_of(1)
    received.take(reply(0, [5], 0, "a"))
    with pytest.raises(EngineStopped, match="2 tokens of sequence 0 are missing"):
        received.take(reply(3, [8], 1, "d"))
    with pytest.raises(EngineStopped, match="1 characters of sequence 0 are missing"):
        received.take(reply(1, [8], 2, "d"))


def test_a_server_without_offsets_is_taken_at_its_word() -> None:
    received = received_of(1)
    for _ in range(2):
        received.take(pb.GenerateResponse(token_ids=[5], text="a"))
    assert received.num_tokens == 2


def test_the_usage_counts_the_prompt_of_the_first_server() -> None:
    received = received_of(1)
    received.take(reply(0, [5], 0, "a", prompt=pb.PromptInfo(num_prompt_tokens=9, num_cached_tokens=3)))
    last = reply(1, [6], 1, "b", prompt=pb.PromptInfo(num_prompt_tokens=9), usage=pb.Usage(num_cached_tokens=9))
    received.take(last)
    assert not last.HasField("prompt")
    assert last.usage.num_cached_tokens == 3


def test_nothing_is_made_for_each_of_absurdly_many_sequences() -> None:
    assert received_of(2**31 - 1).open_indices == [0]


def test_a_resumed_request_that_has_not_begun_here_has_the_ends_that_it_came_with() -> None:
    assert received_of(2, pb.KnownSequence(token_ids=[5], finished=True), pb.KnownSequence()).open_indices == [1]


def attempts(reached: bool = True, **retries) -> Attempts:
    answered = threading.Event()
    if reached:
        answered.set()
    return Attempts(request_to_proto("a", SamplingParams()), Retries(**retries), None, answered)


def refused(calls: Attempts, error: grpc.aio.AioRpcError) -> str:
    with pytest.raises(RequestFailed) as caught:
        calls.wait_after(error)
    return str(caught.value)


def test_the_age_of_a_request_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("jaxserve.serve.received.time.monotonic", clock)
    request, ages = pb.GenerateRequest(), []
    for wait_s in (0.0, 2.0):  # a router, and a client behind it that waits before it calls again
        received = Received(request)
        received.take(reply(0, [5], 0, "a"))
        clock.advance(10.0)
        received.go_on(request, ResumeReason.DIED, wait_s)
        ages.append(request.resume.age_s)
    assert ages == [10.0, 22.0]


def test_waits_grow_until_a_token_comes_and_attempts_end() -> None:
    calls = attempts(attempts=3, first_wait_s=1.0, longest_wait_s=3.0)
    assert calls.message.request_id
    assert calls.message.sampling.HasField("seed"), "a second server would draw another one"
    calls.take(reply(0, [5], 0, "a"))
    causes = ["process 1 is lost", "refused", "refused"]
    waits = [calls.wait_after(broken(UNAVAILABLE, text)) for text in causes]
    end = refused(calls, broken(UNAVAILABLE, "refused again"))
    assert "refused again" in end and "process 1 is lost" in end, "the last error, and what ended the stream"
    for wait_s, longest_s in zip(waits, (1.0, 2.0, 3.0), strict=True):
        assert wait_s is not None
        assert longest_s / 2 <= wait_s <= longest_s
    assert list(calls.message.resume.sequences) == [pb.KnownSequence(token_ids=[5], text_len=1)]
    calls.take(reply(1, [6], 1, "b"))
    assert calls.wait_after(broken(FULL, retry_after_s=7.0)) == 7.0, "a full server says when"


def test_calls_that_are_not_sent_again() -> None:
    assert refused(attempts(reached=False), broken(UNAVAILABLE)) == "refused", "the address is likely wrong"
    assert refused(attempts(), broken(FULL)) == "refused", "nothing had begun"
    assert attempts().wait_after(broken(UNAVAILABLE)) is not None
    begun = attempts()
    begun.take(reply(0, [5], 0, "a"))
    refused(begun, broken(grpc.StatusCode.INTERNAL, public_message(KeyError(), "error 12ab")))
    assert begun.wait_after(broken(grpc.StatusCode.INTERNAL, "The actor died")) is not None, "a proxy's word for it"
    never = attempts(attempts=0)
    never.take(reply(0, [5], 0, "a"))
    refused(never, broken(UNAVAILABLE))
    assert not never.message.request_id
    with pytest.raises(RequestFailed, match="2 tokens of sequence 0 are missing"):
        begun.take(reply(3, [8], 1, "d"))
    begun.take(reply(1, [6], 1, "b", finish_reason=pb.FINISH_REASON_STOP))
    assert begun.wait_after(broken(UNAVAILABLE)) is None, "all that was missing is the status"
    with pytest.raises(ConfigError):
        Retries(first_wait_s=9.0, longest_wait_s=1.0)


def test_a_server_that_drains_says_so_beside_its_status() -> None:
    assert is_draining(broken_by(Draining("it was shut down")))
    assert not is_draining(broken_by(EngineStopped("it was shut down"))), "the text alone means nothing"
    assert not is_draining(broken(FULL, retry_after_s=7.0))
    for why, reason in ((Draining("gone"), pb.RESUME_REASON_DRAINED), (EngineStopped("gone"), pb.RESUME_REASON_CLIENT)):
        calls = Attempts(request_to_proto("a", SamplingParams()), Retries(), None, threading.Event())
        calls.take(reply(0, [5], 0, "a"))
        assert calls.wait_after(broken_by(why)) is not None
        assert calls.message.resume.reason == reason
