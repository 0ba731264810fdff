"""The records and sums that `stats` keeps, and what it looks at of a live request.

Owns their meaning, field by field. Refuses to fill them: `stats.EngineStats` does.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxserve.api import FinishReason, Request
from jaxserve.engine.histogram import HistogramSnapshot
from jaxserve.sched.counts import SchedulerCounts


class StepStats(NamedTuple):
    """One step that was committed, and the turn of the loop that did it.

    Attributes:
      time_s: when its tokens were on the host, on the engine's clock.
      decode_rows, chunks, prefill_tokens: what the plan held.
      slots: tokens that the compiled shape has room for; those beyond the real ones are padding.
      new_tokens: delivered to streams.
      itl_s: of the rows that got a token in the step before, too; 0 when there was none.
      schedule_s, dispatch_s, wait_s, commit_s: where the turn went: planning and launching a step after this one,
        waiting for this one, and handing out its tokens.
      counts: what the scheduler held afterwards; None for one that does not tell.
      num_steps: of a burst, which holds `decode_rows` and `slots` in each; 1 for all else.
    """

    step_id: int
    time_s: float
    decode_rows: int
    chunks: int
    prefill_tokens: int
    slots: int
    new_tokens: int
    itl_s: float
    schedule_s: float
    dispatch_s: float
    wait_s: float
    commit_s: float
    counts: SchedulerCounts | None
    num_steps: int = 1


class FirstToken(NamedTuple):
    """A request got its first token at `time_s`, as the `number`-th of all."""

    number: int
    time_s: float
    ttft_s: float


class RequestStats(NamedTuple):
    """One request that has ended. Times that it never reached are None.

    `finish_reason` is that of its sequence that ended last; `new_tokens` those of all its sequences.
    """

    request_id: str
    time_s: float
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums since the start.

    Attributes:
      ended: requests by finish reason.
      steps: launches; a burst is one.
      computed_tokens, slots: of all steps, without and with padding; of bursts, as planned.
      part_s: seconds of the loop by part: schedule, dispatch, wait, commit.
    """

    steps: int
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    slots: int
    ended: Mapping[FinishReason, int]
    part_s: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]


class SequenceTimes(Protocol):
    """When the tokens of one sequence came; -1 before the first. Mutated by `EngineStats.take`."""

    first_s: float
    last_s: float
    num_tokens: int


class RequestTimes:
    """When one request came to what. Mutated by the loop thread."""

    __slots__ = ("arrival_s", "cached_tokens", "first_s", "request", "scheduled_s", "submitted_s")

    def __init__(self, request: Request, submitted_s: float) -> None:
        self.request = request
        self.arrival_s = request.arrival_s
        self.submitted_s = submitted_s
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.cached_tokens = 0


class Timed(Protocol):
    """What the loop keeps of a live request, as far as it matters here."""

    @property
    def times(self) -> RequestTimes: ...
