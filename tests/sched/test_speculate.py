"""The choice of width and rounds, by arithmetic done by hand and under random times."""

import random

import pytest
from sched_world import random_limits

from jaxserve.api import SamplingParams
from jaxserve.errors import ConfigError, PolicyError
from jaxserve.sched import Bucket, ContinuousScheduler, Limits, Policy, SchedulerOptions, Sequence, create_scheduler
from jaxserve.sched.plan import Drafted
from jaxserve.sched.speculate import PLAIN, SpeculationOptions, Speculator
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request, with_shapes


def make_sequence(name: str = "a", *, structured: bool = False) -> Sequence:
    sampling = SamplingParams(structured={"regex": "a*"}, max_tokens=8) if structured else None
    return Sequence(make_request(name, [1, 2], sampling=sampling), 0, 0, 64)


def timed(ms: dict[tuple[int, int], float], rows: int = 1) -> Limits:
    """Limits with these shapes (width, rounds), and the time of a round of each."""
    limits = with_shapes(make_limits(max_rows=rows), *(shape for shape in ms if shape != PLAIN))
    times = {b: ms[b.width, b.rounds] for b in limits.buckets if b.decode_only}
    return limits.with_buckets(limits.buckets, times)


def make_speculator(ms: dict[tuple[int, int], float], rows: int = 1, **options) -> tuple[Speculator, ManualClock]:
    clock = ManualClock()
    return Speculator(SpeculationOptions(**options), timed(ms, rows), clock), clock


def teach(speculator: Speculator, seq: Sequence, width: int, accepted: int, times: int = 100) -> None:
    speculator.learn(seq, width, [Drafted(width - 1, accepted)] * times)


def test_the_most_tokens_in_a_millisecond_win() -> None:
    seq = make_sequence()
    always, _ = make_speculator({PLAIN: 10.0, (2, 1): 11.0, (4, 1): 15.0})
    teach(always, seq, 4, 3)
    assert always.choose([seq]) == (4, 1)  # 4 / 15 against 2 / 11 and 1 / 10
    first_only, _ = make_speculator({PLAIN: 10.0, (2, 1): 11.0, (4, 1): 15.0})
    teach(first_only, seq, 4, 1)
    assert first_only.choose([seq]) == (2, 1)  # 2 / 11 against 2 / 15
    never, _ = make_speculator({PLAIN: 10.0, (2, 1): 11.0, (4, 1): 15.0})
    teach(never, seq, 4, 0)
    assert never.choose([seq]) == PLAIN


def test_each_sequence_is_judged_by_itself() -> None:
    good, bad, new = make_sequence("good"), make_sequence("bad"), make_sequence("new")
    speculator, _ = make_speculator({PLAIN: 10.0, (4, 1): 20.0}, rows=2)
    teach(speculator, good, 4, 3, times=3)
    teach(speculator, bad, 4, 0, times=30)
    assert speculator.choose([good]) == (4, 1)
    assert speculator.choose([bad]) == PLAIN
    # Nobody knows the newcomer, so it is judged by all rounds so far, nearly all of which were bad ones.
    assert speculator.choose([new]) == PLAIN
    speculator.forget(bad)
    teach(speculator, good, 4, 3, times=100)
    assert speculator.choose([bad]) == (4, 1), "forgotten: what holds for all holds for it"


def test_a_place_without_a_draft_is_a_miss() -> None:
    seq = make_sequence()
    speculator, _ = make_speculator({PLAIN: 10.0, (2, 1): 11.0})
    speculator.learn(seq, 2, [Drafted(0, 0)] * 100)
    assert speculator.choose([seq]) == PLAIN, "a drafter that finds nothing costs the width all the same"


def test_a_little_better_is_not_enough_to_change() -> None:
    seq = make_sequence()
    for round_ms, expected in ((1.97, PLAIN), (1.85, (2, 1))):  # 2 tokens in it: 1.5 % and 8 % better than 1 in 1
        speculator, _ = make_speculator({PLAIN: 1.0, (2, 1): round_ms})
        teach(speculator, seq, 2, 1, times=1000)
        assert speculator.choose([seq]) == expected
    speculator.use_limits(timed({PLAIN: 1.0, (2, 1): 2.06}))
    assert speculator.choose([seq]) == (2, 1), "3 % worse now, and it stays"
    speculator.use_limits(timed({PLAIN: 1.0, (2, 1): 2.2}))
    assert speculator.choose([seq]) == PLAIN


def test_one_step_in_64_is_a_trial() -> None:
    seq = make_sequence()
    speculator, _ = make_speculator({PLAIN: 10.0, (2, 1): 30.0, (4, 1): 40.0})
    teach(speculator, seq, 4, 0)
    chosen = [speculator.choose([seq]) for _ in range(192)]
    assert [at for at, shape in enumerate(chosen) if shape != PLAIN] == [63, 127, 191]
    assert {chosen[at] for at in (63, 127, 191)} == {(2, 1)}, "the narrowest teaches what is needed to go on"


