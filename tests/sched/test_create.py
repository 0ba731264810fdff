"""`create_scheduler`: every way to name one, and what is no scheduler."""

import re
from typing import Any, cast

import pytest

from jaxserve.errors import ConfigError
from jaxserve.sched import (
    ContinuousScheduler,
    Limits,
    Policy,
    SchedulerOptions,
    Sequence,
    create_scheduler,
    uses_priority,
)
from jaxserve.sched.lengths import AskedLengths, max_output_len
from jaxserve.sched.plan import HostSlots
from jaxserve.sched.policies import FcfsPolicy, SjfPolicy
from jaxserve.testing import FakeRunner, drive, make_limits, make_request

LIMITS = make_limits()


def make_scheduler(limits: Limits, options: SchedulerOptions) -> ContinuousScheduler:
    return ContinuousScheduler(limits, FcfsPolicy(options), options)


class Own(ContinuousScheduler):
    def __init__(self, limits: Limits, options: SchedulerOptions) -> None:
        super().__init__(limits, FcfsPolicy(options), options)


class Half:
    def __init__(self, limits: Limits, options: SchedulerOptions) -> None:
        self.limits = limits

    def schedule(self) -> None: ...

    def commit(self) -> None: ...


class OnDemand:
    """An object that is called: a factory with settings of its own."""

    def __call__(self, limits: Limits, options: SchedulerOptions) -> ContinuousScheduler:
        return make_scheduler(limits, options)


@pytest.mark.parametrize(
    "choice",
    ["fcfs", "priority", "jaxserve.sched.policies:FcfsPolicy", FcfsPolicy, FcfsPolicy(SchedulerOptions()),
     make_scheduler, Own, OnDemand(), make_scheduler(LIMITS, SchedulerOptions())],
    ids=lambda v: repr(v).split(" at 0x")[0],
)  # fmt: skip
def test_every_way_to_name_a_scheduler(choice) -> None:
    assert isinstance(create_scheduler(choice, LIMITS), ContinuousScheduler)


@pytest.mark.parametrize("choice", [Half, Half(LIMITS, SchedulerOptions())], ids=["class", "object"])
def test_what_is_missing_is_named(choice) -> None:
    with pytest.raises(ConfigError, match="a Half without add, abort, has_work; a scheduler has"):
        create_scheduler(choice, LIMITS)


@pytest.mark.parametrize(
    "choice",
    [7, object(), lambda limits, options: None, "json:dumps.__doc__"],
    ids=lambda v: repr(v).split(" at 0x")[0],
)
def test_what_is_no_scheduler_at_all_is_a_config_error(choice) -> None:
    with pytest.raises(ConfigError):
        create_scheduler(choice, LIMITS)


def test_a_policy_without_an_order_is_a_config_error() -> None:
    class NoOrder(Policy):
        preemptive = True

    with pytest.raises(ConfigError, match="NoOrder lacks the method key"):
        create_scheduler(NoOrder, LIMITS)


@pytest.mark.parametrize("change", [{"slots": HostSlots()}, {"prefix_caching": False}, {"policy": make_scheduler}])
def test_a_store_needs_a_policy_slots_and_the_prefix_cache(change) -> None:
    limits = make_limits(slots=change.get("slots", HostSlots(4, 4, 1)))
    options = SchedulerOptions(prefix_caching=change.get("prefix_caching", True))
    with pytest.raises(ConfigError, match="store"):
        create_scheduler(change.get("policy", "fcfs"), limits, options=options, store=object())


def test_a_policy_says_whether_it_reads_priorities() -> None:
    class Reads(FcfsPolicy):
        uses_priority = True

    assert [uses_priority(create_scheduler(p, LIMITS)) for p in ("fcfs", "priority", Reads)] == [False, True, True]


class Counting:
    """A predictor that counts how often it is asked."""

    asked = 0

    def expected_len(self, seq: Sequence) -> int:
        type(self).asked += 1
        return max_output_len(seq)

    def learn(self, seq: Sequence) -> None: ...


@pytest.mark.parametrize("form", ["class", "object"])
def test_an_object_brings_its_predictor_of_lengths(form: str) -> None:
    class Asked(Counting):
        asked = 0

    lengths = Asked if form == "class" else Asked()
    scheduler = create_scheduler(SjfPolicy(SchedulerOptions(lengths=lengths)), LIMITS)
    requests = [make_request(f"r{number}", [1, 2, 3], 4) for number in range(3)]
    drive(scheduler, FakeRunner(LIMITS), requests)
    assert Asked.asked >= len(requests)
    same = SchedulerOptions(lengths=lengths)
    create_scheduler(SjfPolicy(same), LIMITS, options=same)


