"""Policies in every small world: no deadlock, no leak, no starvation, no event after an end.

Requests of few tokens on three pages, two rows, two steps in flight, and devices that draw one token of a row in a
step, or any number up to three (with fcfs alone: the numbers are the mechanism's). Every run of the tests explores
three requests in all orders of arrival, finish and delay, and two with all moves. The large worlds, with more tokens
and pages, and with aborts, preemptions and jumps of the clock for three, are long.
"""

import dataclasses

import pytest
from sched_world import POLICIES
from small_world import OPTIONS, OWNED, SMALLER, STOP, Rules, SmallWorld, explore

from jaxserve.sched.plan import HostSlots
from jaxserve.testing import make_request

SMALL = Rules(requests=SMALLER, num_pages=3)
NO_MOVE = {"max_aborts": 0, "max_preempts": 0, "max_ticks": 0}
# A group that sees all and one that sees two tokens, which gives a page back at nearly every step; and two windows.
WINDOWS = ((None, 2), (1, 3))
SHAPES = (((3, 1),), ((1, 1), (2, 2)))


def worlds(rules: Rules, shapes: dict[str, tuple[tuple[int, int], ...]]) -> dict[str, tuple[str, Rules]]:
    """Policy and rules of each exploration, without the moves that a path may make for three."""
    pages, still = rules.num_pages, dataclasses.replace(rules, **NO_MOVE)
    two = dataclasses.replace(rules, num_requests=2)
    found = {f"3 {policy}": (policy, still) for policy in POLICIES}
    found |= {f"2 {policy}": (policy, two) for policy in POLICIES}
    found |= {f"3 groups {i}": ("fcfs", dataclasses.replace(still, windows=w, num_pages=2 * pages))
              for i, w in enumerate(WINDOWS)}  # fmt: skip
    found["2 groups"] = ("preemptive", dataclasses.replace(two, windows=WINDOWS[0], num_pages=2 * pages))
    found["3 owners"] = ("fair", dataclasses.replace(still, requests=OWNED, num_pages=pages + 1))
    found["2 owners"] = ("fair", dataclasses.replace(two, requests=OWNED, max_preempts=0, max_ticks=0))
    for name, shape in shapes.items():
        found[f"3 {name}"] = ("fcfs", dataclasses.replace(still, shapes=shape, num_pages=pages + 1))
        found[f"2 {name}"] = ("fcfs", dataclasses.replace(two, shapes=shape, num_pages=pages + 1))
    return found


EVERY = worlds(SMALL, {"up to 3": SHAPES[0]})
LARGE = worlds(Rules(), {"up to 3": SHAPES[0], "2 rounds": SHAPES[1]})
# Three with a move: policies that sort once, that choose victims, and whose order depends on when somebody came.
for _move, _policy in (("aborts", "fcfs"), ("preempts", "preemptive"), ("ticks", "slo")):
    LARGE[f"3 {_move}"] = (_policy, Rules(**{**NO_MOVE, f"max_{_move}": 1}))
EVERY["3 aborts"] = ("fcfs", dataclasses.replace(SMALL, **{**NO_MOVE, "max_aborts": 1}))
QUICK = ("3 preemptive", "2 groups", "2 up to 3", "2 preemptive", "2 fair", "2 owners", "2 slo")


def check_every(policy: str, rules: Rules) -> None:
    num_worlds, num_moves, num_preempted = explore(policy, rules)
    assert num_worlds > 400 and num_moves > 1500, (num_worlds, num_moves)
    short_of_memory = rules.num_requests == 3 and rules.windows in ((None,), WINDOWS[0])
    assert num_preempted > 20 or not short_of_memory, "memory must run short by itself"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EVERY])
def test_every_move_in_small(name: str) -> None:
    check_every(*EVERY[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_move_at_large(name: str) -> None:
    check_every(*LARGE[name])


# Two sequences, three pages, two slots: what one of them has is lost to the other, saved and loaded.
TIERED = Rules(
    num_requests=2,
    num_pages=3,
    max_ticks=0,
    slots=HostSlots(num_slots=2, max_draining=2, max_loads=1),
    requests=(make_request("a", [1, 2], 2, stop=[STOP]), make_request("b", [3], 3, stop=[STOP])),
)


@pytest.mark.parametrize(
    ("windows", "preempts"), [((None,), 0), pytest.param((None,), 1, marks=pytest.mark.slow), ((None, 2), 1)]
)
def test_a_host_tier_with_every_move(windows: tuple[int | None, ...], preempts: int) -> None:
    """Saves that drain at once or late, aborts and preemptions while pages wait to be loaded."""
    loads = skipped = 0

    def count(world: SmallWorld) -> None:
        nonlocal loads, skipped
        loads, skipped = loads + world.num_loads, skipped + world.num_skipped

    rules = dataclasses.replace(TIERED, windows=windows, num_pages=3 * len(windows), max_preempts=preempts)
    num_worlds, _, _ = explore("fcfs", rules, count)
    assert num_worlds > 400 and loads > 100 and skipped > 20, (num_worlds, loads, skipped)


def test_exploration_finds_a_leak() -> None:
    """A page that does not come back is seen: what the other tests would say of a fault."""
    world = SmallWorld("fcfs", Rules(), OPTIONS)
    world.move(("add", 0))
    world.move(("run", 0))
    world.scheduler.memory.pool.allocate()
    with pytest.raises(AssertionError):
        world.drain()
