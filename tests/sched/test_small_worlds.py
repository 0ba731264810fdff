"""Policies in every small world: no deadlock, no leak, no starvation, no event after an end.

Three requests, six pages, two rows, two steps in flight, and devices that draw one token of a row in a step, or any
number up to three (with fcfs alone: the numbers are the mechanism's). The quick part has all orders of arrival, finish
and delay, and all moves for two requests; the slow part has aborts, preemptions and jumps of the clock for three, with
some policies for each: those that sort once, those that sort again, and those that choose victims. The clock jumps for
some whose order depends on when somebody came.
"""

import dataclasses

import pytest
from sched_world import POLICIES
from small_world import OPTIONS, STOP, Rules, SmallWorld, explore

from jaxserve.sched.plan import HostSlots
from jaxserve.testing import make_request

THREE = {
    "abort": (Rules(max_aborts=1, max_preempts=0, max_ticks=0), ("fcfs",)),
    "preempt": (Rules(max_aborts=0, max_preempts=1, max_ticks=0), ("preemptive",)),
    "tick": (Rules(max_aborts=0, max_preempts=0, max_ticks=1), ("slo",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_three_in_every_order_of_arrival_and_finish(policy: str) -> None:
    num_worlds, num_moves, num_preempted = explore(policy, Rules(max_aborts=0, max_preempts=0, max_ticks=0))
    assert num_worlds > 400 and num_moves > 1500, (num_worlds, num_moves)
    assert num_preempted > 20, "memory must run short by itself"


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((3, 1),), ((1, 1), (2, 2))])
def test_several_tokens_a_step_in_every_order_of_arrival_and_finish(shapes: tuple[tuple[int, int], ...]) -> None:
    num_worlds, num_moves, _ = explore("fcfs", Rules(max_aborts=0, max_preempts=0, max_ticks=0, shapes=shapes))
    assert num_worlds > 400 and num_moves > 1500, (num_worlds, num_moves)


# A group that sees all and one that sees two tokens, which gives a page back at nearly every step; and two windows.
WINDOWS = ((None, 2), (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS)
def test_two_groups_of_pages_in_every_order_of_arrival_and_finish(windows: tuple[int | None, ...]) -> None:
    rules = Rules(max_aborts=0, max_preempts=0, max_ticks=0, windows=windows, num_pages=8)
    num_worlds, num_moves, num_preempted = explore("fcfs", rules)
    assert num_worlds > 400 and num_moves > 1500, (num_worlds, num_moves)
    assert None not in windows or num_preempted > 20, "memory must run short by itself"


def test_two_groups_of_pages_with_every_move() -> None:
    num_worlds, _, _ = explore("preemptive", Rules(num_requests=2, windows=WINDOWS[0], num_pages=8))
    assert num_worlds > 400, num_worlds


@pytest.mark.parametrize("shapes", [((3, 1),), pytest.param(((1, 1), (2, 2)), marks=pytest.mark.slow)])
def test_two_of_several_tokens_a_step_with_every_move(shapes: tuple[tuple[int, int], ...]) -> None:
    num_worlds, _, _ = explore("fcfs", Rules(num_requests=2, shapes=shapes))
    assert num_worlds > 400, num_worlds


@pytest.mark.parametrize(
    "policy", [p if p == "preemptive" else pytest.param(p, marks=pytest.mark.slow) for p in POLICIES]
)
def test_two_with_every_move(policy: str) -> None:
    num_worlds, _, _ = explore(policy, Rules(num_requests=2))
    assert num_worlds > 400, num_worlds


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), [(kind, policy) for kind, (_, names) in THREE.items() for policy in names])
def test_three_with_every_move(kind: str, policy: str) -> None:
    num_worlds, num_moves, num_preempted = explore(policy, THREE[kind][0])
    assert num_worlds > 2000 and num_moves > 8000, (num_worlds, num_moves)
    assert num_preempted > 100, num_preempted


# Two sequences, three pages, two slots: what one of them has is lost to the other, saved and loaded.
TIERED = Rules(
    num_requests=2,
    num_pages=3,
    slots=HostSlots(num_slots=2, max_draining=2, max_loads=1),
    requests=(make_request("a", [1, 2], 2, stop=[STOP]), make_request("b", [3], 3, stop=[STOP])),
)


@pytest.mark.parametrize("windows", [(None,), pytest.param((None, 2), marks=pytest.mark.slow)])
def test_a_host_tier_with_every_move(windows: tuple[int | None, ...]) -> None:
    """Saves that drain at once or late, aborts and preemptions while pages wait to be loaded."""
    loads = skipped = 0

    def count(world: SmallWorld) -> None:
        nonlocal loads, skipped
        loads, skipped = loads + world.num_loads, skipped + world.num_skipped

    rules = dataclasses.replace(TIERED, windows=windows, num_pages=3 * len(windows), max_ticks=0)
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
