"""One simulated engine: the turns of `engine.Engine.step`, with a clock that is set instead of read.

Two times matter in a turn: when the host is ready, and when the device is. The caller submits the requests that have
arrived before each turn, so one engine and a hundred behind a router run the same code.

A turn that begins at t, as in the real loop: take arrived requests, plan step i, launch it at t + host_s, and hand out
the tokens of step i-2; then wait for step i-1, commit it, and begin the next turn. The device begins step i when it is
launched and step i-1 is done. Here the commit is carried out at the begin of the next turn, the same moment: nothing
reads the scheduler in between.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import FinishReason, TokenEvent
from jaxserve.errors import ConfigError, UnsupportedOption, UserError
from jaxserve.lab.simulation.store import SimulatedStore
from jaxserve.lab.simulation.values import (
    CostModel,
    SimRequest,
    SimulatedRequest,
    SimulatedStep,
    SimulationResult,
    StepCost,
    VirtualClock,
)
from jaxserve.sched.base import MayWait, Scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.draft_counts import DraftCounts, sum_drafts
from jaxserve.sched.page_exchange import PageExchange
from jaxserve.sched.plan import Bucket, Drafted, Limits, RowSetup, StepPlan, StepResult
from jaxserve.sched.record import rounds_run

_FIRST_OWN_ID = 2**40  # beyond any vocabulary
_IDS_PER_REQUEST = 2048  # more than the sequences that one may have


AcceptDrafts = Callable[[str, int, int, int], int]  # as `SimulatedDrafts`


class _Row:
    """The owner of a row. `last_position`: position of its last token; -1 where only a limit ends it.

    `length`: tokens in its pages, counted only where rows may draw several tokens in a step.
    """

    __slots__ = ("index", "last_position", "length", "request_id", "row", "stop_id", "token_id")

    def __init__(self, setup: RowSetup, token_id: int, stop_id: int, last_position: int) -> None:
        self.row = setup.row
        self.request_id = setup.request_id
        self.index = setup.index
        self.token_id = token_id
        self.stop_id = stop_id
        self.last_position = last_position
        self.length = 0


class TokenSource:
    """Executes plans in order. Mutated only by the simulated engine that made it.

    `most` is the number of tokens that a row may draw in a step. Where it is 1, the step in which a sequence ends is
    known in advance, and a step costs nothing for each of its rows; else each row is looked at, as on a device.
    """

    def __init__(self, most: int, accept: AcceptDrafts | None) -> None:
        self._execute = self._draw_one if most == 1 else self._draw_several
        self._accept = accept
        self._requests: dict[str, tuple[SimRequest, int]] = {}
        self._num_requests = 0
        self._rows: dict[int, _Row] = {}
        self._token_of_row: dict[int, int] = {}
        self._tick = 0
        self._due: collections.defaultdict[int, list[_Row]] = collections.defaultdict(list)
        self._decode_rows: tuple[int, ...] = ()
        self._decode_tokens: list[int] = []

    def add(self, request: SimRequest) -> None:
        """Adds a request: from now on its id may stand in a plan."""
        own_id = _FIRST_OWN_ID + self._num_requests * _IDS_PER_REQUEST
        self._num_requests += 1
        self._requests[request.request.request_id] = (request, own_id)

    def owner_of(self, row: int) -> tuple[str, int]:
        """Request and index of the sequence whose row it is."""
        owner = self._rows[row]
        return owner.request_id, owner.index

    def remove(self, request_id: str) -> None:
        """The request has ended; a row that it still has is freed by a later plan."""
        del self._requests[request_id]

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of the device for this plan."""
        if plan.freed_rows or plan.setups:
            self._change_rows(plan)
        return self._execute(plan)

    def _draw_several(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        counts: list[int] = []
        drafts: list[list[Drafted]] = []
        for row, most in zip(plan.decode_rows, plan.row_tokens or (1,) * len(plan.decode_rows), strict=True):
            before = len(tokens)
            drafts.append(self._run_rounds(self._rows[row], most, plan, tokens))
            counts.append(len(tokens) - before)
        for chunk in plan.chunks:
            owner = self._rows[chunk.row]
            owner.length = chunk.start + len(chunk.token_ids)
            if chunk.sample:
                tokens.append(owner.stop_id if owner.length - 1 == owner.last_position else owner.token_id)
        pooled = {chunk.row: [0.0] for chunk in plan.chunks if chunk.pooled}
        return StepResult(
            token_ids=tokens,
            hidden_sums=pooled or None,
            counts=counts if plan.row_tokens else None,
            drafts=drafts if plan.width > 1 else None,
        )

    def _run_rounds(self, owner: _Row, room: int, plan: StepPlan, tokens: list[int]) -> list[Drafted]:
        """Appends what the row draws in the rounds of a step, `room` tokens at most."""
        rounds: list[Drafted] = []
        while room and len(rounds) < plan.rounds:
            drafted, accepted = min(plan.width, room) - 1, 0
            if drafted:
                assert self._accept is not None, plan
                accepted = self._accept(owner.request_id, owner.index, owner.length + 1, drafted)
            left = owner.last_position - owner.length  # tokens before the one that ends the sequence
            ends = 0 <= left <= accepted
            if ends:
                accepted = left
            tokens += [owner.token_id] * accepted
            tokens.append(owner.stop_id if ends else owner.token_id)
            owner.length += accepted + 1
            room = 0 if ends else room - accepted - 1
            rounds.append(Drafted(drafted, accepted))
        return rounds

    def _draw_one(self, plan: StepPlan) -> StepResult:
        self._tick += 1
        if plan.decode_rows is not self._decode_rows:
            self._decode_rows = plan.decode_rows
            self._decode_tokens = list(map(self._token_of_row.__getitem__, plan.decode_rows))
        tokens = self._decode_tokens
        due = self._due.pop(self._tick, None)
        if due is not None:
            tokens = self._draw_last(due, plan, tokens)
        if not plan.chunks:
            return StepResult(token_ids=tokens)
        drawn = [
            self._draw_first(chunk.row, chunk.start + len(chunk.token_ids) - 1) for chunk in plan.chunks if chunk.sample
        ]
        pooled = {chunk.row: [0.0] for chunk in plan.chunks if chunk.pooled}
        return StepResult(token_ids=tokens + drawn, hidden_sums=pooled or None)

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            del self._rows[row]
        for setup in plan.setups:
            owner = self._rows[setup.row] = self._owner(setup)
            self._token_of_row[setup.row] = owner.token_id
        self._decode_rows, self._decode_tokens = (), []  # the same rows may have other owners

    def _owner(self, setup: RowSetup) -> _Row:
        request, own_id = self._requests[setup.request_id]
        token_id = own_id + setup.index if request.output_token_id is None else request.output_token_id
        if request.output_len >= request.request.max_tokens:
            return _Row(setup, token_id, -1, -1)
        # The token fed at position p yields the one at p + 1.
        return _Row(setup, token_id, setup.stop_token_ids[0], setup.prompt_len + request.output_len - 2)

    def _draw_first(self, row: int, position: int) -> int:
        owner = self._rows[row]
        left = owner.last_position - position
        if left == 0:
            return owner.stop_id
        if left > 0:
            self._due[self._tick + left].append(owner)
        return owner.token_id

    def _draw_last(self, due: list[_Row], plan: StepPlan, tokens: list[int]) -> list[int]:
        """The tokens of the decode rows with the stop ids of those that end in this step."""
        tokens = tokens.copy()
        for owner in due:
            if self._rows.get(owner.row) is not owner:
                continue  # preempted since
            if owner.row not in plan.decode_rows:
                self._due[self._tick + 1].append(owner)  # it waits for a page, or for a prompt that runs alone
                continue
            place = plan.decode_rows.index(owner.row)
            left = owner.last_position - plan.decode_positions[place]
            if left == 0:
                tokens[place] = owner.stop_id
            elif left > 0:
                self._due[self._tick + left].append(owner)
        return tokens


class _Launched(NamedTuple):
    plan: StepPlan
    result: StepResult
    done_s: float  # when the device has it
    commit_s: float


class _Live:
    """A request that has not ended. Mutated only by `SimulatedEngine`."""

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "first_token_s",
        "left_row_s",
        "num_setups",
        "num_unfinished",
        "preempted_s",
        "request",
        "times_s",
    )

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens = 0
        self.num_setups = 0
        self.left_row_s: dict[int, float] = {}  # by sequence; one that is at its limit leaves its row for good
        self.preempted_s = 0.0
        self.num_unfinished = request.request.sampling.n
        self.times_s: list[float] = []


