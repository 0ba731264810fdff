"""One sequence, its four states, and the group of a request.

The legal changes of state are checked here; the scheduler makes them. Positions count from 0; a token at position p is
*fed* when it is an input of a step, which writes its keys and values into page p // page_size, and yields the token at
p + 1.

    WAITING --> RUNNING <--> PREEMPTED          any of the three --> FINISHED
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.api import NOT_FINITE, FinishReason, Pooling, PromptInfo, Request, TokenLogprobs
from jaxserve.sched.entry import PageEntry
from jaxserve.sched.plan import DUMMY_PAGE
from jaxserve.values.content import Blocks

# An odd 63-bit constant (2**63 over the golden ratio): multiples of it are distinct modulo 2**63 and far apart.
_SEED_STEP = 0x4F1BBCDCBFA53E0B
NEVER = 1 << 62


class SequenceState(enum.Enum):
    """The state of a sequence. It has pages while RUNNING, and a row until its last feed has been planned."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_ARROWS = frozenset(
    {
        (SequenceState.WAITING, SequenceState.RUNNING),
        (SequenceState.RUNNING, SequenceState.PREEMPTED),
        (SequenceState.PREEMPTED, SequenceState.RUNNING),
        (SequenceState.WAITING, SequenceState.FINISHED),
        (SequenceState.RUNNING, SequenceState.FINISHED),
        (SequenceState.PREEMPTED, SequenceState.FINISHED),
    }
)


def sequence_seed(request: Request, index: int) -> int:
    """The seed of the index-th sequence: the request's own for 0, distinct for all, the same on every run."""
    return (request.seed + index * _SEED_STEP) % 2**63


class BlockTable:
    """The pages of one sequence in one group of layers. Mutated only by `SequenceMemory`.

    `page_ids[c]` holds positions c * page_size and on; columns before `first` are given back, or were never there, and
    hold DUMMY_PAGE.
    """

    __slots__ = ("first", "page_ids")

    def __init__(self, first: int, page_ids: Iterable[int]) -> None:
        self.first = first
        self.page_ids = [DUMMY_PAGE] * first
        self.page_ids += page_ids

    @property
    def held(self) -> list[int]:
        """The pages, in the order of their positions."""
        return self.page_ids[self.first :]

    @property
    def num_held(self) -> int:
        return len(self.page_ids) - self.first


class PendingLoad(NamedTuple):
    """A page of a sequence that no plan has loaded yet: the content of `entry` in group `at`, from `slot`."""

    entry: PageEntry
    at: int
    slot: int
    page_id: int


