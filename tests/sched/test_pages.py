"""The page pool against a naive model, and the order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.sched.pages import PagePool


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of holders (each a list of pages), and a list of idle pages, oldest first."""

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages: int) -> None:
        self.evicted: list[int] = []
        self.pool = PagePool(num_pages, self.evicted.append)
        self.num_pages = num_pages
        self.holders: list[list[int]] = []
        self.idle: list[int] = []
        self.kept: set[int] = set()

    def held(self) -> set[int]:
        return {p for holder in self.holders for p in holder}

    @precondition(lambda self: self.pool.num_available > 0)
    @rule()
    def allocate(self) -> None:
        held, idle = self.held(), list(self.idle)
        self.evicted.clear()
        page_id = self.pool.allocate()
        assert 1 <= page_id <= self.num_pages
        assert page_id not in held, "a referenced page was evicted"
        if len(held) + len(idle) < self.num_pages:
            assert not self.evicted
            assert page_id not in idle, "content was thrown away while a free page was there"
        else:
            assert self.evicted == [page_id] == idle[:1], "eviction is not least recently held first"
            self.idle.pop(0)
            self.kept.discard(page_id)
        self.holders.append([page_id])

    @precondition(lambda self: self.held() or self.idle)
    @rule(choice=st.integers(0, 100))
    def share(self, choice: int) -> None:
        candidates = sorted(self.held()) + self.idle
        page_id = candidates[choice % len(candidates)]
        self.pool.retain(page_id)
        if page_id in self.idle:
            self.idle.remove(page_id)
        self.holders.append([page_id])

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        pages = self.holders.pop(choice % len(self.holders))
        self.pool.release(pages)
        self.idle += [p for p in pages if p in self.kept and p not in self.held()]

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 100))
    def keep(self, choice: int) -> None:
        page_id = self.holders[choice % len(self.holders)][0]
        self.pool.keep_content(page_id)
        self.kept.add(page_id)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check(self.holders)
        assert self.pool.num_held == len(self.held())
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_available == self.num_pages - len(self.held())


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, derandomize=True)
TestPool = PoolMachine.TestCase


def test_ids_start_at_one_and_the_dummy_is_never_given():
    pool = PagePool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate()


def test_double_release_is_caught():
    pool = PagePool(2)
    page_id = pool.allocate()
    pool.release([page_id])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([page_id])


def test_a_free_page_cannot_be_shared():
    with pytest.raises(AssertionError, match="free"):
        PagePool(2).retain(1)


def test_check_finds_wrong_counts():
    pool = PagePool(4)
    a, b = pool.allocate(), pool.allocate()
    pool.check([[a], [b]])
    for wrong in ([[a]], [[a, b], [b]], [[a], [b], [3]]):
        with pytest.raises(AssertionError, match="holders say"):
            pool.check(wrong)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()
    pool._free.append(a)
    with pytest.raises(AssertionError):
        pool.check()
