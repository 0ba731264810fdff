"""Places that owners share: a caller alone has all, beside others an even part, and nobody's place is lost."""

import asyncio
import random
from collections import Counter

import pytest

from jaxserve.engine.fair_places import FairPlaces

A, B, C = b"a", b"b", b"c"


class Crowd:
    """Holders of places, each a task that keeps its place until it is told to leave. Tells who came, in order."""

    def __init__(self, count: int) -> None:
        self.places, self.came = FairPlaces[bytes](count), list[bytes]()
        self._leaving: dict[bytes, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, owner: bytes, times: int = 1) -> list[asyncio.Task[None]]:
        made = [asyncio.create_task(self._hold(owner)) for _ in range(times)]
        self.tasks += made
        return made

    async def leave(self, owner: bytes) -> None:
        """One of its holders goes."""
        self._leaving[owner].pop(0).set()
        await settle()

    async def _hold(self, owner: bytes) -> None:
        async with self.places.place(owner):
            self.came.append(owner)
            leaving = asyncio.Event()
            self._leaving.setdefault(owner, []).append(leaving)
            await leaving.wait()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_alone_has_all_and_the_next_gets_its_part_as_places_come_back() -> None:
    async def run() -> None:
        crowd = Crowd(4)
        crowd.ask(A, 100)
        await settle()
        assert crowd.came == [A] * 4
        crowd.ask(B, 100)
        await settle()
        assert crowd.places.num_held(B) == 0, "no place is taken from anybody"
        for _ in range(2):
            await crowd.leave(A)
        assert (crowd.places.num_held(A), crowd.places.num_held(B)) == (2, 2)
        crowd.ask(C)
        await settle()
        await crowd.leave(B)
        assert crowd.came[-1] == C, "one who holds nothing is next, however many others wait"
        for _ in range(20):
            await crowd.leave(max((A, B), key=crowd.places.num_held))
            assert {crowd.places.num_held(owner) for owner in (A, B)} <= {1, 2}
        await crowd.end()

    asyncio.run(run())


def test_of_those_that_hold_as_many_the_one_that_has_waited_longest_is_next() -> None:
    async def run() -> None:
        crowd = Crowd(1)
        for owner in (A, B, C, B, C):
            crowd.ask(owner)
            await settle()
        while len(crowd.came) < 5:
            await crowd.leave(crowd.came[-1])
        assert crowd.came == [A, B, C, B, C]
        await crowd.end()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_no_place_is_lost_whoever_gives_up(seed: int) -> None:
    async def run() -> None:
        rng, crowd = random.Random(seed), Crowd(3)
        for _ in range(200):
            move = rng.random()
            if move < 0.5:
                crowd.ask(rng.choice((A, B, C)))
            elif move < 0.8 and crowd.tasks:
                crowd.tasks.pop(rng.randrange(len(crowd.tasks))).cancel()  # it may be given a place in this very turn
            if rng.random() < 0.5:
                await settle()
            held = sum(map(crowd.places.num_held, (A, B, C)))
            assert held <= 3
        await crowd.end()
        await settle()
        assert not any(map(crowd.places.num_held, (A, B, C)))
        crowd.came.clear()
        crowd.ask(A, 3)
        await settle()
        assert Counter(crowd.came) == {A: 3}, "all places are free again"
        await crowd.end()

    asyncio.run(run())
