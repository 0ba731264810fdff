"""The waiting queue: how many keys a step computes, what is found at once and what late, and keys that are none."""

import collections
import math
import random

import pytest
from sched_world import POLICIES

from jaxserve.errors import PolicyError
from jaxserve.sched import (
    SCHEDULERS,
    Bucket,
    ContinuousScheduler,
    Limits,
    Policy,
    SchedulerOptions,
    Sequence,
    StepPlan,
    StepResult,
    create_scheduler,
)
from jaxserve.sched.queue import RECHECKED, WaitingQueue
from jaxserve.testing import ManualClock, make_request

NUM_WAITING, ROWS = 4000, 32


class CheapestPrompt(Policy):
    """The policy of the README."""

    dynamic_order = True

    def key(self, seq: Sequence, now_s: float) -> float:
        return len(seq.tokens) - self.memory.place(seq, None).start + 20 * seq.request.arrival_s


class Told(Policy):
    """Keys are what the test says."""

    dynamic_order = True

    def __init__(self, keys: dict[str, object]) -> None:
        super().__init__(SchedulerOptions())
        self.keys = keys
        self.num_asked = 0

    def key(self, seq: Sequence, now_s: float) -> float:
        self.num_asked += 1
        return self.keys[seq.request_id]  # type: ignore[return-value]


def waiting(name: str, order: int) -> Sequence:
    return Sequence(make_request(name, [1], 4), 0, order, 5)


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (seq := queue.first()) is not None:
        names.append(seq.request_id)
        queue.remove(seq)
    return names


@pytest.mark.parametrize("short", ["pages", "rows"])
@pytest.mark.parametrize("policy", [*POLICIES, CheapestPrompt])
def test_a_long_queue_costs_a_step_no_more_keys_than_a_short_one(policy, short: str) -> None:
    """4,000 wait; now and then one is let in. Keys of running ones, to find victims, are not of the queue."""
    found = SCHEDULERS.get(policy)
    assert isinstance(found, type) and issubclass(found, Policy)
    num_asked = collections.Counter[bool]()

    class Counting(found):
        def key(self, seq: Sequence, now_s: float):
            num_asked[seq.row < 0] += 1
            return super().key(seq, now_s)

    limits = Limits(
        max_rows=ROWS,
        num_pages=ROWS * (6 if short == "rows" else 2),
        page_size=16,
        max_model_len=96,
        buckets=(Bucket(ROWS, ROWS, True), Bucket(512, ROWS, False)),
    )
    clock = ManualClock()
    scheduler = create_scheduler(Counting, limits, clock=clock)
    assert isinstance(scheduler, ContinuousScheduler)
    num_added, num_entered, most = 0, 0, 0
    previous: StepPlan | None = None
    for step in range(120):
        while scheduler.num_waiting < NUM_WAITING:
            prompt = [num_added % 300, *range(1, 20 + num_added % 16)]
            scheduler.add(make_request(f"r{num_added}", prompt, 16 + num_added % 32, arrival_s=clock()))
            num_added += 1
        num_asked.clear()
        plan = scheduler.schedule()
        if step > 10:
            most = max(most, num_asked[True])
            num_entered += len(plan.setups) if plan is not None else 0
        clock.advance(0.01)
        if previous is not None:
            scheduler.commit(previous, StepResult(token_ids=[1000] * len(previous.sampled_rows)))
        previous = plan
    assert num_entered > 20
    assert most <= 2 * RECHECKED + 2 * ROWS, "those that were preempted enter the queue, too"


def test_a_short_queue_is_right_throughout() -> None:
    rng = random.Random(7)
    policy = Told({f"r{i}": rng.random() for i in range(RECHECKED)})
    queue = WaitingQueue(policy)
    for i, name in enumerate(policy.keys):
        queue.push(waiting(name, i), 0.0)
    for _ in range(20):
        policy.keys = {name: rng.random() for name in policy.keys}
        queue.refresh(0.0)
        names = [seq.request_id for _, seq in queue._lines[""]]
        assert names == sorted(policy.keys, key=lambda name: policy.keys[name])  # type: ignore[arg-type, return-value]


