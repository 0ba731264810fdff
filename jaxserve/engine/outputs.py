"""From token events to the client's text: text that never breaks a character, stop strings, finish reasons.

The state of each request's text is kept here. Used by the loop thread alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.api import FinishReason, Known, PromptInfo, Request, TokenEvent, TokenLogprobs
from jaxserve.engine.resuming import follow_known
from jaxserve.engine.stats import EngineStats, RequestTimes
from jaxserve.errors import InvalidRequest, JaxserveError, NotFinite
from jaxserve.sched.plan import Drafted
from jaxserve.text.base import Tokenizer
from jaxserve.text.detokenizer import Detokenizer, PieceTexts

logger = logging.getLogger(__name__)


class _SequenceDrafts:
    """What became of the drafts of one sequence. Mutated by its LiveRequest only."""

    __slots__ = ("_accepted", "_drafted", "_latest", "_num_before")

    def __init__(self) -> None:
        self._drafted = self._accepted = 0
        self._latest: Sequence[Drafted] = ()  # rounds of the latest step that had any
        self._num_before = 0  # tokens of the sequence before that step

    def add(self, rounds: Sequence[Drafted], num_tokens: int) -> None:
        """A step has been computed, before which the sequence had `num_tokens`."""
        self._drafted += sum(drafted for drafted, _ in rounds)
        self._accepted += sum(accepted for _, accepted in rounds)
        self._latest, self._num_before = rounds, num_tokens

    def total(self, num_tokens: int) -> Drafted:
        """Of an answer that ended with `num_tokens`: what the latest step drew beyond them is not part of it."""
        left, accepted = num_tokens - self._num_before, self._accepted
        for round_ in self._latest:
            accepted -= round_.accepted - min(round_.accepted, max(0, left))
            left -= round_.accepted + 1
        return Drafted(self._drafted, accepted)


class DrawnBy(NamedTuple):
    """The version of the weights that drew the tokens of a sequence from number `first_token` on."""

    first_token: int
    version: str


class Update(NamedTuple):
    """What is new of one sequence of one request.

    Attributes:
      index: which of the n sequences.
      token_ids: new tokens; the token that ended the sequence is among them.
      text: new text; with echo, the first update begins with the prompt. Text of a resumed sequence that its client
        lacks comes first, in an update without tokens.
      finish_reason: set on the last update of this sequence.
      stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and length (as vLLM).
      logprobs: one entry per new token, when asked for.
      prompt: on the first update of a sequence.
      error: set when the request ends without an answer; then `finish_reason` is ERROR.
      last: no update of any sequence of this request follows.
      admitted_s: beside `prompt`: when a step first gave the request a row, on the engine's clock.
      drafts: beside `finish_reason`: drafts that the sequence fed, and how many of its tokens were drafts; None: no
        step fed any.
      weights: beside `finish_reason`: which weights drew the tokens; empty: those that the engine was started with.
    """

    request_id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index is of no use here
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt: PromptInfo | None = None
    error: JaxserveError | None = None
    last: bool = False
    admitted_s: float | None = None
    drafts: Drafted | None = None
    weights: tuple[DrawnBy, ...] = ()


# Called on the loop thread; must return at once (put it in a queue). To wake a thread costs more than all else here:
# wake once for all updates of a turn, see `Engine.watch_deliveries`.
Sink = Callable[[Update], None]


class _LiveSequence:
    """Text state of one sequence. Mutated by its LiveRequest only."""

    __slots__ = ("_drafts", "detokenizer", "done", "first_s", "last_s", "num_known", "num_tokens")

    def __init__(self, detokenizer: Detokenizer | None, known: Known) -> None:
        self.detokenizer = detokenizer
        self.num_tokens = self.num_known = len(known.token_ids)
        self.first_s = self.last_s = -1.0  # when its tokens came; see `SequenceTimes`
        self.done = known.finished
        self._drafts: _SequenceDrafts | None = None

    def add_drafts(self, rounds: Sequence[Drafted]) -> None:
        """A step has been computed, whose tokens come next."""
        if self._drafts is None:
            self._drafts = _SequenceDrafts()
        self._drafts.add(rounds, self.num_tokens)

    @property
    def drafts(self) -> Drafted | None:
        """Drafts so far, and how many of the tokens so far were drafts."""
        return None if self._drafts is None else self._drafts.total(self.num_tokens)


class LiveRequest:
    """One accepted request that has not ended. Mutated by the loop thread only.

    `affects_plans` says whether its text or its grammar may change what the scheduler plans next; `num_waiting`, how
    many of its sequences have no token yet; `started`, that one has.
    """

    __slots__ = (
        "_eos_token_ids",
        "_sequences",
        "_stats",
        "_versions",
        "affects_plans",
        "matchers",
        "num_waiting",
        "request",
        "sink",
        "started",
        "times",
    )

    def __init__(
        self,
        request: Request,
        sink: Sink,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        *,
        stats: EngineStats,
        times: RequestTimes,
        pieces: PieceTexts | None = None,
    ) -> None:
        self._stats = stats
        self._versions: list[tuple[str, tuple[int, ...]]] = []  # and how many tokens each sequence had before
        self.times = times
        self.request = request
        self.sink = sink
        self.started = False
        self._eos_token_ids = eos_token_ids
        sampling = request.sampling
        self.num_waiting = len(request.open_indices)
        self._sequences = [
            _LiveSequence(_detokenizer(request, tokenizer, pieces), request.known(index)) for index in range(sampling.n)
        ]
        grammar = request.grammar
        self.matchers = () if grammar is None else tuple(grammar.start() for _ in self._sequences)
        self.affects_plans = bool(self.matchers or (sampling.stop and tokenizer is not None))

    @property
    def done(self) -> bool:
        """Whether all sequences have ended."""
        return all(s.done for s in self._sequences)

    def add_drafts(self, index: int, rounds: Sequence[Drafted]) -> None:
        """What became of the drafts of a step, before its tokens are pushed and after those of the step before."""
        if not self._sequences[index].done:
            self._sequences[index].add_drafts(rounds)

    def note_weights(self, version: str) -> None:
        """All its tokens from now on are drawn by these weights. Called when those before have been pushed."""
        self._versions.append((version, tuple(sequence.num_tokens for sequence in self._sequences)))

    def _drawn_by(self, index: int) -> tuple[DrawnBy, ...]:
        """Of a sequence: parts without a token are left out."""
        parts: list[DrawnBy] = []
        end = self._sequences[index].num_tokens
        for version, counts in reversed(self._versions):
            if counts[index] < end:
                parts.append(DrawnBy(counts[index], version))
            end = counts[index]
        return tuple(reversed(parts))

    def resume(self) -> list[Update]:
        """Takes the known tokens of a resumed request, before any other, and returns what its client lacks of them.

        A sequence that ends with its known tokens ends here, and is not one of `num_waiting` any more. Raises
        InvalidRequest for tokens that this request cannot have had.
        """
        request, updates = self.request, list[Update]()
        for index in request.open_indices:
            sequence, matcher = self._sequences[index], self.matchers[index] if self.matchers else None
            found = follow_known(request, index, sequence.detokenizer, matcher, self._eos_token_ids)
            if found.text:
                updates.append(Update(request.request_id, index, text=found.text))
            if found.finish_reason is not None:
                sequence.done = True
                self.num_waiting -= 1
                end = (request.request_id, index, (), found.rest, found.finish_reason, found.stop_reason)
                updates.append(Update(*end, last=self.done))
        if self.done and (reason := updates[-1].finish_reason) is not None:
            self._stats.note_end(self.times, self._sequences, reason)
        return updates

    def push(self, event: TokenEvent) -> Update | None:
        """Takes one token and returns the news, or None when the sequence has already ended.

        When a stop string ended the sequence the update says so while `event.finish_reason` did not: the caller then
        tells the scheduler. The same holds when its grammar is complete before min_tokens, and when it cannot go on;
        then it ends with an error.
        """
        sequence = self._sequences[event.index]
        if sequence.done:  # a stop string ended it one step ago; the token in flight is dropped
            return None
        stats = self._stats
        if event.finish_reason is None and not self.affects_plans and sequence.last_s == stats.previous_s:
            # Nearly all tokens: neither the first nor the last, and nothing to search. Half the time of the code below.
            sequence.last_s = stats.now_s
            sequence.num_tokens += 1
            token_ids, detokenizer = (event.token_id,), sequence.detokenizer
            text = "" if detokenizer is None else detokenizer.push(token_ids)
            logprobs = None if event.logprobs is None else (event.logprobs,)
            request_id, index = event.request_id, event.index
            return tuple.__new__(
                Update, (request_id, index, token_ids, text, None, None, logprobs, None, None, False, None, None, ())
            )
        if event.finish_reason is FinishReason.ERROR:
            return self._end_broken(sequence, event)
        if self.request.pooling:
            sequence.done = True
            stats.take_pooled(self.times, event.prompt)
            stats.note_end(self.times, self._sequences, FinishReason.STOP)
            return Update(
                event.request_id,
                0,
                finish_reason=event.finish_reason,
                prompt=event.prompt,
                last=True,
                admitted_s=self.times.scheduled_s,
            )
        if sequence.last_s == stats.now_s:
            stats.num_together += 1  # not the first token that the step drew
        elif sequence.last_s != stats.previous_s:
            stats.take(sequence, self.times, event.prompt)
        if event.prompt is not None and self.request.resume is not None:  # its tokens may have been cached as well
            num_cached = min(event.prompt.num_cached_tokens, len(self.request.prompt_token_ids))
            event = event._replace(prompt=event.prompt._replace(num_cached_tokens=num_cached))
        sequence.last_s = stats.now_s
        first = sequence.num_tokens == 0
        sequence.num_tokens += 1
        if self.matchers and event.finish_reason is None and event.token_id in self._eos_token_ids:
            event = event._replace(finish_reason=FinishReason.STOP)  # complete, though min_tokens asks for more
        text, finish_reason, stop_reason = self._read_text(sequence, event)
        error: InvalidRequest | None = None
        if self.matchers and finish_reason is None and (error := self._accept(event)) is not None:
            finish_reason = FinishReason.ERROR
        last = False
        if finish_reason is not None:
            sequence.done = True
            last = self.done
            if last:
                stats.note_end(self.times, self._sequences, finish_reason)
        return Update(
            event.request_id,
            event.index,
            (event.token_id,),
            self.request.echo_text + text if first else text,
            finish_reason,
            stop_reason,
            (event.logprobs,) if event.logprobs is not None else None,
            event.prompt,
            error,
            last,
            self.times.scheduled_s if event.prompt is not None else None,
            None if finish_reason is None else sequence.drafts,
            self._drawn_by(event.index) if finish_reason is not None and self._versions else (),
        )

    def _end_broken(self, sequence: _LiveSequence, event: TokenEvent) -> Update:
        """The end of a sequence that drew NOT_FINITE."""
        sequence.done = True
        if self.done:
            self._stats.note_end(self.times, self._sequences, FinishReason.ERROR)
        error = NotFinite(
            f"the model's numbers for token {sequence.num_tokens + 1} of this answer are not finite, so none follows; "
            "other requests go on. Look for NaN in the checkpoint; in float16 or with an 8-bit cache try "
            "model.dtype or cache.dtype bfloat16"
        )
        return Update(event.request_id, event.index, finish_reason=FinishReason.ERROR, error=error, last=self.done)

    def _accept(self, event: TokenEvent) -> InvalidRequest | None:
        try:
            self.matchers[event.index].accept(event.token_id)
        except InvalidRequest as error:
            return error
        return None

    def _read_text(
        self, sequence: _LiveSequence, event: TokenEvent
    ) -> tuple[str, FinishReason | None, int | str | None]:
        sampling = self.request.sampling
        finish_reason = event.finish_reason
        ended_by_id = finish_reason is FinishReason.STOP
        stop_reason: int | str | None = None
        if ended_by_id and (sampling.ignore_eos or event.token_id not in self._eos_token_ids):
            stop_reason = event.token_id
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return "", finish_reason, stop_reason
        text = ""
        if not ended_by_id or sampling.include_stop_str_in_output:
            text = detokenizer.push((event.token_id,))
            if detokenizer.stopped is not None:
                return text, FinishReason.STOP, detokenizer.stopped
        if finish_reason is not None:
            text += detokenizer.flush()
        return text, finish_reason, stop_reason

    def fail(self, error: JaxserveError | None, reason: FinishReason = FinishReason.ERROR) -> None:
        """Ends every unfinished sequence with `reason` and tells the client, whose sink may itself be broken."""
        open_sequences = [i for i, s in enumerate(self._sequences) if not s.done]
        if not open_sequences:
            return
        for i in open_sequences:
            self._sequences[i].done = True  # all of them first: the sink may raise
        self._stats.note_end(self.times, self._sequences, reason)
        try:
            for i in open_sequences:
                drafts = self._sequences[i].drafts
                last = i == open_sequences[-1]
                weights = self._drawn_by(i)
                self.sink(
                    Update(
                        self.request.request_id,
                        i,
                        finish_reason=reason,
                        error=error,
                        last=last,
                        drafts=drafts,
                        weights=weights,
                    )
                )
        except Exception:  # a closed event loop, say
            logger.exception("a client could not be told that its request ended")


def _detokenizer(request: Request, tokenizer: Tokenizer | None, pieces: PieceTexts | None) -> Detokenizer | None:
    sampling = request.sampling
    if tokenizer is None or not sampling.detokenize:
        return None
    return Detokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        stop=tuple(sampling.stop or ()),
        include_stop_str=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        pieces=pieces,
    )
