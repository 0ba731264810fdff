"""The mechanism of continuous batching, the same under every policy.

It covers the life of sequences: admission to rows, chunks, decode rows, page growth, preemption, commit. The order of
sequences and the choice of victims are decided in `policy`, the content of pages in `memory`, the embeddings of
pictures in `encoder_cache`, the cost of buckets in `budget`.

A step is planned in this order: decode rows get the pages they need (preempting if they must), prompts that have begun
go on, waiting sequences are admitted while rows, pages and tokens last, the last chunk is trimmed to a bucket edge.

Overlap. `schedule` may run while one step is in flight, whose tokens are unknown. The rules, each with a test:
  * A decode row is planned again without knowing its input, which the device keeps in `last_token[row]`, nor its
    length (`length[row]`): where a row may draw several tokens, `num_fed` is an upper bound until the commit.
  * A sequence with a grammar (`stepwise`) is planned again only after its last tokens are committed. Its drafts are the
    host's, which says how many there are (`note_drafts`).
  * A sequence whose planned outputs surely reach its limit is not planned again, and its row goes to another in the
    next plan, so a length limit wastes no step of a row. Its pages are free from the commit of its last token: until
    then its other answers may fork it, and its last pages may become findable. Where it is not sure, the commit tells.
  * A stop id is seen one step late. The token of the step in flight is dropped at its commit; row and pages are free
    from the commit that saw the end, and the order of the device makes their reuse safe (see `plan`).
  * An aborted sequence in flight is the same: what comes back for it is dropped.
  * A preempted sequence in flight keeps its token, which is valid: it is appended at commit, and the sequence is not
    admitted again before that commit, since it must then be computed with all its tokens.
  * A row stands in `freed_rows` once, in the next plan after it was given up.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping

from jaxserve.api import FinishReason, Request, TokenEvent, TokenLogprobs, shown_id
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.sched.adapter_slots import AdapterSlots
from jaxserve.sched.base import CacheState, Flushed, MayWait
from jaxserve.sched.budget import StepBudget, check_fits, max_sequence_len, most_pages
from jaxserve.sched.draft import Draft, Flight, row_setup
from jaxserve.sched.encoder_cache import EncoderCache
from jaxserve.sched.headroom import Headroom
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.ladder import Rung
from jaxserve.sched.lengths import create_lengths
from jaxserve.sched.loading import LOOK_AHEAD, Loader, SlotStore
from jaxserve.sched.memory import Placement, SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.page_exchange import PageExchange
from jaxserve.sched.page_watch import PageWatcher
from jaxserve.sched.plan import HostSlots, Limits, StepPlan, StepResult
from jaxserve.sched.policy import Policy, broken_rule
from jaxserve.sched.queue import WaitingQueue
from jaxserve.sched.running import RunningSet
from jaxserve.sched.speculate import PLAIN, Speculator
from jaxserve.sched.state import NEVER, Group, Sequence, SequenceState
from jaxserve.sched.tier_policy import TierPolicy, create_tier_policy

_SMALLER = 4  # of the largest step, tokens of prompts beside rows that decode, see `Rung.SMALL_CHUNKS`
RUNNING, FINISHED = SequenceState.RUNNING, SequenceState.FINISHED


class ContinuousScheduler:
    """A `sched.base.Scheduler`, `Operable` and `Degrades`. Mutated only through its own methods, from one thread."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        options: SchedulerOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.num_preemptions = 0
        self._chunked = options.chunked_prefill
        self._budget = StepBudget(limits)
        max_chunk = self._budget.max_prefill_only
        slots, tier = limits.slots, None
        if slots.num_slots and options.prefix_caching:
            tier = _make_tier(slots, options)
            tier.saves_early = options.lends
        self.memory = SequenceMemory(
            limits,
            max_chunk,
            options.prefix_caching,
            options.namespace,
            tier,
            sparse=options.sparse,
            page_shares=options.page_shares,
        )
        self.exchange = None if self.memory.tier is None else PageExchange(self.memory, self.memory.tier)
        if options.page_shares and any(group.window is not None for group in limits.page_groups):
            raise ConfigError(
                "cache.page_shares is set, but layers of this model see a window of the tokens alone, and take pages "
                "as a prompt goes on, which could not be promised to its tenant; leave cache.page_shares out"
            )
        self.encoder = EncoderCache(limits.encoder)
        self.adapters = AdapterSlots(limits.adapter_slots)
        self._clock = clock
        self._queue = WaitingQueue(policy)
        self._groups: dict[str, Group] = {}
        self._orders = itertools.count()
        self._step_id = 0
        self._last_committed = -1
        self._flights: collections.deque[Flight] = collections.deque()
        self._running = RunningSet(limits.max_rows)
        self._blocked: tuple[Sequence | None, int] = (None, 0)  # what did not fit, and how many had left by then
        self._lengths = create_lengths(options.lengths)
        self._headroom = Headroom(self.memory, options, self._lengths)
        self._speculator = Speculator(options.speculation, limits, clock)
        self._loader: Loader | None = None
        self._reclaims = False  # pages beyond the size of the pool are taken from the sequences that hold them
        self._policy_may_wait = isinstance(self, MayWait)  # it may refuse a sequence while nothing runs
        self._rung = Rung.NONE
        self._held_back: Sequence | None = None  # the first in the queue, if the last `schedule` let it wait for pages
        policy.bind(self.memory, self._lengths, clock)

    # ---- what a user of the scheduler calls ------------------------------------------------------------------------

    def watch_pages(self, watcher: PageWatcher) -> None:
        """Tells `watcher` of every page that can be found from now on. Without a prefix cache there is none."""
        if self.memory.prefix is not None:
            self.memory.prefix.watcher = watcher
        if self.memory.tier is not None:
            self.memory.tier.watcher = watcher

    def add(self, request: Request) -> None:
        """Takes a request. Raises InvalidRequest, PromptTooLong or RequestRejected; then nothing has changed."""
        if request.request_id in self._groups:
            name = shown_id(request.request_id)
            raise InvalidRequest(f"a request with id {name!r} is live; ids must be unique among those")
        check_fits(request, self.limits, self._budget, self._chunked, self.memory.most_for(request))
        self.encoder.check_fits(request)
        assert request.adapter is None or self.limits.adapter_slots, "the engine has no adapters without slots for them"
        group = self._groups[request.request_id] = Group(request, next(self._orders))
        if request.known(0).finished:
            self._enqueue_forks(group)
        else:
            self._enqueue(group, 0)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Ends all sequences of a request, or one. Frees their pages now. False when none was live. No event."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if index is None:
            group.unforked.clear()
        elif index in group.unforked:
            group.unforked.remove(index)
            return True
        victims = [seq for seq in group.live.values() if index is None or seq.index == index]
        if group.unforked and victims:  # index 0 ends before its prompt was done: the others must run it themselves
            self._enqueue_forks(group)
        for seq in victims:
            self._end(seq)
        return bool(victims)

    def finish(self, request_id: str, index: int) -> bool:
        """See `TakesEnds`: as `abort`, and the predictor of lengths learns from it."""
        group = self._groups.get(request_id)
        seq = None if group is None else group.live.get(index)
        if seq is None:
            return False
        self._lengths.learn(seq)
        return self.abort(request_id, index)

    def note_drafts(self, request_id: str, index: int, count: int) -> None:
        """See `TakesDrafts`."""
        group = self._groups.get(request_id)
        seq = None if group is None else group.live.get(index)
        if seq is not None and seq.stepwise:
            seq.num_drafts = count

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a commit or an add."""
        assert len(self._flights) < 2, "a second plan while one is in flight; commit the first"
        self._held_back = None
        self.encoder.begin_step()
        if self._loader is not None:
            self._loader.poll()
        if self.exchange is not None:
            self.exchange.poll()
        draft = Draft(self._step_id, self._budget, self._chunked, self.limits.slots.max_loads)
        running = self._running
        running.refresh()
        if self._reclaims:
            self._reclaim(draft)
        due = [seq for seq in running.decoding if seq.num_fed == seq.next_page_at]
        if due:
            self._serve_due(due, draft)
        draft.num_rows = draft.num_tokens = len(running.decoding) - len(draft.stalled)
        if running.prefilling or len(self._queue):
            self._plan_prefills(draft)
        if self._loader is not None:
            self._loader.look_ahead(self._queue.head(LOOK_AHEAD))
        decoding = draft.without_stalled(running.decoding)
        if not decoding and not draft.chunks:
            assert not draft.grants and not draft.setups, (draft.grants, draft.setups)
            if draft.stalled and not self._flights:
                raise broken_rule(
                    self.policy, "victim_for_page", "it gives None while nothing is in flight, so that nobody can go on"
                )
            # Pages that another engine waits for are saved even if no step comes that computes something.
            if self.exchange is None or self._flights or not self.exchange.wants_step:
                return None
        return self._finish_plan(decoding, draft)

    def use_limits(self, limits: Limits) -> None:
        """See `TakesLimits`. Plans in flight keep their buckets."""
        assert set(limits.buckets) >= set(self.limits.buckets), (limits.buckets, self.limits.buckets)
        assert limits.with_buckets(()) == self.limits.with_buckets(()), (limits, self.limits)
        self.limits = limits
        self._budget = StepBudget(limits)
        self._speculator.use_limits(limits)

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes the result of the oldest plan in flight. One event for each token of a live sequence."""
        return self._commit(plan, result, True)

    def commit_quietly(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """As `commit`, but tokens that neither begin nor end an answer need not have an event: for simulations."""
        return self._commit(plan, result, False)

    def _commit(self, plan: StepPlan, result: StepResult, tell_all: bool) -> list[TokenEvent]:
        flight = self._flights.popleft()
        assert flight.plan.step_id == plan.step_id, f"step {plan.step_id} committed, expected {flight.plan.step_id}"
        self._last_committed = plan.step_id
        drawn_by = flight.sampled
        if self._speculator.active and plan.num_rows:
            self._learn(flight, result)
        if self.memory.tier is not None:
            self._settle_slots(self.memory.tier, plan, result)
        if result.counts is not None:
            drawn_by = flight.drawn_by(result.counts)
            self._running.note_lengths()
        assert len(result.token_ids) == len(drawn_by), (len(result.token_ids), len(drawn_by))
        self.policy.on_served(plan, flight.sampled)
        events = [self._answer_pooled(seq) for seq in flight.read_prompts(result)] if flight.prefilled else []
        add_event, new_event = events.append, tuple.__new__  # half the time of TokenEvent(...), and there are hundreds
        logprobs = result.logprobs if result.logprobs is not None else itertools.repeat(None)
        for seq, token_id, logprob in zip(drawn_by, result.token_ids, logprobs, strict=False):
            tokens = seq.tokens
            if len(tokens) < seq.next_check_len and token_id not in seq.stop_ids:
                tokens.append(token_id)
                if tell_all:
                    add_event(new_event(TokenEvent, (seq.request_id, seq.index, token_id, None, logprob, None)))
            elif seq.state is not FINISHED:
                add_event(self._take_token(seq, token_id, logprob))
        return events

    @property
    def cache_state(self) -> CacheState:
        """See `Operable`."""
        pool, tier, loader = self.memory.pool, self.memory.tier, self._loader
        return CacheState(
            pool.num_pages,
            pool.num_grantable,
            pool.num_held,
            (self.encoder.keeps if self.encoder.pool.host_embeddings else None) if tier is None else tier.enabled,
            None if loader is None else loader.enabled,
            self._rung.label,
        )

    @property
    def store(self) -> SlotStore | None:
        """See `Operable`."""
        return None if self._loader is None else self._loader.store

    def flush(self, salt: str | None) -> Flushed:
        """See `Operable`."""
        self.encoder.flush(salt)
        return Flushed(*self.memory.flush(salt, (*self._running, *self._running.ending)))

    def begin_anew(self, namespace: str, *, recompute: bool) -> None:
        """See `Operable`."""
        assert not self._flights, "a step is in flight, which belongs to what was before"
        if recompute:
            draft = Draft(self._step_id, self._budget, self._chunked, self.limits.slots.max_loads)
            for seq in list(self._running):
                self._preempt(seq, draft)
            self._running.refresh()
        waiting = [seq for group in self._groups.values() for seq in group.live.values() if seq.state is not RUNNING]
        if self._loader is not None:
            for seq in waiting:
                self._loader.forget(seq)
        self.adapters.forget_idle()
        self.memory.rename(namespace, [*self._running, *self._running.ending, *waiting])
        if self._loader is not None:
            for seq in waiting:
                self._loader.begin(seq)
        self._blocked = (None, 0)

    def resize_pool(self, num_pages: int, *, preempt: bool) -> None:
        """See `Operable`."""
        limits = self.limits
        if not len(limits.page_groups) <= num_pages <= limits.num_pages:
            raise InvalidRequest(
                f"a pool of {num_pages} pages is asked for, but {limits.num_pages} were made at the start and a "
                f"sequence needs {len(limits.page_groups)} at least; give a number from {len(limits.page_groups)} to "
                f"{limits.num_pages}"
            )
        needed = {name: most_pages(group.request, limits, self._budget) for name, group in self._groups.items()}
        groups, most_for = self._groups, self.memory.most_for
        unfit = [name for name in needed if needed[name] > most_for(groups[name].request, num_pages)]
        if (largest := max(unfit, key=needed.__getitem__, default=None)) is not None:
            raise InvalidRequest(
                f"a pool of {num_pages} pages is asked for, but the live request {largest!r} can need "
                f"{needed[largest]}; leave it as many, abort the request, or wait until it has ended"
            )
        self.memory.pool.resize(num_pages)
        self._headroom.note_resize()
        self._blocked = (None, 0)
        self._reclaims = preempt

    def use_tiers(self, *, host: bool | None = None, store: bool | None = None) -> None:
        """See `Operable`."""
        tier, loader = self.memory.tier, self._loader
        if host is not None and tier is None and not self.encoder.pool.host_embeddings:
            raise InvalidRequest(
                "there is no host memory to switch: the engine was started without cache.host_bytes, and without "
                "vision.host_bytes"
            )
        if store is not None and loader is None:
            raise InvalidRequest("there is no store to switch: the engine was started without store.kind")
        if tier is not None and host is not None and host != tier.enabled:
            tier.switch(host)
        if host is not None and host != self.encoder.keeps:
            self.encoder.switch_host(host)
        if loader is not None and store is not None:
            loader.enabled = store

    def degrade(self, rung: Rung) -> None:
        """See `Degrades`."""
        self._rung = rung
        if self.memory.tier is not None:
            self.memory.tier.use_saves(rung < Rung.NO_SAVES)
        if self._loader is not None:
            self._loader.prefetches = rung < Rung.NO_PREFETCH
            self._loader.spared = rung >= Rung.NO_STORE

    @property
    def store_pages(self) -> Mapping[str, int]:
        """See `Degrades`."""
        return {} if self._loader is None else self._loader.store.counts.pages

    def has_work(self) -> bool:
        """See `Scheduler.has_work`."""
        return bool(self._groups)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, the preempted ones included."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def num_held_pages(self) -> int:
        """Pages that running sequences hold; the others are free or hold cached prefixes."""
        return self.memory.pool.num_held

    def check(self) -> None:
        """Proves the counts of rows and pages. For tests: takes time in proportion to the pool."""
        loading = [load for flight in self._flights for load in flight.plan.loads]
        writing = () if self._loader is None else self._loader.writing
        self.memory.check((*self._running, *self._running.ending), loading, writing)
        if self.exchange is not None:
            self.exchange.check()
        self._running.check()
        self.encoder.check()
        self.adapters.check()

    # ---- planning --------------------------------------------------------------------------------------------------

    def _serve_due(self, due: list[Sequence], draft: Draft) -> None:
        """Drops the rows whose last feed is planned, and gives a page to each row that needs one."""
        growing = [seq for seq in due if seq.num_fed < seq.max_fed]
        if len(growing) < len(due):
            self._running.note_lengths()
        pool, num_groups = self.memory.pool, len(self.limits.page_groups)
        for seq in growing:
            self.memory.give_back(seq)
        if (
            self.memory.has_shares or len(growing) * num_groups > pool.num_available
        ):  # an earlier sequence in order must not be the victim of a later one
            now_s = self._clock()
            growing.sort(key=lambda seq: self._queue.rank(seq, now_s))
        for seq in growing:
            if seq.state is not RUNNING:
                continue  # gave way to a sequence before it
            if self.memory.num_available(seq) < num_groups and not self._make_room(seq, num_groups, draft):
                if not self._yields(seq, draft):
                    draft.stalled.append(seq)
                continue
            draft.grants += self.memory.grow(seq)
        self._running.refresh()

    def _reclaim(self, draft: Draft) -> None:
        """The pool was made smaller, and not to wait: sequences give way until no more pages are held than it has."""
        now_s, pool = self._clock(), self.memory.pool
        first = min(self._preemptible(draft), key=lambda s: self._queue.rank(s, now_s), default=None)
        if first is None or not pool.num_owed:
            self._reclaims = False
        else:
            self._reclaims = not self._preempt_behind(first, lambda: not pool.num_owed, draft)

    def _make_room(self, seq: Sequence, num_pages: int, draft: Draft) -> bool:
        """Preempts sequences behind `seq` until so many pages are available. False: there are too few behind it."""
        return self._preempt_behind(seq, lambda: self.memory.num_available(seq) >= num_pages, draft)

    def _yields(self, seq: Sequence, draft: Draft) -> bool:
        """Whether `seq`, which lacks a page, has given way itself, since others are within the shares of their tenants.

        These may hold cached pages of its own tenant, and wait for a page as it does: then nobody would go on.
        """
        if not self.memory.has_shares or not any(not self.memory.may_give_way(seq, other) for other in self._running):
            return False
        self._give_way(seq, draft)
        return True

    def _preempt_behind(self, seq: Sequence, enough: Callable[[], bool], draft: Draft) -> bool:
        """Preempts sequences behind `seq` until it is enough. False: there are too few behind it."""
        now_s = self._clock()
        rank = self._queue.rank
        behind = [s for s in self._preemptible(draft) if rank(s, now_s) > rank(seq, now_s)]
        behind.sort(key=lambda s: rank(s, now_s))
        while not enough():
            if self.memory.has_shares:  # which a victim may have brought a tenant down to
                behind = [s for s in behind if self.memory.may_give_way(seq, s)]
            victim = self.policy.victim_for_page(seq, behind) if behind else None
            if victim is None:
                return False
            if victim not in behind:
                raise broken_rule(
                    self.policy, "victim_for_page", f"{victim!r:.120} is none of those behind that it may choose from"
                )
            behind.remove(victim)
            self._give_way(victim, draft)
        return True

    def _preemptible(self, draft: Draft) -> list[Sequence]:
        """Running sequences with tokens left to plan, which have at most a decode row in this plan."""
        planned = [chunk.seq for chunk in draft.chunks]
        return [seq for seq in self._running if seq.num_fed < seq.max_fed and seq not in planned]

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        """Takes rows and pages away; the tokens stay and are computed again later."""
        for flight in self._flights:
            if seq in flight.sampled or seq in flight.prefilled:
                seq.ready_after = flight.plan.step_id
        draft.drop(seq)
        draft.num_preempted += 1
        self.num_preemptions += 1
        self._leave_row(seq, SequenceState.PREEMPTED)
        seq.rewind()
        self._wait(seq)

    def _leave_row(self, seq: Sequence, state: SequenceState) -> None:
        self.memory.release(seq)
        self.adapters.release(seq.request.adapter)
        self._running.leave(seq, state)
        seq.next_check_len = 0
        seq.forkable_from = NEVER

    def _plan_prefills(self, draft: Draft) -> None:
        may_enter = len(self._queue) > 0 and (self._running.has_free_row or self.policy.may_preempt())
        if not may_enter and not self._running.prefilling:
            return
        budget = self.policy.prefill_budget(self._running.decoding) if self._chunked else None
        if budget is not None:
            if budget < 1:
                raise broken_rule(
                    self.policy,
                    "prefill_budget",
                    f"{budget} tokens of prompts are none, so none would ever run",
                )
            draft.prefill_left = budget
        beside = self._budget.max_prefill_beside(len(self._running.decoding)) if self._chunked else None
        if beside is not None:
            draft.prefill_left = min(draft.prefill_left, beside)
        if self._rung >= Rung.SMALL_CHUNKS and self._chunked and self._running.decoding:
            draft.prefill_left = min(draft.prefill_left, max(1, self.limits.max_step_tokens // _SMALLER))
        begun = list(self._running.prefilling)
        for seq, most in zip(begun, self._parts_of(begun, draft), strict=False):
            if seq.state is not RUNNING:
                continue  # gave way to a sequence before it
            if most < 1:
                continue  # the rest of the step is others'
            if seq.loads and not draft.take_loads(seq):
                continue  # what is left to load is the work of later steps
            length = min(most, draft.fitting(len(seq.tokens) - seq.num_fed))
            if length and self.memory.num_wanted(seq, seq.num_fed + length):
                length = self._reach(seq, length, draft)
                if length == 0:
                    draft.stalled.append(seq)
                    continue
            if length and not (length := self.encoder.hold(seq, seq.num_fed, length)):
                continue  # its next picture is the work of a later step
            if not self._add_chunk(seq, length, draft):
                return
        if draft.num_preempted or draft.stalled:
            return  # memory is short: a sequence admitted now would be the next victim
        if self.policy.dynamic_order and may_enter:
            self._queue.refresh(self._clock())
        while self._admit_first(draft):
            pass

    def _parts_of(self, begun: list[Sequence], draft: Draft) -> Iterable[int]:
        """The most tokens of each prompt that has begun, as the policy shares what the step has for prompts."""
        room = draft.fitting(NEVER) if begun and self._chunked else 0
        if room < 1:
            return itertools.repeat(NEVER)
        running, first = self._running, self._queue.first()
        may_enter = first is not None and running.has_free_row and self._blocked != (first, running.num_left)
        parts = self.policy.prefill_parts(begun, room, may_enter)
        if parts is None:
            return itertools.repeat(NEVER)
        if len(parts) != len(begun) or parts[0] < 1:
            raise broken_rule(
                self.policy, "prefill_parts", f"{parts!r:.80} are not {len(begun)} numbers, the first of them above 0"
            )
        return parts

    def _reach(self, seq: Sequence, length: int, draft: Draft) -> int:
        """Takes the pages for the next `length` tokens of a prompt that has begun, or for fewer. Returns how many.

        Only layers with a window take pages for a prompt that has begun.
        """
        memory, end = self.memory, seq.num_fed + length
        least = seq.num_fed + 1 if self._chunked else end
        if memory.reachable(seq, end) < least and not self._make_room(seq, memory.num_wanted(seq, least), draft):
            return 0
        end = memory.reachable(seq, end)
        grants = memory.reach(seq, end)
        if seq.is_set_up:  # else all its pages are granted with the setup of its row
            draft.grants += grants
        return end - seq.num_fed

    def _add_chunk(self, seq: Sequence, length: int, draft: Draft) -> bool:
        """Takes the next tokens of a prompt into the step, with the setup of its row before the first of them. False
        when none fits."""
        if not draft.add_chunk(seq, length):
            return False
        if not seq.is_set_up:
            seq.is_set_up = True
            draft.grants += self.memory.grants_of(seq)
            draft.setups.append(row_setup(seq))
        return True

    def _admit_first(self, draft: Draft) -> bool:
        """Admits the first in the queue with its first chunk. False: it waits, and so do all behind it."""
        running = self._running
        if not running.has_free_row and not self.policy.may_preempt():
            return False
        seq = self._queue.first()
        if seq is None or seq.ready_after > self._last_committed:
            return False
        if self._loader is not None and self._loader.holds_back(seq):
            self._held_back = seq
            return False
        if running and self._blocked == (seq, running.num_left) and not self.policy.may_preempt():
            return False  # no sequence has left since: do not match a long prompt again at every step
        if not self.adapters.has_room(seq.request.adapter):
            self._blocked = (seq, running.num_left)  # until a sequence with another adapter has left
            return False
        if not self.policy.may_admit(seq, list(running)):
            if not running and not self._flights and not self._policy_may_wait:
                raise broken_rule(
                    self.policy, "may_admit", f"it refuses {seq.request_id!r} while nothing runs, so nothing ever would"
                )
            return False
        while True:
            placement = self.memory.place(seq, self._groups[seq.request_id].fork_source(seq, draft.step_id))
            length = draft.fitting(len(seq.tokens) - placement.start)
            if length == 0 and (running.has_free_row or draft.prefill_left <= 0):
                return False  # the step is full
            if running.has_free_row and self._headroom.admits(seq, placement, running):
                break
            if not self.policy.may_preempt():
                self._blocked = (seq, running.num_left)
                return False
            victim = self._victim_for(seq, draft)
            if victim is None:
                return False
            if running.has_free_row and self.memory.fits(seq, placement, 0):
                break  # it fits but for the growth of others, which will be at the expense of sequences behind it
            self._give_way(victim, draft)
        length = self.encoder.hold(seq, placement.start, length)
        if length == 0:
            return False  # its first picture is the work of a later step
        self._queue.remove(seq)
        self.adapters.note_waiting(seq.request.adapter, -1)
        self._enter_row(seq, placement, length, draft)
        if seq.loads and not draft.take_loads(seq):
            return True  # its first chunk comes with its last load; others need not wait for that
        return self._add_chunk(seq, length, draft)

    def _victim_for(self, seq: Sequence, draft: Draft) -> Sequence | None:
        """The sequence that the policy would preempt for `seq`, the first in the queue."""
        if draft.copies:
            return None  # a page that is copied in this step must not change hands in it
        now_s, rank = self._clock(), self._queue.rank
        candidates = sorted(self._preemptible(draft), key=lambda s: rank(s, now_s))
        if self.memory.has_shares:
            candidates = [other for other in candidates if self.memory.may_give_way(seq, other)]
        victim = self.policy.victim_for_admission(seq, candidates) if candidates else None
        if victim is not None and victim not in candidates:
            raise broken_rule(
                self.policy, "victim_for_admission", f"{victim!r:.120} is none of those that it may choose from"
            )
        if victim is not None and rank(victim, now_s) < rank(seq, now_s):
            raise broken_rule(
                self.policy,
                "victim_for_admission",
                f"{victim.request_id!r} stands before {seq.request_id!r} in the order of the policy, so each would "
                "preempt the other for ever; a victim stands behind",
            )
        return victim

    def _give_way(self, victim: Sequence, draft: Draft) -> None:
        if victim in self._running.decoding and victim not in draft.stalled and not draft.prefill_only:
            draft.num_rows -= 1
            draft.num_tokens -= 1
        self._preempt(victim, draft)
        self._running.refresh()

    def _enter_row(self, seq: Sequence, placement: Placement, length: int, draft: Draft) -> None:
        self._running.enter(seq)
        seq.adapter_slot = self.adapters.hold(seq.request.adapter)
        draft.copies += self.memory.take(seq, placement, placement.start + length)
        if self._loader is not None:
            self._loader.note_placed(seq)
        seq.begin(placement.start)
        self.policy.on_run(seq)

    def _finish_plan(self, decoding: list[Sequence], draft: Draft) -> StepPlan:
        """Turns the draft into a plan and moves every counter on."""
        draft.trim()
        positions = [seq.num_fed for seq in decoding]
        running = self._running
        width, rounds = self._shape_of(decoding, draft)
        row_tokens = self._feed(decoding, draft, width, rounds)
        rows = running.decode_rows if decoding is running.decoding else tuple([seq.row for seq in decoding])
        self.policy.observe(decoding, [(chunk.seq, chunk.length) for chunk in draft.chunks])
        sampled = [*decoding, *(p.seq for p in draft.chunks if p.samples)] if draft.chunks else decoding
        memory = self.memory
        if self.exchange is not None:
            self.exchange.save()
        loads = [load for seq, count in draft.loads for load in memory.load(seq, count)]
        encodes, pictures = self.encoder.finish_step(draft.chunks) if self.limits.encoder.num_pages else ((), ())
        plan = StepPlan(
            step_id=self._step_id,
            decode_rows=rows,
            decode_positions=tuple(positions),
            chunks=tuple([chunk.to_chunk() for chunk in draft.chunks]),
            setups=tuple(draft.setups),
            grants=tuple(draft.grants),
            saves=() if memory.tier is None else memory.tier.take_saves(),
            loads=tuple(loads),
            copies=tuple(draft.copies),
            freed_rows=running.take_freed_rows(),
            row_tokens=row_tokens,
            width=width,
            rounds=rounds,
            encodes=encodes,
            pictures=pictures,
            adapters=self.adapters.take_loads(),
        )
        for chunk in draft.chunks:
            self._advance_prefill(chunk.seq, chunk.length)
        self._step_id += 1
        self._flights.append(Flight(plan, sampled, [chunk.seq for chunk in draft.chunks]))
        return plan

    def _shape_of(self, decoding: list[Sequence], draft: Draft) -> tuple[int, int]:
        """Width and rounds of the step. Beside prompts there is one round of one token."""
        spared = self._rung >= Rung.NO_SPECULATION
        if draft.chunks or not decoding or spared or not self._speculator.active:
            return PLAIN
        offered = self._speculator.offered(len(decoding))
        chosen = self.policy.speculate(decoding, offered)
        if chosen is None:
            return self._speculator.choose(decoding)
        if chosen not in offered:
            raise broken_rule(self.policy, "speculate", f"{chosen} is none of the shapes (width, rounds) {offered}")
        return chosen

    def _feed(self, decoding: list[Sequence], draft: Draft, width: int, rounds: int) -> tuple[int, ...]:
        """Counts what the decode rows may feed: one token each, or as many as the shape has, while pages are free."""
        if (width, rounds) == PLAIN:
            for seq in decoding:
                seq.num_fed += 1
            return ()
        row_tokens: list[int] = []
        for seq in decoding:
            wanted = self._speculator.room(seq, width, rounds)
            while seq.num_fed + wanted > seq.next_page_at and self.memory.num_available(seq) >= len(seq.tables):
                draft.grants += self.memory.grow(seq)
            row_tokens.append(min(wanted, seq.next_page_at - seq.num_fed))
            seq.feed(row_tokens[-1])
        return tuple(row_tokens)

    def _advance_prefill(self, seq: Sequence, length: int) -> None:
        seq.num_fed += length
        self.memory.publish(seq, seq.num_fed)
        if seq.num_fed < len(seq.tokens):
            return
        seq.forkable_from = self._step_id + 1
        self._running.end_prefill(seq)
        self._enqueue_forks(self._groups[seq.request_id])

    def _enqueue_forks(self, group: Group) -> None:
        """The prompt is planned, or index 0 is gone: the other sequences may run from the next step on."""
        for index in group.unforked:
            self._enqueue(group, index)
        group.unforked.clear()

    def _enqueue(self, group: Group, index: int) -> None:
        seq = Sequence(group.request, index, group.order, max_sequence_len(group.request, self.limits))
        group.live[index] = seq
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        self.policy.on_wait(seq)
        self._queue.push(seq, self._clock())
        self.adapters.note_waiting(seq.request.adapter, 1)
        if self._loader is not None:
            self._loader.begin(seq)

    # ---- results ---------------------------------------------------------------------------------------------------

    def _settle_slots(self, tier: HostTier, plan: StepPlan, result: StepResult) -> None:
        """The saves and loads of the plan have run; its time says what a load costs, and a token."""
        tier.commit(plan, result.num_draining)
        if self.exchange is not None:
            self.exchange.poll()
        if self._loader is not None:
            self._loader.write(plan)
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self.memory.costs.note_commit(
            self._clock(), num_prompt_tokens, plan.num_tokens, len(plan.loads), bool(self._flights), plan.rounds
        )

    def _learn(self, flight: Flight, result: StepResult) -> None:
        """What the result says of drafts and of the time of a step."""
        plan = flight.plan
        if result.drafts is not None:
            for seq, rounds in zip(flight.sampled, result.drafts, strict=True):
                if seq.state is RUNNING:
                    self._speculator.learn(seq, plan.width, rounds)
        if plan.decode_only:
            self._speculator.note_commit(len(plan.decode_rows), (plan.width, plan.rounds), bool(self._flights))

    def _take_token(self, seq: Sequence, token_id: int, logprob: TokenLogprobs | None) -> TokenEvent:
        """The careful way to append a token: first ones, last ones, full pages, preempted sequences."""
        assert seq.state is not FINISHED, seq
        reason = seq.take(token_id)
        # With ERROR there is no token: the latest, which may be the first, has been told already.
        prompt = seq.prompt_info() if seq.has_first_token and reason is not FinishReason.ERROR else None
        if seq.state is RUNNING and reason is not FinishReason.ERROR:
            self.memory.publish(seq, len(seq.tokens) - 1)
            seq.next_check_len = min(seq.max_fed, self.memory.next_publish(seq))
        if reason is not None:
            if reason is not FinishReason.ERROR:
                self._lengths.learn(seq)
            self._end(seq)
        return TokenEvent(seq.request_id, seq.index, token_id, reason, logprob, prompt)

    def _answer_pooled(self, seq: Sequence) -> TokenEvent:
        """The event of a sequence that generates nothing, whose prompt has run."""
        self._end(seq)
        return TokenEvent(seq.request_id, seq.index, -1, FinishReason.STOP, None, seq.pooled_info())

    def _end(self, seq: Sequence) -> None:
        if seq.state is not RUNNING:
            self._queue.remove(seq)
            self.adapters.note_waiting(seq.request.adapter, -1)
        self.policy.on_end(seq)
        self._speculator.forget(seq)
        if self._loader is not None:
            self._loader.forget(seq)
        if seq.state is RUNNING:
            self._leave_row(seq, FINISHED)
        else:
            seq.move(FINISHED)
        group = self._groups[seq.request_id]
        del group.live[seq.index]
        if not group.live and not group.unforked:
            del self._groups[seq.request_id]


def _make_tier(slots: HostSlots, options: SchedulerOptions) -> HostTier:
    """Raises ConfigError."""
    shares = options.page_shares
    if shares and isinstance(options.host_policy, TierPolicy):
        raise ConfigError(
            "cache.page_shares is set, so each of its tenants needs a tier policy of its own, and cache.host_policy is "
            "a finished one; give its class or its name"
        )
    settings = options.host_tier
    if shares:  # keys that are remembered take as much memory as without shares
        settings = dataclasses.replace(settings, ghost_keys=max(1, settings.ghost_keys // (1 + len(shares))))
    policies = [create_tier_policy(options.host_policy, settings) for _ in range(1 + len(shares))]
    return HostTier(slots, policies[0], [*zip(policies[1:], shares.values(), strict=True)])