class SimulatedEngine:
    """Mutated by its driver: `submit` the requests that have arrived by `next_turn_s`, then `turn`.

    Args:
      scheduler: reads `clock`, and has run nothing yet.
      keep_steps, keep_plans, keep_token_times: collect `steps` and `plans`, and the time of every token.
      on_end: called with every request that has ended.
      accept: says which drafts are right, where `limits` have steps with drafts.
      store: that `scheduler` was made with, and waits for.

    Attributes:
      number: of its replica.
      next_turn_s: when its next turn begins; infinity while it sleeps.
      slowness: multiplies the seconds of every step that is planned from now on.
      num_steps, device_s, tokens, padded_tokens, row_steps, row_tokens, drafts, saved_pages, loaded_pages, encodes,
        encoded_patches: so far, see `SimulationResult`.

    Raises ConfigError for steps with drafts and no `accept`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost_model: CostModel,
        limits: Limits,
        clock: VirtualClock,
        on_end: Callable[[SimulatedRequest], None],
        *,
        accept: AcceptDrafts | None = None,
        store: SimulatedStore | None = None,
        number: int = 0,
        keep_steps: bool = False,
        keep_plans: bool = False,
        keep_token_times: bool = False,
    ) -> None:
        if accept is None and any(bucket.width > 1 for bucket in limits.buckets):
            raise ConfigError(
                "the simulated device has steps with drafts, and nothing says how many of them are right; give "
                "SimulatedDrafts(rates=...), or limits without such steps"
            )
        self.number = number
        self.next_turn_s = math.inf
        self.slowness = 1.0
        self.num_steps = 0
        self.device_s = 0.0
        self.tokens = 0
        self.padded_tokens = 0
        self.row_steps = self.row_tokens = 0
        self.drafts = DraftCounts()
        self.saved_pages = self.loaded_pages = 0
        self.encodes = self.encoded_patches = 0
        self.steps: list[SimulatedStep] = []
        self.plans: list[StepPlan] = []
        self._scheduler = scheduler
        self._mechanism = scheduler if isinstance(scheduler, ContinuousScheduler) else None
        # A subclass may have a commit of its own.
        quiet = type(scheduler) is ContinuousScheduler and not keep_token_times
        self._commit_step = self._mechanism.commit_quietly if quiet and self._mechanism else scheduler.commit
        self._cost_model = cost_model
        self._limits = limits
        self._clock = clock
        self._on_end = on_end
        self._keep_steps = keep_steps
        self._keep_plans = keep_plans
        self._keep_token_times = keep_token_times
        self._source = TokenSource(limits.max_row_tokens, accept)
        self._live: dict[str, _Live] = {}
        self._inbox: list[SimRequest] = []
        self._deadlines: list[tuple[float, str]] = []
        self._launched: _Launched | None = None  # by the last turn
        self._awaited: _Launched | None = None  # by the one before; its commit ends the last turn
        self._device_free_s = 0.0
        self._slots = limits.slots
        self._store = store
        self._waits = False  # for the store: all work that is left does
        self._saves_done_s: collections.deque[float] = collections.deque()  # of pages on their way to host slots
        self._buckets: dict[tuple[int, int, bool, int, int], Bucket] = {}

    @property
    def num_live(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._live) + len(self._inbox)

    @property
    def now_s(self) -> float:
        """The virtual time of its last turn."""
        return self._clock.now_s

    @property
    def exchange(self) -> PageExchange | None:
        """Of its scheduler, where that has one."""
        return None if self._mechanism is None else self._mechanism.exchange

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request that was submitted has not been admitted."""
        live = self._live.get(request_id)
        return (
            live.admitted_s is None
            if live is not None
            else any(one.request.request_id == request_id for one in self._inbox)
        )

    def submit(self, request: SimRequest, now_s: float) -> None:
        """Takes an arrived request. Wakes an engine that sleeps."""
        self._inbox.append(request)
        if self.next_turn_s == math.inf or self._waits:
            self.next_turn_s = now_s

    def turn(self) -> None:
        """One turn at `next_turn_s`, which moves on."""
        now_s = self._clock.now_s = self.next_turn_s
        self._waits = False
        events = [] if self._awaited is None else self._commit(self._awaited, now_s)
        if self._inbox:
            self._drain_inbox(now_s)
        if self._deadlines and self._deadlines[0][0] <= now_s:
            self._end_late(now_s)
        plan = self._scheduler.schedule()
        previous, self._launched = self._launched, None
        launched_s = now_s
        if plan is not None:
            launched_s = self._launch(plan, now_s)
        self._hand_out(events, launched_s)
        self._awaited = previous
        if previous is not None:
            self.next_turn_s = max(launched_s, previous.done_s) + previous.commit_s
        elif plan is not None:
            self.next_turn_s = launched_s
        else:
            self.next_turn_s = self._end_of_wait(now_s) if self._scheduler.has_work() else math.inf

    def kill(self) -> list[SimRequest]:
        """Kills the engine. Returns its unfinished requests, in the order of arrival. No method may follow."""
        lost = [live.request for live in self._live.values()] + self._inbox
        self.next_turn_s = math.inf
        return lost

    def started(self, request_id: str) -> tuple[float | None, float | None, tuple[float, ...]]:
        """When a live request was admitted and had its first token, if it was and had, and its kept token times."""
        live = self._live.get(request_id)
        return (None, None, ()) if live is None else (live.admitted_s, live.first_token_s, tuple(live.times_s))

    def _end_of_wait(self, now_s: float) -> float:
        """When the scheduler, whose work all waits, is to look again."""
        scheduler = self._scheduler
        assert isinstance(scheduler, MayWait) and scheduler.waits(), (
            "nothing is in flight, work is left, and the scheduler neither plans nor waits"
        )
        self._waits = True
        until_s = scheduler.waits_until_s()
        if self._store is not None:
            until_s = min(until_s, self._store.next_event_s)
        if until_s == math.inf:
            raise UnsupportedOption(
                f"all work of the scheduler {type(scheduler).__name__} waits for something outside of it at {now_s:g} "
                "s, and in a simulation nothing comes but steps, requests and pages of a simulated store; leave out "
                "what it waits for, or let it plan on"
            )
        assert until_s >= now_s, (until_s, now_s)  # the same: a fill without latency has ended, and is polled next
        return until_s

    def _drain_inbox(self, now_s: float) -> None:
        for request in self._inbox:
            try:
                self._scheduler.add(request.request)
            except UserError as error:
                self._end(_Live(request), None, FinishReason.ERROR, str(error))
                continue
            self._live[request.request.request_id] = _Live(request)
            self._source.add(request)
            if request.request.deadline_s < math.inf:
                heapq.heappush(self._deadlines, (request.request.deadline_s, request.request.request_id))
        self._inbox.clear()

    def _end_late(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            live = self._live.get(request_id)
            if live is not None and live.request.request.deadline_s == deadline_s:
                self._scheduler.abort(request_id)
                self._forget(request_id)
                self._end(live, None, FinishReason.ERROR, f"it had to end by {deadline_s} s")

    def _launch(self, plan: StepPlan, now_s: float) -> float:
        """Starts a step; returns the time at which the host has launched it."""
        num_tokens, num_rows = plan.num_tokens, plan.num_rows
        shape = (num_tokens, num_rows, not plan.chunks, plan.width, plan.rounds)
        bucket = self._buckets.get(shape)
        if bucket is None:
            bucket = self._limits.bucket_of(plan)
            assert bucket is not None, f"no bucket for {num_tokens} tokens of {num_rows} rows"
            self._buckets[shape] = bucket
        for row in plan.freed_rows:
            request_id, index = self._source.owner_of(row)
            if (live := self._live.get(request_id)) is not None:
                live.left_row_s[index] = now_s
        result = self._source.execute(plan)
        as_run = plan if plan.rounds == 1 else dataclasses.replace(plan, rounds=rounds_run(result))
        host_s, device_s, commit_s = self._cost_model.step_seconds(as_run, bucket)
        if self.slowness != 1.0:
            host_s, device_s, commit_s = (self.slowness * seconds for seconds in (host_s, device_s, commit_s))
        assert host_s >= 0 and device_s >= 0 and commit_s >= 0, (host_s, device_s, commit_s)
        if plan.loads:
            device_s += self.slowness * len(plan.loads) * self._slots.load_ms / 1000
        for setup in plan.setups:
            live = self._live[setup.request_id]
            live.num_setups += 1
            if live.admitted_s is None:
                live.admitted_s = now_s
            if live.left_row_s:
                live.preempted_s += now_s - live.left_row_s.pop(setup.index, now_s)
        launched_s = now_s + host_s
        device_start_s = max(launched_s, self._device_free_s)
        self._device_free_s = device_start_s + device_s
        for _ in plan.saves:  # one after the other over the link, from the step's begin on
            before_s = self._saves_done_s[-1] if self._saves_done_s else 0.0
            self._saves_done_s.append(max(before_s, device_start_s) + self.slowness * self._slots.save_ms / 1000)
        self.saved_pages += len(plan.saves)
        self.loaded_pages += len(plan.loads)
        self.encodes += sum(not encode.load for encode in plan.encodes)
        self.encoded_patches += sum(encode.num_patches for encode in plan.encodes)
        self._launched = _Launched(plan, result, self._device_free_s, commit_s)
        self.num_steps += 1
        self.device_s += device_s
        self.tokens += num_tokens
        self.padded_tokens += bucket.tokens
        num_decoding = len(plan.decode_rows)
        self.row_steps += num_decoding
        self.row_tokens += num_decoding if result.counts is None else sum(result.counts)
        for rounds in result.drafts or ():
            self.drafts.add(rounds)
        if self._keep_plans:
            self.plans.append(plan)
        if self._keep_steps:
            cost = StepCost(host_s, device_s, commit_s)
            self.steps.append(self._note_step(plan, bucket, now_s, device_start_s, cost))
        return launched_s

    def _note_step(
        self, plan: StepPlan, bucket: Bucket, now_s: float, device_start_s: float, cost: StepCost
    ) -> SimulatedStep:
        mechanism = self._mechanism
        return SimulatedStep(
            step_id=plan.step_id,
            start_s=now_s,
            host_s=cost.host_s,
            device_start_s=device_start_s,
            device_s=cost.device_s,
            commit_s=cost.commit_s,
            decode_rows=len(plan.decode_rows),
            chunks=len(plan.chunks),
            tokens=plan.num_tokens,
            bucket=bucket,
            held_pages=-1 if mechanism is None else mechanism.num_held_pages,
            waiting=-1 if mechanism is None else mechanism.num_waiting,
        )

    def _commit(self, step: _Launched, now_s: float) -> list[TokenEvent]:
        while self._saves_done_s and self._saves_done_s[0] <= now_s:
            self._saves_done_s.popleft()
        result = step.result
        if self._saves_done_s:
            num_draining = len(self._saves_done_s)
            if self._launched is not None:  # the saves of the step in flight are not this one's
                num_draining = max(0, num_draining - len(self._launched.plan.saves))
            result = dataclasses.replace(result, num_draining=num_draining)
        return self._commit_step(step.plan, result)

    def _hand_out(self, events: list[TokenEvent], now_s: float) -> None:
        """Gives the tokens of a committed step to the requests that have not ended since."""
        if self._keep_token_times:
            for event in events:
                if event.request_id in self._live:
                    self._live[event.request_id].times_s.append(now_s)
        for event in events:
            if event.request_id in self._live and (event.finish_reason is not None or event.prompt is not None):
                self._note_event(event, now_s)

    def _note_event(self, event: TokenEvent, now_s: float) -> None:
        live = self._live[event.request_id]
        if event.prompt is not None and live.first_token_s is None:
            live.first_token_s = now_s
            live.cached_tokens = event.prompt.num_cached_tokens
        if event.finish_reason is not None:
            live.num_unfinished -= 1
            if live.num_unfinished == 0:
                self._forget(event.request_id)
                self._end(live, now_s, event.finish_reason, "")

    def _forget(self, request_id: str) -> None:
        del self._live[request_id]
        self._source.remove(request_id)

    def _end(self, live: _Live, last_token_s: float | None, reason: FinishReason, error: str) -> None:
        request, sim = live.request.request, live.request
        prompt_len = len(request.prompt_token_ids)
        longest = min(sim.output_len, request.max_tokens, self._limits.max_model_len - prompt_len)
        num_sequences = request.sampling.n
        self._on_end(
            SimulatedRequest(
                request_id=request.request_id,
                owner=request.owner,
                tenant=request.tenant,
                priority=request.priority,
                arrival_s=sim.arrival_s,
                first_token_s=live.first_token_s,
                last_token_s=last_token_s,
                prompt_tokens=prompt_len,
                asked_tokens=request.max_tokens * num_sequences,
                output_tokens=0 if error or request.pooling else longest * num_sequences,
                preemptions=max(0, live.num_setups - num_sequences),
                cached_tokens=live.cached_tokens,
                finish_reason=reason,
                error=error,
                token_times_s=tuple(live.times_s),
                replica=self.number,
                admitted_s=live.admitted_s,
                preempted_s=live.preempted_s,
            )
        )


def summarise(engines: list[SimulatedEngine], ended: list[SimulatedRequest], duration_s: float) -> SimulationResult:
    """The result of engines that have run side by side."""
    return SimulationResult(
        requests=tuple(ended),
        steps=tuple(step for engine in engines for step in engine.steps),
        plans=tuple(plan for engine in engines for plan in engine.plans),
        duration_s=duration_s,
        num_steps=sum(engine.num_steps for engine in engines),
        device_s=sum(engine.device_s for engine in engines),
        tokens=sum(engine.tokens for engine in engines),
        padded_tokens=sum(engine.padded_tokens for engine in engines),
        row_steps=sum(engine.row_steps for engine in engines),
        row_tokens=sum(engine.row_tokens for engine in engines),
        drafts=sum_drafts(engine.drafts.totals() for engine in engines),
        saved_pages=sum(engine.saved_pages for engine in engines),
        loaded_pages=sum(engine.loaded_pages for engine in engines),
        encodes=sum(engine.encodes for engine in engines),
        encoded_patches=sum(engine.encoded_patches for engine in engines),
    )
