"""`simulate` beside an event simulator of its own kind: written from docs/scheduling.md, it shares no code with it.

It knows first come, first served alone: one price for every step, rows, a budget of tokens, one step planned ahead. In
such worlds both must agree on the number of steps and of tokens, and on every time to the last bit.
"""

import collections
import math

import numpy as np
import pytest

from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.sched import Bucket, Limits

NUM_REQUESTS = 1000


class Job:
    """One request: what it still needs, and the times of its first and its last token."""

    def __init__(self, arrival_s: float, prompt: int, output: int) -> None:
        self.arrival_s = arrival_s
        self.prompt_left = prompt
        self.output_left = output
        self.first_s = self.last_s = math.nan


def run_events(jobs: list[Job], rows: int, budget: int, cost: StepCost) -> tuple[int, int]:
    """Runs the jobs, in the order of arrival, to their ends. Returns the number of steps, and that of their tokens."""
    arriving = collections.deque(jobs)
    waiting: collections.deque[Job] = collections.deque()
    running: list[Job] = []  # in the order of admission
    now_s = device_free_s = 0.0
    num_steps = num_tokens = 0
    flying: tuple[list[Job], float] | None = None  # launched by the last turn: who gets a token of it, and its end
    awaited: list[Job] = []
    while True:
        drawn, awaited = awaited, []
        while arriving and arriving[0].arrival_s <= now_s:
            waiting.append(arriving.popleft())
        drawing = [job for job in running if not job.prompt_left]
        left = budget - len(drawing)
        for job in running:
            if job.prompt_left and left:
                left -= (chunk := min(left, job.prompt_left))
                job.prompt_left -= chunk
                drawing += [job] * (not job.prompt_left)
        while waiting and left and len(running) < rows:
            running.append(job := waiting.popleft())
            left -= (chunk := min(left, job.prompt_left))
            job.prompt_left -= chunk
            drawing += [job] * (not job.prompt_left)
        for job in drawing:
            job.output_left -= 1
        running = [job for job in running if job.output_left]
        before, flying = flying, None
        launched_s = now_s
        if left < budget:
            num_steps, num_tokens = num_steps + 1, num_tokens + budget - left
            launched_s = now_s + cost.host_s
            device_free_s = max(launched_s, device_free_s) + cost.device_s
            flying = drawing, device_free_s
        for job in drawn:  # clients have a token once the loop has launched what it planned after it
            job.first_s = launched_s if math.isnan(job.first_s) else job.first_s
            job.last_s = launched_s
        if before is not None:
            awaited = before[0]
            now_s = max(launched_s, before[1]) + cost.commit_s
        elif flying is not None:
            now_s = launched_s
        elif arriving:
            now_s = arriving[0].arrival_s
        else:
            return num_steps, num_tokens


@pytest.mark.parametrize(
    ("rows", "budget", "load", "cost"),
    [
        pytest.param(1, 64, 0.8, StepCost(0.0, 0.01), id="one-row"),
        pytest.param(8, 64, 0.9, StepCost(0.001, 0.01, 0.002), id="device-bound"),
        pytest.param(16, 32, 0.7, StepCost(0.012, 0.007, 0.001), id="host-bound-short-of-tokens"),
        pytest.param(32, 256, 1.5, StepCost(0.002, 0.02, 0.0005), id="overloaded"),
    ],
)
def test_an_event_simulator_gives_the_same_times(rows: int, budget: int, load: float, cost: StepCost) -> None:
    rng = np.random.default_rng(rows)
    prompts = 1 + rng.geometric(1 / 40, NUM_REQUESTS)
    outputs = rng.geometric(1 / 12, NUM_REQUESTS)  # also answers of one token
    # Seconds of a request: its steps, shared by the rows, or its share of the tokens of a step if that is more.
    step_s = max(cost.host_s, cost.device_s) + cost.commit_s
    each_s = step_s * max((12 + 40 / budget) / rows, (12 + 40) / budget)
    arrivals = np.cumsum(rng.exponential(each_s / load, NUM_REQUESTS))
    facts = list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
    jobs = [Job(*fact) for fact in facts]
    num_steps, num_tokens = run_events(jobs, rows, budget, cost)

    limits = Limits(
        max_rows=rows,
        num_pages=100_000,
        page_size=16,
        max_model_len=2048,
        buckets=tuple(sorted((Bucket(rows, rows, True), Bucket(budget, rows, False)))),
    )
    shapes = [
        Shape(parts=(Part(number, prompt),), output_len=output, arrival_s=arrival_s)
        for number, (arrival_s, prompt, output) in enumerate(facts)
    ]
    found = simulate("fcfs", list(sim_requests(shapes, ClientOptions())), FixedCost(cost=cost), limits)
    assert (found.num_steps, found.tokens) == (num_steps, num_tokens)
    assert found.tokens == int((prompts + outputs - 1).sum()), "the first token comes with the prompt"
    times = {one.request_id: (one.first_token_s, one.last_token_s) for one in found.requests}
    assert times == {str(number): (job.first_s, job.last_s) for number, job in enumerate(jobs)}
    waits = [one for one in found.requests if (one.admitted_s or 0.0) - one.arrival_s > step_s]
    assert len(waits) > NUM_REQUESTS / 20, "a world in which nobody waits proves little"