class Sequence:
    """One of the n answers to a request. Mutated only by the scheduler that made it and by its `SequenceMemory`.

    Attributes:
      tokens: prompt and committed output.
      num_given: of these, tokens that it came with: the prompt, and output that another engine generated.
      num_fed: positions that have been fed by plans so far, the step in flight included: an upper bound.
      num_unsure: positions of `num_fed` that the step in flight may turn out not to have fed.
      max_fed: positions that will ever be fed; the token sampled at max_fed - 1 is the last one.
      next_page_at: `num_fed` at which a decode row needs another page, or has been fed all it will be.
      stop_ids: tokens that end it, NOT_FINITE included.
      next_check_len: while it has fewer tokens, a drawn token is only compared with the stop ids.
      tables: its block tables, one for each group of layers; empty unless RUNNING.
      num_columns: of the tables, once all its known tokens are fed: all groups grow together.
      num_promised: pages that its prompt will yet take, in groups that take them chunk by chunk.
      blocks: the contents of its pages, with the keys; None until the prefix cache asks.
      loads: pages that must be loaded before anything is fed, and that no plan has loaded yet; their slots are pinned.
      is_set_up: a plan has told the device of its row: with its first chunk, and not before all its pages are loaded.
      chain: prefix-cache entries of its first pages; `chain_open` says whether the next full page may join.
      forkable_from: first step that may copy its prompt pages (the one after the step that completes them).
      ready_after: the step that must be committed before it may be admitted again.
      stepwise: the tokens that it may draw next follow from its last ones, so it waits for the commit of each step.
      num_drafts: drafts that the host has for its next tokens; NEVER where the device makes them.
      adapter_slot: that its adapter has, while it is RUNNING; 0: it has no adapter.
      hidden_sum: over the pooled tokens of its prompt that have been committed; empty before the first.
    """

    __slots__ = (
        "adapter_slot",
        "blocks",
        "chain",
        "chain_open",
        "forkable_from",
        "hidden_sum",
        "index",
        "is_set_up",
        "loads",
        "max_fed",
        "next_check_len",
        "next_page_at",
        "num_cached",
        "num_columns",
        "num_drafts",
        "num_fed",
        "num_given",
        "num_promised",
        "num_unsure",
        "order",
        "prompt_len",
        "prompt_logprobs",
        "ready_after",
        "request",
        "request_id",
        "row",
        "state",
        "stepwise",
        "stop_ids",
        "tables",
        "tokens",
    )

    def __init__(self, request: Request, index: int, order: int, max_len: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.index = index
        self.order = order
        self.prompt_len = len(request.prompt_token_ids)
        self.max_fed = max_len - 1
        self.stop_ids = request.stop_token_ids | {NOT_FINITE}
        self.tokens = [*request.prompt_token_ids, *request.known(index).token_ids]
        self.num_given = len(self.tokens)
        assert self.num_given < max_len, f"{request.request_id}/{index} came with all of its tokens"
        self.state = SequenceState.WAITING
        self.row = -1
        self.adapter_slot = 0
        self.num_fed = 0
        self.num_unsure = 0
        self.num_cached = 0
        self.next_page_at = 0
        self.next_check_len = 0
        self.tables: tuple[BlockTable, ...] = ()
        self.num_columns = 0
        self.num_promised = 0
        self.blocks: Blocks | None = None
        self.loads: list[PendingLoad] = []
        self.is_set_up = False
        self.chain: list[PageEntry] = []
        self.chain_open = False
        self.forkable_from = NEVER
        self.ready_after = -1
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stepwise = request.sampling.structured is not None
        self.num_drafts = 0 if self.stepwise else NEVER
        self.hidden_sum: list[float] = []

    def __repr__(self) -> str:
        return (
            f"<{self.request_id}/{self.index} {self.state.value} row={self.row} tokens={len(self.tokens)} "
            f"fed={self.num_fed}/{self.max_fed} pages={self.num_pages}>"
        )

    @property
    def page_ids(self) -> list[int]:
        """The pages that it holds, group by group."""
        return [page_id for table in self.tables for page_id in table.held]

    @property
    def num_pages(self) -> int:
        """How many pages it holds."""
        return sum(table.num_held for table in self.tables)

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def asks_prompt_logprobs(self) -> bool:
        """The prompt is scored once: by the first sequence, and not again when it is computed again later."""
        return (
            self.index == 0
            and self.request.sampling.prompt_logprobs is not None
            and len(self.tokens) == self.prompt_len
        )

    @property
    def needs_whole_prompt(self) -> bool:
        """Every token of the prompt must be computed, whatever a cache has. The last one always is."""
        return self.asks_prompt_logprobs or self.request.pooling not in (None, Pooling.LAST)

    def begin(self, num_cached: int) -> None:
        """Gets a row; `num_cached` tokens are in its pages. Results of its prompt are collected anew."""
        self.num_cached = num_cached
        self.prompt_logprobs = []
        self.hidden_sum = []

    def room(self, width: int, rounds: int) -> int:
        """Tokens that a step of this shape could draw, were all drafts right. Host drafts are those of one round."""
        left = self.max_fed - self.num_fed
        return min(left, width, 1 + self.num_drafts) if self.stepwise else min(left, width * rounds)

    def feed(self, most: int) -> None:
        """A plan lets the sequence feed `most` tokens, of which it feeds one at least."""
        self.num_fed += most
        self.num_unsure += most - 1

    def settle(self, most: int, count: int) -> None:
        """Of `most` tokens `count` were fed. A sequence that lost its row meanwhile is fed from its beginning."""
        if self.state is SequenceState.RUNNING:
            self.num_fed -= most - count
            self.num_unsure -= most - 1

    def rewind(self) -> None:
        """The pages are gone: all tokens must be fed again."""
        self.num_fed = self.num_unsure = 0

    def add_hidden(self, part: list[float]) -> None:
        """Takes the sum over some more of the pooled tokens."""
        self.hidden_sum = [a + b for a, b in zip(self.hidden_sum, part, strict=True)] if self.hidden_sum else part

    def take(self, token_id: int) -> FinishReason | None:
        """Appends a drawn token. Returns the reason when the sequence ends with it, else None."""
        if token_id == NOT_FINITE:
            return FinishReason.ERROR
        self.tokens.append(token_id)
        if token_id in self.stop_ids and self.num_outputs > self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) > self.max_fed else None

    def pooled_info(self) -> PromptInfo:
        """The answer to a request that pools, once all of its prompt has run."""
        assert self.request.pooling is not None, self
        count = len(self.request.pooling.positions(self.prompt_len))
        return PromptInfo(self.num_cached, None, tuple(value / count for value in self.hidden_sum))

    @property
    def has_first_token(self) -> bool:
        """Its latest token is the first that was generated here."""
        return len(self.tokens) == self.num_given + 1

    def prompt_info(self) -> PromptInfo:
        """The results of the prompt, for the first event."""
        asked = self.index == 0 and self.request.sampling.prompt_logprobs is not None
        return PromptInfo(self.num_cached, tuple(self.prompt_logprobs) if asked else None)

    def move(self, state: SequenceState) -> None:
        """Changes the state along one of the arrows above."""
        assert (self.state, state) in _ARROWS, f"{self!r} cannot become {state.value}"
        self.state = state


class Group:
    """A live request. `unforked` are the indices that wait for the prompt of index 0. Mutated only by its scheduler."""

    __slots__ = ("live", "order", "request", "unforked")

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order
        self.live: dict[int, Sequence] = {}
        self.unforked = [index for index in request.open_indices if index > 0]

    def fork_source(self, seq: Sequence, step_id: int) -> Sequence | None:
        """The sequence whose prompt pages `seq` may share in this step: index 0, if it holds them by now."""
        leader = self.live.get(0)
        if leader is None or seq.num_outputs > 0 or leader.forkable_from > step_id:
            return None
        return leader
