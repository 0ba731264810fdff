"""How far a step has come: launched, committed, delivered.

Owns what the loop keeps of a step between its turns. Refuses to move it on: the loop does (`engine`).
"""

from typing import NamedTuple

from jaxserve.sched.base import InFlight
from jaxserve.sched.plan import Limits, StepPlan, StepResult


class Launched(NamedTuple):
    """A step that the device has, and when its planning began and ended and its launch ended."""

    plan: StepPlan
    limits: Limits  # that it was made for
    handle: InFlight
    begun_s: float
    planned_s: float
    launched_s: float


class Committed(NamedTuple):
    """A step whose tokens the scheduler has and its clients have not, and when the loop asked for it and had it."""

    step: Launched
    result: StepResult
    num_events: int
    asked_s: float
    committed_s: float
