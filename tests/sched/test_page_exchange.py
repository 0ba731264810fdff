"""Pages that are lent to another engine, and slots that wait for pages of one."""

import dataclasses
import random
from typing import Any

import pytest
from sched_world import World, random_request

from jaxserve.api import Pooling
from jaxserve.sched.page_exchange import Lent, Place, Prompt
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import make_limits, make_request

SIZE = 4
TOKENS = tuple(range(1, 7)) * 3  # of 18, four full pages before the last token


def world(num_slots: int = 16, max_draining: int = 2, windows: tuple[int | None, ...] = (None,)) -> World:
    return World(
        make_limits(
            max_rows=4,
            num_pages=12 * len(windows),
            page_size=SIZE,
            windows=windows,
            max_model_len=40,
            token_buckets=[8],
            slots=HostSlots(num_slots, max_draining, 2),
        ),
        admission="second_sight",
    )


def compute(one: World, tokens: tuple[int, ...] = TOKENS) -> None:
    """Runs a prompt to its end."""
    request = make_request(f"p{one.num_added}", tokens, 1)
    one.add(request)
    one.finish()


def run_out(one: World) -> None:
    """Plans until there is nothing to plan, as an engine does."""
    while True:
        one.schedule()
        if not one.flights:
            break
        one.commit()
    one.check()


def lend(one: World, name: bytes = b"a", tokens: tuple[int, ...] = TOKENS) -> Lent:
    told: list[Lent] = []
    exchange = one.scheduler.exchange
    assert exchange is not None
    exchange.lend(name, Prompt("", tokens), told.append)
    run_out(one)
    assert len(told) == 1
    return told[0]


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_pages_of_a_prompt_are_saved_by_steps_of_their_own_and_held(windows: Any) -> None:
    one = world(windows=windows)
    compute(one)
    exchange = one.scheduler.exchange
    lent = lend(one)
    assert lent.num_blocks == 4 and lent.firsts == (0, 3)[: len(windows)]
    for first, slots in zip(lent.firsts, lent.slots, strict=True):
        for number, slot in enumerate(slots, start=first):
            assert tuple(one.runner._slots[slot]) == TOKENS[number * SIZE : (number + 1) * SIZE]
    assert exchange.num_held == sum(map(len, lent.slots)) and exchange.is_whole(b"a")
    for number in range(6):  # all pages and slots are given to others meanwhile
        compute(one, tuple(number + k % 3 for k in range(17)))
        lend(one, b"other", tuple(number + k % 3 for k in range(17)))
        exchange.release(b"other")
    for first, slots in zip(lent.firsts, lent.slots, strict=True):
        for number, slot in enumerate(slots, start=first):
            assert tuple(one.runner._slots[slot]) == TOKENS[number * SIZE : (number + 1) * SIZE]
    exchange.release(b"a")
    assert exchange.num_held == 0
    one.check()


def test_a_flush_takes_what_is_lent_and_the_slots_stay_until_they_are_given_back() -> None:
    one = world()
    compute(one)
    lent = lend(one)
    one.scheduler.flush(None)
    assert not one.scheduler.exchange.is_whole(b"a") and one.scheduler.exchange.num_held == 4
    one.check()
    one.scheduler.exchange.release(b"a")
    one.check()
    assert one.scheduler.memory.tier.num_used == 0 and lent.num_blocks == 4


def test_two_loans_of_one_prompt_share_its_slots() -> None:
    one = world(max_draining=16)
    compute(one)
    exchange, told = one.scheduler.exchange, []
    for name in (b"a", b"b"):
        exchange.lend(name, Prompt("", TOKENS), told.append)
    run_out(one)
    assert told[0] == told[1] and told[0].num_blocks == 4 and exchange.num_held == 4
    exchange.release(b"a")
    assert exchange.is_whole(b"b") and exchange.num_held == 4
    exchange.release(b"b")
    one.check()


