"""Groups of layers with a window: how few pages they hold, and what is found, shared and given way for all the same."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import SamplingParams
from jaxserve.errors import RequestRejected
from jaxserve.sched import ContinuousScheduler, Limits, PageGroup, SchedulerOptions, create_scheduler
from jaxserve.testing import FakeRunner, Output, drive, make_limits, make_request

CONTEXT = 32_768


def scheduler_of(limits: Limits, **options) -> ContinuousScheduler:
    made = create_scheduler("fcfs", limits, options=SchedulerOptions(watermark=0.0, growth=0.0, **options))
    assert isinstance(made, ContinuousScheduler)
    return made


@given(window=st.integers(1, 40), chunk=st.integers(1, 40), page_size=st.integers(1, 9), position=st.integers(0, 99))
def test_columns_that_are_seen(window: int, chunk: int, page_size: int, position: int) -> None:
    group = PageGroup(window)
    seen = {p // page_size for end in range(position, position + chunk) for p in range(end - window + 1, end + 1)}
    columns = sorted(column for column in seen if column >= 0)
    assert group.first_column(position, page_size) == columns[0]
    assert len(columns) <= group.most_columns(chunk, page_size)
    fullest = max(len({p // page_size for p in range(first, first + window - 1 + chunk)}) for first in range(page_size))
    assert group.most_columns(chunk, page_size) == fullest


@pytest.mark.parametrize(
    ("windows", "slots", "layers", "share"),
    [
        ([4096], 32, 32, 1 / 7),  # Mistral 7B
        ([None, *[1024] * 6], 5, 34, 1 / 4),  # Gemma 3 4B: 5 layers see all, 29 a window
    ],
)
def test_pages_held_at_a_long_context(windows: Sequence[int | None], slots: int, layers: int, share: float) -> None:
    """In bytes: a page has `slots` layers now, and had all of them when every layer kept everything."""
    page_size, chunk, columns = 64, 512, CONTEXT // 64
    limits = make_limits(
        max_rows=1, num_pages=columns * len(windows), page_size=page_size, windows=windows,
        max_model_len=CONTEXT, token_buckets=(chunk,),
    )  # fmt: skip
    scheduler, runner = scheduler_of(limits), FakeRunner(limits, vocab_size=1000)
    scheduler.add(make_request("r", [i * i % 1000 for i in range(CONTEXT - 8)], 8))
    held = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        held.append(scheduler.num_held_pages)
        scheduler.commit(plan, runner.dispatch(plan).result())
    assert held[-1] * slots <= share * columns * layers, (held[-1], columns)
    assert max(held) <= limits.pages_of(CONTEXT, chunk), "the prompt, too, holds what its chunks see"
    assert scheduler.num_held_pages == 0


def test_a_prefix_is_found_by_its_end_when_its_beginning_is_gone() -> None:
    limits = make_limits(num_pages=8, page_size=2, windows=[4], max_model_len=40, token_buckets=(4,))
    scheduler, runner = scheduler_of(limits), FakeRunner(limits)
    prompt = list(range(20))
    drive(scheduler, runner, [make_request("first", prompt, 2)])
    assert scheduler.memory.pool.num_idle < 10, "eight pages hold no ten"
    out = drive(scheduler, runner, [make_request("second", prompt, 2)])
    assert _num_cached(out["second", 0]) == 18
    scheduler.memory.check(())


def test_a_beginning_is_no_use_without_the_window_before_its_end() -> None:
    """A group that sees all still has the first blocks, and the one with the window has lost its own."""
    limits = make_limits(num_pages=13, page_size=2, windows=[None, 4], max_model_len=24, token_buckets=(4,))
    scheduler, runner = scheduler_of(limits), FakeRunner(limits)
    prompt = list(range(16))
    drive(scheduler, runner, [make_request("long", prompt, 2)])  # 8 pages of the one, of the other the last are newest
    out = drive(scheduler, runner, [make_request("short", [*prompt[:6], 77], 1)])
    assert _num_cached(out["short", 0]) == 0
    out = drive(scheduler, runner, [make_request("again", prompt, 1)])
    assert _num_cached(out["again", 0]) == 6, "what the short one computed"
    scheduler.memory.check(())


def _num_cached(output: Output) -> int:
    assert output.prompt is not None
    return output.prompt.num_cached_tokens


def test_a_fork_computes_what_its_parent_has_given_back() -> None:
    """The second answer waits for a row until the window of the first has left the prompt behind."""
    limits = make_limits(max_rows=1, page_size=2, num_pages=40, windows=[3], max_model_len=40, token_buckets=(8,))
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=12)
    scheduler, runner = scheduler_of(limits, prefix_caching=False), FakeRunner(limits, mode="context")
    out = drive(scheduler, runner, [make_request("r", [1, 2, 3, 4, 5], 12, sampling=sampling)])
    assert all(len(out["r", index].token_ids) == 12 for index in (0, 1))
    assert runner.num_copies == 0


def test_a_prompt_that_has_begun_keeps_what_was_promised_to_it() -> None:
    limits = make_limits(max_rows=4, num_pages=12, page_size=2, windows=[8], max_model_len=40, token_buckets=(4,))
    scheduler, runner = scheduler_of(limits), FakeRunner(limits)
    scheduler.add(make_request("long", range(30), 2))
    scheduler.add(make_request("next", range(100, 112), 2))
    plan = scheduler.schedule()
    assert plan is not None and [setup.request_id for setup in plan.setups] == ["long"]
    assert scheduler.num_held_pages == 2, "the first chunk's"
    pool, promised = scheduler.memory.pool, scheduler.memory._num_promised
    assert pool.num_available - promised == 12 - limits.pages_of(30, 4), "its window and a chunk are not for others"
    scheduler.commit(plan, runner.dispatch(plan).result())
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.check()
        scheduler.commit(plan, runner.dispatch(plan).result())
    assert scheduler.num_preemptions == 0


def test_what_can_never_fit_is_refused() -> None:
    limits = make_limits(num_pages=11, page_size=2, windows=[None, 4], max_model_len=64, token_buckets=(4,))
    assert limits.pages_of(14, 4) == 7 + 4
    scheduler = scheduler_of(limits)
    scheduler.add(make_request("fits", range(12), 3))
    with pytest.raises(RequestRejected, match="can need 12 pages"):
        scheduler.add(make_request("does not", range(12), 4))


@pytest.mark.parametrize("num_pages", [14, 15, 18])
def test_prompts_go_on_where_answers_eat_their_pages(num_pages: int) -> None:
    limits = make_limits(num_pages=num_pages, page_size=1, windows=[None, 2], max_model_len=10, token_buckets=(4,))
    assert limits.pages_of(9, 4) == 14
    scheduler = scheduler_of(limits)
    requests = [make_request(f"r{i}", [i, *range(i + 1)], 8 - i) for i in range(5)]
    out = drive(scheduler, FakeRunner(limits, mode="context"), requests)
    assert len(out) == 5 and all(one.finish_reason is not None for one in out.values())
    assert scheduler.num_preemptions > 0
