"""The demo model and its simulation: the same arrivals, a cost model fitted to the step log of that run."""

import dataclasses
import random
import statistics
import threading
import time
from pathlib import Path

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import AnyEngine
from jaxserve.lab.fitted import Fitted
from jaxserve.sched import SimRequest, simulate
from jaxserve.sched.record import read_header, read_records

SETTINGS = {
    "model.path": "demo",
    "sched.max_rows": 16,
    "sched.max_step_tokens": 128,
    "runtime.token_buckets": [32, 128],
    "runtime.row_buckets": [4, 16],
    "runtime.background_buckets": False,
    "runtime.compile_cache": None,
}


@dataclasses.dataclass(kw_only=True)
class Real:
    """What a run of the engine took, in seconds of its clock. Filled by `serve`."""

    start_s: float = 0.0
    requests: list[Request] = dataclasses.field(default_factory=list)
    first_s: dict[str, float] = dataclasses.field(default_factory=dict)
    last_s: dict[str, float] = dataclasses.field(default_factory=dict)


def serve(engine: AnyEngine, count: int, rate: float, seed: int) -> Real:
    """Sends requests at random times to an engine that has its thread; waits for all."""
    rng = random.Random(seed)
    real, done, due_s = Real(start_s=time.monotonic()), threading.Event(), 0.0
    for i in range(count):
        due_s += rng.expovariate(rate)
        prompt = [rng.randint(5, 200) for _ in range(rng.randint(10, 150))]
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(8, 60), ignore_eos=True, detokenize=False)
        time.sleep(max(0.0, real.start_s + due_s - time.monotonic()))
        request = engine.prepare(prompt, sampling, request_id=f"{seed}-{i}")

        def sink(update, name=request.request_id) -> None:
            real.first_s.setdefault(name, time.monotonic())
            if update.last:
                real.last_s[name] = time.monotonic()
                if len(real.last_s) == count:
                    done.set()

        real.requests.append(request)
        engine.submit(request, sink)
    assert done.wait(120.0), f"{count - len(real.last_s)} requests hang"
    return real


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rate"), [(120, 12.0), (300, 80.0)], ids=["half busy", "more than it can do"])
def test_throughput_and_ttft_of_the_demo_model(count: int, rate: float, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    engine = assemble(load_config(None, {**SETTINGS, "runtime.step_log": str(log)})).engine
    engine.start()
    try:
        serve(engine, 20, 30.0, seed=1)  # warms every cache
        real = serve(engine, count, rate, seed=2)
    finally:
        engine.stop()
    fitted = Fitted(read_records(log), skip=20)
    trace = []
    for request in real.requests:
        moved = dataclasses.replace(request, arrival_s=request.arrival_s - real.start_s)
        trace.append(SimRequest(request=moved, arrival_s=moved.arrival_s, output_len=moved.max_tokens))
    found = simulate("fcfs", trace, fitted, read_header(log).limits)
    simulated = {r.request_id: r for r in found.requests}

    real_end_s = max(real.last_s.values()) - real.start_s
    assert found.duration_s == pytest.approx(real_end_s, rel=0.10)
    real_ttft_s = [real.first_s[r.request_id] - r.arrival_s for r in real.requests]
    ttft_s = [
        (simulated[r.request_id].first_token_s or 0.0) - t.arrival_s for r, t in zip(real.requests, trace, strict=True)
    ]
    assert statistics.median(ttft_s) == pytest.approx(statistics.median(real_ttft_s), rel=0.15)
