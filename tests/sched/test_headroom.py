"""Admission that looks ahead, and the lengths that it expects."""

import pytest
from sched_world import BLIND

from jaxserve.api import Request
from jaxserve.errors import ConfigError
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, Sequence, create_scheduler
from jaxserve.sched.lengths import AskedLengths, LearnedLengths, create_lengths
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

LIMITS = make_limits(max_rows=8, num_pages=40, page_size=2, max_model_len=40, token_buckets=(32,))


def jobs(count: int, max_tokens: int = 24) -> list[Request]:
    return [make_request(f"r{i}", [i, 1, 2, 3], max_tokens, arrival_s=i) for i in range(count)]


def run(options: SchedulerOptions, requests: list[Request]) -> tuple[ContinuousScheduler, FakeRunner]:
    scheduler, runner = create_scheduler("fcfs", LIMITS, options=options, clock=ManualClock()), FakeRunner(LIMITS)
    assert isinstance(scheduler, ContinuousScheduler)
    drive(scheduler, runner, requests)
    return scheduler, runner


def test_known_lengths_and_whole_growth_never_preempt() -> None:
    blind, _ = run(BLIND, jobs(12))
    ahead, runner = run(SchedulerOptions(watermark=0.0, growth=1.0, lengths="asked"), jobs(12))
    assert blind.num_preemptions > 5
    assert ahead.num_preemptions == 0
    # 40 pages are 80 tokens, and each job reaches 27: two at a time would be safe without looking at ends.
    assert max(plan.num_rows for plan in runner.plans) >= 2


def test_the_projection_uses_pages_that_others_will_give_back() -> None:
    """Staggered jobs: the sum of what all reach is more than there is, the peak is not."""
    requests = [make_request(f"r{i}", [i, 1], 4 + 6 * i, arrival_s=i) for i in range(5)]
    total_pages = sum(-(-(2 + 4 + 6 * i) // 2) for i in range(5))
    limits = make_limits(max_rows=8, num_pages=total_pages - 12, page_size=2, max_model_len=40, token_buckets=(32,))
    scheduler = create_scheduler(
        "fcfs", limits, options=SchedulerOptions(watermark=0.0, growth=1.0, lengths="asked"), clock=ManualClock()
    )
    assert isinstance(scheduler, ContinuousScheduler)
    runner = FakeRunner(limits)
    drive(scheduler, runner, requests)
    assert scheduler.num_preemptions == 0
    assert len({s.request_id for s in runner.plans[0].setups}) == 5, "all at once"


def test_the_watermark_stays_free_at_admission() -> None:
    _, runner = run(SchedulerOptions(watermark=0.5, growth=0.0), jobs(12, max_tokens=1))
    # Two pages each: twenty pages may be taken, so all eight rows; with more kept free, fewer.
    assert len(runner.plans[0].setups) == 8
    _, runner = run(SchedulerOptions(watermark=0.8, growth=0.0), jobs(12, max_tokens=1))
    assert len(runner.plans[0].setups) == 4


def test_who_is_alone_needs_no_headroom() -> None:
    scheduler, _ = run(SchedulerOptions(watermark=0.9, growth=1.0), [make_request("r", [1] * 30, 10)])
    assert not scheduler.has_work()


@pytest.mark.parametrize("field", ["watermark", "growth"])
def test_bounds(field: str) -> None:
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"sched.{field} is"):
            SchedulerOptions(**{field: value})


def sequence(num_outputs: int, max_tokens: int) -> Sequence:
    request = make_request("r", [1, 2, 3], max_tokens)
    seq = Sequence(request, 0, 0, 3 + max_tokens)
    seq.tokens += [7] * num_outputs
    return seq


def test_asked_is_the_limit() -> None:
    assert AskedLengths().expected_len(sequence(5, 100)) == 100


def test_learned_begins_with_the_limit_and_then_knows_better() -> None:
    lengths = LearnedLengths()
    for number in range(20):
        assert lengths.expected_len(sequence(0, 100)) == (100 if number < 8 else 20)
        lengths.learn(sequence(20, 100))
    assert lengths.expected_len(sequence(0, 1000)) == 1000, "another class"
    assert lengths.expected_len(sequence(0, 64)) == 20
    assert lengths.expected_len(sequence(25, 100)) == 26, "at least one more than it has"
    assert lengths.expected_len(sequence(40, 100)) == 100, "it has outlived every example"


def test_learned_counts_only_those_that_got_as_far() -> None:
    lengths = LearnedLengths()
    for _ in range(50):
        lengths.learn(sequence(4, 1000))
        lengths.learn(sequence(600, 1000))
    assert lengths.expected_len(sequence(0, 1000)) == 302
    assert lengths.expected_len(sequence(100, 1000)) == 600


def test_learned_forgets() -> None:
    lengths = LearnedLengths()
    for _ in range(600):
        lengths.learn(sequence(10, 1000))
    for _ in range(6000):
        lengths.learn(sequence(500, 1000))
    assert lengths.expected_len(sequence(0, 1000)) > 490


def test_only_natural_ends_are_learned() -> None:
    seen: list[int] = []

    class Watching(AskedLengths):
        def learn(self, seq: Sequence) -> None:
            seen.append(seq.num_outputs)

    scheduler = create_scheduler("sjf", LIMITS, options=SchedulerOptions(lengths=Watching()))
    scheduler.add(make_request("gone", [1], 9))
    scheduler.abort("gone")
    drive(scheduler, FakeRunner(LIMITS, forced={("stop", 0): {2: 99}}), [
        make_request("stop", [1], 9, stop=[99]), make_request("end", [2], 5)
    ])  # fmt: skip
    assert sorted(seen) == [3, 5]


def test_every_way_to_name_a_predictor() -> None:
    made = LearnedLengths()
    assert create_lengths(made) is made
    assert isinstance(create_lengths(LearnedLengths), LearnedLengths)
    assert isinstance(create_lengths("asked"), AskedLengths)
    assert isinstance(create_lengths("jaxserve.sched.lengths:AskedLengths"), AskedLengths)
    with pytest.raises(ConfigError, match="no length predictor is called 'guess'; known: learned, asked"):
        create_lengths("guess")
    with pytest.raises(ConfigError, match="gives a JSONDecoder without expected_len and learn"):
        create_lengths("json:JSONDecoder")
