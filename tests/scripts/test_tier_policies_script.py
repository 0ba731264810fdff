"""The comparison of tier policies: its ceiling is the best that can be done, and blocks are equal as prompts are."""

import itertools
import random

import pytest
import tier_policies as script

from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.sched.tier_policy import TIER_POLICIES, TierOptions, create_tier_policy


def chain(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def best(asked: list[bytes], capacity: int) -> int:
    """The most hits, over every choice of what to keep after each request."""
    states: dict[frozenset[bytes], int] = {frozenset(): 0}
    for page in asked:
        following: dict[frozenset[bytes], int] = {}
        for kept, hits in states.items():
            there = kept | {page}
            for size in range(min(capacity, len(there)) + 1):
                for choice in map(frozenset, itertools.combinations(sorted(there), size)):
                    following[choice] = max(following.get(choice, 0), hits + (page in kept))
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(5))
def test_the_ceiling_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    asked = [bytes([rng.randrange(6)]) for _ in range(14)]
    for capacity in (1, 2, 3):
        assert script.belady([[page] for page in asked], capacity).hits == best(asked, capacity)


def test_no_policy_is_above_the_ceiling() -> None:
    rng = random.Random(0)
    chains = [chain(rng.randrange(3), rng.randrange(3, 40)) for _ in range(400)]
    ceiling = script.belady(chains, 10)
    for name in TIER_POLICIES.names():
        outcome = script.run_alone(create_tier_policy(name, TierOptions(admission="always")), chains, 10)
        assert 0 < outcome.hits <= ceiling.hits < ceiling.asked == outcome.asked == 800


def test_a_hit_needs_all_blocks_before_it() -> None:
    chains = [chain(1, 2, 3), chain(4, 5), chain(1, 2, 3)]
    tier = create_tier_policy("lru", TierOptions(admission="always"))
    # After two requests it has 1, 5 and 4: a chain is taken in from its end on, so its end goes first. 1 is then used
    # before 3 and 2 are taken in, and stays.
    assert script.run_alone(tier, chains, 3) == script.Outcome(asked=8, hits=1, written=7)


def test_a_tier_behind_a_device_has_what_the_device_gives_up() -> None:
    chains = [chain(1, 2), chain(3, 4), chain(1, 2), chain(1, 2)]
    tier = create_tier_policy("lru", TierOptions(admission="always"))
    outcome = script.run_behind(tier, chains, 10, device_blocks=2)
    assert outcome == script.Outcome(asked=8, hits=2, written=4), "the last request finds both on the device"
    again = script.run_behind(create_tier_policy("lru"), chains, 10, device_blocks=2)
    assert again == outcome, "a tier that is not full takes everything"


def test_blocks_are_equal_as_far_as_prompts_are() -> None:
    def blocks(*parts: Part) -> list[bytes]:
        return list(script.chain_of(Shape(parts=parts, output_len=1), 4))

    first = blocks(Part(1, 6), Part(2, 6))
    assert len(first) == 3 and len(set(first)) == 3
    assert blocks(Part(1, 6), Part(3, 6))[:2] == [first[0], blocks(Part(1, 6), Part(3, 6))[1]]
    assert blocks(Part(1, 6), Part(3, 6))[1] != first[1]
    assert blocks(Part(1, 6), Part(2, 5)) == first[:2], "a block that is not full has no key"
    assert blocks(Part(1, 3)) == []