def test_in_a_long_queue_whose_key_falls_is_found_within_a_round() -> None:
    count = 10 * RECHECKED
    policy = Told({f"r{i}": float(i) for i in range(count)})
    queue = WaitingQueue(policy)
    for i in range(count):
        queue.push(waiting(f"r{i}", i), 0.0)
    policy.keys["r150"] = -1.0
    policy.num_asked = rounds = 0
    while (first := queue.first()) is not None and first.request_id != "r150":
        queue.refresh(0.0)
        rounds += 1
    assert rounds <= count // RECHECKED
    assert policy.num_asked <= 2 * RECHECKED * rounds


def test_what_the_policy_names_is_found_at_once() -> None:
    policy = Told({f"r{i}": float(i) for i in range(10 * RECHECKED)})
    queue = WaitingQueue(policy)
    seqs = [waiting(name, i) for i, name in enumerate(policy.keys)]
    for seq in seqs:
        queue.push(seq, 0.0)
    policy.keys["r150"] = -1.0
    gone = waiting("gone", 1)
    policy.changed += [seqs[150], gone]
    queue.refresh(0.0)
    assert drain(queue)[:2] == ["r150", "r0"]
    assert not policy.changed and len(queue) == 0


def test_the_first_whose_keys_have_risen_are_not_served_before_others() -> None:
    policy = Told({f"r{i}": float(i) for i in range(10 * RECHECKED)})
    queue = WaitingQueue(policy)
    for i, name in enumerate(policy.keys):
        queue.push(waiting(name, i), 0.0)
    for _ in range(12):
        queue.refresh(0.0)
    late = [f"r{i}" for i in range(RECHECKED)]
    policy.keys |= dict.fromkeys(late, 1e6)
    queue.refresh(0.0)
    assert drain(queue) == [*(name for name in policy.keys if name not in late), *late]


def test_an_end_in_the_middle_leaves_the_rest_in_order() -> None:
    policy = Told({f"r{i}": float(i % 7) for i in range(50)})
    queue = WaitingQueue(policy)
    seqs = [waiting(name, i) for i, name in enumerate(policy.keys)]
    for seq in seqs:
        queue.push(seq, 0.0)
    for seq in seqs[::3]:
        queue.remove(seq)
    rest = [seq for i, seq in enumerate(seqs) if i % 3]
    assert len(queue) == len(rest)
    assert drain(queue) == [s.request_id for s in sorted(rest, key=lambda s: (policy.keys[s.request_id], s.order))]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"a": 1.0, "b": math.nan}, "the key of 'b' is nan; NaN has no place"),
        ({"a": (0, 1.0), "b": (0, math.nan)}, r"the key of 'b' is \(0, nan\)"),
        ({"a": 1.0, "b": (1.0,)}, "does not compare with 1.0 of another"),
        ({"a": 1.0, "b": None}, "the key None of 'b' does not compare"),
    ],
)
def test_a_key_without_a_place_in_an_order_names_policy_and_method(keys: dict[str, object], why: str) -> None:
    queue = WaitingQueue(Told(keys))
    queue.push(waiting("a", 0), 0.0)
    with pytest.raises(PolicyError, match=rf"the policy Told breaks a rule of its method `key`: .*{why}"):
        queue.push(waiting("b", 1), 0.0)


def test_a_line_without_a_place_in_an_order_names_policy_and_method() -> None:
    class Nowhere(Told):
        def line(self, seq: Sequence) -> str:
            return seq.request_id

        def line_key(self, line: str) -> float:
            return math.nan

    queue = WaitingQueue(Nowhere({"a": 1.0, "b": 2.0}))
    queue.push(waiting("a", 0), 0.0)
    queue.push(waiting("b", 1), 0.0)
    with pytest.raises(PolicyError, match="the policy Nowhere breaks a rule of its method `line_key`: the key of 'a'"):
        queue.first()
