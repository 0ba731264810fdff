"""The ingress without a cluster: a scripted handle stands for Ray's, which is all that the ingress sees of it."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

from jaxserve.errors import Status
from jaxserve.fleet import ray_ingress, ray_prompts
from jaxserve.fleet.messages import Accepted, CallFailed, Refusal
from jaxserve.fleet.ray_ingress import Ingress
from jaxserve.serve.gen import handoff_pb2
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.route_apart import Apart

APART = Apart(prefill_above=8, timeout_s=60.0, retries=2)
REQUEST = pb.GenerateRequest(text="Once upon a time " * 8)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Context:
    """What is set on a call's gRPC context."""

    code: grpc.StatusCode | None = None
    details = ""
    trailers: Sequence[tuple[str, str]] = ()

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailers: Sequence[tuple[str, str]]) -> None:
        self.trailers = trailers


class Stream:
    """One scripted stream: items, exceptions that are raised, and None, which waits for ever."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.cancelled = False
        self._items = self._play(script)

    async def _play(self, script: Sequence[Any]) -> AsyncGenerator[Any, None]:
        for item in script:
            if item is None:
                await asyncio.Event().wait()
            if isinstance(item, Exception):
                raise item
            yield item

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Ray's handle of the engines. `alive` answers `is_alive`, `answers` one after the other; exceptions are raised.

    `offers` are the scripts of `offer`, in order.
    """

    def __init__(
        self,
        *scripts: Sequence[Any],
        alive: bool | Exception = True,
        answers: Sequence[Any] = (),
        offers: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.streams = [Stream(script) for script in scripts]
        self.calls: list[dict[str, Any]] = []
        self.answers = list(answers)
        self.offers = list(offers)
        self.alive = alive
        self._method = ""

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        bound = Handle(alive=self.alive)
        bound.streams, bound.calls, bound._method = self.streams, self.calls, method_name
        bound.answers, bound.offers = self.answers, self.offers
        return bound

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self._method == "is_alive":
            return self._say(self.alive)
        if self._method == "answer":
            self.calls.append({"method": args[0], "message": args[1]})
            return self._say(self.answers.pop(0))
        if self._method == "offer":
            return Stream(self.offers.pop(0))
        self.calls.append({"message": args[0], **kwargs})
        return self.streams[len(self.calls) - 1]

    async def _say(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def _text(text: str, *token_ids: int) -> bytes:
    return pb.GenerateResponse(text=text, token_ids=token_ids).SerializeToString()


async def _run(
    handle: Handle, max_attempts: int = 3, request: pb.GenerateRequest = REQUEST, prompts: Handle | None = None
) -> tuple[str, Context, CallFailed | None]:
    context, texts = Context(), []
    ingress: Any = Ingress(handle, max_attempts, APART, prompts)  # type: ignore[arg-type]
    try:
        async for reply in ingress.Generate(copy.copy(request), context):
            texts.append(reply.text)
    except CallFailed as error:
        return "".join(texts), context, error
    return "".join(texts), context, None


async def test_an_answer_passes_through() -> None:
    handle = Handle([Accepted(replica="a"), _text("one "), _text("two")])
    text, context, error = await _run(handle)
    assert (text, error, context.code) == ("one two", None, None)
    assert dict(context.trailers) == {"jaxserve-replica": "a", "jaxserve-attempt": "1"}
    assert not handle.streams[0].cancelled
    assert len(handle.calls[0]["prompt_key"]) == 2, "two blocks of 64 bytes are full"


@pytest.mark.parametrize(
    "end", [ActorDiedError(), Refusal(status=Status.UNAVAILABLE, text="the engine has died")], ids=["process", "engine"]
)
async def test_a_death_before_the_first_message_is_tried_elsewhere(end: Any) -> None:
    handle = Handle([Accepted(replica="a"), end], [Accepted(replica="b"), _text("all")])
    text, context, error = await _run(handle)
    assert (text, error) == ("all", None)
    assert dict(context.trailers) == {"jaxserve-replica": "b", "jaxserve-attempt": "2"}
    assert [call["avoid"] for call in handle.calls] == [(), ("a",)]
    first, second = (pb.GenerateRequest.FromString(call["message"]) for call in handle.calls)
    assert first == second
    assert first.request_id, "one id for all attempts"


@pytest.mark.parametrize(
    "end", [ActorDiedError(), Refusal(status=Status.UNAVAILABLE, text="replica a died")], ids=["process", "engine"]
)
async def test_a_death_after_a_message_is_not_seen(end: Any) -> None:
    handle = Handle(
        [Accepted(replica="a"), _text("one ", 1), _text("two ", 2), end], [Accepted(replica="b"), _text("three", 3)]
    )
    text, _, error = await _run(handle)
    assert (text, error) == ("one two three", None)
    first, second = (pb.GenerateRequest.FromString(call["message"]) for call in handle.calls)
    assert not first.HasField("resume")
    assert second.resume.reason == pb.RESUME_REASON_DIED
    assert list(second.resume.sequences) == [pb.KnownSequence(token_ids=[1, 2], text_len=8)]
    assert second.sampling.seed == first.sampling.seed
    second.ClearField("resume")
    assert first == second


async def test_a_replica_that_is_shut_down_has_not_failed() -> None:
    gone = Refusal(status=Status.UNAVAILABLE, text="shut down", drained=True)
    drains = [[Accepted(replica=name), gone] for name in "bcd"]
    handle = Handle([Accepted(replica="a"), _text("one ", 1), gone], *drains, [Accepted(replica="e"), _text("two", 2)])
    text, _, error = await _run(handle, max_attempts=1)
    assert (text, error) == ("one two", None)
    assert pb.GenerateRequest.FromString(handle.calls[1]["message"]).resume.reason == pb.RESUME_REASON_DRAINED
    _, context, error = await _run(Handle(*[[Accepted(replica="a"), gone]] * 4), max_attempts=1)
    assert error is not None and context.code is grpc.StatusCode.UNAVAILABLE, "the same one twice"


async def test_attempts_after_the_second_failure_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(ray_ingress.asyncio, "sleep", sleep)
    dead = [[Accepted(replica=name), ActorDiedError()] for name in "abcd"]
    text, _, error = await _run(Handle(*dead, [_text("all")]), max_attempts=5)
    assert (text, error) == ("all", None)
    assert waits[0] == 0.0, "another one is likely well"
    assert [0.5 * 2**k <= wait / 0.1 <= 2**k for k, wait in enumerate(waits[1:])] == [True] * 3


async def test_deaths_without_a_new_token_are_told() -> None:
    dead = [[Accepted(replica=name), ActorDiedError()] for name in "bcd"]
    handle = Handle([Accepted(replica="a"), _text("one ", 1), ActorDiedError()], *dead)
    text, context, error = await _run(handle, max_attempts=2)
    assert text == "one "
    assert error is not None
    assert context.code is grpc.StatusCode.UNAVAILABLE
    assert context.details.startswith("the answer broke off after 1 tokens: replica b died")
    assert len(handle.calls) == 2


async def test_the_time_of_a_request_goes_on_when_it_moves() -> None:
    handle = Handle([Accepted(replica="a"), ActorDiedError()], [Accepted(replica="b"), _text("one")])
    text, _, error = await _run(handle, request=pb.GenerateRequest(text="hello", timeout_s=60.0))
    assert (text, error) == ("one", None)
    first, second = (pb.GenerateRequest.FromString(call["message"]).timeout_s for call in handle.calls)
    assert second < first == 60.0
    handle = Handle([Accepted(replica="a"), ActorDiedError()])
    _, context, error = await _run(handle, request=pb.GenerateRequest(text="hello", timeout_s=1e-9))
    assert error is not None
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_in_which_something_is_missing_goes_on_elsewhere() -> None:
    gap = pb.GenerateResponse(token_offset=2, token_ids=[3], text="three").SerializeToString()
    handle = Handle([Accepted(replica="a"), _text("one ", 1), gap], [Accepted(replica="b"), _text("two", 2)])
    text, _, error = await _run(handle)
    assert (text, error) == ("one two", None)


async def test_attempts_are_bounded() -> None:
    handle = Handle(*[[Accepted(replica=name), ActorDiedError()] for name in "abc"])
    _, context, error = await _run(handle, max_attempts=2)
    assert error is not None
    assert len(handle.calls) == 2
    assert context.code is grpc.StatusCode.UNAVAILABLE
    assert "2 attempts failed before anything was streamed" in context.details


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.INVALID, grpc.StatusCode.INVALID_ARGUMENT),
        (Status.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
async def test_other_refusals_keep_their_status_and_are_not_repeated(status: Status, code: grpc.StatusCode) -> None:
    handle = Handle([Accepted(replica="a"), Refusal(status=status, text="because")])
    _, context, error = await _run(handle)
    assert error is not None
    assert (context.code, context.details) == (code, "because")
    assert len(handle.calls) == 1


async def test_a_full_replica_is_left_once() -> None:
    full = [Accepted(replica="a"), Refusal(status=Status.OVERLOADED, text="the queue is full")]
    text, _, error = await _run(Handle(full, [Accepted(replica="b"), _text("all")]))
    assert (text, error) == ("all", None)
    handle = Handle(full, full, full)
    _, context, error = await _run(handle)
    assert error is not None
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert len(handle.calls) == 2


async def test_what_is_cancelled_is_not_sent_again() -> None:
    handle = Handle([Accepted(replica="a"), TaskCancelledError()], [_text("nobody waits for this")])
    with pytest.raises(TaskCancelledError):
        await _run(handle)
    assert len(handle.calls) == 1


async def test_a_defect_is_no_death() -> None:
    handle = Handle([Accepted(replica="a"), RayTaskError("generate", "traceback", ValueError("x"))])
    with pytest.raises(RayTaskError):
        await _run(handle)
    assert len(handle.calls) == 1


async def test_a_client_that_leaves_cancels_the_stream() -> None:
    handle = Handle([Accepted(replica="a"), _text("one"), None])
    replies = Ingress(handle, 3, APART).Generate(copy.copy(REQUEST), Context())  # type: ignore[arg-type]
    assert (await anext(replies)).text == "one"
    waiting = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert handle.streams[0].cancelled


# ---- prompts computed elsewhere --------------------------------------------------------------------------------------

FULL = Refusal(status=Status.OVERLOADED, text="no room")


def _lent(ticket: bytes) -> bytes:
    return handoff_pb2.PrefillResponse(ticket=ticket).SerializeToString()


def _ticket(call: dict[str, Any]) -> bytes:
    return pb.GenerateRequest.FromString(call["message"]).ticket


async def test_a_prompt_is_computed_elsewhere_for_a_replica_that_has_room() -> None:
    handle = Handle(
        [Accepted(replica="b"), _text("all")], offers=[[Accepted(replica="a"), FULL], [Accepted(replica="b")]]
    )
    prompts = Handle([Accepted(replica="p"), _lent(b"ticket")])
    assert (await _run(handle, prompts=prompts))[0] == "all"
    assert [(call["wanted"], call["avoid"], _ticket(call)) for call in handle.calls] == [("b", ("a",), b"ticket")]
    assert len(prompts.calls) == 1, "nothing was computed for the replica without room"
    short = Handle([Accepted(replica="a"), _text("all")])
    assert (await _run(short, request=pb.GenerateRequest(text="hello"), prompts=prompts))[0] == "all"
    assert (short.calls[0]["wanted"], len(prompts.calls)) == (None, 1)


@pytest.mark.parametrize(
    ("scripts", "ticket"),
    [
        ([[Accepted(replica="p"), ActorDiedError()], [Accepted(replica="q"), _lent(b"t")]], b"t"),
        ([[Accepted(replica="p"), FULL], [Accepted(replica="q"), _lent(b"t")]], b"t"),
        ([[Accepted(replica="p"), FULL], [Accepted(replica="p"), None]], b""),
        ([[Accepted(replica="p"), Refusal(status=Status.INVALID, text="")]], b""),
        ([[Accepted(replica="p"), RayTaskError("prefill", "traceback", ValueError("x"))]], b""),
        ([[Accepted(replica=name), ActorDiedError()] for name in "pq"], b""),
    ],
    ids=["death", "full", "the only one", "refusal", "defect", "two deaths"],
)
async def test_whatever_happens_to_a_prompt_its_request_is_answered(scripts: Any, ticket: bytes) -> None:
    handle = Handle([Accepted(replica="a"), _text("all")], offers=[[Accepted(replica="a")]])
    prompts = Handle(*scripts)
    text, _, error = await _run(handle, prompts=prompts)
    assert (text, error, _ticket(handle.calls[0])) == ("all", None, ticket)
    assert len(prompts.calls) == len(scripts), "and no other replica is asked"


async def test_a_ticket_outlives_the_replica_that_was_to_use_it_and_one_that_is_refused_is_left_out() -> None:
    handle = Handle(
        [Accepted(replica="a"), ActorDiedError()],
        [Accepted(replica="b"), Refusal(status=Status.INVALID, text="of another fleet")],
        [Accepted(replica="b"), _text("all")],
        offers=[[Accepted(replica="a")]],
    )
    prompts = Handle([Accepted(replica="p"), _lent(b"ticket")])
    assert (await _run(handle, prompts=prompts))[0] == "all"
    assert [_ticket(call) for call in handle.calls] == [b"ticket", b"ticket", b""]


async def test_replicas_that_are_not_there_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_prompts, "_TAKE_S", 0.01)
    handle = Handle(*[[Accepted(replica="a"), _text("all")]] * 2, offers=[[Accepted(replica="a")]] * 2)
    prompts = Handle([None])
    ingress: Any = Ingress(handle, 3, APART, prompts)  # type: ignore[arg-type]
    for _ in range(2):
        assert [reply.text async for reply in ingress.Generate(copy.copy(REQUEST), Context())] == ["all"]
    assert len(prompts.calls) == 1 and prompts.streams[0].cancelled


DEAD = Refusal(status=Status.UNAVAILABLE, text="the engine has died")


@pytest.mark.parametrize("deaths", [(), (ActorDiedError(),), (DEAD,), (ActorDiedError(), DEAD)])
async def test_a_question_is_answered_by_any_replica_that_lives(deaths: tuple[Any, ...]) -> None:
    handle = Handle(answers=[*deaths, pb.DetokenizeResponse(text="a fox").SerializeToString()])
    context = Context()
    request = pb.DetokenizeRequest(token_ids=[1, 2])
    answer = await Ingress(handle, 3, APART).Detokenize(request, context)  # type: ignore[arg-type]
    assert (answer.text, context.code) == ("a fox", None)
    assert [call["method"] for call in handle.calls] == ["Detokenize"] * (len(deaths) + 1)
    assert pb.DetokenizeRequest.FromString(handle.calls[-1]["message"]) == request


async def test_questions_are_asked_a_bounded_number_of_times_and_refusals_once() -> None:
    context, handle = Context(), Handle(answers=[DEAD] * 5)
    with pytest.raises(CallFailed, match="2 replicas died"):
        await Ingress(handle, 2, APART).GetModel(pb.GetModelRequest(), context)  # type: ignore[arg-type]
    assert (context.code, len(handle.calls)) == (grpc.StatusCode.UNAVAILABLE, 2)
    context, handle = Context(), Handle(answers=[Refusal(status=Status.INVALID, text="no text")])
    with pytest.raises(CallFailed, match="no text"):
        await Ingress(handle, 3, APART).Tokenize(pb.TokenizeRequest(), context)  # type: ignore[arg-type]
    assert (context.code, len(handle.calls)) == (grpc.StatusCode.INVALID_ARGUMENT, 1)


async def test_what_no_single_replica_knows_is_unimplemented() -> None:
    ingress, context = Ingress(Handle(), 3, APART), Context()  # type: ignore[arg-type]
    for ask in (ingress.GetLoad(pb.GetLoadRequest(), context), ingress.Abort(pb.AbortRequest(), context)):  # type: ignore[arg-type]
        with pytest.raises(CallFailed, match="does not answer"):
            await ask
        assert context.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("alive", "status"), [(True, SERVING), (False, NOT_SERVING), (ActorDiedError(), NOT_SERVING)])
async def test_health_is_what_a_replica_says(alive: bool | Exception, status: int) -> None:
    ingress = Ingress(Handle(alive=alive), 3, APART)  # type: ignore[arg-type]
    for name in ("", "jaxserve.v1.Inference"):
        request = health_pb2.HealthCheckRequest(service=name)
        assert (await ingress.Check(request, Context())).status == status  # type: ignore[arg-type]
        async with contextlib.aclosing(ingress.Watch(request)) as watch:
            assert (await anext(watch)).status == status


async def test_unknown_health_names_are_not_found() -> None:
    context = Context()
    with pytest.raises(CallFailed, match="nobody"):
        await Ingress(Handle(), 3, APART).Check(health_pb2.HealthCheckRequest(service="nobody"), context)  # type: ignore[arg-type]
    assert context.code is grpc.StatusCode.NOT_FOUND