def test_the_time_of_a_launch_is_learned_and_makes_rounds_worth_while() -> None:
    seq = make_sequence()
    speculator, clock = make_speculator({PLAIN: 1.0, (1, 8): 1.3})
    assert speculator.choose([seq]) == PLAIN, "a round of eight costs more than a step of one"
    for _ in range(100):
        clock.advance(0.004)  # a step of 1 ms comes back every 4 ms
        speculator.note_commit(1, PLAIN, True)
    assert speculator.choose([seq]) == (1, 8)  # 8 / (3 + 8 x 1.3) against 1 / (3 + 1)
    for _ in range(100):  # times of a loop that slept say nothing of a launch
        clock.advance(50.0)
        speculator.note_commit(1, PLAIN, False)
    assert speculator._launch_ms == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_is_worse_than_one_token_a_step_by_its_own_model(seed: int) -> None:
    rng = random.Random(seed)
    trials = 0
    for _ in range(40):
        shapes = [(width, rounds) for width in (1, 2, 4, 8) for rounds in (1, 4) if (width, rounds) != PLAIN]
        ms = {shape: rng.uniform(0.5, 9.0) for shape in [PLAIN, *rng.sample(shapes, 3)]}
        speculator, _ = make_speculator(ms, rows=4)
        speculator._launch_ms = rng.choice([0.0, rng.uniform(0.0, 5.0)])
        seqs = [make_sequence(str(number)) for number in range(rng.randint(1, 4))]
        for _ in range(50):
            chosen = speculator.choose(seqs)
            speeds = {shape: speculator._tokens_per_ms(shape, seqs) for shape in speculator.offered(len(seqs))}
            if speculator._last == chosen:
                assert 1.05 * speeds[chosen] >= max(speeds.values()), (chosen, speeds)
            else:
                trials += 1  # to learn, and after 64 narrow steps alone
            for seq in seqs:
                teach(speculator, seq, chosen[0], rng.randint(0, chosen[0] - 1), times=1)
    assert trials <= 40 * 50 / 64


def test_rows_with_a_grammar_count_the_drafts_that_there_are() -> None:
    free, bound = make_sequence("free"), make_sequence("bound", structured=True)
    speculator, _ = make_speculator({PLAIN: 10.0, (2, 1): 14.0, (4, 1): 30.0}, rows=2)
    teach(speculator, free, 4, 3)
    assert speculator.choose([free]) == (2, 1)  # 2 / 14 against 4 / 30
    assert speculator.choose([free, bound]) == (2, 1)  # 3 / 14 against 2 / 10
    assert speculator.choose([bound]) == PLAIN, "no drafts, and the good ones of others say nothing of it"
    bound.num_drafts = 3
    assert speculator.choose([bound]) == (2, 1)  # 1.7 / 14 as long as nobody knows better than 0.7
    for _ in range(40):
        speculator.learn(bound, 4, [Drafted(3, 0)])
    assert speculator.choose([bound]) == PLAIN
    for _ in range(40):
        speculator.learn(bound, 4, [Drafted(1, 1)])  # of one draft each time: a place without one is no miss
    bound.num_drafts = 1
    assert speculator.choose([bound]) == (2, 1)
    bound.num_drafts = 3
    for _ in range(40):
        speculator.learn(bound, 4, [Drafted(3, 3)])
    assert speculator._tokens_of(bound, 4, 8) == speculator._tokens_of(bound, 4, 1) > 3.5, (
        "one round, whatever the step"
    )
    bound.num_drafts = 0
    assert speculator._tokens_of(bound, 4, 1) == 1.0


def test_a_device_without_drafts_is_asked_for_none() -> None:
    """Only rows with a grammar have drafts, which the host makes."""
    free, bound = make_sequence("free"), make_sequence("bound", structured=True)
    for adaptive in (True, False):
        times = {PLAIN: 1.0, (4, 1): 1.1, (1, 2): 1.0, (4, 2): 1.1}
        speculator, _ = make_speculator(times, rows=2, adaptive=adaptive, device_drafts=False)
        assert {speculator.choose([free])[0] for _ in range(200)} == {1}, "nor is a wide step tried"
        assert speculator.room(free, 4, 2) == 2
        bound.num_drafts = 3
        assert speculator.choose([bound])[0] == speculator.choose([free, bound])[0] == 4
        bound.num_drafts = 0
        assert speculator.choose([free, bound])[0] == 1


