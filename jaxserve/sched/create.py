"""The registry of policies, and the way from a name in a config, or an object from a notebook, to a scheduler."""

import dataclasses
import difflib
import inspect
import time
from collections.abc import Callable, Mapping
from typing import cast

from jaxserve.errors import ConfigError
from jaxserve.sched.base import Scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.lengths import DEFAULT_LENGTHS, LengthPredictor
from jaxserve.sched.loading import SlotStore
from jaxserve.sched.loading_scheduler import LoadingScheduler
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import Limits
from jaxserve.sched.policy import Policy
from jaxserve.values.registry import Registry, check_complete

SchedulerFactory = Callable[[Limits, SchedulerOptions], Scheduler]

SCHEDULERS: Registry[type[Policy] | Policy | SchedulerFactory | Scheduler] = Registry(
    "scheduler",
    "jaxserve.schedulers",
    {
        "fcfs": "jaxserve.sched.policies:FcfsPolicy",
        "priority": "jaxserve.sched.policies:PriorityPolicy",
        "preemptive": "jaxserve.sched.policies:PreemptivePolicy",
        "sjf": "jaxserve.sched.policies:SjfPolicy",
        "fair": "jaxserve.sched.policies:FairPolicy",
        "slo": "jaxserve.sched.policies:SloPolicy",
    },
)
"""What `sched.policy` can name: the built-in policies, and the entry points of the group `jaxserve.schedulers`."""

_SCHEDULER_METHODS = ("add", "abort", "schedule", "commit", "has_work")  # of the protocol


def create_scheduler(
    policy: str | type[Policy] | Policy | SchedulerFactory | Scheduler,
    limits: Limits,
    *,
    options: SchedulerOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
    store: SlotStore | None = None,
) -> Scheduler:
    """Builds the scheduler that a config or a notebook asks for.

    Args:
      policy: a name (see `SCHEDULERS.names()`), `package.module:Name`, `./file.py:Name`, the two last also with
        parameters of a policy (`package.module:Name?quantum=32`), or the thing itself: a Policy class or object, a
        scheduler class or any function (called with `limits` and `SchedulerOptions`), or a finished scheduler (returned
        as it is).
      limits: of the runner.
      options: None takes the defaults. A policy object keeps those that it was made with; these are then only for the
        mechanism around it, but for `lengths`, which both use: that of the object, unless it has the default.
      clock: monotonic seconds; must be the clock that stamps `Request.arrival_s`.
      store: where host slots are filled from and written to; only for policies, and a device with such slots.

    Raises:
      ConfigError: nothing has this name, or what was found is no scheduler or policy; or `store` is given without
        slots, without a prefix cache or with another scheduler; or a policy object and `options` name two predictors.
      CapacityError: the buckets cannot hold all rows.
    """
    if options is None:
        options = SchedulerOptions()
    found = find_scheduler(policy)
    if isinstance(found, type) and issubclass(found, Policy):
        found = _make_policy(found, policy, options)
    if isinstance(found, Policy):
        options = dataclasses.replace(options, lengths=_one_predictor(found, options))
        if store is not None:
            if not limits.slots.num_slots or not options.prefix_caching:
                raise ConfigError(
                    f"a store of pages is given, with {limits.slots.num_slots} slots of host memory and prefix_caching "
                    f"{options.prefix_caching}, but it fills slots, whose pages the prefix cache finds; set "
                    "cache.host_bytes and cache.prefix_caching, or leave the store out"
                )
            return LoadingScheduler(limits, found, options, clock, store)
        return ContinuousScheduler(limits, found, options, clock)
    if store is not None:
        raise ConfigError(
            f"store.kind is set, but the scheduler {policy!r:.120} is none of jaxserve's, and would have to fill slots "
            "by itself; leave store.kind out, or give a policy"
        )
    if isinstance(found, type) or (callable(found) and not callable(getattr(found, "schedule", None))):
        found = cast(SchedulerFactory, found)(limits, options)
    missing = [name for name in _SCHEDULER_METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"the scheduler {policy!r:.120} gives a {type(found).__name__} without {', '.join(missing)}; a scheduler "
            f"has the methods {', '.join(_SCHEDULER_METHODS)}, a policy derives from jaxserve.sched.Policy"
        )
    return cast(Scheduler, found)


