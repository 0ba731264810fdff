"""Shares of the device's pages and of host slots: what a tenant has, up to its share, others do not take from it."""

import random

import pytest
from sched_world import VOCAB, expected_output

from jaxserve.errors import ConfigError, RequestRejected
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, Sequence, create_scheduler
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import NO_SLOTS, HostSlots
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy
from jaxserve.testing import FakeRunner, ManualClock, Output, drive, make_limits, make_request

POLICIES = ("fcfs", "fair", "preemptive")


def _scheduler(limits, shares, policy="fcfs", **options) -> ContinuousScheduler:
    options = SchedulerOptions(page_shares=shares, watermark=0.0, growth=0.0, **options)
    made = create_scheduler(policy, limits, options=options, clock=ManualClock())  # so that no load looks slow
    assert isinstance(made, ContinuousScheduler)
    return made


# ---- the pool --------------------------------------------------------------------------------------------------------


def _idle(pool: PagePool, owner: int, count: int) -> list[int]:
    pages = [pool.allocate(owner) for _ in range(count)]
    for page_id in pages:
        pool.keep_content(page_id)
    pool.release(pages)
    return pages


def test_an_eviction_leaves_the_share_of_others() -> None:
    evicted: list[int] = []
    pool = PagePool(10, evicted.append, shares=(0.4, 0.3))
    first, second = _idle(pool, 1, 6), _idle(pool, 2, 2)
    assert pool.num_available == 10
    assert pool.num_available_to(0) == 2 + 2, "free ones, and what the first has beyond its share"
    assert pool.num_available_to(1) == 2 + 6
    assert pool.num_available_to(2) == 2 + 2 + 2
    assert [pool.allocate() for _ in range(4)][2:] == evicted == first[:2]
    assert pool.num_available_to(0) == 0
    assert pool.idle_ids() == [*reversed(second), *reversed(first[2:])]
    assert pool.allocate(2) == second[0], "its own, although older ones are there"
    assert [pool.most_for(owner) for owner in (0, 1, 2)] == [3, 7, 6]
    pool.check()


def test_an_owner_without_a_share_has_what_nobody_else_wants() -> None:
    pool = PagePool(10, shares=(0.4,))
    _idle(pool, 0, 10)
    assert pool.num_available_to(1) == 10
    pool.resize(5)
    assert pool.num_reserved(1) == 2
    pool.check()


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def _hits(out: dict[tuple[str, int], Output], name: str) -> int:
    prompt = out[name, 0].prompt
    assert prompt is not None
    return prompt.num_cached_tokens


@pytest.mark.parametrize(
    ("shares", "num_slots", "hit"),
    [({}, 0, 0), ({"calm": 0.25}, 0, 32), ({}, 90, 0), ({"calm": 0.1}, 0, 16), ({"calm": 0.1}, 90, 32)],
)
def test_a_flood_does_not_evict_a_neighbour(shares: dict[str, float], num_slots: int, hit: int) -> None:
    """Also where the neighbour's share of the device holds less than half of its prompt, and host slots the rest."""
    slots = HostSlots(num_slots, 100, 16) if num_slots else NO_SLOTS
    limits = make_limits(max_rows=4, page_size=4, num_pages=40, max_model_len=128, token_buckets=(16, 64), slots=slots)
    scheduler = _scheduler(limits, shares, host_tier=TierOptions(admission="always"))
    runner = FakeRunner(limits, mode="context", vocab_size=VOCAB)
    prompt = list(range(36))
    drive(scheduler, runner, [make_request("before", prompt, 2, tenant="calm")])
    flood = [make_request(f"flood{k}", [k, *range(40)], 20, tenant="flood") for k in range(30)]
    drive(scheduler, runner, flood)
    out = drive(scheduler, runner, [make_request("after", prompt, 2, tenant="calm")])
    assert _hits(out, "after") == hit
    scheduler.check()


def test_a_sequence_gives_way_itself_where_all_others_are_within_their_shares() -> None:
    """A neighbour that has little of its own holds cached pages of the first, which so cannot have them back: without
    that both would wait for each other."""
    limits = make_limits(max_rows=4, page_size=2, num_pages=10, max_model_len=24, token_buckets=(4, 16))
    scheduler, runner = _scheduler(limits, {"calm": 0.4}), FakeRunner(limits, mode="context", vocab_size=VOCAB)
    prompt = [k % VOCAB for k in range(11)]
    drive(scheduler, runner, [make_request("cached", prompt, 1, tenant="flood")])
    first = make_request("first", [5, 6], 9, tenant="flood")
    calm = make_request("calm", prompt, 5, tenant="calm")
    flights, outputs, live = [], {}, {"first", "calm"}
    scheduler.add(first)
    while len(outputs.get("first", ())) < 2:
        _turn(scheduler, runner, flights, outputs, live)
    scheduler.add(calm)
    while scheduler.has_work() or flights:
        _turn(scheduler, runner, flights, outputs, live)
    assert scheduler.num_preemptions == 1
    for request in (first, calm):
        assert outputs[request.request_id] == expected_output(request, 0, limits.max_model_len)[0]
    scheduler.check()


