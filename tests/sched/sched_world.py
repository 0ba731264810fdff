"""A scheduler and a fake runner under random operations, with a naive model of what must come out.

The model is a loop over a list: no pages, no batches, no scheduler. Every token of every sequence must equal it,
whatever was added, cut, preempted, shared or aborted around it.
"""

import collections
import random
from collections.abc import Callable, Iterable
from typing import Any

from jaxserve.api import FinishReason, Request, SamplingParams
from jaxserve.errors import UserError
from jaxserve.sched import InFlight, Limits, Policy, SchedulerOptions, Sequence, StepPlan, create_scheduler
from jaxserve.sched.base import MayWait
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.entry import PageEntry
from jaxserve.sched.plan import EncoderPool, HostSlots
from jaxserve.sched.state import sequence_seed
from jaxserve.sched.tier_policy import TierOptions
from jaxserve.testing import FakeRunner, ManualClock, Output, make_limits, make_picture, make_request, seen_tokens
from jaxserve.values.content import PlacedPicture

VOCAB = 7
PLACEHOLDER = 6  # which the prompts without a picture hold, too
# Admission that never looks ahead: for tests of what happens when the cache runs dry.
BLIND = SchedulerOptions(watermark=0.0, growth=0.0)
POLICIES = ("fcfs", "priority", "preemptive", "sjf", "fair", "slo")


class Urgent(Policy):
    """Takes rows and pages from the less urgent: preemption at moments that the built-in policies never choose."""

    preemptive = True

    def key(self, seq: Sequence, now_s: float) -> float:
        return seq.request.priority

    def victim_for_admission(self, seq, running):
        return running[-1] if running[-1].request.priority > seq.request.priority else None


def first_tokens(plan: StepPlan) -> tuple[int, ...]:
    """What the first row that the plan sets up knows by the end of it: from its pages, then from its chunk."""
    setup = plan.setups[0]
    return setup.token_ids + next(chunk.token_ids for chunk in plan.chunks if chunk.row == setup.row)


def expected_output(request: Request, index: int, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What FakeRunner's "context" mode yields for one sequence, computed without any scheduler."""
    seed, sampling, prompt = sequence_seed(request, index), request.sampling, seen_tokens(request)
    tokens: list[int] = []
    while True:
        token = hash((seed, *prompt, *tokens)) % VOCAB
        while len(tokens) < sampling.min_tokens and token in request.stop_token_ids:
            token = (token + 1) % VOCAB
        tokens.append(token)
        if token in request.stop_token_ids and len(tokens) > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) == request.max_tokens or len(request.prompt_token_ids) + len(tokens) == max_model_len:
            return tokens, FinishReason.LENGTH


class PublishedPages:
    """Asserts that a page never changes as long as others may find it. Mutated by `check`."""

    def __init__(self, scheduler: ContinuousScheduler, runner: FakeRunner) -> None:
        self._prefix = scheduler.memory.prefix
        self._runner = runner
        self._seen: dict[int, tuple[PageEntry, list[int | None]]] = {}

    def check(self) -> None:
        """Looks at the pages after a step has run."""
        if self._prefix is None:
            return
        seen, self._seen = self._seen, {}
        for page_id, entry in self._prefix._by_page.items():
            holds = self._runner._pages[page_id]
            before = seen.get(page_id)
            if before is None or before[0] is not entry:
                assert all(token is not None and token >= 0 for token in holds), f"page {page_id} is published: {holds}"
                before = (entry, list(holds))
            assert before[1] == holds, f"page {page_id} can be found and was written: {before[1]}, {holds}"
            self._seen[page_id] = before


def random_limits(rng: random.Random) -> Limits:
    max_rows = rng.randint(1, 8)
    largest = rng.choice([max_rows, max_rows + 1, 8, 12, 16, 33])
    edges = sorted({e for e in (2, 4, 8, 16) if e < largest} | {max(largest, max_rows)})
    mixed_rows = {e: rng.randint(1, max_rows) for e in edges[:-1] if rng.random() < 0.3}
    window = rng.randint(1, 12)
    windows = rng.choice(
        [(None,), (None, window), (None, window), (window,), (window, None, window, rng.randint(1, 5))]
    )
    return make_limits(
        max_rows=max_rows,
        num_pages=rng.choice([rng.randint(3, 12), rng.randint(8, 40)]) * len(windows),
        page_size=rng.choice([1, 1, 2, 3, 4, 8]),
        windows=windows,
        max_model_len=rng.randint(4, 40),
        token_buckets=edges,
        mixed_rows={**mixed_rows, edges[-1]: max_rows},
        slots=random_slots(rng),
        encoder=random_encoder(rng),
    )


def random_encoder(rng: random.Random) -> EncoderPool:
    """None in half of the worlds, else one with room for few pictures or many, and any budget."""
    if rng.random() < 0.5:
        return EncoderPool()
    return EncoderPool(
        num_pages=rng.choice([1, 2, 3, 6, 20]), page_size=rng.choice([1, 2, 4]), max_patches=rng.choice([1, 12, 40])
    )


