"""The prefix cache: what is found, and above all what must not be."""

import gc

import pytest

from jaxserve.sched import SchedulerOptions, create_scheduler
from jaxserve.sched.entry import PageEntry
from jaxserve.sched.pages import PagePool
from jaxserve.sched.prefix import PrefixCache
from jaxserve.testing import FakeRunner, drive, make_limits, make_request
from jaxserve.values.content import Blocks


def cache(num_pages: int = 8, page_size: int = 2, **options) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, page_size, **options)


def fill(pool: PagePool, prefix: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Computes `tokens` as one sequence would; returns its pages."""
    parent, blocks, pages = prefix.root(salt), prefix.blocks(salt, tokens), []
    for number in range(len(tokens) // 2):
        pages.append(pool.allocate())
        parent = prefix.record(parent, blocks, number, [pages[-1]])
        assert parent is not None
    return pages


def found(prefix: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    return [entry.page_ids[0] for entry in prefix.match(salt, prefix.blocks(salt, tokens))]


def record(prefix: PrefixCache, tokens: list[int], page_id: int, parent: PageEntry | None = None) -> PageEntry | None:
    """Records the page of the last two of `tokens`; the pages before it are those of `parent`."""
    blocks = known(prefix, tokens)
    return prefix.record(parent or prefix.root(""), blocks, len(blocks.keys) - 1, [page_id])


def known(prefix: PrefixCache, tokens: list[int]) -> Blocks:
    blocks = prefix.blocks("", tokens)
    for _ in range(len(tokens) // 2):
        blocks.extend()
    return blocks


def test_longest_chain_of_full_pages_leaves_one_token():
    pool, prefix = cache()
    pages = fill(pool, prefix, [1, 2, 3, 4, 5, 6])
    assert found(prefix, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert found(prefix, [1, 2, 3, 4, 5, 6]) == pages[:2], "a token must be left to compute"
    assert found(prefix, [1, 2, 3, 4, 9, 9, 9]) == pages[:2]
    assert found(prefix, [1, 2, 3]) == pages[:1]
    assert found(prefix, [1, 2]) == []
    assert found(prefix, [9, 2, 3, 4, 5]) == []


def test_salts_do_not_meet():
    pool, prefix = cache()
    a = fill(pool, prefix, [1, 2, 3, 4], "a")
    b = fill(pool, prefix, [1, 2, 3, 4], "b")
    assert found(prefix, [1, 2, 3, 4, 5], "a") == a
    assert found(prefix, [1, 2, 3, 4, 5], "b") == b
    assert found(prefix, [1, 2, 3, 4, 5], "c") == []


def test_a_block_is_found_only_after_its_own_beginning():
    pool, prefix = cache()
    fill(pool, prefix, [1, 2, 3, 4])
    fill(pool, prefix, [7, 8])
    assert len(found(prefix, [7, 8, 3, 4, 5])) == 1


def test_collisions_are_misses_everywhere():
    pool, prefix = cache(hash_block=lambda parent, content: b"42")
    first = pool.allocate()
    entry = record(prefix, [1, 2], first)
    assert entry is not None
    assert found(prefix, [1, 2, 9]) == [first]
    assert found(prefix, [3, 4, 9]) == []
    assert found(prefix, [1, 2, 9], "other") == [], "another salt with the same hash"
    assert found(prefix, [1, 2, 1, 2, 9]) == [first], "the same tokens one page later are another content"
    assert record(prefix, [3, 4], pool.allocate()) is None, "the key is taken"
    assert record(prefix, [1, 2, 1, 2], pool.allocate(), entry) is None
    assert found(prefix, [1, 2, 9]) == [first]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_tokens_are_right_under_a_hash_that_always_collides(page_size: int):
    limits = make_limits(page_size=page_size, num_pages=40)
    scheduler = create_scheduler("fcfs", limits)
    scheduler.memory.prefix._hash_block = lambda parent, content: b"key"
    requests = [make_request(f"r{i}", [i % 3, 1, 2, 3, 4, 5, 6, i], 6) for i in range(8)]
    crowd = drive(scheduler, FakeRunner(limits, mode="context"), requests)
    for request in requests:
        alone = drive(create_scheduler("fcfs", limits), FakeRunner(limits, mode="context"), [request])
        assert crowd[request.request_id, 0].token_ids == alone[request.request_id, 0].token_ids


def test_a_child_is_not_found_under_a_parent_that_took_over_the_key():
    """Contents A and B have one key. A's child must not be found after B: B must wait until nothing comes after A."""
    alike = [known(cache()[1], [i, i]).contents[0] for i in (1, 2)]
    pool, prefix = cache(num_pages=3, hash_block=lambda parent, content: b"1" if content in alike else content)
    a = pool.allocate()
    entry_a = record(prefix, [1, 1], a)
    assert entry_a is not None
    child = pool.allocate()
    assert record(prefix, [1, 1, 5, 5], child, entry_a) is not None
    pool.release([a])
    pool.allocate()  # the third page
    b = pool.allocate()
    assert b == a, "the page of A was evicted"
    assert record(prefix, [2, 2], b) is None, "the way to the child of A leads through the key"
    assert found(prefix, [2, 2, 5, 5, 9]) == found(prefix, [1, 1, 5, 5, 9]) == []
    pool.release([child])
    assert pool.allocate() == child
    assert record(prefix, [2, 2], b) is not None
    assert found(prefix, [2, 2, 5, 5, 9]) == [b], "5, 5 was computed after 1, 1"
    assert found(prefix, [1, 1, 5, 5, 9]) == []
    prefix.check()


def test_a_beginning_that_is_computed_again_leads_to_what_came_after_it():
    pool, prefix = cache(num_pages=4)
    parent, child = fill(pool, prefix, [1, 2, 3, 4])
    others = [pool.allocate(), pool.allocate()]
    pool.release([parent])
    assert pool.allocate() == parent  # evicts it; its child is still held, but no match leads there
    assert found(prefix, [1, 2, 3, 4, 5]) == []
    pool.release(others)
    again = fill(pool, prefix, [1, 2, 3, 4])
    assert found(prefix, [1, 2, 3, 4, 5]) == [again[0], child]
    prefix.check()
    pool.check([[parent], [child], again])


def test_equal_content_computed_twice_is_one_chain():
    pool, prefix = cache()
    first = fill(pool, prefix, [1, 2])
    twin = pool.allocate()
    entry = record(prefix, [1, 2], twin)
    assert entry is not None
    assert entry.page_ids == [first[0]]
    third = pool.allocate()
    assert record(prefix, [1, 2, 3, 4], third, entry) is not None
    assert found(prefix, [1, 2, 3, 4, 5]) == [first[0], third]
    pool.release([twin])
    assert pool.num_idle == 0, "the twin has no entry, so it is free"


def test_salts_made_up_by_clients_do_not_pile_up():
    _, prefix = cache()
    for i in range(100):
        found(prefix, [1, 2, 3], f"salt {i}")
    gc.collect()
    assert len(prefix._roots) == 0


def test_pages_of_a_planned_prompt_are_shared_before_it_is_committed():
    limits = make_limits(page_size=2, token_buckets=(8,), max_rows=4)
    scheduler = create_scheduler("fcfs", limits)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6, 7], 4))
    scheduler.schedule()
    scheduler.add(make_request("b", [1, 2, 3, 4, 5, 6, 9], 4))
    plan = scheduler.schedule()  # the first step has not come back
    assert plan is not None
    assert [(c.start, c.token_ids) for c in plan.chunks] == [(6, (9,))]