def test_one_scheduler_has_one_predictor_of_lengths() -> None:
    with pytest.raises(ConfigError, match="SjfPolicy was made with lengths=.*Counting.*, and sched.lengths is 'asked'"):
        create_scheduler(
            SjfPolicy(SchedulerOptions(lengths=Counting)), LIMITS, options=SchedulerOptions(lengths="asked")
        )
    made = create_scheduler(SjfPolicy(SchedulerOptions()), LIMITS, options=SchedulerOptions(lengths="asked"))
    assert isinstance(made, ContinuousScheduler)
    assert isinstance(made.policy.lengths, AskedLengths), "the default of an object names none"


class Levels(FcfsPolicy):
    def __init__(self, options: SchedulerOptions | None = None, quantum: int = 16, fast: bool = False) -> None:
        super().__init__(options)
        self.quantum, self.fast = quantum, fast


class OnlyOwn(FcfsPolicy):
    def __init__(self, alpha: float = 3) -> None:
        super().__init__()
        self.alpha = alpha


class Needs(FcfsPolicy):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha


def policy_of(choice: object) -> Any:
    made = create_scheduler(cast(Any, choice), LIMITS, options=SchedulerOptions(ageing_s=7.0))
    assert isinstance(made, ContinuousScheduler)
    return made.policy


def test_parameters_of_a_policy_are_given_by_name() -> None:
    plain, given = policy_of(Levels), policy_of("test_create:Levels?quantum=32&fast=true")
    assert [(one.quantum, one.fast, one.options.ageing_s) for one in (plain, given)] == [
        (16, False, 7.0),
        (32, True, 7.0),
    ]
    for choice, alpha in ((OnlyOwn, 3), ("test_create:OnlyOwn?alpha=0.5", 0.5), ("test_create:Needs?alpha=2", 2)):
        made = policy_of(choice)
        assert (made.alpha, made.options.ageing_s) == (alpha, 7.0)
    assert policy_of(Needs(4)).alpha == 4


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("test_create:Levels?quantun=32", "no parameter 'quantun'; it has quantum, fast. Did you mean 'quantum'"),
        ("test_create:Levels?options=32", "no parameter 'options'"),
        ("fcfs?quantum=32", "FcfsPolicy has no parameter 'quantum'; it has none of its own"),
        ("test_create:Levels?quantum=x", "quantum='x' of the policy Levels must be a number"),
        ("test_create:Levels?quantum=true", "quantum=True of the policy Levels must be a number"),
        ("test_create:Levels?fast=1", "fast=1 of the policy Levels must be true or false"),
        ("test_create:Levels?", "the parameter ''; write each once as NAME=VALUE"),
        ("test_create:Levels?quantum=1&quantum=2", "the parameter 'quantum=2'; write each once"),
        ("test_create:make_scheduler?quantum=1", "is no class of a policy, so it takes no parameters"),
        (Needs, "Needs needs its parameter 'alpha'; give it a default"),
    ],
)  # fmt: skip
def test_parameters_that_a_policy_does_not_have_are_refused(choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        policy_of(choice)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("victim_for_admision", "victim_for_admission"), ("on_serve", "on_served"), ("may_admitt", "may_admit"),
     ("preemptve", "preemptive"), ("onwait", "on_wait")],
)  # fmt: skip
def test_a_hook_that_is_nearly_spelt_right_is_refused(name: str, meant: str) -> None:
    misspelt = type("Mine", (FcfsPolicy,), {name: lambda *_: None})
    with pytest.raises(ConfigError, match=f"Mine has '{name}', which nothing calls or reads. Did you mean '{meant}'"):
        create_scheduler(misspelt, LIMITS)
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        create_scheduler(type("Derived", (misspelt,), {})(SchedulerOptions()), LIMITS)


def test_names_of_ones_own_are_free() -> None:
    own = {name: lambda *_: None for name in ("lines", "level", "admits", "on_page", "_on_serve", "victims", "tenants")}
    create_scheduler(type("Mine", (FcfsPolicy,), own), LIMITS)
