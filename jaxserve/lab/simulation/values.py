"""The inputs and results of a simulation: requests with their true lengths, costs of steps, times.

A result has the times of each request; metrics are computed by the code that computes those of real runs.
"""

import dataclasses
from typing import NamedTuple, Protocol

from jaxserve.api import FinishReason, Request
from jaxserve.errors import InvalidRequest
from jaxserve.sched.draft_counts import DraftTotals
from jaxserve.sched.plan import Bucket, StepPlan


class VirtualClock:
    """Seconds since the start of a simulation, as policies read them. Moved only by the simulation."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A request and its true output length, which no scheduler may see.

    Attributes:
      request: `arrival_s` in it must be the same as here. Token ids need not be of any vocabulary: equal ids are equal
        tokens, and that is all that matters.
      arrival_s: virtual seconds.
      output_len: tokens that each of its sequences really generates. Below `request.max_tokens` it ends with the lowest
        of its stop ids; otherwise with its limit.
      output_token_id: the token that it generates, over and over, so that a later prompt can hold this answer and find
        it cached; None: a number of its own, that no prompt has.

    Raises InvalidRequest when the length and the request contradict each other.
    """

    request: Request
    arrival_s: float
    output_len: int
    output_token_id: int | None = None

    def __post_init__(self) -> None:
        request, who = self.request, f"request {self.request.request_id!r}"
        if request.arrival_s != self.arrival_s:
            raise InvalidRequest(f"{who} arrives at {self.arrival_s} s, but its arrival_s says {request.arrival_s}")
        if request.pooling:
            return
        if self.output_len < 1:
            raise InvalidRequest(f"{who} generates {self.output_len} tokens; give an output_len of 1 or more")
        if self.output_token_id is not None and self.output_token_id in request.stop_token_ids:
            raise InvalidRequest(f"{who} generates token {self.output_token_id}, one of its stop ids; choose another")
        if self.output_len >= request.max_tokens:
            return
        if not request.stop_token_ids:
            raise InvalidRequest(
                f"{who} ends after {self.output_len} of {request.max_tokens} tokens, but has no stop id to end with; "
                "give it one, or lower max_tokens"
            )
        if self.output_len <= request.sampling.min_tokens:
            raise InvalidRequest(
                f"{who} ends after {self.output_len} tokens, but its min_tokens is {request.sampling.min_tokens}"
            )


class StepCost(NamedTuple):
    """Seconds of one step.

    Attributes:
      host_s: from the begin of a turn of the loop to the launch: schedule, pack, transfer.
      device_s: time of the device, from the moment when it begins.
      commit_s: from the result to the end of the turn that reads it: commit, text, streams.
    """

    host_s: float
    device_s: float
    commit_s: float = 0.0


class CostModel(Protocol):
    """The time that a step takes, apart from loads of pages: the engine adds `HostSlots.load_ms` for each of these."""

    def step_seconds(self, plan: StepPlan, bucket: Bucket) -> StepCost:
        """Called once for each plan, in order. `bucket` is the shape that it runs in.

        `plan.rounds` are those that the step really has: all its rows may end before the rounds that were allowed.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FixedCost:
    """A cost model for tests and for thinking: every step takes the same time."""

    cost: StepCost

    def step_seconds(self, plan: StepPlan, bucket: Bucket) -> StepCost:
        """The same for each step."""
        return self.cost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """The result of one request; virtual seconds.

    Attributes:
      admitted_s: begin of the turn that first gave one of its sequences a row; None where none did. It queued until
        then, and its prompt was computed from then to the first token.
      first_token_s, last_token_s: when the loop handed it out, after the launch that followed the commit; None where
        there was none.
      output_tokens: of all its sequences.
      preemptions: how often one of its sequences lost its row.
      preempted_s: from each of these losses to the next row, summed over its sequences: time in the queue that
        `admitted_s` does not show.
      cached_tokens: of the prompt, found in the prefix cache by its first sequence when it was first admitted.
      finish_reason: of the sequence that ended last; ERROR when it was refused, late, or lost with its replica.
      error: the reason, in that case.
      token_times_s: of every token, ascending; empty unless kept.
      replica: that ended it; 0 without a cluster.
      restarts: how often it began anew because its replica had died.
    """

    request_id: str
    tenant: str
    priority: int
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    asked_tokens: int
    output_tokens: int
    preemptions: int
    cached_tokens: int
    finish_reason: FinishReason
    error: str = ""
    token_times_s: tuple[float, ...] = ()
    replica: int = 0
    restarts: int = 0
    admitted_s: float | None = None
    preempted_s: float = 0.0
    owner: str = ""


class SimulatedStep(NamedTuple):
    """One step; virtual seconds.

    Attributes:
      start_s: begin of the turn that planned it.
      host_s, device_s, commit_s: see `StepCost`.
      device_start_s: later than start_s + host_s when the device was still at the step before.
      decode_rows, chunks: rows of either kind.
      tokens: of the step, padding left out.
      held_pages: that sequences held when it was planned, and `waiting` sequences without a row; -1: the scheduler
        has no counts.
    """

    step_id: int
    start_s: float
    host_s: float
    device_start_s: float
    device_s: float
    commit_s: float
    decode_rows: int
    chunks: int
    tokens: int
    bucket: Bucket
    held_pages: int
    waiting: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A whole run.

    Attributes:
      requests: in the order in which they ended.
      steps, plans: in order; empty unless kept.
      duration_s: from 0 to the end of the last turn.
      num_steps, device_s, tokens, padded_tokens: of all steps; `padded_tokens` counts the room of the buckets. A step
        of several rounds counts as one of them.
      row_steps, row_tokens: rows that decoded in a step, over all steps, and tokens that they drew.
      drafts: what became of drafts.
      saved_pages, loaded_pages: to and from host slots.
      encodes, encoded_patches: pictures that the tower encoded, and their patches. Prompts came to more of them where
        some had their embeddings, or lay in a prefix that was found.
    """

    requests: tuple[SimulatedRequest, ...]
    steps: tuple[SimulatedStep, ...]
    plans: tuple[StepPlan, ...]
    duration_s: float
    num_steps: int
    device_s: float
    tokens: int
    padded_tokens: int
    row_steps: int
    row_tokens: int
    drafts: DraftTotals
    saved_pages: int = 0
    loaded_pages: int = 0
    encodes: int = 0
    encoded_patches: int = 0
