"""Room that owners share: whoever fills it, others with little get in, and nothing of it is lost."""

import random
from collections import Counter

import pytest

from jaxserve.engine.shared_room import SharedRoom

A, B, C = "a", "b", "c"


def fill(room: SharedRoom[str], owner: str, amount: int = 1) -> int:
    """Enters as long as it can. Returns what the owner has then."""
    while room.enter(owner, amount):
        pass
    return room.held(owner)


def test_one_alone_has_all_and_beside_it_those_with_little_get_an_even_part_of_a_quarter() -> None:
    room: SharedRoom[str] = SharedRoom(100)
    assert fill(room, A) == 100
    assert fill(room, B) == 13, "half of the quarter: there are two"
    assert fill(room, C) == 9
    assert not room.enter(A, 1) and room.total == 122
    room.leave(A, 30)
    assert fill(room, C) == 17, "there is room for anybody up to the most"
    room.leave(A, 40)
    assert room.enter(A, 40) and not room.enter(A, 1)


def test_of_the_least_room_something_is_left_for_others() -> None:
    room: SharedRoom[str] = SharedRoom(1)
    assert (fill(room, A), fill(room, B), fill(room, C)) == (1, 1, 0)


def test_what_must_enter_does() -> None:
    room: SharedRoom[str] = SharedRoom(100)
    assert not room.enter(A, 300)
    assert room.enter(A, 300, at_any_rate=True) and not room.enter(B, 1)
    room.leave(A, 300)
    assert room.enter(B, 100) and room.held(A) == 0
    room.clear()
    assert room.total == room.held(B) == 0 and not room.by_owner


def test_what_is_about_to_enter_counts_for_its_owner() -> None:
    room: SharedRoom[str] = SharedRoom(100)
    room.enter(A, 60)
    assert room.lacking(A, 1, {A: 40}) == 1 and room.lacking(A, 1, {A: 39}) == 0
    assert room.lacking(B, 5, {A: 40}) == 0, "those of another are not its own"
    assert room.lacking(B, 5, {A: 40, B: 9}) == 1
    assert room.lacking(B, 30, {A: 40}) == 30, "more than its part has to wait for others"
    assert room.total == 60, "it was only asked"


@pytest.mark.parametrize("seed", range(4))
def test_random_owners_never_have_more_than_there_is(seed: int) -> None:
    rng, held = random.Random(seed), Counter[str]()
    room: SharedRoom[str] = SharedRoom(1000)
    for _ in range(3000):
        owner, amount = rng.choice((A, B, C)), rng.randint(1, 60)
        if rng.random() < 0.6:
            lacking = room.lacking(owner, amount)
            if room.enter(owner, amount):
                assert lacking == 0
                held[owner] += amount
            else:
                assert held.total() + amount > 1000 and 0 < lacking <= held.total()
        elif held[owner]:
            amount = rng.randint(1, held[owner])
            room.leave(owner, amount)
            held[owner] -= amount
        assert room.total == held.total() <= 1250
        assert room.by_owner == +held
