"""A plan in the making, and a plan in flight.

Owns the scratch values of one `schedule`, how much more fits into it, and what `commit` must remember of it. Refuses
every decision about who.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.api import TokenLogprobs
from jaxserve.sched.budget import StepBudget
from jaxserve.sched.plan import Chunk, PageCopy, PageGrant, RowSetup, StepPlan, StepResult
from jaxserve.sched.state import NEVER, Sequence, SequenceState, sequence_seed


class Piece:
    """A chunk whose length may still be trimmed. Mutated only while its plan is made."""

    __slots__ = ("length", "seq")

    def __init__(self, seq: Sequence, length: int) -> None:
        self.seq = seq
        self.length = length

    @property
    def samples(self) -> bool:
        """Whether it reaches the last known token, so that a new one is drawn."""
        return self.seq.num_fed + self.length == len(self.seq.tokens) and not self.seq.request.pooling

    def to_chunk(self) -> Chunk:
        """What the plan says of it."""
        seq, start = self.seq, self.seq.num_fed
        token_ids = tuple(seq.tokens[start : start + self.length])
        return Chunk(seq.row, start, token_ids, self.samples, seq.asks_prompt_logprobs, seq.request.pooling)


class Draft:
    """What one `schedule` has decided so far. Mutated only by the scheduler.

    `num_rows` and `num_tokens` count decode rows and pieces. `stalled` are decode rows that got no page. `alone` says
    that the decode rows wait for this step. `prefill_left` is what the policy still allows of prompts.
    """

    __slots__ = (
        "_budget",
        "_chunked",
        "alone",
        "copies",
        "grants",
        "num_preempted",
        "num_rows",
        "num_tokens",
        "pieces",
        "prefill_left",
        "setups",
        "stalled",
        "step_id",
    )

    def __init__(self, step_id: int, budget: StepBudget, chunked: bool) -> None:
        self.step_id = step_id
        self._budget = budget
        self._chunked = chunked
        self.num_rows = 0
        self.num_tokens = 0
        self.num_preempted = 0
        self.prefill_left = NEVER
        self.alone = False
        self.stalled: list[Sequence] = []
        self.pieces: list[Piece] = []
        self.setups: list[RowSetup] = []
        self.grants: list[PageGrant] = []
        self.copies: list[PageCopy] = []

    def fitting(self, length: int) -> int:
        """Tokens of a prompt, of which `length` are left, that this step can take; 0 for none.

        Without chunked prefill a prompt runs whole, and one that does not fit beside the decode rows makes them wait
        for a step; only a recomputation longer than any step is cut, since it could not run otherwise.
        """
        room = self._budget.room(self.num_tokens, self.num_rows)
        if self._chunked:
            return max(0, min(length, room, self.prefill_left))
        if length <= room:
            return length
        return 0 if self.pieces else min(length, self._budget.max_alone)

    def add_piece(self, seq: Sequence, length: int) -> bool:
        """Takes `length` more tokens of a running prompt into the step. False when that is none: the step is full."""
        if length == 0:
            return False
        if length > self._budget.room(self.num_tokens, self.num_rows):
            self.run_alone()
        self.pieces.append(Piece(seq, length))
        self.num_rows += 1
        self.num_tokens += length
        self.prefill_left -= length
        return True

    def trim(self) -> None:
        """Cuts the last piece to the edge of a smaller bucket, where that is cheaper."""
        if self.pieces and self._chunked:
            last = self.pieces[-1]
            last.length -= self._budget.trim(self.num_tokens, self.num_rows, last.length)

    def without_stalled(self, decoding: list[Sequence]) -> list[Sequence]:
        """The decode rows of the step: the very list, where all of it runs."""
        if self.alone:
            return []
        return [seq for seq in decoding if seq not in self.stalled] if self.stalled else decoding

    def run_alone(self) -> None:
        """Makes this a step of one prompt: what decodes waits for the next."""
        assert not self.pieces, self.pieces
        self.alone = True
        self.num_rows = self.num_tokens = 0


class Drawn(NamedTuple):
    """What one step drew: a token for each of `served`, with its log-probabilities when any row asked."""

    served: list[Sequence]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


class Flight:
    """A plan whose result is awaited. `sampled` are the sequences of its tokens, `prefilled` those of its chunks."""

    __slots__ = ("plan", "prefilled", "sampled")

    def __init__(self, plan: StepPlan, sampled: list[Sequence], prefilled: list[Sequence]) -> None:
        self.plan = plan
        self.sampled = sampled
        self.prefilled = prefilled

    def drawn(self, result: StepResult) -> Iterator[Drawn]:
        """The tokens of each step, in order, of one step at least.

        `served` is `sampled` itself wherever all of them took the step, and empty where all had ended before.
        """
        counts, token_ids, logprobs = result.counts, result.token_ids, result.logprobs
        if counts is None:
            assert len(token_ids) == len(self.sampled), (len(token_ids), len(self.sampled))
            yield Drawn(self.sampled, token_ids, logprobs)
            return
        assert len(counts) == len(self.sampled) and sum(counts) == len(token_ids), (counts, len(token_ids))
        begin = 0
        for step in range(max(1, *counts)):
            served = self.sampled
            if min(counts) <= step:
                served = [seq for seq, count in zip(self.sampled, counts, strict=True) if count > step]
            end = begin + len(served)
            yield Drawn(served, token_ids[begin:end], None if logprobs is None else logprobs[begin:end])
            begin = end
        for seq, count, steps in zip(self.sampled, counts, self.plan.steps_of_rows, strict=True):
            assert count == steps or seq.state is SequenceState.FINISHED, (
                f"{seq} took {count} of {steps} steps and goes on"
            )

    def read_prompts(self, result: StepResult) -> list[Sequence]:
        """Hands out what came back of prompts. Returns the live sequences that want no more than that, and have it."""
        complete: list[Sequence] = []
        for seq, chunk in zip(self.prefilled, self.plan.chunks, strict=True):
            if chunk.prompt_logprobs and result.prompt_logprobs is not None:
                seq.prompt_logprobs += result.prompt_logprobs.get(chunk.row, ())
            if chunk.pool:
                assert result.hidden_sums is not None, chunk
                seq.add_hidden(result.hidden_sums[chunk.row])
                if seq.state is SequenceState.RUNNING and chunk.start + len(chunk.token_ids) == seq.prompt_len:
                    complete.append(seq)
        return complete


def row_setup(seq: Sequence) -> RowSetup:
    """What the device must know of a sequence that gets a row."""
    request = seq.request
    return RowSetup(
        row=seq.row,
        request_id=seq.request_id,
        index=seq.index,
        seed=sequence_seed(request, seq.index),
        prompt_len=seq.prompt_len,
        token_ids=tuple(seq.tokens),
        sampling=request.sampling,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        bad_word_ids=request.bad_word_ids,
    )