def test_no_step_is_wider_than_its_rows_have_room_for() -> None:
    seq, bound = make_sequence(), make_sequence("bound", structured=True)
    fixed, _ = make_speculator({PLAIN: 1.0, (2, 1): 9.0, (4, 1): 9.0, (4, 3): 9.0}, rows=2, adaptive=False)
    for left, shape in ((1, PLAIN), (2, (2, 1)), (3, (4, 1)), (4, (4, 1)), (5, (4, 3)), (40, (4, 3))):
        seq.num_fed = seq.max_fed - left
        assert fixed.choose([seq]) == shape, left
    for drafts, shape in ((0, PLAIN), (1, (2, 1)), (9, (4, 1))):
        bound.num_drafts = drafts
        assert fixed.choose([bound]) == shape, "the host's drafts are those of one round"
    learned, _ = make_speculator({PLAIN: 10.0, (4, 1): 15.0})
    teach(learned, seq, 4, 3)
    seq.num_fed = seq.max_fed - 1
    assert learned.choose([seq]) == PLAIN
    assert all(learned.choose([seq]) == PLAIN for _ in range(200)), "nor is one tried, which would teach nothing"


def test_without_times_or_by_request_the_largest_shape_is_taken() -> None:
    seq = make_sequence()
    limits = with_shapes(make_limits(max_rows=1), (2, 1), (4, 2))
    assert Speculator(SpeculationOptions(), limits, ManualClock()).choose([seq]) == (4, 2)
    assert Speculator(SpeculationOptions(width=2), limits, ManualClock()).choose([seq]) == (2, 1)
    fixed, _ = make_speculator({PLAIN: 1.0, (2, 1): 50.0}, adaptive=False)
    assert fixed.choose([seq]) == (2, 1)
    for name in ("width", "rounds"):
        with pytest.raises(ConfigError, match=f"speculation.{name} is 0"):
            SpeculationOptions(**{name: 0})


def test_only_what_the_device_has_for_so_many_rows_is_on_offer() -> None:
    limits = make_limits(max_rows=4)
    limits = limits.with_buckets((*limits.buckets, Bucket(4, 2, True, 2), Bucket(4, 1, True, 4)))
    speculator = Speculator(SpeculationOptions(), limits, ManualClock())
    assert [speculator.offered(rows) for rows in (1, 2, 3)] == [(PLAIN, (2, 1), (4, 1)), (PLAIN, (2, 1)), (PLAIN,)]
    speculator.use_limits(limits.with_buckets((*limits.buckets, Bucket(16, 4, True, 4))))
    assert speculator.offered(3) == (PLAIN, (4, 1)), "shapes that come later"
    plain = Speculator(SpeculationOptions(), random_limits(random.Random(0)), ManualClock())
    assert not plain.active


class Told(Policy):
    """Takes the shapes of a list, in turn."""

    told: tuple[tuple[int, int] | None, ...] = ()

    def bind(self, memory, lengths, clock) -> None:
        super().bind(memory, lengths, clock)
        self.asked: list[tuple[int, tuple[tuple[int, int], ...]]] = []

    def key(self, seq, now_s):
        return seq.request.arrival_s

    def speculate(self, decoding, shapes):
        self.asked.append((len(decoding), tuple(shapes)))
        return self.told[(len(self.asked) - 1) % len(self.told)]


def test_a_policy_decides_where_it_wants_to() -> None:
    limits = with_shapes(make_limits(max_rows=2), (2, 1), (4, 1))
    policy = Told(SchedulerOptions())
    policy.told = ((2, 1), PLAIN, None)
    runner = FakeRunner(limits)
    requests = [make_request(name, [1, 2, 3], 12) for name in "ab"]
    outputs = drive(create_scheduler(policy, limits), runner, requests)
    assert outputs["a", 0].token_ids == list(range(4, 16))
    assert [plan.width for plan in runner.plans if plan.decode_only][:3] == [2, 1, 4], "None: without times, the widest"
    assert set(policy.asked) <= {(rows, (PLAIN, (2, 1), (4, 1))) for rows in (1, 2)}
    without = Told(SchedulerOptions())
    drive(create_scheduler(without, make_limits()), FakeRunner(make_limits()), [make_request("a", [1], 4)])
    assert not without.asked, "a device with one shape leaves no choice"


def test_a_shape_that_is_not_on_offer_is_a_broken_rule() -> None:
    limits = make_limits(max_rows=2)
    limits = limits.with_buckets((*limits.buckets, Bucket(2, 1, True, 2)))
    policy = Told(SchedulerOptions())
    policy.told = ((2, 1),)
    scheduler = create_scheduler(policy, limits)
    assert isinstance(scheduler, ContinuousScheduler)
    with pytest.raises(
        PolicyError, match=r"Told breaks a rule of its method `speculate`: \(2, 1\) is none of .*\(\(1, 1\),\)"
    ):
        drive(scheduler, FakeRunner(limits), [make_request(name, [1, 2, 3], 12) for name in "ab"])
