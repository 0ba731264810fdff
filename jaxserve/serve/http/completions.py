"""`/v1/completions`: prompts in, text out.

Both kinds of answers are made of the same pieces: a stream sends each, an answer in one piece joins them, so that they
cannot differ.
"""

import functools
import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from jaxserve.api import Request, RequestOptions, SamplingParams, TokenLogprobs
from jaxserve.engine import Prompt, Update
from jaxserve.errors import InvalidRequest
from jaxserve.serve.http.bodies import EVENTS, REFUSALS, JsonRoute
from jaxserve.serve.http.door import Door, check_answered, follow, new_id, prepare, trace_of
from jaxserve.serve.http.errors import error_event, json_response
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.logprobs import CompletionLogprobsBuilder, join_logprobs, prompt_logprobs
from jaxserve.serve.http.requests import CompletionRequest
from jaxserve.serve.http.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, drawn_by
from jaxserve.serve.http.sampling import caller_of, completion_sampling, resume_of
from jaxserve.serve.http.streaming import DONE, EventStream, UsageCounter, event, is_known, usage_at_end, usage_in_all
from jaxserve.serve.owners import Owner


def completions_router(door: Door) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["OpenAI"])

    @router.post(
        "/v1/completions", response_model=CompletionResponse, response_model_exclude_unset=True, responses=EVENTS
    )
    async def create_completion(body: CompletionRequest, call: HttpRequest) -> Response:
        """Continues prompts."""
        door.check_model(body.model)
        sampling = completion_sampling(body)
        answer_id = new_id(body.request_id, call)
        owner = owner_of(call)
        makers = _makers(door, body, sampling, answer_id, trace_of(call), owner)
        requests = await prepare(door, makers, sampling.n, tenant=caller_of(body), owner=owner)
        answer = _Answer(door, body, sampling, requests, answer_id)
        if body.stream:
            return EventStream(door, requests, answer, answer_id, resumable=True)
        return json_response(await answer.whole(door), headers={"x-request-id": answer_id})

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


def _makers(
    door: Door, body: CompletionRequest, sampling: SamplingParams, answer_id: str, traceparent: str, owner: Owner
) -> list[Callable[[], Request]]:
    prompts = list_prompts(body.prompt, "prompt")
    if body.resume is not None and len(prompts) > 1:
        raise InvalidRequest(f"resume is for one prompt, and there are {len(prompts)}; send them one by one")
    return [
        functools.partial(
            door.engine.engine.prepare,
            prompt,
            sampling,
            owner.sign(
                RequestOptions(
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
                    resume=resume_of(body),
                )
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


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
        self._body = body
        self._sampling = sampling
        self._requests = requests
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._scores_only = bool(body.echo) and body.max_tokens == 0
        self._counter = UsageCounter(requests)
        self._prompt_entries: dict[int, tuple[TokenLogprobs, ...]] = {}  # told with a prompt's first sequence alone
        self._begun: set[int] = set()
        self._logprobs = [
            CompletionLogprobsBuilder(
                self._tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
            for request in requests
            for _ in range(sampling.n)
        ]
        has = [requests[0].known(index).token_ids for index in range(sampling.n)] if body.resume else []
        for index, known in enumerate(has if body.logprobs is not None else ()):
            if known or has[0]:  # the prompt was scored with the first sequence, and is not again
                self._logprobs[index].skip(known, echo=bool(body.echo))
                self._begun.add(index)
        self._id = f"cmpl-{answer_id}"
        self._created_s = int(time.time())
        self._model = body.model or door.model_name

    async def whole(self, door: Door) -> CompletionResponse:
        pieces: list[list[CompletionChoice]] = [[] for _ in self._logprobs]
        async with follow(door, self._requests) as updates:
            async for update in updates:
                check_answered(update)
                piece = self._piece(update)
                pieces[piece.index].append(piece)
        return self._response([_join(each) for each in pieces], usage=True)

    def events(self, update: Update) -> str:
        if is_known(update):
            return ""
        return event(self._response([self._piece(update)], usage=usage_in_all(self._body.stream_options)))

    def last_events(self, error: Exception | None) -> str:
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

    def _piece(self, update: Update) -> CompletionChoice:
        number = self._numbers[update.request_id]
        request = self._requests[number]
        if self._scores_only:
            text = (
                ""
                if self._tokenizer is None
                else self._tokenizer.decode(
                    request.prompt_token_ids, skip_special_tokens=self._sampling.skip_special_tokens
                )
            )
            update = update._replace(token_ids=(), text=text, logprobs=())
        self._counter.take(update)
        index = number * self._sampling.n + update.index
        choice = CompletionChoice(index=index, text=update.text, logprobs=None, finish_reason=None)
        if update.finish_reason is not None:
            choice.finish_reason = update.finish_reason.value  # pyright: ignore[reportAttributeAccessIssue]
            choice.stop_reason = update.stop_reason
            if update.weights:
                choice.weights = drawn_by(update.weights)
        if self._body.logprobs is not None:
            choice.logprobs = self._build_logprobs(index, number, update)
        if update.prompt is not None and update.prompt.logprobs is not None and self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, update.prompt.logprobs)
        if self._body.return_token_ids:
            choice.token_ids = list(update.token_ids)
            if update.prompt is not None:
                choice.prompt_token_ids = list(request.prompt_token_ids)
        return choice

    def _build_logprobs(self, index: int, number: int, update: Update) -> CompletionLogprobs:
        builder, count = self._logprobs[index], self._body.logprobs
        assert count is not None
        if update.prompt is not None and update.prompt.logprobs is not None:
            self._prompt_entries[number] = update.prompt.logprobs
        parts = []
        if self._body.echo and index not in self._begun:
            parts.append(builder.build_prompt(self._prompt_entries.get(number, ()), count))
        self._begun.add(index)
        return join_logprobs([*parts, builder.build(update.logprobs or (), count)])


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
    parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if parts:
        joined.logprobs = join_logprobs(parts)
    if pieces[0].prompt_logprobs is not None:
        joined.prompt_logprobs = pieces[0].prompt_logprobs
    if pieces[0].token_ids is not None:
        joined.token_ids = [i for piece in pieces for i in piece.token_ids or ()]
        joined.prompt_token_ids = pieces[0].prompt_token_ids
    return joined
