"""Room that owners share: whoever fills it, others with little get in, and nothing of it is lost."""

import random
from collections import Counter

import pytest

from jaxserve.serve.shared_room import SharedRoom

A, B, C = b"a", b"b", b"c"


def fill(room: SharedRoom, owner: bytes, amount: int = 1) -> int:
    """Enters as long as it can. Returns what the owner has then."""
    while room.enter(owner, amount):
        pass
    return room.held(owner)


def test_one_alone_leaves_a_quarter_and_those_with_little_get_an_even_part_of_it() -> None:
    room = SharedRoom(100)
    assert fill(room, A) == 75
    assert fill(room, B) == 12, "half of the quarter: there are two"
    assert fill(room, C) == 8
    assert not room.enter(A, 1) and room.total == 95
    room.leave(A, 75)
    assert fill(room, C) == 63, "three quarters together"
    assert room.enter(A, 8) and not room.enter(A, 1)


def test_what_must_enter_does() -> None:
    room = SharedRoom(100)
    assert not room.enter(A, 300)
    assert room.enter(A, 300, at_any_rate=True) and not room.enter(B, 1)
    room.leave(A, 300)
    assert room.enter(B, 75) and room.held(A) == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_owners_never_have_more_than_there_is(seed: int) -> None:
    rng, room, held = random.Random(seed), SharedRoom(1000), Counter[bytes]()
    for _ in range(3000):
        owner, amount = rng.choice((A, B, C)), rng.randint(1, 60)
        if rng.random() < 0.6:
            before = held.total()
            if room.enter(owner, amount):
                held[owner] += amount
            else:
                assert before + amount > 750
        elif held[owner]:
            amount = rng.randint(1, held[owner])
            room.leave(owner, amount)
            held[owner] -= amount
        assert room.total == held.total() <= 1000
        assert all(room.held(owner) == held[owner] for owner in (A, B, C))