def test_equal_prompts_of_one_step_do_not_share_what_is_not_written_yet():
    limits = make_limits(page_size=2, token_buckets=(32,), max_rows=4)
    scheduler = create_scheduler("fcfs", limits)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2, 3, 4, 5], 4))
    plan = scheduler.schedule()
    assert plan is not None
    assert [c.start for c in plan.chunks] == [0, 0]


def test_output_is_found_by_the_next_turn_of_a_chat():
    limits = make_limits(page_size=2)
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    first = drive(scheduler, runner, [make_request("a", [1, 2, 3], 6)])["a", 0].token_ids
    assert first == [4, 5, 6, 7, 8, 9]
    out = drive(scheduler, runner, [make_request("b", [1, 2, 3, *first, 50], 2)])["b", 0]
    assert out.prompt is not None
    assert out.prompt.num_cached_tokens == 8, "the last token of an answer is never fed"


def test_prompt_logprobs_skip_the_cache_and_switching_it_off_works():
    from jaxserve.api import SamplingParams

    limits = make_limits(page_size=2, token_buckets=(4,))
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    drive(scheduler, runner, [make_request("a", prompt, 2)])
    out = drive(scheduler, runner, [make_request("b", prompt, 2, sampling=scored)])["b", 0]
    assert out.prompt is not None
    assert out.prompt.num_cached_tokens == 0
    assert [entry.token_id for entry in out.prompt.logprobs or ()] == prompt[1:], "summed over the chunks"
    off = create_scheduler("fcfs", limits, options=SchedulerOptions(prefix_caching=False))
    runner = FakeRunner(limits)
    for name in "ab":
        out = drive(off, runner, [make_request(name, prompt, 2)])[name, 0]
        assert out.prompt is not None and out.prompt[:2] == (0, None)
    assert off.memory.num_queried_tokens == 0
