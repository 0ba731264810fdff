"""Statistics of the loop: one record a step, one a request, and sums over all of them.

Every figure that metrics, dashboards and the live page show is defined here. The records kept are bounded in number.
The definitions are vLLM's, so that figures can be compared:

  * TTFT: from a request's arrival at the front door to its first token on the host.
  * ITL: between two tokens of one sequence, as they reach the host; all tokens of a step do so together.
  * TPOT: of a request that has ended, (last token - first token) / (tokens - 1); with n > 1, over all its sequences.
  * queue time: from the moment the engine was given a request to the step that first gave it a row.
  * end to end: from arrival to the end.

Why the sums cost so little: a token of a sequence that also got one in the step before has the same ITL as all such
tokens of its step, so they are counted and not measured; only the others are looked at one by one. The loop thread
alone writes. Others read copies: `deque.copy` is one uninterrupted operation of the interpreter. `tuple(deque)` is not:
making the tuple may collect garbage, which runs Python code and lets the loop append in between.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from jaxserve.api import FinishReason, PromptInfo, Request, Resume, ResumeReason, shown_id
from jaxserve.engine.histogram import SECONDS, TOKENS, Histogram, HistogramSnapshot
from jaxserve.sched.adapter_slots import AdapterCounts
from jaxserve.sched.base import BucketCounts, Scheduler
from jaxserve.sched.counts import SchedulerCounts, adapter_counts_of, counts_of, page_states_of
from jaxserve.sched.draft_counts import DraftCounts, DraftTotals
from jaxserve.sched.ladder import Pressure, Rung
from jaxserve.sched.plan import Drafted, Limits, StepPlan


class StepStats(NamedTuple):
    """One step that was committed, and the turn of the loop in which it was.

    Attributes:
      time_s: when its tokens were on the host, on the engine's clock.
      decode_rows, chunks, prefill_tokens: rows, chunks and tokens of prompts in the plan.
      slots: tokens that the compiled shape has room for; those beyond the real ones are padding.
      new_tokens: delivered to streams.
      itl_s: of the rows that got a token in the step before, too; 0 when there was none.
      schedule_s, dispatch_s, wait_s, commit_s: the parts of the turn: planning and launching a step after this one,
        waiting for this one, and handing out its tokens.
      counts: what the scheduler held afterwards; None for a scheduler without counts.
      width: tokens that each of `decode_rows` had room to feed at once: its last one, and drafts.
      drafted, accepted: drafts that were fed in all its rounds, and those of them that were drawn as well.
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
    width: int = 1
    drafted: int = 0
    accepted: int = 0


class FirstToken(NamedTuple):
    """A request got its first token at `time_s`, as the `number`-th of all."""

    number: int
    time_s: float
    ttft_s: float


class RequestStats(NamedTuple):
    """One request that has ended. Times that it never reached are None.

    `finish_reason` is that of its sequence that ended last; `new_tokens` those of all its sequences, of which
    `accepted_tokens` were drafts, out of `drafted_tokens`.
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums since the start.

    Attributes:
        A step of several rounds counts as one of them.
      decode_rows, decode_tokens: rows that fed tokens of their own, over all steps, and the tokens that they drew.
      drafts: what became of drafts of the device.
      grammar_drafts: what became of those that the host made for rows with a grammar.
      ended: requests by finish reason.
      resumed: requests that began elsewhere and went on here, by the reason why they moved.
      known_tokens: generated tokens with which they came.
      recomputed_tokens: of their prompts and known tokens, those that were in no cache here.
      computed_tokens, slots: of all steps, without and with padding.
      part_s: seconds of the loop by part: schedule, dispatch, wait, commit.
    """

    steps: int
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    slots: int
    decode_rows: int
    decode_tokens: int
    drafts: DraftTotals
    grammar_drafts: DraftTotals
    ended: Mapping[FinishReason, int]
    resumed: Mapping[ResumeReason, int]
    known_tokens: int
    recomputed_tokens: int
    part_s: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]


class SequenceTimes(Protocol):
    """When the tokens of one sequence came; -1 before the first. Mutated by `EngineStats.take`.

    `num_known`: of its `num_tokens`, those that another engine generated, of which no time is known. `drafts`: those
    that it fed, and how many of its tokens were drafts; None where there were none.
    """

    first_s: float
    last_s: float
    num_tokens: int
    num_known: int

    @property
    def drafts(self) -> Drafted | None: ...


