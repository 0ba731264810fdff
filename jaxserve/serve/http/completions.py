"""`/v1/completions`: prompts in, text out.

Both kinds of answers are made of the same pieces: a stream sends each, an answer in one piece joins them, so that they
cannot differ.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import Request, RequestOptions, SamplingParams, TokenLogprobs
from jaxserve.engine import Prompt, Update
from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.bodies import EVENTS, REFUSALS, JsonRoute
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, trace_of
from jaxserve.serve.http.errors import error_event
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.logprobs import CompletionLogprobsBuilder, WrittenLogprobs, write_prompt_logprobs
from jaxserve.serve.http.pieces import WrittenList, json_answer
from jaxserve.serve.http.requests import CompletionRequest
from jaxserve.serve.http.responses import CompletionChoice, CompletionResponse, as_fields, drawn_by
from jaxserve.serve.http.sampling import caller_of, completion_sampling, resume_of
from jaxserve.serve.http.streaming import (
    DONE,
    Event,
    EventStream,
    UsageCounter,
    event,
    is_known,
    large_event,
    usage_at_end,
    usage_in_all,
)
from jaxserve.serve.owners import Owner


def completions_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["OpenAI"])

    @router.post(
        "/v1/completions", response_model=CompletionResponse, response_model_exclude_unset=True, responses=EVENTS
    )
    async def create_completion(body: CompletionRequest, call: HttpRequest) -> Response:
        """Continues prompts."""
        door.check_model(body.model)
        answer_id, owner = new_id(body.request_id, call), owner_of(call)
        prompts, n = list_prompts(body.prompt, "prompt"), body.n or 1
        work = functools.partial(_prepare, door, body, prompts, answer_id, trace_of(call), owner)
        sampling, requests = await door.engine.run(
            work, prompts=len(prompts), n=n, tenant=caller_of(body), owner=owner.id
        )
        door.engine.check_answer(requests, repeats_prompt=bool(body.echo) and body.logprobs is not None)
        answer = _Answer(door, body, sampling, requests, answer_id)
        if body.stream:
            return EventStream(door, requests, answer, answer_id, resumable=True)
        return await json_answer(door.turns, await answer.whole(door), {"x-request-id": answer_id})

    return router


def list_prompts(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], name: str) -> list[Prompt]:
    """One or several, as text or as ids. Raises InvalidRequest for none."""
    if isinstance(given, str):
        return [given]  # empty or not: a tokenizer may add a token that begins a text
    if not given:
        raise InvalidRequest(f"{name} is empty; send at least one token")
    if isinstance(given[0], int):
        return [given]  # pyright: ignore[reportReturnType]  (a list of ids, as the model of the body has checked)
    return list(given)  # pyright: ignore[reportReturnType]  (texts, or lists of ids)


def check_texts(door: Door, prompts: Sequence[Prompt]) -> None:
    """Raises InvalidRequest for texts to be cut of which all together are too much to encode."""
    door.engine.check_text(*(prompt for prompt in prompts if isinstance(prompt, str)))


def _prepare(
    door: Door, body: CompletionRequest, prompts: Sequence[Prompt], answer_id: str, traceparent: str, owner: Owner
) -> tuple[SamplingParams, list[Request]]:
    """The options of a call, which may be as many as a body holds, and a request for each prompt. Any thread."""
    sampling = completion_sampling(body)
    if body.resume is not None and len(prompts) > 1:
        raise InvalidRequest(f"resume is for one prompt, and there are {len(prompts)}; send them one by one")
    if sampling.truncate_prompt_tokens is not None:
        check_texts(door, prompts)
    resume = resume_of(body)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        options = RequestOptions(
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=body.user or "",
            ttft_target_s=body.ttft_target_s,
            tpot_target_s=body.tpot_target_s,
            add_special_tokens=body.add_special_tokens is not False,
            traceparent=traceparent,
            echo=bool(body.echo),
            adapter=body.model,
            resume=resume,
        )
        requests.append(door.engine.engine.prepare(prompt, sampling, owner.sign(options)))
    return sampling, requests


class _Answer:
    """Builds the pieces of one answer. Used by its call alone."""

    def __init__(
        self,
        door: Door,
        body: CompletionRequest,
        sampling: SamplingParams,
        requests: Sequence[Request],
        answer_id: str,
    ) -> None:
        self._tokenizer = door.engine.engine.tokenizer
        self._turns = door.turns
        self._body = body
        self._sampling = sampling
        self._requests = requests
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._scores_only = bool(body.echo) and body.max_tokens == 0
        self._counter = UsageCounter(requests)
        self._echoed: dict[int, WrittenLogprobs] = {}  # of a prompt, which is told with its first sequence alone
        self._begun: set[int] = set()
        self._logprobs = [self._builder(request) for request in requests for _ in range(sampling.n)]
        has = [requests[0].known(index).token_ids for index in range(sampling.n)] if body.resume else []
        for index, known in enumerate(has if body.logprobs is not None else ()):
            if known or has[0]:  # the prompt was scored with the first sequence, and is not again
                self._logprobs[index].follow_prompt(len(requests[0].echo_text))
                self._logprobs[index].skip(known)
                self._begun.add(index)
        self._id = f"cmpl-{answer_id}"
        self._created_s = int(time.time())
        self._model = body.model or door.model_name

    def _builder(self, request: Request) -> CompletionLogprobsBuilder:
        return CompletionLogprobsBuilder(
            self._tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=self._sampling.skip_special_tokens,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )

    async def whole(self, door: Door) -> dict[str, Any]:
        """The answer in one piece, as `json_pieces` takes it."""
        choices = [_WholeChoice() for _ in self._logprobs]
        async with follow(door, self._requests) as updates:
            async for update in updates:
                check_answered(update)
                piece = await self._piece(update)
                choices[piece.choice.index].add(piece)
        answer = as_fields(self._response([], usage=True))
        return {**answer, "choices": [choice.fields for choice in choices]}

    async def events(self, update: Update) -> list[Event]:
        if is_known(update):
            return []
        piece = await self._piece(update)
        if piece.is_small:
            return [event(self._response([piece.choice], usage=usage_in_all(self._body.stream_options)))]
        answer = as_fields(self._response([], usage=usage_in_all(self._body.stream_options)))
        logprobs = None if self._body.logprobs is None else WrittenLogprobs()
        if logprobs is not None:
            piece.write_logprobs(logprobs)
        choice = _with_lists(piece.choice, logprobs, piece.prompt_logprobs)
        return [await large_event(self._turns, {**answer, "choices": [choice]})]

    async def last_events(self, error: Exception | None) -> str:
        if error is not None:
            return error_event(error) + DONE
        return (event(self._response([], usage=True)) if usage_at_end(self._body.stream_options) else "") + DONE

    def _response(self, choices: list[CompletionChoice], *, usage: bool) -> CompletionResponse:
        response = CompletionResponse(
            id=self._id, object="text_completion", created=self._created_s, model=self._model, choices=choices
        )
        if usage:
            response.usage = self._counter.usage
        return response

    async def _piece(self, update: Update) -> "_Piece":
        number = self._numbers[update.request_id]
        request = self._requests[number]
        if self._scores_only:
            update = update._replace(token_ids=(), text=request.echo_text, logprobs=())
        self._counter.take(update)
        index = number * self._sampling.n + update.index
        choice = CompletionChoice(index=index, text=update.text, logprobs=None, finish_reason=None)
        if update.finish_reason is not None:
            choice.finish_reason = update.finish_reason.value  # pyright: ignore[reportAttributeAccessIssue]
            choice.stop_reason = update.stop_reason
            if update.weights:
                choice.weights = drawn_by(update.weights)
        entries = None if update.prompt is None else update.prompt.logprobs
        echoed = prompt = None
        if self._body.logprobs is not None:
            echoed = await self._echo(index, number, entries)
            choice.logprobs = self._logprobs[index].build(update.logprobs or (), self._body.logprobs)
        if entries is not None and self._body.prompt_logprobs is not None:
            prompt = await write_prompt_logprobs(self._tokenizer, entries, self._turns)
        if self._body.return_token_ids:
            choice.token_ids = list(update.token_ids)
            if update.prompt is not None:
                choice.prompt_token_ids = list(request.prompt_token_ids)
        return _Piece(choice, echoed, prompt)

    async def _echo(self, index: int, number: int, entries: Sequence[TokenLogprobs] | None) -> WrittenLogprobs | None:
        """What stands before the first entries of a sequence: those of its prompt, if it is echoed."""
        assert self._body.logprobs is not None
        is_first = index not in self._begun
        self._begun.add(index)
        if not self._body.echo or not is_first:
            return None
        request = self._requests[number]
        if number not in self._echoed:
            builder = self._builder(request)
            self._echoed[number] = await builder.write_prompt(entries or (), self._body.logprobs, self._turns)
        self._logprobs[index].follow_prompt(len(request.echo_text))
        return self._echoed[number]


class _Piece(NamedTuple):
    """What an update tells of a choice. `choice` lacks what is told of the prompt: `echoed`, which comes before its own
    log-probabilities, and `prompt_logprobs`."""

    choice: CompletionChoice
    echoed: WrittenLogprobs | None
    prompt_logprobs: WrittenList | None

    @property
    def is_small(self) -> bool:
        return self.echoed is None and self.prompt_logprobs is None

    def write_logprobs(self, written: WrittenLogprobs) -> None:
        """Writes its log-probabilities behind those of earlier pieces, and lets them go."""
        if self.echoed is not None:
            written.extend(self.echoed)
        if self.choice.logprobs is not None:
            written.add(self.choice.logprobs)
            self.choice.logprobs = None


class _WholeChoice:
    """A choice, joined of its pieces, whose log-probabilities are written when they come."""

    def __init__(self) -> None:
        self._pieces: list[CompletionChoice] = []
        self._logprobs: WrittenLogprobs | None = None
        self._prompt_logprobs: WrittenList | None = None

    def add(self, piece: _Piece) -> None:
        """Takes the next piece."""
        if piece.choice.logprobs is not None:
            self._logprobs = self._logprobs or WrittenLogprobs()
            piece.write_logprobs(self._logprobs)
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
        self._pieces.append(piece.choice)

    @property
    def fields(self) -> dict[str, Any]:
        """As `json_pieces` takes them."""
        return _with_lists(_join(self._pieces), self._logprobs, self._prompt_logprobs)


def _with_lists(
    choice: CompletionChoice, logprobs: WrittenLogprobs | None, prompt_logprobs: WrittenList | None
) -> dict[str, Any]:
    """The fields of a choice, with written lists in their places."""
    if prompt_logprobs is not None:
        choice.prompt_logprobs = []  # its place among the fields
    fields = as_fields(choice)
    if logprobs is not None:
        fields["logprobs"] = logprobs.fields
    return fields if prompt_logprobs is None else {**fields, "prompt_logprobs": prompt_logprobs}


def _join(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    assert pieces, "a sequence that ended well has at least one update"
    last = pieces[-1]
    joined = CompletionChoice(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        logprobs=None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    if last.weights is not None:
        joined.weights = last.weights
    if pieces[0].token_ids is not None:
        joined.token_ids = [i for piece in pieces for i in piece.token_ids or ()]
        joined.prompt_token_ids = pieces[0].prompt_token_ids
    return joined
