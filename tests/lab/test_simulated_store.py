"""Simulations of a store behind host memory: what is found, when it comes, and that nothing waits for ever."""

import itertools

import pytest

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.simulation.store import SimulatedStore, StoreLink, StoreModel, model_of_store
from jaxserve.lab.simulation.values import VirtualClock
from jaxserve.lab.workloads.conversations import conversations_of, drawn_again
from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.sched import SchedulerOptions
from jaxserve.sched.loading import Filled, StoreKey, Written
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import make_limits

MODEL = StoreModel(num_pages=3, page_bytes=100, latency_s=0.5, bandwidth=100.0)
KEYS = [StoreKey("", bytes([number])) for number in range(5)]


def stored(count: int, model: StoreModel = MODEL) -> tuple[SimulatedStore, VirtualClock]:
    """A store after `count` pages were written."""
    clock = VirtualClock()
    store = SimulatedStore(model, clock)
    for number, key in enumerate(KEYS[:count]):
        assert store.write(key, number)
    clock.now_s = 100.0
    assert store.poll() == [Written(number) for number in range(count)]
    return store, clock


def test_pages_cross_the_link_one_after_the_other_behind_the_latency() -> None:
    store, clock = stored(2)
    ticket = store.fill([KEYS[0], KEYS[4], KEYS[1]], [0, 1, 2], 10.0)
    other = store.fill([KEYS[0]], [3], 10.0)
    assert ticket is not None and other is not None
    assert store.next_event_s == 102.5  # a latency, and the two pages that are there
    clock.now_s = 102.4
    assert store.poll() == []
    clock.now_s = 103.5  # the page of the other call waits for the link, and its latency has passed meanwhile
    assert store.poll() == [Filled(ticket, (True, False, True)), Filled(other, (True,))]
    assert store.next_event_s == float("inf")


def test_what_would_come_after_the_deadline_does_not_come() -> None:
    store, clock = stored(3)
    ticket = store.fill(KEYS[:3], [0, 1, 2], 2.0)
    clock.now_s = 102.0
    assert store.poll() == [Filled(ticket, (True, False, False))]  # type: ignore[arg-type]
    assert store.counts.pages["late"] == 2


def test_the_page_used_last_stays() -> None:
    store, clock = stored(3)
    store.fill([KEYS[0]], [0], 10.0)
    store.write(KEYS[3], 1)
    clock.now_s = 200.0
    store.poll()
    store.fill(KEYS[:4], [0, 1, 2, 3], 50.0)
    clock.now_s = 300.0
    [event] = store.poll()
    assert isinstance(event, Filled) and event.ok == (True, False, True, True)


CHATS = [
    Shape(
        parts=tuple(Part(key, 8) for key in (0, 100 * chat, *range(100 * chat + 1, 100 * chat + turn + 1))),
        output_len=2,
        arrival_s=float(10 * turn + chat),
    )
    for turn in range(4)
    for chat in range(1, 9)
]


def cached(slots: int, store: StoreModel | None, wait_s: float = 5.0) -> tuple[int, float]:
    """Prompt tokens that were found, and the mean time to the first token."""
    limits = make_limits(
        num_pages=14,
        page_size=8,
        token_buckets=(8, 64),
        max_model_len=60,
        slots=HostSlots(num_slots=slots, max_draining=4, max_loads=4, load_ms=0.01, page_bytes=100),
    )
    trace = sim_requests(CHATS, ClientOptions())
    cost = FixedCost(cost=StepCost(0.0, 0.2))
    options = SchedulerOptions(watermark=0.0, store_wait_s=wait_s)
    done = simulate("fcfs", trace, cost, limits, options=options, store=store)
    assert len(done.requests) == len(CHATS) and not any(one.error for one in done.requests)
    ttfts = [one.first_token_s - one.arrival_s for one in done.requests if one.first_token_s is not None]
    return sum(one.cached_tokens for one in done.requests), sum(ttfts) / len(ttfts)


def test_a_store_finds_what_few_slots_do_not_and_a_slow_one_costs_no_request_more_than_its_wait() -> None:
    fast = StoreModel(num_pages=1000, page_bytes=100, latency_s=0.001, bandwidth=1e6)
    slow = StoreModel(num_pages=1000, page_bytes=100, latency_s=50.0, bandwidth=1e6)
    none, little, much = cached(0, None), cached(8, None), cached(8, fast)
    assert none[0] <= little[0] < much[0]
    late = cached(8, slow, wait_s=0.5)
    assert late[0] < much[0] and late[1] <= little[1] + 0.5 * 1.2


def test_a_store_that_nothing_is_known_of_needs_a_link() -> None:
    config = load_config(None, {"store.kind": "mine:Store"}).config.store
    with pytest.raises(ConfigError, match="--store-bandwidth"):
        model_of_store(config, 100, None)
    model = model_of_store(config, 100, StoreLink(0.1, 1e9))
    assert model is not None and model.latency_s == 0.1
    with pytest.raises(ConfigError, match=r"cache\.host_bytes"):
        model_of_store(config, 0, StoreLink(0.1, 1e9))


def test_conversations_drawn_again_keep_lengths_and_gaps_and_share_their_beginning_alone() -> None:
    conversations = conversations_of(CHATS)
    assert [len(turns) for turns in conversations] == [4] * 8
    drawn = []
    for shape in drawn_again(conversations, rate=1.0, seed=3):
        drawn.append(shape)
        if len(drawn) == 400:
            break
    times = [shape.arrival_s for shape in drawn]
    assert times == sorted(times)  # type: ignore[type-var]
    by_draw: dict[int, list[Shape]] = {}
    for shape in drawn:
        by_draw.setdefault(shape.session, []).append(shape)  # type: ignore[arg-type]
    for turns in by_draw.values():
        gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(turns)]  # type: ignore[operator]
        assert gaps == pytest.approx([10.0] * len(gaps))
        assert all(b.parts[: len(a.parts)] == a.parts for a, b in itertools.pairwise(turns))
    owned = [{part.key for shape in turns for part in shape.parts} - {0} for turns in by_draw.values()]
    assert len(set().union(*owned)) == sum(map(len, owned))
