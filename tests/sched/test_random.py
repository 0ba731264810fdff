"""Random operations against the naive model, and a Hypothesis machine that shrinks what fails."""

import collections
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sched_world import POLICIES, Urgent, World, random_limits, random_request

from jaxserve.sched import Policy
from jaxserve.testing import with_shapes

OPS_PER_WORLD = 400
SHAPES = (((1, 4),), ((2, 1), (4, 1)), ((2, 1), (4, 2)), ((1, 3), (2, 3), (8, 1)))


def random_drafts(rate: float) -> Callable[[str, int, int, int], int]:
    """Accepts drafts at random: `rate` of those whose predecessors were accepted."""
    rng = random.Random(1)
    return lambda request_id, index, position, count: next((i for i in range(count) if rng.random() >= rate), count)


def run_world(seed: int) -> World:
    rng = random.Random(seed)
    world = World(
        with_shapes(random_limits(rng), *rng.choice([(), (), *SHAPES])),
        policy=rng.choice([*POLICIES, Urgent]),
        chunked=rng.random() < 0.7,
        prefix_caching=rng.random() < 0.8,
        look_ahead=rng.random() < 0.3,
        accept=rng.choice([None, random_drafts(rng.choice([0.0, 0.3, 0.8, 1.0]))]),
        any_shape=rng.random() < 0.7,
        host_policy=rng.choice(["lru", "lru", "lfu", "arc", "s3-fifo"]),
        admission=rng.choice(["always", "always", "always", "second_sight"]),
    )
    weights = (*rng.choice([(6, 0.5, 10, 10), (12, 1, 5, 5), (4, 1, 10, 10)]), rng.choice([0, 0, 1]))
    for number in range(OPS_PER_WORLD):
        op = rng.choices(("add", "abort", "schedule", "commit", "operate"), weights)[0]
        if op == "add" and len(world.live()) < 20:
            world.add(random_request(rng, number, world.clock()))
        elif op == "abort" and world.live():
            request_id, index = rng.choice(world.live())
            world.abort(request_id, rng.choice([None, index]))
        elif op == "commit":
            world.commit()
        elif op == "operate":
            world.operate(rng)
        else:
            world.schedule()
        world.check()
    world.finish()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("num_worlds", [60, 250])
def test_random_operations_agree_with_the_naive_model(num_worlds):
    preempted = hits = ended = forks = several = fewer = saved = loaded = waited = skipped = 0
    flushed = resized = encoded = found = evicted = 0
    shapes = collections.Counter[tuple[int, int]]()
    for seed in range(num_worlds):
        world = run_world(seed)
        preempted += world.scheduler.num_preemptions
        hits += world.scheduler.memory.num_hit_tokens
        ended += world.num_added
        forks += world.runner.num_copies
        several += world.num_several
        fewer += world.num_fewer
        shapes += world.shapes
        saved += world.runner.num_saves
        loaded += world.runner.num_loads
        waited += world.num_waited
        flushed += world.num_flushed
        resized += world.num_resized
        encoded += world.runner.num_encodes
        found += world.scheduler.encoder.num_hits
        evicted += world.scheduler.encoder.num_evicted
        if (tier := world.scheduler.memory.tier) is not None:
            skipped += tier.num_skipped
    # The worlds must really have been through what they are for.
    least = num_worlds / 250
    assert preempted > 500 * least, preempted
    assert flushed > 500 * least and resized > 200 * least, (flushed, resized)
    assert hits > 1000 * least, hits
    assert forks > 300 * least, forks
    assert ended > 5000 * least, ended
    assert several > 2000 * least, several
    assert fewer > 1000 * least, fewer
    assert encoded > 500 * least and found > 200 * least and evicted > 200 * least, (encoded, found, evicted)
    assert saved > 5000 * least and loaded > 300 * least and waited > 10 * least, (saved, loaded, waited)
    assert skipped > 1000 * least, skipped
    wanted = {(1, 1)}.union(*SHAPES)
    assert min(shapes[shape] for shape in wanted) > 100 * least, shapes


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations, chosen by Hypothesis."""

    world: World | None = None

    @property
    def made(self) -> World:
        assert self.world is not None, "`start` makes it"
        return self.world

    @initialize(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from([*POLICIES, Urgent]),
        chunked=st.booleans(),
        shapes=st.sampled_from([(), *SHAPES]),
        any_shape=st.booleans(),
    )
    def start(
        self,
        seed: int,
        policy: str | type[Policy],
        chunked: bool,
        shapes: tuple[tuple[int, int], ...],
        any_shape: bool,
    ) -> None:
        limits = with_shapes(random_limits(random.Random(seed)), *shapes)
        self.world = World(limits, policy=policy, chunked=chunked, any_shape=any_shape)
        self.number = 0

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed: int) -> None:
        self.number += 1
        self.made.add(random_request(random.Random(seed), self.number, self.made.clock()))

    @rule(choice=st.integers(0, 100), whole=st.booleans())
    def abort(self, choice: int, whole: bool) -> None:
        live = self.made.live()
        if live:
            request_id, index = live[choice % len(live)]
            self.made.abort(request_id, None if whole else index)

    @rule()
    def schedule(self) -> None:
        self.made.schedule()

    @rule()
    def commit(self) -> None:
        self.made.commit()

    @invariant()
    def counts_hold(self) -> None:
        self.made.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