def test_what_no_slot_can_be_had_for_is_not_lent() -> None:
    one = world(num_slots=4)
    compute(one)
    lent = lend(one)
    assert lent.num_blocks == 2 and one.scheduler.exchange.num_refused == 2
    assert lend(one, b"b", (9,) * 9).num_blocks == 0  # never computed


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_pages_that_arrive_are_loaded_like_any_others(windows: Any) -> None:
    one = world(windows=windows)
    exchange = one.scheduler.exchange
    wanted = exchange.expect(b"x", Prompt("", TOKENS), 99)
    assert (wanted.num_found, wanted.num_blocks) == (0, 4)
    assert set(wanted.slots) == {Place(n, 0) for n in range(4)} | {Place(3, 1) for _ in windows[1:]}
    for place, slot in wanted.slots.items():
        one.runner._slots[slot] = list(TOKENS[place.block * SIZE : (place.block + 1) * SIZE])
    one.check()
    exchange.arrive(b"x", wanted.slots)
    one.add(make_request("q", TOKENS, 6))
    one.schedule()
    assert sum(len(chunk.token_ids) for chunk in one.flights[-1][0].chunks) in (0, 2)  # its first loads, or its end
    one.finish()
    assert one.outputs["q", 0].prompt.num_cached_tokens == 16
    exchange.release(b"x")
    one.check()


def test_what_does_not_arrive_is_computed() -> None:
    one = world()
    exchange = one.scheduler.exchange
    wanted = exchange.expect(b"x", Prompt("", TOKENS), 99)
    come = {place: slot for place, slot in wanted.slots.items() if place.block in (0, 1, 3)}
    for place, slot in come.items():
        one.runner._slots[slot] = list(TOKENS[place.block * SIZE : (place.block + 1) * SIZE])
    exchange.arrive(b"x", come)
    one.add(make_request("q", TOKENS, 6))
    one.finish()
    assert one.outputs["q", 0].prompt.num_cached_tokens == 8
    exchange.release(b"x")
    exchange.release(b"x")
    one.check()
    # One who gives up before anything has come gives all slots back.
    used = one.scheduler.memory.tier.num_used
    exchange.expect(b"y", Prompt("", (7,) * 17), 99)
    exchange.release(b"y")
    one.check()
    assert one.scheduler.memory.tier.num_used == used


def test_a_prompt_to_be_lent_generates_nothing() -> None:
    one = world()
    request = dataclasses.replace(make_request("p", TOKENS[:16], 1), pooling=Pooling.LAST, max_tokens=0)
    one.scheduler.add(request)
    while one.scheduler.has_work():
        plan = one.scheduler.schedule()
        assert plan is not None and not plan.sampled_rows
        one.scheduler.commit(plan, one.runner.dispatch(plan).result())
    assert lend(one).num_blocks == 4


@pytest.mark.parametrize("seed", range(30))
def test_anything_may_happen_around_exchanges(seed: int) -> None:
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None, 6), (7, None)])
    one = world(rng.choice([1, 4, 9, 30]), rng.choice([1, 3, 8]), windows)
    exchange = one.scheduler.exchange
    names: list[bytes] = []
    for number in range(80):
        what = rng.random()
        if what < 0.25:
            one.add(random_request(rng, number, one.clock()))
        elif what < 0.4:
            name = b"l%d" % number
            names.append(name)
            tokens = random_request(rng, number, 0.0).prompt_token_ids * 2
            exchange.lend(name, Prompt("", tokens), lambda lent: None)
        elif what < 0.5:
            name = b"r%d" % number
            names.append(name)
            tokens = random_request(rng, number, 0.0).prompt_token_ids * 2
            wanted = exchange.expect(name, Prompt("", tokens), rng.randint(0, 40))
            come = {place: slot for place, slot in wanted.slots.items() if rng.random() < 0.8}
            for place, slot in come.items():
                one.runner._slots[slot] = list(tokens[place.block * SIZE : (place.block + 1) * SIZE])
            if rng.random() < 0.8:
                exchange.arrive(name, come)
        elif what < 0.6 and names:
            exchange.release(names.pop(rng.randrange(len(names))))
        elif what < 0.65:
            one.operate(rng)
        elif what < 0.85:
            one.schedule()
        else:
            one.commit()
        one.check()
    one.scheduler.resize_pool(one.limits.num_pages, preempt=False)
    one.finish()
    for name in names:
        exchange.release(name)
    one.check()
    assert exchange.num_held == 0 and not one.scheduler.memory.tier.holds
