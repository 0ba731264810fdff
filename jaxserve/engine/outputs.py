"""From token events to what a client reads: text that never breaks a character, stop strings, finish reasons.

Owns the per-request text state. Refuses to decide who runs; the only thing it tells the scheduler is that a stop
string ended a sequence. Used by the loop thread alone.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import FinishReason, PromptInfo, Request, TokenEvent, TokenLogprobs
from jaxserve.errors import JaxserveError
from jaxserve.text.base import Tokenizer
from jaxserve.text.detokenizer import Detokenizer


class Update(NamedTuple):
    """News of one sequence of one request.

    Attributes:
      index: which of the n sequences.
      token_ids: new tokens; the token that ended the sequence is among them.
      text: new text; with echo, the first update begins with the prompt.
      finish_reason: set on the last update of this sequence.
      stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and length (as vLLM).
      logprobs: one entry per new token, when asked for.
      prompt: on the first update of a sequence.
      error: set when the request ends without an answer; then `finish_reason` is ERROR.
      last: no update of any sequence of this request follows.
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


# Called on the loop thread; must return at once (put it in a queue, wake somebody).
Sink = Callable[[Update], None]


class _LiveSequence:
    """Text state of one sequence. Mutated by its LiveRequest only."""

    __slots__ = ("detokenizer", "done", "num_tokens")

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.num_tokens = 0
        self.done = False


class LiveRequest:
    """One accepted request on its way. Mutated by the loop thread only."""

    __slots__ = ("_eos_token_ids", "_sequences", "echo_text", "request", "sink", "started")

    def __init__(
        self, request: Request, sink: Sink, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], echo: bool
    ) -> None:
        self.request = request
        self.sink = sink
        self.started = False
        self._eos_token_ids = eos_token_ids
        sampling = request.sampling
        self.echo_text = ""
        if echo and tokenizer is not None:
            self.echo_text = tokenizer.decode(
                request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )
        self._sequences = [_LiveSequence(_detokenizer(request, tokenizer)) for _ in range(sampling.n)]

    @property
    def done(self) -> bool:
        """All sequences have ended."""
        return all(s.done for s in self._sequences)

    def push(self, event: TokenEvent) -> Update | None:
        """Takes one token and returns the news, or None when the sequence has already ended.

        When a stop string ended the sequence the update says so while `event.finish_reason` did not: the caller then
        tells the scheduler.
        """
        sequence = self._sequences[event.index]
        if sequence.done:  # a stop string ended it one step ago; the token in flight is dropped
            return None
        first = sequence.num_tokens == 0
        sequence.num_tokens += 1
        text, finish_reason, stop_reason = self._read_text(sequence, event)
        sequence.done = finish_reason is not None
        return Update(
            event.request_id,
            event.index,
            (event.token_id,),
            self.echo_text + text if first else text,
            finish_reason,
            stop_reason,
            (event.logprobs,) if event.logprobs is not None else None,
            event.prompt,
            None,
            finish_reason is not None and self.done,
        )

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
        """Ends every unfinished sequence with `reason` and tells the client."""
        open_sequences = [i for i, s in enumerate(self._sequences) if not s.done]
        for i in open_sequences:
            self._sequences[i].done = True  # all of them first: the sink may raise
        for i in open_sequences:
            self.sink(
                Update(self.request.request_id, i, finish_reason=reason, error=error, last=i == open_sequences[-1])
            )


def _detokenizer(request: Request, tokenizer: Tokenizer | None) -> Detokenizer | None:
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
    )
