"""The whole engine and the simulator, fed the same arrivals step by step: one sequence of plans.

How close the times of both come is a measurement: `scripts/bench_fidelity.py`.
"""

import dataclasses
import random
from pathlib import Path

import pytest
from whole import FIXTURES, POOL, SMALL

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.lab import SimRequest, simulate
from jaxserve.lab.simulation.simulate import FixedCost, StepCost
from jaxserve.sched import SchedulerOptions
from jaxserve.sched.record import read_header, read_records

AGEING_S = 1e9  # the clocks differ, and no order may follow from them
# No plan follows from what a model computes, so it is the one that other tests compile.
SETTINGS = {
    "model.path": str(FIXTURES / "llama"),
    **SMALL,
    **{name.replace("__", "."): value for name, value in POOL.items()},
    "sched.ageing_s": AGEING_S,
}


@pytest.mark.slow  # of a fake device: tests/sched/test_simulate.py
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("policy", ["sjf", "fair"])
def test_plans_are_the_same(policy: str, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    overrides = {**SETTINGS, "sched.policy": policy, "runtime.step_log": str(log)}
    engine = assemble(load_config(None, overrides)).engine
    rng = random.Random(policy)
    shared = [rng.randint(5, 127) for _ in range(40)]
    turn, trace = 0, []
    for i in range(40):
        for _ in range(rng.choice([0, 0, 1, 6])):  # arrivals together, one by one, and after a while
            turn += engine.step()
        prompt = shared[: rng.choice([0, 20, 40])] + [rng.randint(5, 127) for _ in range(rng.randint(1, 50))]
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 20), ignore_eos=True, detokenize=False)
        request = engine.prepare(prompt, sampling, RequestOptions(request_id=f"r{i}", tenant=f"t{i % 3}"))
        engine.submit(request, lambda update: None)
        moved = dataclasses.replace(request, arrival_s=float(turn))
        trace.append(SimRequest(request=moved, arrival_s=moved.arrival_s, output_len=moved.max_tokens))
    engine.run_until_idle()
    engine.stop()
    plans = [record.plan for record in read_records(log)]

    turns = FixedCost(cost=StepCost(1.0, 0.0))  # the clock counts turns, as the arrivals do
    limits, options = read_header(log).limits, SchedulerOptions(ageing_s=AGEING_S)
    found = simulate(policy, trace, turns, limits, options=options, keep_plans=True)
    assert list(found.plans) == plans
    assert len(plans) > 60 and len({plan.num_rows for plan in plans}) > 2
