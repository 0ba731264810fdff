"""Small worlds, explored to the end: every order of arrival, abort, finish, preemption and delay of a step.

The moves are here, and the test that two worlds are the same. A move is made on a real scheduler and a `FakeRunner`
that asserts every rule of plans. Schedulers cannot be copied, so a world is reached by making its moves again from the
beginning.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from sched_world import BLIND, PublishedPages

from jaxserve.api import FinishReason, Request
from jaxserve.sched import (
    ContinuousScheduler,
    InFlight,
    Limits,
    PageGroup,
    SchedulerOptions,
    SequenceState,
    StepPlan,
    create_scheduler,
)
from jaxserve.sched.accounts import Accounts
from jaxserve.sched.draft import Draft
from jaxserve.sched.plan import NO_ENCODER, NO_SLOTS, EncoderPool, HostSlots
from jaxserve.sched.policies import FairPolicy, SloPolicy
from jaxserve.sched.tier_policies import Lru
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request, with_shapes

STOP = 99  # outside of the vocabulary: drawn only where a move says so


def _limits(token_bucket: int) -> Limits:
    return make_limits(max_rows=2, num_pages=6, page_size=1, max_model_len=5, token_buckets=(token_bucket,))


LIMITS = _limits(4)
OPTIONS = dataclasses.replace(
    BLIND, ageing_s=2.0, ttft_target_s=5.0, output_weight=1.0, preempt_lag=0.5, preempt_after=1
)
TICK_S = 10.0
MAX_DRAIN = 60  # steps in which any of these worlds must end

Move = tuple[str, int]


REQUESTS: tuple[Request, ...] = (
    # They need eleven pages of six, have a common beginning, and differ in tenant, class and length.
    make_request("a", [1, 2], 2, stop=[STOP], priority=1, tenant="x"),
    make_request("b", [1, 2, 3], 2, stop=[STOP], priority=0, tenant="y"),
    make_request("c", [1], 4, stop=[STOP], priority=-1, tenant="x"),
)
# The same with fewer tokens, for three pages.
SMALLER = (
    make_request("a", [1, 2], 1, stop=[STOP], priority=1, tenant="x"),
    make_request("b", [1, 2], 2, stop=[STOP], priority=0, tenant="y"),
    make_request("c", [1], 3, stop=[STOP], priority=-1, tenant="x"),
)


# One owner has two of them, and the rows, when the other comes: a row gives way after two tokens.
OWNED = (
    make_request("a", [1], 3, stop=[STOP], owner="o"),
    make_request("b", [1], 2, stop=[STOP], owner="p"),
    make_request("c", [2], 3, stop=[STOP], owner="o"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How often a path may make the moves that need no limit by nature, and what the device can do."""

    num_requests: int = 3
    max_aborts: int = 1
    max_preempts: int = 1
    max_ticks: int = 1
    shapes: tuple[tuple[int, int], ...] = ()
    windows: tuple[int | None, ...] = (None,)
    num_pages: int = LIMITS.num_pages
    slots: HostSlots = NO_SLOTS
    encoder: EncoderPool = NO_ENCODER
    token_bucket: int = 4
    requests: tuple[Request, ...] = REQUESTS


@functools.cache  # a world is made for each path, of few rules
def _limits_of(rules: Rules) -> Limits:
    return dataclasses.replace(
        with_shapes(_limits(rules.token_bucket), *rules.shapes),
        page_groups=tuple(map(PageGroup, rules.windows)),
        num_pages=rules.num_pages,
        slots=rules.slots,
        encoder=rules.encoder,
    )


class Drawing(NamedTuple):
    """What a planned step can draw; it does not depend on what is drawn.

    Attributes:
      num_rows: that draw.
      most: tokens of a row.
      is_mixed: it has prompts, so only the last shape is its own.
    """

    num_rows: int
    most: int
    is_mixed: bool

    def allows(self, bits: int, drawn_at_most: int, is_last_shape: bool) -> bool:
        return not (bits >> self.num_rows or drawn_at_most > self.most or (self.is_mixed and not is_last_shape))


NOTHING_TO_RUN = Drawing(0, 0, False)  # not even one token


