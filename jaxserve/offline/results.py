"""Results of prompts, in the names and meanings of vLLM, and the sink that gathers them from updates."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable

from jaxserve.api import FinishReason, PromptInfo, TokenLogprobs
from jaxserve.engine import DrawnBy, Update, embedding_of
from jaxserve.errors import JaxserveError
from jaxserve.offline.jobs import Job
from jaxserve.sched.plan import Drafted
from jaxserve.text import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative at one position; natural logarithm of the raw probability. `rank` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
      index: which of the n sequences.
      text: empty without a tokenizer or with `detokenize=False`.
      token_ids: the token that ended the sequence included.
      cumulative_logprob: sum over the drawn tokens; None unless logprobs were asked for.
      logprobs: per token, the drawn one first, then the most likely ones.
      finish_reason: "stop", "length" or "abort".
      stop_reason: the stop string or stop token id; None for end-of-sequence and length.
      weights: which weights drew the tokens (see `LLM.update_weights`); empty: those of the start.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    weights: tuple[DrawnBy, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Monotonic seconds. `first_token_s` and `admitted_s` are None when nothing was generated.

    `admitted_s` is when a step first gave the request a row: it queued from `arrival_s` until then, and its prompt was
    computed from then to `first_token_s`. Of the generated tokens, `accepted_tokens` had been drafted before the model
    drew them; `drafted_tokens` are all drafts.
    """

    arrival_s: float
    first_token_s: float | None
    finished_s: float
    admitted_s: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
      prompt: the text that was encoded; None when ids were given.
      prompt_logprobs: one entry per prompt token, the first None; None unless asked for.
      outputs: n sequences.
      num_cached_tokens: prompt tokens that a prefix hit saved.
      embedding: of a job that pools, which has no outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    embedding: list[float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """Numbers of one prompt, as many as were asked for; see `LLM.embed`."""

    embedding: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The result of one prompt of `LLM.embed`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """P(yes) / (P(yes) + P(no)) of the model's answer about one document; 0 to 1."""

    score: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """The result of one query and document of `LLM.score`. `request_id`: of the last request that was made for it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


Result = RequestOutput | JaxserveError


@dataclasses.dataclass(slots=True)
class Counts:
    """Progress so far. Written by `run_jobs`, read by progress bars."""

    num_done: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class _Sequence:
    """The output of one sequence so far. Mutated by its Gatherer."""

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids", "weights")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.weights: tuple[DrawnBy, ...] = ()
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


class Gatherer:
    """The sink of one request. Mutated by the engine's step."""

    def __init__(
        self,
        index: int,
        job: Job,
        tokenizer: Tokenizer | None,
        counts: Counts,
        on_end: Callable[["Gatherer"], None],
    ) -> None:
        """`on_end` is called once, with the last update."""
        self.index = index
        self._on_end = on_end
        self._job = job
        self._tokenizer = tokenizer
        self._counts = counts
        self._sequences = [_Sequence() for _ in range(job.request.sampling.n)]
        self._prompt: PromptInfo | None = None
        self._error: JaxserveError | None = None
        self._first_token_s: float | None = None
        self._admitted_s: float | None = None
        self._drafts = Drafted(0, 0)

    @property
    def request_id(self) -> str:
        """The id of the job's request."""
        return self._job.request.request_id

    def take(self, update: Update) -> None:
        """The sink: takes one update."""
        sequence = self._sequences[update.index]
        if self._first_token_s is None and update.token_ids:
            self._first_token_s = time.monotonic()
        sequence.texts.append(update.text)
        sequence.token_ids += update.token_ids
        sequence.logprobs += update.logprobs or ()
        sequence.finish_reason = update.finish_reason
        sequence.stop_reason = update.stop_reason
        sequence.weights = update.weights
        self._prompt = self._prompt or update.prompt
        self._admitted_s = update.admitted_s if self._admitted_s is None else self._admitted_s
        self._error = self._error or update.error
        if update.drafts is not None:
            before = self._drafts
            self._drafts = Drafted(before.drafted + update.drafts.drafted, before.accepted + update.drafts.accepted)
        self._counts.output_tokens += len(update.token_ids)
        if update.last:
            self._on_end(self)

    def result(self) -> Result:
        """The whole result, after the last update; the error if there was one."""
        if self._error is not None:
            return self._error
        request, prompt = self._job.request, self._prompt
        logprobs = prompt.logprobs if prompt is not None else None
        embedding: list[float] | None = None
        if request.pooling and prompt is not None:
            try:
                embedding = embedding_of(prompt, self._job.form)
            except JaxserveError as error:
                return error
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._job.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=None if logprobs is None else [None, *self._position_dicts(logprobs)],
            outputs=[] if request.pooling else [self._completion(i, s) for i, s in enumerate(self._sequences)],
            finished=True,
            num_cached_tokens=prompt.num_cached_tokens if prompt is not None else 0,
            metrics=RequestMetrics(
                arrival_s=request.arrival_s,
                first_token_s=self._first_token_s,
                finished_s=time.monotonic(),
                admitted_s=self._admitted_s,
                drafted_tokens=self._drafts.drafted,
                accepted_tokens=self._drafts.accepted,
            ),
            embedding=embedding,
        )

    def _completion(self, index: int, sequence: _Sequence) -> CompletionOutput:
        asked = self._job.request.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(sequence.texts),
            token_ids=sequence.token_ids,
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if asked else None,
            logprobs=self._position_dicts(sequence.logprobs) if asked else None,
            finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
            stop_reason=sequence.stop_reason,
            weights=sequence.weights,
        )

    def _position_dicts(self, entries: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
        return [
            {
                token_id: Logprob(logprob, rank, self._token_text(token_id))
                for token_id, logprob, rank in (
                    (entry.token_id, entry.logprob, entry.rank),
                    *zip(entry.top_ids, entry.top_logprobs, itertools.count(1)),
                )
            }
            for entry in entries
        ]

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)