def test_a_request_that_shares_leave_no_room_for_is_refused() -> None:
    limits = make_limits(max_rows=4, page_size=4, num_pages=20, max_model_len=80, token_buckets=(16, 64))
    scheduler = _scheduler(limits, {"calm": 0.5})
    with pytest.raises(RequestRejected):
        scheduler.add(make_request("big", [1] * 40, 20, tenant="flood"))
    scheduler.add(make_request("big", [1] * 40, 20, tenant="calm"))


@pytest.mark.parametrize("shares", [{"a": 0.6, "b": 0.4}, {"a": 1.0}, {"a": -0.1}])
def test_shares_that_leave_nothing_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="page_shares"):
        SchedulerOptions(page_shares=shares)


def test_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"page_shares is set, but layers"):
        _scheduler(make_limits(windows=[8]), {"a": 0.5})


def test_a_finished_tier_policy_cannot_be_that_of_each_tenant() -> None:
    with pytest.raises(ConfigError, match="give its class or its name"):
        _scheduler(make_limits(slots=HostSlots(8, 8, 8)), {"a": 0.5}, host_policy=create_tier_policy("lru"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_work_keeps_the_shares(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing within a share changes hands, everything ends, and every token is that of the request alone."""
    draw = random.Random(seed)
    slots = HostSlots(12, 16, 4)
    limits = make_limits(max_rows=6, page_size=4, num_pages=30, max_model_len=48, token_buckets=(8, 32), slots=slots)
    host_policy = ("lru", "lfu", "arc", "s3-fifo")[seed]
    scheduler = _scheduler(
        limits, {"a": 0.3, "b": 0.2}, policy, host_policy=host_policy, host_tier=TierOptions(admission="always")
    )
    runner = FakeRunner(limits, mode="context", vocab_size=VOCAB)
    pool, memory, tier = scheduler.memory.pool, scheduler.memory, scheduler.memory.tier
    assert tier is not None
    drop, num_dropped = tier._drop_one, 0

    def drop_one(incoming: bytes, owner: int):
        nonlocal num_dropped
        before = [len(one) for one in tier._policies]
        dropped = drop(incoming, owner)
        for at, one in enumerate(tier._policies):
            if len(one) < before[at]:
                num_dropped += 1
                assert at == owner or len(one) >= tier._num_reserved[at], f"owner {owner} took a slot of {at}"
        return dropped

    monkeypatch.setattr(tier, "_drop_one", drop_one)
    evict, give_way, preempt_behind = pool._take, scheduler._give_way, scheduler._preempt_behind
    taken_for: list[Sequence] = []
    asking: list[Sequence] = []

    def take(owner: int | None) -> int:
        owned = list(pool._num_owned)
        page_id = evict(owner)
        for at, before in enumerate(owned):
            if pool._num_owned[at] < before and at != owner:
                assert pool._num_owned[at] >= pool.num_reserved(at), f"owner {owner} took a page of {at}"
        return page_id

    def give(victim: Sequence, draft) -> None:
        taken_for.append(victim)
        owner = memory.owner_of(victim)
        if asking and owner and owner != memory.owner_of(asking[-1]):
            assert pool._num_owned[owner] > pool.num_reserved(owner), f"{victim} of {owner} gave way within its share"
        give_way(victim, draft)

    def preempt(seq: Sequence, *arguments) -> bool:
        asking.append(seq)
        found = preempt_behind(seq, *arguments)
        asking.pop()
        return found

    monkeypatch.setattr(pool, "_take", take)
    monkeypatch.setattr(scheduler, "_give_way", give)
    monkeypatch.setattr(scheduler, "_preempt_behind", preempt)
    requests, live, outputs = {}, set(), {}
    flights: list = []
    for number in range(160):
        tenant = draw.choice(["a", "b", "c", "c", "d"])
        opening = [draw.randrange(2)] * draw.choice((0, 4, 12))
        prompt = opening + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]
        request = make_request(f"r{number}", prompt, draw.randrange(1, 20), tenant=tenant, priority=draw.randrange(3))
        scheduler.add(request)
        requests[request.request_id] = request
        live.add(request.request_id)
        for _ in range(draw.randrange(4)):
            _turn(scheduler, runner, flights, outputs, live)
        if draw.random() < 0.1 and live:
            gone = draw.choice(sorted(live))
            scheduler.abort(gone)
            live.discard(gone)
            requests.pop(gone)
        scheduler.check()
    for _ in range(20_000):
        if not scheduler.has_work() and not flights:
            break
        _turn(scheduler, runner, flights, outputs, live)
    assert not live, f"these never end: {live}"
    assert num_dropped > 0, "the slots were never full"
    scheduler.check()
    assert scheduler.num_held_pages == 0
    for name, request in requests.items():
        assert outputs[name] == expected_output(request, 0, limits.max_model_len)[0]
    assert taken_for, "memory was never short: the test shows nothing"
    assert memory.has_shares


def _turn(scheduler, runner, flights, outputs, live) -> None:
    plan = scheduler.schedule()
    if plan is not None:
        flights.append((plan, runner.dispatch(plan)))
    if flights and (plan is None or len(flights) > 1):
        done, handle = flights.pop(0)
        for event in scheduler.commit(done, handle.result()):
            outputs.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                live.discard(event.request_id)
