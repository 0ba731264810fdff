"""Slots of adapters: what a plan loads, which adapter gives way, and who waits."""

import dataclasses

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.sched import Limits, SchedulerOptions, create_scheduler
from jaxserve.sched.adapter_slots import AdapterSlots
from jaxserve.sched.counts import adapter_counts_of
from jaxserve.sched.plan import Bucket, StepPlan, StepResult
from jaxserve.values.content import SALT_END, Adapter, private_salt, salts_agree


def adapter(name: str) -> Adapter:
    return Adapter(digest=name.encode() * 32, name=name, num_bytes=1, weights=None)


A, B, C = map(adapter, "abc")


def test_the_adapter_that_was_used_longest_ago_gives_way() -> None:
    slots = AdapterSlots(2)
    assert (slots.hold(A), slots.hold(B), slots.hold(None)) == (1, 2, 0)
    assert [(load.slot, load.name) for load in slots.take_loads()] == [(1, "a"), (2, "b")]
    assert not slots.has_room(C) and slots.has_room(A) and slots.has_room(None)
    slots.release(B)
    slots.release(A)
    assert slots.hold(A) == 1 and slots.take_loads() == (), "it is there still"
    slots.release(A)
    assert slots.hold(C) == 2, "that of B, since A was used later, although it was loaded first"
    slots.check()
    slots.note_waiting(A, 2)
    slots.note_waiting(None, 1)
    also_c = dataclasses.replace(C, name="also c")
    assert slots.hold(also_c) == 2, "names of one digest share a slot"
    assert slots.counts == (2, {"c": 1, "also c": 1}, {"a": 2}, 3)
    slots.release(also_c)
    slots.note_waiting(A, -2)
    assert slots.counts == (2, {"c": 1}, {}, 3)
    slots.forget_idle()
    assert slots.hold(B) == 1 and [load.name for load in slots.take_loads()] == ["c", "b"]
    slots.check()


def request(name: str, which: Adapter | None) -> Request:
    return Request(
        request_id=name, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(), max_tokens=2, seed=0, adapter=which
    )


def test_a_request_waits_until_a_slot_is_free() -> None:
    limits = Limits(
        max_rows=4,
        num_pages=20,
        page_size=4,
        max_model_len=16,
        buckets=(Bucket(4, 4, True), Bucket(16, 4, False)),
        adapter_slots=1,
    )
    scheduler = create_scheduler("fcfs", limits, options=SchedulerOptions())
    for name, which in (("one", A), ("two", B), ("three", None), ("four", A)):
        scheduler.add(request(name, which))
    plans: list[StepPlan] = []
    rows: dict[int, str] = {}
    order: list[tuple[str, int]] = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        order += [(setup.request_id, setup.adapter) for setup in plan.setups]
        rows |= {setup.row: setup.request_id for setup in plan.setups}
        scheduler.commit(plan, StepResult(token_ids=[7] * len(plan.sampled_rows)))
        scheduler.check()
        counts = adapter_counts_of(scheduler)
        assert counts is not None
        assert sum(counts.waiting.values()) + sum(counts.running.values()) <= 3, "one of the four has no adapter"
    assert adapter_counts_of(scheduler) == (1, {}, {}, 3)
    assert order == [("one", 1), ("two", 1), ("three", 0), ("four", 1)]
    loads = [load.name for plan in plans for load in plan.adapters]
    assert loads == ["a", "b", "a"], "two waits for one, and four for two"
    assert StepPlan.from_json(plans[0].to_json()) == plans[0]


@pytest.mark.parametrize("salt", ["", "tenant", "adapter=00"])
def test_salts_of_pages(salt: str) -> None:
    with_adapter = private_salt(salt, "adapter=00")
    assert private_salt(salt) == salt and with_adapter != private_salt(salt, "adapter=01")
    assert with_adapter not in {private_salt(other) for other in ("", "tenant", "adapter=00", "tenantadapter=00")}
    assert salts_agree(with_adapter, salt) and not salts_agree(with_adapter, f"{salt}x") and SALT_END in with_adapter
