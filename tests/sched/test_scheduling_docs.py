"""docs/scheduling.md: its code runs as it stands, and every name that it should know of is in it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from sched_world import POLICIES

from jaxserve.sched import SCHEDULERS, Policy, Sequence, SequenceState, StepPlan
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.pages import PagePool
from jaxserve.testing import make_request

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/scheduling.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_code_runs_from_top_to_bottom() -> None:
    names: dict[str, Any] = {"__name__": "scheduling"}
    for block in BLOCKS:
        exec(block, names)
    assert {"ShortPrompts", "FewestRows", "order", "ttft_s"} <= names.keys(), "each block was one of these"
    # With ageing, as its docstring says: 100 tokens are a second.
    policy = names["ShortPrompts"](SchedulerOptions())
    early, late = (
        Sequence(make_request("r", [1] * length, 1, arrival_s=at), 0, 0, 300) for length, at in ((200, 0.0), (50, 1.4))
    )
    assert policy.key(late, 0.0) < policy.key(early, 0.0)
    late.request = dataclasses.replace(late.request, arrival_s=1.6)
    assert policy.key(early, 0.0) < policy.key(late, 0.0)


def test_every_decision_hook_option_and_policy_is_described() -> None:
    rows = re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE)
    hooks = [name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")]
    assert sorted(rows) == sorted(hooks)
    for name in ("dynamic_order", "preemptive", "uses_priority"):
        assert f"`{name} = True`" in TEXT
    named = {name for option in dataclasses.fields(SchedulerOptions) if (name := f"`{option.name}`") in TEXT}
    assert len(named) == len(dataclasses.fields(SchedulerOptions))
    assert set(SCHEDULERS.names()[: len(POLICIES)]) == set(POLICIES)
    for policy in POLICIES:
        assert f"| `{policy}` |" in TEXT
        assert f"- **{policy}**" in TEXT
    for field in dataclasses.fields(StepPlan):
        assert field.name == "step_id" or re.search(rf"^\| .*`{field.name}`", TEXT, re.MULTILINE), field.name


def test_what_a_policy_can_look_at_is_there() -> None:
    section = TEXT.split("**What a policy can look at.**")[1].split("###")[0]
    for name in ("num_missing", "num_own", "refill_cost", "place"):
        assert f"`{name}(" in section
        assert name in vars(SequenceMemory)
    for name in re.findall(r"`pool\.(\w+)`", section):
        assert name in vars(PagePool) or name in vars(PagePool(1))
    seq = Sequence(make_request("r", [1], 1), 0, 0, 2)
    for name in ("request", "prompt_len", "num_outputs", "num_cached", "state"):
        assert f"`{name}`" in section
        getattr(seq, name)
    assert seq.state is SequenceState.WAITING


def test_every_file_that_it_names_exists() -> None:
    folders = [ROOT, ROOT / "jaxserve", ROOT / "tests/sched", ROOT / "docs"]
    for path in re.findall(r"`?((?:[\w-]+/)*[\w-]+\.py)\b", TEXT) + re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", TEXT):
        assert path == "my.py" or any((folder / path).exists() for folder in folders), path