def find_scheduler(
    policy: str | type[Policy] | Policy | SchedulerFactory | Scheduler,
) -> type[Policy] | Policy | SchedulerFactory | Scheduler:
    """The object that `policy` names, without its parameters, checked as far as possible without a device.

    Raises ConfigError, also for parameters that a policy does not have.
    """
    given: dict[str, _Value] = {}
    if isinstance(policy, str):
        policy, given = split_parameters(policy)
    found = SCHEDULERS.get(policy)
    if isinstance(found, type) and issubclass(found, Policy):
        check_complete("policy", found)
        _check_spelling(found)
        _check_parameters(found, given)
        return found
    if isinstance(found, Policy):
        _check_spelling(type(found))
    if given:
        raise ConfigError(
            f"the scheduler {policy!r:.120} is no class of a policy, so it takes no parameters by name; leave out "
            f"{', '.join(given)}"
        )
    return found


def _check_spelling(found: type[Policy]) -> None:
    """A hook under a name that is nearly its own would never be called, and nothing would say so."""
    hooks = [name for name in vars(Policy) if not name.startswith("_")]
    for kind in found.__mro__[: found.__mro__.index(Policy)]:
        for name in vars(kind):
            if name.startswith("_") or name in hooks or len(name) < _LEAST_NAME:
                continue
            if close := difflib.get_close_matches(name, hooks, n=1, cutoff=_ALIKE):
                raise ConfigError(
                    f"the policy {found.__name__} has {name!r}, which nothing calls or reads. Did you mean "
                    f"{close[0]!r}? If not, begin its name with an underscore"
                )


_LEAST_NAME = 6  # in shorter names every letter counts: line and lines may both be meant
_ALIKE = 0.85
_Value = bool | int | float | str | None
_WORDS: Mapping[str, _Value] = {"true": True, "false": False, "null": None}


def split_parameters(name: str) -> tuple[str, dict[str, _Value]]:
    """'my:Mine?quantum=32&fast=true' in its two parts. Raises ConfigError for parameters that are not NAME=VALUE."""
    bare, mark, text = name.partition("?")
    parameters: dict[str, _Value] = {}
    for part in text.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in parameters:
            raise ConfigError(
                f"the policy {name!r:.120} has the parameter {part!r:.60}; write each once as NAME=VALUE, and & between"
            )
        parameters[key] = _parse_value(value)
    return bare, parameters


def _parse_value(text: str) -> _Value:
    """The number, true, false or null that it says; else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _own_parameters(found: type[Policy]) -> Mapping[str, inspect.Parameter]:
    """What the class takes beside `options`."""
    left_out = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(found).parameters
    return {name: one for name, one in parameters.items() if name != "options" and one.kind not in left_out}


def _check_parameters(found: type[Policy], given: Mapping[str, _Value]) -> None:
    own = _own_parameters(found)
    if strange := [name for name in given if name not in own]:
        close = difflib.get_close_matches(strange[0], own, n=1)
        raise ConfigError(
            f"the policy {found.__name__} has no parameter {strange[0]!r}; "
            + (f"it has {', '.join(own)}" if own else "it has none of its own")
            + (f". Did you mean {close[0]!r}?" if close else "")
        )
    if lacking := [name for name, one in own.items() if one.default is one.empty and name not in given]:
        raise ConfigError(
            f"the policy {found.__name__} needs its parameter {lacking[0]!r}; give it a default, write it behind the "
            f"name, as in {found.__module__}:{found.__name__}?{lacking[0]}=1, or give a finished policy. (The options "
            "of the scheduler go to a parameter of the name options.)"
        )
    for name, value in given.items():
        default = own[name].default
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r:.60} of the policy {found.__name__} must be true or false")
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{name}={value!r:.60} of the policy {found.__name__} must be a number")


def _make_policy(found: type[Policy], policy: object, options: SchedulerOptions) -> Policy:
    """Of a class that `find_scheduler` has checked. One without a parameter for the options gets them afterwards."""
    given = split_parameters(policy)[1] if isinstance(policy, str) else {}
    make = cast(Callable[..., Policy], found)
    parameters = inspect.signature(found).parameters
    if "options" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return make(options=options, **given)
    if any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
        return make(options, **given)
    made = make(**given)
    made.options = options
    return made


def _one_predictor(policy: Policy, options: SchedulerOptions) -> str | LengthPredictor | type[LengthPredictor]:
    """The `lengths` of the policy and of the mechanism around it, which learn and ask together."""
    own, given = policy.options.lengths, options.lengths
    if own in (given, DEFAULT_LENGTHS):
        return given
    if given == DEFAULT_LENGTHS:
        return own
    raise ConfigError(
        f"the policy {type(policy).__name__} was made with lengths={own!r:.120}, and sched.lengths is {given!r:.120}, "
        "but a scheduler has one predictor of lengths; give it in one of the two places"
    )


def uses_priority(scheduler: Scheduler) -> bool:
    """Whether `Request.priority` may change anything. True for a class from elsewhere, which may use it."""
    return not isinstance(scheduler, ContinuousScheduler) or scheduler.policy.uses_priority