def random_slots(rng: random.Random) -> HostSlots:
    """None in half of the worlds, else fewer than a sequence needs, or many; and any budgets."""
    num_slots = rng.choice([0, 0, 0, 1, 3, rng.randint(2, 20), 100])
    max_draining, max_loads = rng.choice([1, 4, 16]), rng.choice([1, 1, 2, 8])
    return HostSlots(num_slots, max_draining, max_loads, rng.choice([0.0, 200.0])) if num_slots else HostSlots()


class World:
    """Operations that a rule machine or a random loop may call in any order."""

    def __init__(
        self,
        limits: Limits,
        *,
        policy: str | Policy | type[Policy] = "fcfs",
        chunked: bool = True,
        prefix_caching: bool = True,
        look_ahead: bool = False,
        accept: Callable[[str, int, int, int], int] | None = None,
        any_shape: bool = False,
        host_policy: str = "lru",
        admission: str = "always",
        store: Any = None,
    ) -> None:
        """`store`: as in `test_store_fills`.

        `accept`: as of `FakeRunner`. `any_shape`: each step has a random one of the shapes that are on offer."""
        self.clock = ManualClock()
        self.limits = limits
        scheduler = create_scheduler(
            policy,
            limits,
            options=SchedulerOptions(
                chunked_prefill=chunked,
                prefix_caching=prefix_caching,
                ageing_s=2.0,
                preempt_lag=6.0,
                preempt_after=1,
                watermark=0.03 if look_ahead else 0.0,
                growth=0.5 if look_ahead else 0.0,
                host_policy=host_policy,
                host_tier=TierOptions(admission=admission),
            ),
            clock=self.clock,
            store=store,
        )
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        counts = random.Random(0)
        if any_shape:
            scheduler.policy.speculate = lambda decoding, shapes: counts.choice(shapes)
        self.runner = FakeRunner(
            limits,
            vocab_size=VOCAB,
            mode="context",
            keep_plans=False,
            draw_count=lambda most: counts.randint(1, most),
            accept=accept,
            num_draining=lambda num_saved: counts.randint(0, num_saved),
        )
        self.store = store
        if store is not None:
            store.runner = self.runner
        self.published = PublishedPages(scheduler, self.runner)
        self.chunked = chunked
        self.requests: dict[str, Request] = {}
        self.outputs: dict[tuple[str, int], Output] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.flights: collections.deque[tuple[StepPlan, InFlight]] = collections.deque()
        self.num_rejected = 0
        self.shapes = collections.Counter[tuple[int, int]]()  # steps by width and rounds
        self.num_several = 0  # rows that drew more than one token in a step
        self.num_fewer = 0  # rows that drew fewer tokens than they could
        self.num_added = 0
        self.num_flushed = 0
        self.num_resized = 0
        self.num_waited = 0  # steps after which a sequence with a row had pages left to load

    def add(self, request: Request) -> None:
        self.clock.advance(0.5)
        try:
            self.scheduler.add(request)
        except UserError:
            self.num_rejected += 1
            return
        self.num_added += 1
        self.requests[request.request_id] = request
        self.outputs |= {(request.request_id, i): Output() for i in range(request.sampling.n)}

    def operate(self, rng: random.Random) -> None:
        """What an operator may do at any time: flush, resize, switch tiers off and on."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        what = rng.choice(("flush", "resize", "resize", "host", "store"))
        if what == "flush":
            salt = rng.choice([None, "", "tenant"])
            forgotten = scheduler.flush(salt)
            self.num_flushed += forgotten.pages + forgotten.slots
            if memory.prefix is not None:
                assert not [e for e in memory.prefix._by_key.values() if salt in (None, memory.prefix.salt_of(e))]
        elif what == "resize":
            wanted = rng.choice([self.limits.num_pages, rng.randint(1, self.limits.num_pages)])
            try:
                scheduler.resize_pool(wanted, preempt=rng.random() < 0.5)
            except UserError:
                self.num_rejected += 1
            else:
                self.num_resized += 1
                assert scheduler.cache_state.grantable == wanted
                assert memory.pool.num_available == 0 or scheduler.cache_state.held <= wanted
        elif what == "host" and memory.tier is not None:
            scheduler.use_tiers(host=(on := rng.random() < 0.7))
            assert on or not memory.tier._owners
        elif what == "store" and self.store is not None:
            scheduler.use_tiers(store=rng.random() < 0.7)

    def live(self) -> list[tuple[str, int]]:
        return [key for key, out in self.outputs.items() if out.finish_reason is None and key not in self.aborted]

    def abort(self, request_id: str, index: int | None) -> None:
        keys = {key for key in self.live() if key[0] == request_id and index in (None, key[1])}
        assert self.scheduler.abort(request_id, index) == bool(keys)
        self.aborted |= keys

    def schedule(self) -> None:
        """Plans and launches, unless two steps are on their way already."""
        if len(self.flights) == 2:
            return
        plan = self.scheduler.schedule()
        if plan is None:
            if not self.flights and self.store is not None and self.scheduler.has_work():
                assert isinstance(self.scheduler, MayWait) and self.scheduler.waits(), (
                    "work is left and nothing can ever run"
                )
                self.clock.advance(1.0)  # of a deadline
                return
            assert self.flights or not self.scheduler.has_work(), "work is left and nothing can ever run"
            return
        if not self.chunked:
            assert all(c.sample or self._may_be_cut(c.row) for c in plan.chunks), "a prompt was cut"
        self.flights.append((plan, self.runner.dispatch(plan)))
        self.shapes[plan.width, plan.rounds] += 1
        self.num_waited += any(seq.loads for seq in self.scheduler._running)
        self.published.check()

    def _may_be_cut(self, row: int) -> bool:
        """Before a picture, or when it is computed again."""
        seq = next(seq for seq in self.scheduler._running if seq.row == row)
        return seq.num_outputs > 0 or len(seq.request.pictures) > 0

    def commit(self) -> None:
        if not self.flights:
            return
        plan, handle = self.flights.popleft()
        result = handle.result()
        if result.counts is not None:
            self.num_several += sum(count > 1 for count in result.counts)
            self.num_fewer += sum(a < b for a, b in zip(result.counts, plan.row_tokens, strict=False))
        for event in self.scheduler.commit(plan, result):
            key = (event.request_id, event.index)
            assert key not in self.aborted, f"an event of an aborted sequence: {event}"
            self.outputs[key].take(event)

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_running <= self.limits.max_rows
        assert self.scheduler.has_work() == bool(self.live())

    def finish(self) -> None:
        """Runs everything to its end, and compares it all with the model."""
        for _ in range(20_000):
            if not self.flights and not self.scheduler.has_work():
                break
            self.schedule()
            if len(self.flights) == 2 or (self.flights and self.scheduler.num_running == 0):
                self.commit()
            elif self.flights:
                self.schedule()
                self.commit()
        assert not self.live(), f"never ended: {self.live()}"
        while self.flights:
            self.commit()
        self.check()
        assert self.scheduler.num_held_pages == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for (request_id, index), out in self.outputs.items():
            self._compare(self.requests[request_id], index, out)

    def _compare(self, request: Request, index: int, out: Output) -> None:
        tokens, reason = expected_output(request, index, self.limits.max_model_len)
        if (request.request_id, index) in self.aborted:
            assert out.token_ids == tokens[: len(out.token_ids)], (request, index)
            return
        assert (out.token_ids, out.finish_reason) == (tokens, reason), (request, index)
        assert out.prompt is not None
        if request.sampling.prompt_logprobs is None or index > 0:
            assert out.prompt.logprobs is None
        else:
            assert [entry.token_id for entry in out.prompt.logprobs or ()] == list(request.prompt_token_ids[1:])
            assert out.prompt.num_cached_tokens == 0


def random_request(rng: random.Random, number: int, now_s: float) -> Request:
    """Prompts over a tiny vocabulary with common beginnings, so that prefixes meet often."""
    common = [[1, 2, 3, 4, 5, 6] * 5, [0] * 30, [1, 2, 3, 4, 6, 6] * 5]
    prompt = [*rng.choice(common)[: rng.randint(0, 12)], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))]
    pictures = random_pictures(rng, prompt) if rng.random() < 0.25 else []
    max_tokens = rng.choice([1, 3, 8, 15, 25])
    stop: Iterable[int] = rng.sample(range(VOCAB), rng.choice([0, 0, 0, 1]))
    sampling = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
        prompt_logprobs=rng.choice([None, None, None, None, 1]),
        logprobs=rng.choice([None, None, 2]),
    )
    return make_request(
        f"q{number}",
        prompt,
        max_tokens,
        sampling=sampling,
        seed=rng.randrange(2**63),
        stop=stop,
        arrival_s=now_s,
        priority=rng.randint(-2, 2),
        salt=rng.choice(["", "", "", "tenant"]),
        tenant=rng.choice("abc"),
        owner="xyz"[number % 3],
        owner_weight=1.0 + number % 2,
        pictures=pictures,
    )


def random_pictures(rng: random.Random, prompt: list[int]) -> list[PlacedPicture]:
    """Up to three of few pictures, at the same few places of many prompts, adjacent or not."""
    pictures, at = [], rng.choice([0, 1, 3])
    for _ in range(rng.randint(1, 3)):
        length = rng.choice([1, 2, 3, 5])
        if at + length > len(prompt):
            break
        pictures.append(make_picture(at, length, rng.choice(["cat", "dog"])))
        prompt[at : at + length] = [PLACEHOLDER] * length
        at += length + rng.choice([0, 0, 1, 4])
    return pictures
