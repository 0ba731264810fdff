"""A plan in the making, and a plan in flight.

The draft holds the scratch values of one `schedule` and how much more fits into the step; the flight holds what
`commit` must remember of the plan. Which sequences run is decided in `core`.
"""

from jaxserve.api import Request
from jaxserve.sched.budget import StepBudget
from jaxserve.sched.plan import (
    Chunk,
    PageCopy,
    PageGrant,
    PoolSpan,
    RowPicture,
    RowSetup,
    StepPlan,
    StepResult,
    reads_history,
)
from jaxserve.sched.state import NEVER, Sequence, SequenceState, sequence_seed
from jaxserve.values.content import root_key


class DraftChunk:
    """A chunk whose length may still be trimmed. Mutated only while its plan is made."""

    __slots__ = ("length", "seq")

    def __init__(self, seq: Sequence, length: int) -> None:
        self.seq = seq
        self.length = length

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that a new one is drawn."""
        return self.seq.num_fed + self.length == len(self.seq.tokens) and self.seq.request.pooling is None

    def to_chunk(self) -> Chunk:
        """The chunk as a value of the plan."""
        seq, start = self.seq, self.seq.num_fed
        token_ids = tuple(seq.tokens[start : start + self.length])
        span: PoolSpan | None = None
        if (pooling := seq.request.pooling) is not None:
            positions = pooling.positions(seq.prompt_len)
            span = PoolSpan(positions.start, positions.stop)
        return Chunk(seq.row, start, token_ids, self.samples, seq.asks_prompt_logprobs, span)


class Draft:
    """The decisions of one `schedule` so far. Mutated only by the scheduler.

    `num_rows` and `num_tokens` count decode rows and chunks. `stalled` are decode rows that got no page. `prefill_only`
    says that the decode rows wait for this step. `prefill_left`: tokens of prompts that the policy still allows.
    `loads`: sequences with the number of their pages that this step loads; `loads_left`: of the step.
    """

    __slots__ = (
        "_budget",
        "_chunked",
        "chunks",
        "copies",
        "grants",
        "loads",
        "loads_left",
        "num_preempted",
        "num_rows",
        "num_tokens",
        "prefill_left",
        "prefill_only",
        "setups",
        "stalled",
        "step_id",
    )

    def __init__(self, step_id: int, budget: StepBudget, chunked: bool, max_loads: int = 0) -> None:
        self.step_id = step_id
        self._budget = budget
        self._chunked = chunked
        self.num_rows = 0
        self.num_tokens = 0
        self.num_preempted = 0
        self.prefill_left = NEVER
        self.prefill_only = False
        self.stalled: list[Sequence] = []
        self.chunks: list[DraftChunk] = []
        self.setups: list[RowSetup] = []
        self.grants: list[PageGrant] = []
        self.copies: list[PageCopy] = []
        self.loads: list[tuple[Sequence, int]] = []
        self.loads_left = max_loads

    def take_loads(self, seq: Sequence) -> bool:
        """Lets the step load pages of `seq`, as many as its budget allows. False when some are left for later steps.

        A step that computes nothing yet loads them all: there is no row that a long load would keep waiting.
        """
        count = len(seq.loads) if self.num_rows == 0 else min(len(seq.loads), self.loads_left)
        if count:
            self.loads.append((seq, count))
            self.loads_left = max(0, self.loads_left - count)
        return count == len(seq.loads)

    def drop(self, seq: Sequence) -> None:
        """The sequence loses its row before the plan is complete."""
        self.grants = [grant for grant in self.grants if grant.row != seq.row]
        self.stalled = [other for other in self.stalled if other is not seq]
        self.loads = [(other, count) for other, count in self.loads if other is not seq]

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
        return 0 if self.chunks else min(length, self._budget.max_prefill_only)

    def add_chunk(self, seq: Sequence, length: int) -> bool:
        """Takes `length` more tokens of a running prompt into the step. False when none fits: the step is full."""
        if length == 0:
            return False
        if length > self._budget.room(self.num_tokens, self.num_rows):
            self.run_prefill_only()
        self.chunks.append(DraftChunk(seq, length))
        self.num_rows += 1
        self.num_tokens += length
        self.prefill_left -= length
        return True

    def trim(self) -> None:
        """Cuts the last chunk to the edge of a smaller bucket, where that is cheaper."""
        if self.chunks and self._chunked:
            last = self.chunks[-1]
            last.length -= self._budget.trim(self.num_tokens, self.num_rows, last.length)

    def without_stalled(self, decoding: list[Sequence]) -> list[Sequence]:
        """The decode rows of the step: the very list of `running`, where none is stalled."""
        if self.prefill_only:
            return []
        return [seq for seq in decoding if seq not in self.stalled] if self.stalled else decoding

    def run_prefill_only(self) -> None:
        """Makes this a step of one prompt: decode rows wait for the next step."""
        assert not self.chunks, self.chunks
        self.prefill_only = True
        self.num_rows = self.num_tokens = 0


class Flight:
    """A plan whose result is awaited. `sampled` are the sequences of its tokens, `prefilled` those of its chunks."""

    __slots__ = ("plan", "prefilled", "sampled")

    def __init__(self, plan: StepPlan, sampled: list[Sequence], prefilled: list[Sequence]) -> None:
        self.plan = plan
        self.sampled = sampled
        self.prefilled = prefilled

    def drawn_by(self, counts: list[int]) -> list[Sequence]:
        """The sequence of each token of a result with `counts`, now that the length of each row is known."""
        assert len(counts) == len(self.sampled), (len(counts), len(self.sampled))
        for seq, count, most in zip(self.sampled, counts, self.plan.row_tokens, strict=False):
            assert 1 <= count <= most, f"{seq} drew {count} tokens of {most}"
            seq.settle(most, count)
        return [seq for seq, count in zip(self.sampled, counts, strict=True) for _ in range(count)]

    def read_prompts(self, result: StepResult) -> list[Sequence]:
        """Hands out the results of prompts. Returns the live sequences that need no more, and have all of it."""
        complete: list[Sequence] = []
        for seq, chunk in zip(self.prefilled, self.plan.chunks, strict=True):
            if chunk.prompt_logprobs and result.prompt_logprobs is not None:
                seq.prompt_logprobs += result.prompt_logprobs.get(chunk.row, ())
            if chunk.pooled:
                assert result.hidden_sums is not None, chunk
                seq.add_hidden(result.hidden_sums[chunk.row])
            ends = chunk.pool is not None and chunk.start + len(chunk.token_ids) == seq.prompt_len
            if ends and seq.state is SequenceState.RUNNING:
                complete.append(seq)
        return complete


def row_setup(seq: Sequence) -> RowSetup:
    """The setup of a row for a sequence whose first `num_cached` tokens are in its pages."""
    request = seq.request
    whole = reads_history(request.sampling, request.bad_word_ids)
    return RowSetup(
        row=seq.row,
        request_id=seq.request_id,
        index=seq.index,
        seed=sequence_seed(request, seq.index),
        prompt_len=seq.prompt_len,
        num_tokens=len(seq.tokens),
        token_ids=tuple(seq.tokens if whole else seq.tokens[: seq.num_cached]),
        sampling=request.sampling,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        bad_word_ids=request.bad_word_ids,
        origin=_origin(request),
        pictures=tuple([RowPicture.of(placed) for placed in request.pictures]),
        adapter=seq.adapter_slot,
    )


def _origin(request: Request) -> int:
    """0 without tenant and salt, else a hash of 63 bits, the same in every process."""
    if not request.tenant and not request.cache_salt:
        return 0
    key = root_key(request.tenant, request.cache_salt, "origin")
    return int.from_bytes(key[:8], "little") >> 1
