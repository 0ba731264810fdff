"""Golden traces: what each policy plans for one small trace, step by step, in a file that a person can read.

There is one scenario for all policies, made so that they differ: owners, tenants, classes, long and short jobs, a
cache that runs dry, an abort, a stop.

    python tests/sched/golden_plans.py        writes golden/*.json again, after a change that is meant
"""

import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # when run as a script

from sched_world import BLIND, POLICIES

from jaxserve.api import Request
from jaxserve.sched import InFlight, SchedulerOptions, StepPlan, create_scheduler
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request

FOLDER = Path(__file__).parent / "golden"
LIMITS = make_limits(max_rows=3, num_pages=14, page_size=2, max_model_len=24, token_buckets=(4, 8))
OPTIONS = {"blind": BLIND, "ahead": SchedulerOptions()}
STEP_S = 0.25


def requests() -> list[tuple[int, Request]]:
    """(turn of the loop, request): who comes when."""
    made = [
        (0, "a-long", [1, 2, 3, 4, 5, 6], 10, 2, "a"),
        (0, "a-again", [1, 2, 3, 4, 9], 6, 2, "a"),
        (0, "a-third", [7, 7, 7, 7, 7, 7, 7], 8, 1, "a"),
        (1, "b-short", [5], 3, 0, "b"),
        (3, "b-cut", [6, 6, 6], 12, 1, "b"),
        (5, "c-urgent", [8, 9], 4, -3, "c"),
        (7, "c-late", [1, 2, 3, 4], 5, 0, "c"),
        (7, "a-last", [3], 2, 3, "a"),
    ]
    return [
        (
            turn,
            make_request(
                name,
                prompt,
                max_tokens,
                priority=level,
                tenant=tenant,
                owner="x" if tenant == "a" else "y",
                arrival_s=turn * STEP_S,
                stop=[200],
            ),
        )
        for turn, name, prompt, max_tokens, level, tenant in made
    ]


def plans_of(policy: str, options: SchedulerOptions) -> list[StepPlan]:
    """Runs the trace as the engine does, one step in flight."""
    clock = ManualClock()
    scheduler = create_scheduler(policy, LIMITS, options=options, clock=clock)
    runner = FakeRunner(LIMITS, forced={("a-third", 0): {4: 200}})
    coming = collections.deque(requests())
    flights: collections.deque[tuple[StepPlan, InFlight]] = collections.deque()
    turn = 0
    while coming or scheduler.has_work() or flights:
        while coming and coming[0][0] <= turn:
            scheduler.add(coming.popleft()[1])
        if turn == 9:
            scheduler.abort("b-cut")
        plan = scheduler.schedule()
        if plan is not None:
            flights.append((plan, runner.dispatch(plan)))
        if flights and (plan is None or len(flights) == 2):
            done, handle = flights.popleft()
            scheduler.commit(done, handle.result())
        clock.advance(STEP_S)
        turn += 1
    return runner.plans


def short_form(plan: StepPlan) -> str:
    """One line: who gets a row, who decodes at which position, pieces of prompts, pages, rows that are given up."""
    parts = [f"{plan.step_id}:"]
    parts += [f"free {row}" for row in plan.freed_rows]
    parts += [f"row {s.row}={s.request_id}" for s in plan.setups]
    parts += [f"pages {g.row}[{g.first}]={','.join(map(str, g.page_ids))}" for g in plan.grants]
    parts += [f"decode {r}@{p}" for r, p in zip(plan.decode_rows, plan.decode_positions, strict=True)]
    parts += [f"chunk {c.row}@{c.start}+{len(c.token_ids)}{'!' if c.sample else ''}" for c in plan.chunks]
    return " ".join(parts)


def golden_of(policy: str) -> dict[str, list[str]]:
    """The content of a golden file."""
    return {name: [short_form(plan) for plan in plans_of(policy, options)] for name, options in OPTIONS.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for policy in POLICIES:
        (FOLDER / f"{policy}.json").write_text(json.dumps(golden_of(policy), indent=1) + "\n")


if __name__ == "__main__":
    main()
