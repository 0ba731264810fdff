"""What can never run is refused with the reason, and leaves no trace."""

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.errors import CapacityError, InvalidRequest, PromptTooLong, RequestRejected
from jaxserve.sched import Bucket, Limits, SchedulerOptions, create_scheduler
from jaxserve.testing import FakeRunner, drive, make_limits, make_request


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (make_request("a", [], 4), InvalidRequest, "empty prompt"),
        (make_request("a", range(16), 1), PromptTooLong, "16 tokens.*end at 16.*model.max_len.*truncate_prompt_tokens"),
        (make_request("a", range(15), 1), RequestRejected, "4 pages.*3 pages of 4 tokens.*cache.num_pages"),
        (make_request("a", range(8), 6), RequestRejected, "4 pages.*lower max_tokens"),
    ],
)
def test_refusals(request_: Request, error: type[Exception], words: str):
    limits = make_limits(num_pages=3, page_size=4, max_model_len=16)
    scheduler = create_scheduler("fcfs", limits)
    with pytest.raises(error, match=words) as caught:
        scheduler.add(request_)
    assert "\n" not in str(caught.value)
    assert not scheduler.has_work()
    assert scheduler.num_waiting == 0
    assert scheduler.schedule() is None


def test_the_largest_request_that_fits_runs():
    limits = make_limits(num_pages=3, page_size=4, max_model_len=64)
    scheduler = create_scheduler("fcfs", limits)
    out = drive(scheduler, FakeRunner(limits), [make_request("a", range(8), 5)])["a", 0]
    assert out.token_ids == [8, 9, 10, 11, 12], "13 tokens, of which the last is never fed: 12 places"


def test_the_context_bounds_what_is_needed():
    limits = make_limits(num_pages=4, page_size=4, max_model_len=16)
    scheduler = create_scheduler("fcfs", limits)
    out = drive(scheduler, FakeRunner(limits), [make_request("a", range(8), 1000)])["a", 0]
    assert len(out.token_ids) == 8
    assert out.finish_reason == "length"


def test_without_chunks_a_prompt_must_fit_a_step():
    limits = make_limits(token_buckets=(8,), num_pages=32)
    scheduler = create_scheduler("fcfs", limits, options=SchedulerOptions(chunked_prefill=False))
    with pytest.raises(RequestRejected, match=r"9 tokens.*holds 8.*chunked_prefill"):
        scheduler.add(make_request("a", range(9)))
    scheduler.add(make_request("a", range(8)))


def test_ids_are_unique_among_live_requests_only():
    limits = make_limits()
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    scheduler.add(make_request("a", [1], 2))
    with pytest.raises(InvalidRequest, match="'a'.*unique"):
        scheduler.add(make_request("a", [2], 2))
    assert scheduler.num_waiting == 1
    assert scheduler.abort("a")
    assert drive(scheduler, runner, [make_request("a", [3], 2)])["a", 0].token_ids == [4, 5]


def test_buckets_that_could_strand_rows_are_refused_at_start():
    limits = Limits(
        max_rows=8, num_pages=8, page_size=4, max_model_len=16, buckets=(Bucket(4, 4, False), Bucket(8, 8, True))
    )
    with pytest.raises(CapacityError, match="sched.max_step_tokens to 8"):
        create_scheduler("fcfs", limits)


def test_n_sequences_need_room_for_one_at_a_time():
    limits = make_limits(num_pages=3, page_size=4, max_rows=4)
    scheduler = create_scheduler("fcfs", limits)
    request = make_request("a", range(6), 7, sampling=SamplingParams(n=4, temperature=0, max_tokens=7))
    out = drive(scheduler, FakeRunner(limits), [request])
    assert all(o.token_ids == [6, 7, 8, 9, 10, 11, 12] for o in out.values())
