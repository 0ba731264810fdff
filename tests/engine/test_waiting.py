"""The bound on what waits, the estimate of when to come again, and deadlines, on a clock that a test moves."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api import FinishReason, Known, Request, RequestOptions, Resume, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.engine.waiting import Waiting
from jaxserve.errors import DeadlineExceeded, InvalidRequest, QueueFull
from jaxserve.sched import create_scheduler
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request


def _request(num_tokens: int) -> Request:
    return make_request("r", range(num_tokens))


def test_requests_and_tokens_are_bounded() -> None:
    waiting = Waiting(2, 10, ManualClock())
    waiting.enter(_request(6))
    with pytest.raises(QueueFull, match="6 prompt tokens are waiting and this request has 5"):
        waiting.enter(_request(5))
    waiting.enter(_request(4))
    with pytest.raises(QueueFull, match="2 sequences are waiting and 1 more"):
        waiting.enter(_request(1))
    waiting.enter(_request(1), bounded=False)
    assert (waiting.num_requests, waiting.num_tokens) == (3, 11)
    waiting.clear()
    waiting.enter(_request(50))  # alone it may, since it could never run otherwise


def _several(num_tokens: int, n: int) -> Request:
    return make_request("r", range(num_tokens), sampling=SamplingParams(n=n))


def test_each_of_the_n_sequences_counts_with_its_prompt() -> None:
    waiting = Waiting(10, 100, ManualClock())
    waiting.enter(_several(5, 6))
    assert (waiting.num_requests, waiting.num_sequences, waiting.num_tokens) == (1, 6, 30)
    with pytest.raises(QueueFull, match="6 sequences are waiting and 5 more"):
        waiting.enter(_several(1, 5))
    with pytest.raises(QueueFull, match="30 prompt tokens are waiting and this request has 80"):
        waiting.enter(_several(20, 4))
    with pytest.raises(QueueFull, match="6 sequences are waiting and 5 more"):
        waiting.check_room(5, "")
    waiting.check_room(4, "")
    waiting.begin(_several(5, 6), first=True)
    waiting.begin(_several(5, 6), first=False)
    assert (waiting.num_requests, waiting.num_sequences, waiting.num_tokens) == (0, 4, 20)
    waiting.leave(_several(5, 6), 4, first=False)
    assert (waiting.num_requests, waiting.num_sequences, waiting.num_tokens) == (0, 0, 0)
    waiting.enter(_several(5, 60))  # alone it may, since it could never run otherwise
    with pytest.raises(QueueFull):
        waiting.check_room(11, "")


def test_sequences_wait_until_each_has_its_first_token() -> None:
    """Not until one of them has: what is left of a request with many would wait uncounted."""
    timed = Timed(max_rows=2)
    timed.submit("many", n=5, max_tokens=2)
    seen = [timed.engine.load.num_waiting]
    while timed.engine.step():
        seen.append(timed.engine.load.num_waiting)
    assert seen[0] == 5 and seen[-1] == 0
    assert seen == sorted(seen, reverse=True) and len(set(seen)) > 3, seen
    timed.submit("cut", n=5, max_tokens=20)
    for _ in range(4):
        timed.engine.step()
    assert 0 < timed.engine.load.num_waiting < 5
    timed.engine.abort("cut")
    timed.engine.run_until_idle()
    assert timed.engine.load[:3] == (0, 0, 0)


def test_the_estimate_follows_the_pace_of_starts() -> None:
    clock = ManualClock()
    waiting = Waiting(100, 1000, clock)
    for _ in range(30):
        waiting.enter(_request(30))
    with pytest.raises(QueueFull) as caught:
        waiting.enter(_request(130))
    assert caught.value.retry_after_s == 1.0, "nothing is known yet"
    for _ in range(5):
        waiting.begin(_request(30), first=True)
        clock.advance(6.0)
    with pytest.raises(QueueFull) as caught:  # 750 wait; 150 tokens have started in 30 s, and 10 are too many
        waiting.enter(_request(260))
    assert caught.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(QueueFull) as caught:
        waiting.enter(_request(2000))
    assert caught.value.retry_after_s == 60.0, "no guess beyond a minute"
    waiting.leave(_request(30), 1, first=True)
    with pytest.raises(QueueFull) as caught:
        waiting.enter(_request(290))
    assert caught.value.retry_after_s == pytest.approx(2.0), "one that left is no start"


def _of(owner: str, num_tokens: int = 1, n: int = 1) -> Request:
    return dataclasses.replace(_several(num_tokens, n), owner=owner)


def test_one_owner_may_fill_the_queue_and_others_still_get_in() -> None:
    waiting = Waiting(4096, 10_000, ManualClock())
    for _ in range(32):
        waiting.enter(_of("a", n=128))
    with pytest.raises(QueueFull) as caught:
        waiting.enter(_of("a"))
    assert str(caught.value) == (
        "4096 sequences are waiting, 4096 of them yours, and 1 more are asked for; sched.max_waiting is 4096, and "
        "while it is full a caller may have 1024; try again in 1 s"
    )
    with pytest.raises(QueueFull, match="4096 sequences are waiting, 0 of them yours, and 513 more .* may have 512;"):
        waiting.enter(_of("b", n=513))
    waiting.enter(_of("b", n=512))
    waiting.check_room(300, "c")
    with pytest.raises(QueueFull, match="4608 sequences are waiting, 512 of them yours, and 1 more"):
        waiting.check_room(1, "b")
    for _ in range(32):
        waiting.leave(_of("a", n=128), 128, first=True)
    for _ in range(28):
        waiting.enter(_of("b", n=128))
    assert waiting.num_sequences == 4096


def test_tokens_and_pictures_are_shared_as_sequences_are() -> None:
    waiting = Waiting(200, 1000, ManualClock())
    waiting.enter(_of("a", 10, n=100))
    with pytest.raises(QueueFull, match=r"1000 prompt tokens .* 0 of them yours, and this request has 126; .*_tokens"):
        waiting.enter(_of("b", 126))
    waiting.enter(_of("b", 125))
    waiting.begin(_of("a", 10, n=100), first=True)
    with pytest.raises(QueueFull, match=r"1115 prompt tokens .* 990 of them yours"):
        waiting.enter(_of("a", 10))


def test_sequences_that_are_to_be_encoded_count_for_their_owners() -> None:
    waiting = Waiting(100, 1000, ManualClock())
    with pytest.raises(QueueFull, match="100 sequences are waiting, 0 of them yours, and 14 more"):
        waiting.check_room(14, "b", {"a": 100})
    waiting.check_room(13, "b", {"a": 100})
    with pytest.raises(QueueFull, match="110 sequences are waiting, 10 of them yours, and 4 more"):
        waiting.check_room(4, "b", {"a": 100, "b": 10})
    with pytest.raises(QueueFull, match="100 sequences are waiting and 1 more .*; sched.max_waiting is 100; try"):
        waiting.check_room(1, "", {"": 100})


def test_the_estimate_of_an_owner_is_for_its_own_part() -> None:
    clock = ManualClock()
    waiting = Waiting(100, 1000, clock)
    waiting.enter(_of("a", n=110))
    for _ in range(10):
        waiting.begin(_of("a", n=110), first=False)
        clock.advance(3.0)
    waiting.enter(_of("b", n=13))
    for owner, count, seconds in (("a", 10, 69.0), ("b", 2, 6.0)):
        with pytest.raises(QueueFull) as caught:
            waiting.check_room(count, owner)
        assert caught.value.retry_after_s == pytest.approx(min(seconds, 60.0))


def test_counts_of_owners_return_to_zero_however_requests_end() -> None:
    """Tokens, an abort in the inbox and one behind it, a deadline, an id that is taken, a resume, a dead engine."""
    timed = Timed(max_rows=2)

    def waits() -> dict[str, int]:
        return dict(timed.engine._waiting._sequences.by_owner)

    def submit(name: str, owner: str, **options: Any) -> None:
        timed.submit(name, owner=owner, **options)

    submit("ends", "a", n=3, max_tokens=3)
    submit("aborted", "b", n=4)
    submit("late", "c", n=2, timeout_s=4.0)
    assert waits() == {"a": 3, "b": 4, "c": 2}
    submit("ends", "d")
    timed.engine.abort("aborted")
    timed.engine.step()
    assert "b" not in waits() and "d" not in waits()
    submit("resumed", "e", n=2, resume=Resume(sequences=(Known((5,), finished=True), Known((5, 6)))), max_tokens=4)
    timed.engine.run_until_idle()
    assert isinstance(timed.updates["late"][-1].error, DeadlineExceeded)
    assert timed.updates["resumed"][-1].finish_reason is FinishReason.LENGTH
    assert waits() == {} and timed.engine._waiting.num_tokens == 0
    submit("dies", "a", n=3)
    timed.engine.step()
    submit("unheard", "b", n=3)
    timed.engine.fail(RuntimeError("the device is gone"))
    assert waits() == {} and not timed.engine._waiting._tokens.by_owner


@given(st.lists(st.integers(1, 9), max_size=40))
def test_counts_return_to_zero(sizes: list[int]) -> None:
    waiting, taken = Waiting(10, 30, ManualClock()), []
    for size in sizes:
        if len(taken) < 10 and (not taken or sum(taken) + size <= 30):
            waiting.enter(_request(size))
            taken.append(size)
        else:
            with pytest.raises(QueueFull):
                waiting.enter(_request(size))
        if len(taken) > 5:
            waiting.begin(_request(taken.pop(0)), first=True)
        assert (waiting.num_requests, waiting.num_tokens) == (len(taken), sum(taken))
        assert len(taken) <= 10


# ---- deadlines -------------------------------------------------------------------------------------------------------


class Timed:
    """An engine driven by hand; each step takes a second."""

    def __init__(self, *, max_rows: int = 4) -> None:
        self.clock = ManualClock()
        limits = make_limits(max_rows=max_rows)
        self.scheduler = create_scheduler("fcfs", limits)
        self.engine = Engine(
            runner=FakeRunner(limits, clock=self.clock, step_s=1.0),
            scheduler=self.scheduler,
            tokenizer=None,
            model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=(255,)),
            clock=self.clock,
        )
        self.updates: dict[str, list[Update]] = {}

    def submit(self, name: str, *, max_tokens: int = 20, n: int = 1, **options: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        request = self.engine.prepare([1, 2], sampling, RequestOptions(request_id=name, **options))
        self.updates.setdefault(name, [])
        self.engine.submit(request, self.updates[name].append)


def test_a_deadline_ends_its_request_at_the_next_step_and_no_other() -> None:
    timed = Timed()
    timed.submit("short", timeout_s=5.0, n=2)
    timed.submit("long", timeout_s=100.0)
    timed.submit("free")
    timed.engine.run_until_idle()
    *tokens, first, last = timed.updates["short"]
    assert 4 <= len(tokens) <= 12
    for update in (first, last):
        assert isinstance(update.error, DeadlineExceeded)
        assert update.finish_reason is FinishReason.ERROR
    assert "had begun to answer when its 5 s were over" in str(last.error)
    assert last.last
    assert not first.last
    for name in ("long", "free"):
        assert len(timed.updates[name]) == 20
        assert timed.updates[name][-1].finish_reason is FinishReason.LENGTH
    assert timed.scheduler.num_held_pages == timed.engine.num_unstarted == 0


def test_a_request_that_waits_has_its_deadline_too() -> None:
    timed = Timed(max_rows=1)
    timed.submit("first")
    timed.submit("second", timeout_s=3.0)
    timed.engine.run_until_idle()
    (only,) = timed.updates["second"]
    assert "was waiting when its 3 s were over" in str(only.error)
    assert timed.engine.num_unstarted == 0
    assert timed.engine.load.num_waiting_tokens == 0


def test_a_deadline_that_passed_in_the_inbox_ends_at_once() -> None:
    timed = Timed()
    timed.submit("late", timeout_s=1.0)
    timed.clock.advance(2.0)
    timed.engine.run_until_idle()
    assert [type(u.error) for u in timed.updates["late"]] == [DeadlineExceeded]


def test_many_deadlines_that_never_come_leave_nothing_behind() -> None:
    timed = Timed()
    for number in range(50):
        timed.submit(f"r{number}", timeout_s=1e6 + number, max_tokens=2)
    timed.engine.run_until_idle()
    timed.clock.advance(2e6)
    timed.submit("next", max_tokens=2)
    timed.engine.run_until_idle()
    assert timed.engine._live.next_deadline_s == math.inf
    assert all(updates[-1].finish_reason is FinishReason.LENGTH for updates in timed.updates.values())


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, True, "5"])
def test_times_that_are_none_are_refused(timeout_s: object) -> None:
    with pytest.raises(InvalidRequest, match="must be more than 0 seconds"):
        Timed().engine.prepare([1], SamplingParams(), RequestOptions(timeout_s=timeout_s))  # type: ignore[arg-type]