class RequestTimes:
    """When one request reached each stage of its life. Mutated by the loop thread."""

    __slots__ = ("arrival_s", "cached_tokens", "first_s", "request", "scheduled_s", "submitted_s")

    def __init__(self, request: Request, submitted_s: float) -> None:
        self.request = request
        self.arrival_s = request.arrival_s
        self.submitted_s = submitted_s
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.cached_tokens = 0


class Timed(Protocol):
    """The part of a live request that statistics use."""

    @property
    def times(self) -> RequestTimes: ...


logger = logging.getLogger(__name__)

KEPT_STEPS = 2048
KEPT_REQUESTS = 1024


class EngineStats:
    """Statistics of one loop. Written by its thread, through the methods of the second part; any thread may read.

    Attributes:
      now_s: when the tokens that are being handed out reached the host.
      previous_s: the same of the step before.
      dropped: tokens of the step whose request has ended. Added to where tokens are dropped.
      num_together: tokens of the step that came with an earlier one of their sequence. Added to where they are counted.
      num_restarts, num_fences: times that the loop was built again after a death, and was given up since it hung.
        Added to by those who do so.
      alive: False once the loop has died; its requests have ended or moved, and its rows and pages are gone.
    """

    def __init__(self, scheduler: Scheduler, limits: Limits, clock: Callable[[], float]) -> None:
        self.now_s = self.previous_s = math.nan  # equal to nothing, not even to itself
        self.dropped = self.num_together = self.num_restarts = self.num_fences = 0
        self.alive = True
        self._scheduler = scheduler
        self._count_compiles: Callable[[], int] = lambda: 0
        self._count_buckets: Callable[[], BucketCounts] = lambda: BucketCounts(len(limits.buckets), 0, 0)
        self.use_limits(limits)
        self._clock = clock
        self._steps: collections.deque[StepStats] = collections.deque(maxlen=KEPT_STEPS)
        self._firsts: collections.deque[FirstToken] = collections.deque(maxlen=KEPT_REQUESTS)
        self._requests: collections.deque[RequestStats] = collections.deque(maxlen=KEPT_REQUESTS)
        self._num_steps = self._num_prompt_tokens = self._num_new_tokens = 0
        self._num_computed_tokens = self._num_slots = self._num_firsts = 0
        self._num_decode_rows = self._num_more_tokens = 0  # tokens of rows beyond the first of each
        self._drafts, self._grammar_drafts = DraftCounts(), DraftCounts()
        self._num_drafted = self._num_accepted = 0  # of this step
        self._num_begun = 0  # sequences that got their first token in this step
        self._odd_gaps: list[float] = []  # ITLs of this step that are not like those of its other rows
        self._watchers: list[Callable[[RequestTimes, RequestStats], None]] = []
        self._ended = dict.fromkeys(FinishReason, 0)
        self.degraded = (Rung.NONE, Pressure())
        self._resumed = dict.fromkeys(ResumeReason, 0)
        self._num_known_tokens = self._num_recomputed_tokens = 0
        self._mark_s = clock()
        self._turn = {"schedule": 0.0, "dispatch": 0.0, "wait": 0.0, "commit": 0.0}
        self._part_s = dict(self._turn)
        seconds = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode", "inference", "step")
        numbers = ("prompt_tokens", "prefill_tokens", "new_tokens", "longest", "n", "max_tokens", "step_tokens")
        self._histograms = {name: Histogram(SECONDS) for name in seconds}
        self._histograms |= {name: Histogram(TOKENS) for name in numbers}

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> SchedulerCounts | None:
        """What the scheduler holds now; None for a scheduler without counts. Of a dead loop the sums alone are left."""
        counts = counts_of(self._scheduler)
        if self.alive or counts is None:
            return counts
        return counts._replace(
            waiting=0, running=0, free_pages=0, cached_pages=0, held_pages=0, shared_pages=0, used_slots=0
        )

    @property
    def adapter_counts(self) -> AdapterCounts | None:
        """What the scheduler has of LoRA adapters now; None where there are none. A dead loop runs nothing."""
        counts = adapter_counts_of(self._scheduler)
        if self.alive or counts is None:
            return counts
        return counts._replace(running={}, waiting={})

    @property
    def clock_s(self) -> float:
        """The time now, on the clock of all times of this object."""
        return self._clock()

    @property
    def num_compiles(self) -> int:
        """Programs compiled since the start, where a counter was given; must stay 0."""
        return self._count_compiles()

    def watch_compiles(self, count: Callable[[], int]) -> None:
        """`count` returns the number of compiles. Called once, before the loop starts."""
        self._count_compiles = count

    @property
    def bucket_counts(self) -> BucketCounts:
        """Step shapes that are there, that are still to come, and that could not be built."""
        return self._count_buckets()

    def watch_buckets(self, count: Callable[[], BucketCounts]) -> None:
        """`count` returns the step shapes by state. Called once, before the loop starts."""
        self._count_buckets = count

    def watch_ends(self, watcher: Callable[[RequestTimes, RequestStats], None]) -> None:
        """`watcher` is called on the loop's thread when a request has ended, and returns at once. Before the loop."""
        self._watchers.append(watcher)

    def page_states(self) -> bytes:
        """One letter a page: f free, c cached, u used, s shared. Takes time in proportion to the pool.

        Empty for a scheduler that does not tell, and for a dead loop.
        """
        return page_states_of(self._scheduler) if self.alive else b""

    def steps(self) -> tuple[StepStats, ...]:
        """The latest steps, oldest first."""
        return tuple(self._steps.copy())

    def first_tokens(self) -> tuple[FirstToken, ...]:
        """The latest requests to get their first token, oldest first."""
        return tuple(self._firsts.copy())

    def requests(self) -> tuple[RequestStats, ...]:
        """The latest requests to end, oldest first."""
        return tuple(self._requests.copy())

    def totals(self) -> Totals:
        """Sums since the start."""
        return Totals(
            steps=self._num_steps,
            prompt_tokens=self._num_prompt_tokens,
            new_tokens=self._num_new_tokens,
            computed_tokens=self._num_computed_tokens,
            slots=self._num_slots,
            decode_rows=self._num_decode_rows,
            decode_tokens=self._num_decode_rows + self._num_more_tokens,
            drafts=self._drafts.totals(),
            grammar_drafts=self._grammar_drafts.totals(),
            ended=dict(self._ended),
            resumed=dict(self._resumed),
            known_tokens=self._num_known_tokens,
            recomputed_tokens=self._num_recomputed_tokens,
            part_s=dict(self._part_s),
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )

    # ---- the loop's thread -----------------------------------------------------------------------------------------

    def use_limits(self, limits: Limits) -> None:
        """The shapes by which padding is counted, from the next step that is committed on."""
        self._buckets = sorted(limits.buckets, key=lambda b: (b.tokens, b.rows, not b.decode_only))

    @property
    def mark_s(self) -> float:
        """When the latest part of a turn ended and the next one began."""
        return self._mark_s

    def start_turn(self) -> float:
        """A turn begins; what came before it was sleep. Returns the mark."""
        self._mark_s = self._clock()
        return self._mark_s

    def add_time(self, part: str) -> float:
        """Adds the time since the last mark to `part`. Returns the new mark."""
        now_s = self._clock()
        self._turn[part] += now_s - self._mark_s
        self._mark_s = now_s
        return now_s

    def note_plan(self, plan: StepPlan | None, live: Mapping[str, Timed]) -> float:
        """A step was planned; the sequences that it sets up have left the queue. Returns the new mark."""
        now_s = self.add_time("schedule")
        if plan is None or not plan.setups:
            return now_s
        for setup in plan.setups:
            timed = live.get(setup.request_id)
            if timed is not None and timed.times.scheduled_s is None:
                timed.times.scheduled_s = now_s
                self._histograms["queue"].add(now_s - timed.times.submitted_s)
        return now_s

    def note_result(self) -> None:
        """The tokens of a step are on the host and will now be handed out."""
        self.previous_s = self.now_s
        self.now_s = self.add_time("wait")

    def take(self, sequence: SequenceTimes, times: RequestTimes, prompt: PromptInfo | None) -> None:
        """A token of a sequence that got none in the step before. Called before it counts the token."""
        now_s = self.now_s
        if sequence.last_s >= 0:
            self._odd_gaps.append(now_s - sequence.last_s)
            return
        sequence.first_s = now_s
        self._num_begun += 1
        if times.request.resume is not None:
            times.first_s = now_s if times.first_s is None else times.first_s
            num_cached = prompt.num_cached_tokens if prompt is not None else 0
            self._num_recomputed_tokens += len(times.request.prompt_token_ids) + sequence.num_known - num_cached
            return  # its prompt and its first token are in the figures of the engine where it began
        if times.first_s is None:
            times.first_s = now_s
            self._note_first(times, prompt)

    def take_pooled(self, times: RequestTimes, prompt: PromptInfo | None) -> None:
        """An answer that is no token: of a request that pools its prompt."""
        self.dropped += 1
        times.first_s = self.now_s
        self._note_first(times, prompt)

    def _note_first(self, times: RequestTimes, prompt: PromptInfo | None) -> None:
        ttft_s = self.now_s - times.arrival_s
        times.cached_tokens = prompt.num_cached_tokens if prompt is not None else 0
        self._num_prompt_tokens += len(times.request.prompt_token_ids)
        self._histograms["prompt_tokens"].add(len(times.request.prompt_token_ids))
        self._histograms["prefill_tokens"].add(len(times.request.prompt_token_ids) - times.cached_tokens)
        self._histograms["ttft"].add(ttft_s)
        if times.scheduled_s is not None:
            self._histograms["prefill"].add(self.now_s - times.scheduled_s)
        self._num_firsts += 1
        self._firsts.append(FirstToken(self._num_firsts, self.now_s, ttft_s))

    def note_drawn(self, counts: Sequence[int]) -> None:
        """How many tokens each row of the step drew, where that may be more than one."""
        self._num_more_tokens += sum(counts) - len(counts)

    def note_drafts(self, plan: StepPlan, drafts: Sequence[Sequence[Drafted]]) -> None:
        """What became of the drafts of each row of the step."""
        by_host = {draft.row for draft in plan.drafts}
        for row, rounds in zip(plan.sampled_rows, drafts, strict=True):
            (self._grammar_drafts if row in by_host else self._drafts).add(rounds)
            for drafted, accepted in rounds:
                self._num_drafted += drafted
                self._num_accepted += accepted

    def note_commit(self, plan: StepPlan, num_events: int) -> float:
        """All tokens of the step have been handed out. Returns the new mark."""
        ended_s = self.add_time("commit")
        new_tokens = num_events - self.dropped
        add_itl = self._histograms["itl"].add
        steady = new_tokens - self._num_begun - len(self._odd_gaps) - self.num_together
        itl_s = self.now_s - self.previous_s if steady > 0 else 0.0
        if steady > 0:
            add_itl(itl_s, steady)
        for odd_gap_s in self._odd_gaps:
            add_itl(odd_gap_s)
        add_itl(0.0, self.num_together)
        self._add_step(plan, new_tokens, itl_s)
        self.dropped = self.num_together = self._num_begun = self._num_drafted = self._num_accepted = 0
        self._odd_gaps.clear()
        return ended_s

    def _add_step(self, plan: StepPlan, new_tokens: int, itl_s: float) -> None:
        decode_rows, chunks = len(plan.decode_rows), plan.chunks
        prefill_tokens = sum([len(chunk.token_ids) for chunk in chunks]) if chunks else 0
        num_tokens, num_rows = decode_rows * plan.width + prefill_tokens, decode_rows + len(chunks)
        slots = num_tokens
        for bucket in self._buckets:
            if bucket.holds(num_tokens, num_rows, not chunks, plan.width, plan.rounds):
                slots = bucket.tokens
                break
        turn, sums = self._turn, self._part_s
        schedule_s, dispatch_s, wait_s, commit_s = turn.values()
        for part, seconds in turn.items():
            sums[part] += seconds
            turn[part] = 0.0
        self._num_steps += 1
        self._num_new_tokens += new_tokens
        self._num_computed_tokens += num_tokens
        self._num_slots += slots
        self._num_decode_rows += decode_rows
        self._histograms["step_tokens"].add(num_tokens)
        self._histograms["step"].add(schedule_s + dispatch_s + wait_s + commit_s)
        self._steps.append(
            StepStats(
                plan.step_id,
                self.now_s,
                decode_rows,
                len(chunks),
                prefill_tokens,
                slots,
                new_tokens,
                itl_s,
                schedule_s,
                dispatch_s,
                wait_s,
                commit_s,
                counts_of(self._scheduler),
                plan.width,
                self._num_drafted,
                self._num_accepted,
            )
        )

    def note_end(self, times: RequestTimes, sequences: Sequence[SequenceTimes], reason: FinishReason) -> None:
        """A request has ended, for whatever reason. Called once for each submitted request."""
        now_s = self._clock()
        new_tokens = sum(s.num_tokens - s.num_known for s in sequences)
        begun = [s for s in sequences if s.num_tokens - s.num_known > 1]
        tpot_s = queue_s = ttft_s = None
        if begun:
            decode_s = sum(s.last_s - s.first_s for s in begun)
            tpot_s = decode_s / sum(s.num_tokens - s.num_known - 1 for s in begun)
            self._histograms["tpot"].add(tpot_s)
            self._histograms["decode"].add(max(s.last_s for s in begun) - min(s.first_s for s in begun))
        if times.scheduled_s is not None:
            queue_s = times.scheduled_s - times.submitted_s
        if times.first_s is not None:
            ttft_s = times.first_s - times.arrival_s
            self._histograms["new_tokens"].add(new_tokens)
            self._histograms["e2e"].add(now_s - times.arrival_s)
            self._note_shape(times, sequences)
        self._ended[reason] += 1
        prompt_tokens = len(times.request.prompt_token_ids)
        drafts = [found for one in sequences if (found := one.drafts) is not None]
        stats = RequestStats(
            shown_id(times.request.request_id),
            now_s,
            reason,
            prompt_tokens,
            times.cached_tokens,
            new_tokens,
            queue_s,
            ttft_s,
            tpot_s,
            now_s - times.arrival_s,
            sum(found.drafted for found in drafts),
            sum(found.accepted for found in drafts),
        )
        self._requests.append(stats)
        for watcher in self._watchers:
            try:
                watcher(times, stats)
            except Exception:  # an error of a watcher must not end the loop
                logger.exception("a watcher of requests failed")

    def _note_shape(self, times: RequestTimes, sequences: Sequence[SequenceTimes]) -> None:
        """What a request had asked for, and how long it was computed. One that pools its prompt generates nothing."""
        last_s = max((s.last_s for s in sequences if s.last_s >= 0), default=times.first_s)
        if times.scheduled_s is not None and last_s is not None:
            self._histograms["inference"].add(last_s - times.scheduled_s)
        if times.request.pooling is None:
            self._histograms["longest"].add(max(s.num_tokens for s in sequences))
            self._histograms["n"].add(times.request.sampling.n)
            self._histograms["max_tokens"].add(times.request.max_tokens)

    def note_pressure(self, rung: Rung, pressure: Pressure) -> None:
        """A look at the pressure, and the rung on which the engine stands."""
        self.degraded = (rung, pressure)

    @property
    def step_sums(self) -> tuple[int, float]:
        """Steps, and the seconds of the loop for them, since the start."""
        return self._num_steps, sum(self._part_s.values())

    def note_resumed(self, resume: Resume) -> None:
        """A request that began elsewhere goes on here."""
        self._resumed[resume.reason] += 1
        self._num_known_tokens += sum(len(known.token_ids) for known in resume.sequences if not known.finished)

    def note_death(self) -> None:
        """The loop has died. Nothing is planned any more."""
        self.alive = False

    def go_on(self, scheduler: Scheduler, limits: Limits) -> None:
        """Another loop takes the place of the one that has died: sums and watchers stay."""
        self._scheduler = scheduler
        self.use_limits(limits)
        self._count_buckets = lambda: BucketCounts(len(limits.buckets), 0, 0)
        self.now_s = self.previous_s = math.nan
        self.dropped = self.num_together = self._num_begun = self._num_drafted = self._num_accepted = 0
        self._odd_gaps.clear()
        self._turn = dict.fromkeys(self._turn, 0.0)
        self.alive = True