class SmallWorld:
    """Reached by `moves` from nothing. Mutated by `move` and `drain`."""

    def __init__(self, policy: str, rules: Rules, options: SchedulerOptions = OPTIONS) -> None:
        self.rules = rules
        self.clock = ManualClock()
        limits = _limits_of(rules)
        made = create_scheduler(policy, limits, options=options, clock=self.clock)
        assert isinstance(made, ContinuousScheduler)
        self.scheduler = made
        self.drains_late = False  # what the next step saves is still on its way when its result is read
        self.forced: dict[tuple[str, int], dict[int, int]] = {}
        self.drawn_at_most = limits.max_row_tokens  # by a row, in the next step
        self.runner = FakeRunner(
            limits, mode="context", forced=self.forced, keep_plans=False, vocab_size=50,
            draw_count=lambda most: min(most, self.drawn_at_most),
            num_draining=lambda num_saved: num_saved if self.drains_late else 0,
        )  # fmt: skip
        self.shapes = rules.shapes or ((1, 1),)
        self.shape = (1, 1)  # of the next step without prompts
        self.drawing = NOTHING_TO_RUN  # of the last step that was planned, or was to be
        made.policy.speculate = lambda decoding, shapes: self.shape
        self.published = PublishedPages(made, self.runner)
        self.requests = rules.requests[: rules.num_requests]
        self.num_loads = self.num_skipped = 0
        self.flights: collections.deque[tuple[StepPlan, InFlight]] = collections.deque()
        self.added: list[int] = []
        self.ended: dict[str, FinishReason | None] = {}
        self.num_made = collections.Counter[str]()

    def moves(self) -> Iterator[Move]:
        """What may happen next.

        `run` plans and launches a step: its low bits say which rows draw the stop id, the next ones how many tokens a
        row draws at most, and the highest which shape the step has, where it has no prompts. With a host tier `late`
        is a `run` whose saves take long.
        """
        scheduler, rules = self.scheduler, self.rules
        yield from (("add", i) for i in range(len(self.requests)) if i not in self.added)
        if self.num_made["abort"] < rules.max_aborts:
            yield from (("abort", i) for i in self.added if self.requests[i].request_id not in self.ended)
        if self.num_made["preempt"] < rules.max_preempts:
            yield from (("preempt", seq.row) for seq in scheduler._running if seq.num_fed < seq.max_fed)
        if self.num_made["tick"] < rules.max_ticks and self.added:
            yield ("tick", 0)
        if len(self.flights) < 2 and scheduler.has_work():
            most = self.runner.limits.max_row_tokens
            kinds = ("run", "late") if rules.slots.num_slots else ("run",)
            yield from ((kind, bits) for kind in kinds for bits in range(len(self.shapes) * most << LIMITS.max_rows))
        if self.flights:
            yield ("commit", 0)

    def move(self, move: Move) -> bool:
        """Makes it. False when the world is spent, since the move is none: nothing to run, or bits beyond who draws."""
        kind, arg = move
        self.num_made[kind] += 1
        if kind == "add":
            self.added.append(arg)
            self.scheduler.add(dataclasses.replace(self.requests[arg], arrival_s=self.clock()))
        elif kind == "abort":
            self.ended[self.requests[arg].request_id] = None
            assert self.scheduler.abort(self.requests[arg].request_id)
        elif kind == "preempt":
            scheduler = self.scheduler
            victim = next(seq for seq in scheduler._running if seq.row == arg)
            scheduler._preempt(victim, Draft(scheduler._step_id, scheduler._budget, True))
        elif kind == "tick":
            self.clock.advance(TICK_S)
        elif kind == "commit":
            self.commit()
        else:
            self.drains_late = kind == "late"
            if not self.run(*self.parts(arg)):
                return False
            return kind == "run" or len(self.flights[-1][0].saves) > 0  # without saves it is a `run`
        return True

    def parts(self, arg: int) -> tuple[int, int, tuple[int, int]]:
        """Of the number of a `run`: bits, how many tokens a row draws at most, and the shape."""
        shape, drawn = divmod(arg >> LIMITS.max_rows, self.runner.limits.max_row_tokens)
        return arg & (1 << LIMITS.max_rows) - 1, 1 + drawn, self.shapes[shape]

    def run(self, bits: int, drawn_at_most: int, shape: tuple[int, int]) -> bool:
        """Plans a step; the i-th drawing row begins with the stop id if bit i is set. False: as in `move`."""
        self.shape = shape
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.flights or not self.scheduler.has_work(), "deadlock: work is left and nothing can ever run"
            self.drawing = NOTHING_TO_RUN
            return False
        sampled = self.scheduler._flights[-1].sampled
        self.drawing = Drawing(len(sampled), max(plan.row_tokens, default=1), bool(plan.chunks))
        if not self.drawing.allows(bits, drawn_at_most, shape == self.shapes[-1]):
            return False
        self.drawn_at_most = drawn_at_most
        self.forced.clear()
        for i, seq in enumerate(sampled):
            if bits >> i & 1:
                num_drawn = len(seq.tokens) - seq.prompt_len
                if i < len(plan.decode_rows):  # the step in flight included
                    num_drawn = len(self.runner._rows[plan.decode_rows[i]].known) - seq.prompt_len
                self.forced[seq.request_id, 0] = {num_drawn: STOP}
        self.flights.append((plan, self.runner.dispatch(plan)))
        self.published.check()
        return True

    def commit(self) -> None:
        plan, handle = self.flights.popleft()
        for event in self.scheduler.commit(plan, handle.result()):
            assert event.request_id not in self.ended, f"an event after the end: {event}"
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason

    def drain(self) -> None:
        """From here on nothing comes and nothing is cut: all must end soon, and every page come back."""
        scheduler, self.drains_late = self.scheduler, False
        for _ in range(MAX_DRAIN):
            if not scheduler.has_work() and not self.flights:
                break
            if len(self.flights) == 2 or not self.run(0, 1, self.shapes[-1]):
                self.commit()
        assert not scheduler.has_work(), f"starved: {list(scheduler._groups)}"
        scheduler.check()
        assert scheduler.num_held_pages == scheduler.num_running == scheduler.num_waiting == 0
        assert len(self.ended) == len(self.added)
        self.num_loads = self.runner.num_loads
        if scheduler.memory.tier is not None:
            self.num_skipped = scheduler.memory.tier.num_skipped

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for worlds that nobody can tell apart from here on, up to the names of pages."""
        scheduler = self.scheduler
        pool, prefix = scheduler.memory.pool, scheduler.memory.prefix
        assert prefix is not None
        names: dict[int, int] = {}
        name = lambda page_id: names.setdefault(page_id, len(names))  # noqa: E731
        seqs = [seq for group in scheduler._groups.values() for seq in group.live.values()]
        running = scheduler._running
        return (
            tuple(self.added),
            tuple(sorted((k, v is None) for k, v in self.ended.items())),
            tuple(self.num_made[kind] for kind in ("preempt", "tick", "abort")),
            tuple(
                (
                    s.request_id, s.state.value, s.row, len(s.tokens), s.num_fed, s.num_unsure,
                    len(s.chain), s.chain_open,
                    s.ready_after - scheduler._last_committed if s.ready_after > scheduler._last_committed else 0,
                    tuple(map(name, s.page_ids)), tuple(t.first for t in s.tables), s.num_promised,
                    self.clock() - s.request.arrival_s, s.is_set_up, tuple(load.slot for load in s.loads),
                    s.forkable_from <= scheduler._step_id,
                )
                for s in seqs
            ),
            # Whether steps in flight have drawn the stop id, which nobody else knows yet.
            tuple(tuple(t == STOP for t in self.runner._rows[s.row].known[len(s.tokens) :]) for s in running),
            tuple((name(p), prefix._by_page[p].content) for p in pool._idle[0]),
            tuple(sorted(e.content for e in prefix._by_key.values() if not any(e.page_ids))),
            tuple(s.request_id for s in running.prefilling), tuple(s.request_id for s in running.ending),
            tuple(s.request_id for s in running.decoding if s.state is SequenceState.RUNNING),
            tuple(running._free_rows), tuple(running._freed_rows),
            tuple(
                (
                    p.decode_rows, p.decode_positions, p.chunks, p.sampled_rows, p.row_tokens,
                    tuple(cast(Any, h)._result.counts or ()), cast(Any, h)._result.num_draining, len(p.saves), p.loads,
                )
                for p, h in self.flights
            ),
            _policy_state(scheduler),
            _tier_state(scheduler),
            tuple(scheduler.encoder._pages.items()), frozenset(scheduler.encoder._unread),
            tuple(scheduler.encoder._free),
        )  # fmt: skip


def _tier_state(scheduler: ContinuousScheduler) -> tuple[object, ...]:
    tier = scheduler.memory.tier
    if tier is None:
        return ()
    assert isinstance(tier._policies[0], Lru)
    return (
        tuple((slot, entry.content, at) for slot, (entry, at) in sorted(tier._owners.items())),
        tuple(map(tier._slot_of.get, tier._policies[0]._order)),
        frozenset(tier._slots._filling), tuple(tier._slots._num_pins), tuple(tier._slots._free),
        tuple(save.slot for save in tier._saves), tier._num_draining,
    )  # fmt: skip


def _policy_state(scheduler: ContinuousScheduler) -> tuple[object, ...]:
    policy = scheduler.policy
    if isinstance(policy, FairPolicy):
        accounts = {"": policy.owners, **{f"of {owner}": one for owner, one in sorted(policy.tenants.items())}}
        return (
            *((name, *_account_state(one)) for name, one in accounts.items()),
            len(policy._charged),
            frozenset((seq.request_id, min(seq.num_outputs - then, 1)) for seq, then in policy._entered.items()),
            max(0.0, policy._next_look - policy._charges),
        )
    if isinstance(policy, SloPolicy):
        return (policy._longest.request_id if policy._longest else "", policy._num_rows % 8)
    return ()


def _account_state(accounts: Accounts) -> tuple[object, ...]:
    lowest = min(accounts.counters.values(), default=0.0)
    # Far behind is far behind: no move of a world this small makes up for more than a whole job, and for its lag.
    return (
        tuple(sorted((k, min(v - lowest, 4.0)) for k, v in accounts.counters.items())),
        tuple(sorted(accounts.places, key=lambda name: accounts.places[name])) if len(accounts.counters) > 1 else (),
        accounts.last_run,
    )


def explore(
    policy: str, rules: Rules, on_end: Callable[[SmallWorld], None] = lambda world: None
) -> tuple[int, int, int]:
    """Makes every move in every world that can be reached; each that a path leads back to is drained once, and
    then `on_end` gets it.

    Returns how many worlds there are, how many moves, and how many preemptions were seen that no move had asked for.
    """
    seen: set[int] = set()
    drained: set[int] = set()
    num_moves = num_preempted = 0
    # A step that was planned once, after a path, with a shape: most runs from there are none, which it tells at once.
    drawings: dict[tuple[tuple[Move, ...], tuple[int, int]], Drawing] = {}
    todo: list[tuple[Move, ...]] = [()]
    world = SmallWorld(policy, rules)

    def is_none(path: tuple[Move, ...]) -> bool:
        kind, arg = path[-1] if path else ("", 0)
        if kind not in ("run", "late"):
            return False
        bits, drawn_at_most, shape = world.parts(arg)
        known = drawings.get((path[:-1], shape))
        return known is not None and not known.allows(bits, drawn_at_most, shape == world.shapes[-1])

    def made(path: tuple[Move, ...]) -> bool:
        """The last move of a path, by the world that the others have led to."""
        kind, arg = path[-1]
        is_new = world.move((kind, arg))
        if kind in ("run", "late"):
            drawings[path[:-1], world.parts(arg)[2]] = world.drawing
        return is_new

    while todo:
        path = todo.pop()
        if is_none(path):
            continue
        world = SmallWorld(policy, rules)
        is_new = all(world.move(move) for move in path[:-1]) and (not path or made(path))
        while is_new:  # goes on from here as long as something new comes, and leaves the other moves for later
            world.scheduler.check()
            state = hash(world.fingerprint())
            moves = list(world.moves()) if state not in seen else []
            seen.add(state)
            if not moves:
                if state not in drained:
                    drained.add(state)
                    world.drain()
                    on_end(world)
                    num_preempted += world.scheduler.num_preemptions - world.num_made["preempt"]
                break
            todo.extend((*path, move) for move in moves[1:])
            path = (*path, moves[0])
            num_moves += len(moves)
            is_new = made(path)
    return len(seen), num_moves, num_preempted
