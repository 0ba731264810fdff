"""Limits of tenants: token buckets for requests and tokens, and the tokens of live requests."""

import dataclasses
import random

import pytest

from jaxserve.api import Known, Resume, SamplingParams
from jaxserve.engine.tenants import TenantLimits, Tenants, tokens_of
from jaxserve.errors import QueueFull, RequestRejected, TenantLimited
from jaxserve.testing import ManualClock, make_request

NONE = TenantLimits()


def _tenants(clock: ManualClock, **limits) -> Tenants:
    return Tenants(NONE, {"a": TenantLimits(**limits)}, clock)


def _refused(tenants: Tenants, name: str = "a", prompts: int = 1) -> TenantLimited:
    with pytest.raises(TenantLimited) as caught:
        tenants.enter(name, prompts)
    assert isinstance(caught.value, QueueFull), "so that every door tells when to come back"
    return caught.value


def test_requests_come_at_their_rate_after_a_burst() -> None:
    clock = ManualClock()
    tenants = _tenants(clock, requests_per_s=2.0, burst_s=3.0)
    for _ in range(6):
        tenants.enter("a", 1)
    error = _refused(tenants)
    assert error.limit == "requests"
    clock.advance(0.5)
    tenants.enter("a", 1)
    _refused(tenants)
    tenants.enter("b", 1000)
    tenants.enter("b", 1)
    clock.advance(1000.0)
    for _ in range(6):
        tenants.enter("a", 1)
    _refused(tenants)


def test_a_large_call_is_taken_and_paid_back() -> None:
    clock = ManualClock()
    tenants = _tenants(clock, requests_per_s=2.0, burst_s=1.0)
    tenants.enter("a", 10)
    wait_s = _refused(tenants).retry_after_s
    assert wait_s == 4.5
    clock.advance(4.5)
    tenants.enter("a", 1)


def test_tokens_of_prompts_and_answers_are_paid_for() -> None:
    clock = ManualClock()
    tenants = _tenants(clock, tokens_per_s=10.0, burst_s=1.0)
    request = make_request("one", [1] * 8, 50, tenant="a")
    tenants.enter("a", 1)
    tenants.begin(request)
    tenants.charge("a", 1)
    tenants.enter("a", 1)
    tenants.charge("a", 21)
    error = _refused(tenants)
    assert (error.limit, error.retry_after_s) == ("tokens", 2.1)
    clock.advance(2.0)
    _refused(tenants)
    clock.advance(0.2)
    tenants.enter("a", 1)
    tenants.end(request)


def test_tokens_at_once() -> None:
    tenants = _tenants(ManualClock(), concurrent_tokens=100)
    two = SamplingParams(temperature=0.0, max_tokens=30, n=2)
    first = make_request("first", [1] * 10, 30, tenant="a", sampling=two)
    assert tokens_of(first) == 80
    tenants.begin(first)
    tenants.enter("a", 1)
    second = make_request("second", [1] * 10, 20, tenant="a")
    with pytest.raises(TenantLimited, match="may have 100 tokens in live requests .* those there are take 80"):
        tenants.begin(second)
    moved = make_request("moved", [1] * 10, 20, tenant="a")
    moved = dataclasses.replace(moved, resume=Resume(sequences=(Known((5,), 0, False),)))
    tenants.begin(moved)
    assert _refused(tenants).limit == "concurrent_tokens"
    tenants.end(moved)
    tenants.end(first)
    tenants.begin(second)
    with pytest.raises(RequestRejected, match="may have 110 tokens, .* 100 at once"):
        tenants.begin(make_request("never", [1] * 10, 100, tenant="a"))


def test_others_and_a_tenant_without_a_name() -> None:
    tenants = Tenants(TenantLimits(requests_per_s=1.0, burst_s=1.0), {"": NONE, "big": NONE}, ManualClock())
    for name in ("x", "y"):
        tenants.enter(name, 1)
        _refused(tenants, name)
    for _ in range(100):
        tenants.enter("", 1)
        tenants.enter("big", 1)


def test_names_that_clients_make_up_do_not_pile_up() -> None:
    clock = ManualClock()
    tenants = Tenants(TenantLimits(requests_per_s=1.0, burst_s=1.0), {}, clock)
    for number in range(20_000):
        tenants.enter(f"name {number}", 1)
        clock.advance(0.01)
    assert len(tenants) <= 2048
    tenants.enter("debtor", 1000)
    for number in range(20_000):
        tenants.enter(f"name {number}", 1)
        clock.advance(0.01)
    _refused(tenants, "debtor")


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_keep_the_rates(seed: int) -> None:
    """Over any time a tenant gets at most its rate, its burst and one call; and at least its rate while it asks."""
    draw, clock = random.Random(seed), ManualClock()
    tenants = _tenants(clock, requests_per_s=5.0, tokens_per_s=200.0, burst_s=2.0, concurrent_tokens=600)
    live = []
    taken = used = largest = 0
    for number in range(4000):
        clock.advance(draw.expovariate(20.0))
        if live and draw.random() < 0.5:
            tenants.end(live.pop(draw.randrange(len(live))))
        prompts = draw.choice([1, 1, 1, 4])
        try:
            tenants.enter("a", prompts)
        except TenantLimited:
            continue
        taken += prompts
        request = make_request(f"{number}", [1] * draw.randrange(1, 40), draw.randrange(1, 90), tenant="a")
        try:
            tenants.begin(request)
        except TenantLimited:
            assert sum(map(tokens_of, live)) + tokens_of(request) > 600
            continue
        live.append(request)
        assert sum(map(tokens_of, live)) <= 600
        generated = draw.randrange(request.max_tokens + 1)
        tenants.charge("a", generated)
        cost = len(request.prompt_token_ids) + generated
        used, largest = used + cost, max(largest, cost)
        assert used <= 200.0 * (clock() + 2.0) + largest
        assert taken <= 5.0 * (clock() + 2.0) + 4
    assert used > 0.7 * 200.0 * clock() or taken > 0.7 * 5.0 * clock(), "it got less than its rate"
