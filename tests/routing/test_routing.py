"""Routers: values computed by hand, and properties over random traffic."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.routing import (
    ROUTERS,
    Balancer,
    Load,
    PrefixTable,
    Router,
    RouterOptions,
    create_router,
    key_of_text,
    key_of_tokens,
)
from jaxserve.routing.prompts import BLOCK_BYTES, BLOCK_TOKENS, MAX_BLOCKS


def loads(*counts: int) -> list[Load]:
    return [Load(f"r{i}", count) for i, count in enumerate(counts)]


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_keys_are_the_same_in_every_process_and_version() -> None:
    """Golden, by a few lines of hashlib: processes must agree, so these values may not change by accident."""
    assert [key.hex() for key in key_of_tokens(range(2 * BLOCK_TOKENS + 1))] == GOLDEN_TOKENS
    text = "Once upon a time there was a small engine that could. " * 2
    assert [key.hex() for key in key_of_text(text)] == GOLDEN_TEXT


GOLDEN_TOKENS = ["c34211d48edc7f4ab4c3f075ef6e9d56", "786ba7a86f8a38865acec9f544f54c5d"]
GOLDEN_TEXT = ["72cfa09edb2e5642d521e189f688004e"]


def test_a_key_has_full_blocks_only_and_an_end() -> None:
    assert key_of_tokens(range(BLOCK_TOKENS - 1)) == ()
    assert len(key_of_tokens(range(BLOCK_TOKENS))) == 1
    assert len(key_of_tokens(range((MAX_BLOCKS + 3) * BLOCK_TOKENS))) == MAX_BLOCKS
    assert len(key_of_text("x" * (BLOCK_BYTES - 1))) == 0
    assert len(key_of_text("\N{SNOWMAN}" * (BLOCK_BYTES * MAX_BLOCKS))) == MAX_BLOCKS


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.lists(st.integers(0, 2**32 - 1), max_size=80))
def test_equal_keys_mean_equal_beginnings(first: list[int], second: list[int]) -> None:
    one, two = key_of_tokens(first), key_of_tokens(second)
    for block in range(min(len(one), len(two))):
        end = (block + 1) * BLOCK_TOKENS
        assert (one[block] == two[block]) == (first[:end] == second[:end])


def test_a_difference_in_the_first_block_changes_all() -> None:
    one, two = key_of_tokens([0] * 64), key_of_tokens([1] + [0] * 63)
    assert not set(one) & set(two)


def test_salt_namespace_and_kind_keep_prompts_apart() -> None:
    ids = [7] * 32
    keys = [
        key_of_tokens(ids), key_of_tokens(ids, cache_salt="a"), key_of_tokens(ids, namespace="a"),
        key_of_tokens(ids, cache_salt="a", namespace="b"), key_of_tokens(ids, cache_salt="ab"),
        key_of_text("\x07\0\0\0\0\0\0\0" * 16),
    ]  # fmt: skip
    assert len({key[0] for key in keys}) == len(keys)


# ---- the memory of beginnings ----------------------------------------------------------------------------------------


def test_a_table_finds_the_longest_beginning() -> None:
    table = PrefixTable(100)
    table.add((1, 2, 3, 4))
    assert [table.match_len(k) for k in [(), (9,), (1,), (1, 2, 9), (1, 2, 3, 4, 5)]] == [0, 0, 1, 2, 4]


def test_ends_are_forgotten_before_beginnings() -> None:
    table = PrefixTable(4)
    table.add((1, 2, 3, 4))
    table.add((11, 12))
    assert len(table) == 4
    assert (table.match_len((1, 2, 3, 4)), table.match_len((11, 12))) == (2, 2)
    table.add((21, 22, 23, 24, 25, 26))
    assert (table.match_len((21, 22, 23, 24, 25, 26)), table.match_len((1, 2))) == (4, 0)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40), st.integers(1, 12))
def test_what_is_left_of_a_chain_is_its_beginning(prompts: list[list[int]], size: int) -> None:
    """The bisection is right: no hole before a block that is there, and never more blocks than allowed."""
    table = PrefixTable(size)
    keys = [tuple(hash(tuple(p[: i + 1])) for i in range(len(p))) for p in prompts]  # chained: a parent is unique
    for key in keys:
        table.add(key)
        assert len(table) <= size
        assert table.match_len(key) == min(len(key), size)
        for other in keys:
            present = [block in table._blocks for block in other]
            assert present == sorted(present, reverse=True)
            assert table.match_len(other) == sum(present)


# ---- policies --------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    router = create_router("round_robin")
    assert [router.choose((), loads(9, 0, 5)) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [router.choose((), loads(0, 0)) for _ in range(3)] == [0, 1, 0], "one has died"


def test_least_load_takes_the_least_and_equals_take_turns() -> None:
    router = create_router("least_load")
    assert [router.choose((), loads(3, 1, 2)) for _ in range(2)] == [1, 1]
    assert [router.choose((), loads(0, 0, 0)) for _ in range(4)] == [2, 0, 1, 2]


def test_power_of_two_repeats_with_its_seed_and_never_takes_the_worst() -> None:
    def draw(seed: int) -> list[int]:
        router = create_router("power_of_two", RouterOptions(seed=seed))
        return [router.choose((), loads(4, 9, 0, 5)) for _ in range(200)]

    assert draw(1) == draw(1) != draw(2)
    assert set(draw(1)) == {0, 2, 3}, "any two have one that is better than the fullest"
    assert draw(1).count(2) > draw(1).count(0) > draw(1).count(3)
    assert create_router("power_of_two").choose((), loads(5)) == 0


LONG, OTHER = tuple(range(100, 110)), tuple(range(200, 210))


def test_prefix_goes_where_the_beginning_is() -> None:
    router = create_router("prefix", RouterOptions(slack=2))
    router.routed(LONG[:4], "r1")
    router.routed(LONG[:8], "r2")
    assert router.choose(LONG, loads(0, 0, 0)) == 2
    assert router.choose(LONG, loads(0, 0, 2)) == 2, "within the cap"
    assert router.choose(LONG, loads(0, 0, 3)) == 1, "over the cap; the next longest is"
    assert router.choose(LONG, loads(0, 3, 3)) == 0, "both are"
    assert router.choose(OTHER, loads(2, 1, 3)) == 1, "nobody has it: the least loaded"
    router.forget("r2")
    assert router.choose(LONG, loads(0, 0, 0)) == 1


def test_a_shared_beginning_spreads_by_itself() -> None:
    balancer = Balancer(create_router("prefix", RouterOptions(slack=3)))
    for number in range(40):
        key = (*LONG, 1000 + number)  # one system prompt, forty questions
        replica = balancer.choose(key, ["a", "b", "c", "d"])
        balancer.start(key, replica)
    counts = [balancer.load(r) for r in "abcd"]
    assert sum(counts) == 40
    assert max(counts) - min(counts) <= 4
    assert balancer.load("a") == 0 or min(counts) > 0


@given(st.data())
def test_every_policy_keeps_its_promise(data: st.DataObject) -> None:
    """Random traffic with deaths: a choice is alive, within the cap, and as good as the policy says."""
    name = data.draw(st.sampled_from(ROUTERS.names()))
    slack = data.draw(st.integers(0, 4))
    lots = random.Random(data.draw(st.integers(0, 2**32)))
    balancer = Balancer(create_router(name, RouterOptions(slack=slack, table_blocks=16)))
    alive, running = ["a", "b", "c", "d"], []
    for number in range(60):
        if running and lots.random() < 0.5:
            balancer.end(running.pop(lots.randrange(len(running))))
        if number == 30:
            dead = alive.pop(lots.randrange(4))
            balancer.forget(dead)
            for replica in [r for r in running if r == dead]:
                running.remove(replica)
                balancer.end(replica)
        key = tuple(hash((lots.randrange(3), i)) for i in range(3))
        before = {replica: balancer.load(replica) for replica in alive}
        chosen = balancer.choose(key, alive)
        assert chosen in alive
        if name == "least_load":
            assert before[chosen] == min(before.values())
        if name == "prefix":
            assert before[chosen] <= min(before.values()) + slack
        if name == "power_of_two" and len(set(before.values())) == len(before):
            assert before[chosen] < max(before.values())
        balancer.start(key, chosen)
        running.append(chosen)
    for replica in running:
        balancer.end(replica)
    assert not any(balancer.load(r) for r in "abcd")


# ---- choosing a router -----------------------------------------------------------------------------------------------


class Last(Router):
    def choose(self, key, loads) -> int:
        return len(loads) - 1


class Unfinished(Router):
    pass


def test_a_router_of_ones_own() -> None:
    for choice in (Last, Last(RouterOptions()), f"{__name__}:Last"):
        assert create_router(choice).choose((), loads(0, 0, 9)) == 2


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("prefx", r"no router is called 'prefx'; known: prefix, least_load.*Did you mean 'prefix'"),
        ("jaxserve.routing:Load", "must derive from Router in jaxserve.routing.base"),
        (Unfinished, "Unfinished lacks the method choose"),
    ],
)
def test_what_is_no_router_is_refused(choice, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        create_router(choice)


@pytest.mark.parametrize(("option", "value"), [("slack", -1), ("table_blocks", 0)])
def test_options_out_of_range(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"route\.{option} is {value}"):
        RouterOptions(**{option: value})


def test_a_choice_out_of_range_is_a_defect() -> None:
    class Wrong(Router):
        def choose(self, key, loads) -> int:
            return len(loads)

    with pytest.raises(AssertionError, match="Wrong chose 2 of 2"):
        Balancer(Wrong(RouterOptions())).choose((), ["a", "b"])
