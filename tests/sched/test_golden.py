"""The plans of every policy, as they were when somebody last looked: see `golden_plans`."""

import json

import pytest
from golden_plans import FOLDER, OPTIONS, golden_of, plans_of
from sched_world import POLICIES

from jaxserve.sched import SCHEDULERS, StepPlan


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_the_golden_ones(policy: str) -> None:
    expected = json.loads((FOLDER / f"{policy}.json").read_text())
    assert golden_of(policy) == expected, "if this is meant: python tests/sched/golden_plans.py"


def test_every_built_in_policy_has_one() -> None:
    assert set(SCHEDULERS.names()[: len(POLICIES)]) == set(POLICIES)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(POLICIES)


def test_the_trace_tells_policies_apart() -> None:
    seen = {policy: tuple(json.loads((FOLDER / f"{policy}.json").read_text())["blind"]) for policy in POLICIES}
    assert len(set(seen.values())) == len(POLICIES), "two policies plan the same"


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_survive_their_json(policy: str) -> None:
    for plan in plans_of(policy, OPTIONS["blind"]):
        assert StepPlan.from_json(plan.to_json()) == plan
