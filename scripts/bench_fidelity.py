"""How close the simulator comes to the engine: the demo model serves a trace, then the same trace is simulated.

The cost model is fitted to the step log of another run of the same engine, half of it served before and half after the
run that is judged, so that nothing of that run is known to it and both see the machine as it is then.

    python scripts/bench_fidelity.py [--rounds 5] [--json FILE]
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, RequestOptions, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import AnyEngine, Update
from jaxserve.lab import SimRequest, simulate
from jaxserve.lab.simulation.fitted import Fitted
from jaxserve.sched.record import StepRecord, read_header, read_records

SETTINGS = {
    "model.path": "demo",
    "sched.max_rows": 16,
    "sched.max_step_tokens": 128,
    "runtime.token_buckets": [32, 128],
    "runtime.row_buckets": [4, 16],
    "runtime.background_buckets": False,
}
LOADS = {"half busy": (120, 12.0), "more than it can do": (300, 80.0)}  # requests, and how many come in a second
PATIENCE_S = 300.0


@dataclasses.dataclass(kw_only=True)
class Run:
    """What a run of the engine took, in seconds of its clock. Filled by `serve`."""

    begin_s: float = 0.0
    requests: list[Request] = dataclasses.field(default_factory=list)
    first_s: dict[str, float] = dataclasses.field(default_factory=dict)
    last_s: dict[str, float] = dataclasses.field(default_factory=dict)


def main() -> int:
    args = _parse()
    results = [
        measure(name, count, rate, seed)
        for seed, (name, (count, rate)) in itertools.product(range(args.rounds), LOADS.items())
    ]
    table = Table(title="simulated / real")
    for column in ("load", "throughput", "its range", "median TTFT", "its range", "error of the fit"):
        table.add_column(column, justify="right")
    for name in LOADS:
        mine = [r for r in results if r["load"] == name]
        row = [name]
        for key in ("throughput_ratio", "ttft_ratio"):
            ratios = sorted(float(r[key]) for r in mine)
            row += [f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f} - {ratios[-1]:.3f}"]
        table.add_row(*row, f"{statistics.median(float(r['fit_error']) for r in mine):.1%}")
    Console().print(table)
    if args.json:
        write_record(args.json, results, settings=SETTINGS)
    return 0


def measure(load: str, count: int, rate: float, seed: int) -> dict[str, float | str]:
    """One run of the engine and of the simulator."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        engine = assemble(load_config(None, {**SETTINGS, "runtime.step_log": str(log)})).engine
        engine.start()
        try:
            serve(engine, f"{seed}-warm", 20, 30.0)  # every cache of the machine is filled
            serve(engine, f"{seed}-before", count // 2, rate)
            real = serve(engine, f"{seed}-real", count, rate)
            serve(engine, f"{seed}-after", count // 2, rate)
        finally:
            engine.stop()
        limits = read_header(log).limits
        fitted = Fitted(_others(read_records(log), f"{seed}-real"))
    trace = []
    for request in real.requests:
        moved = dataclasses.replace(request, arrival_s=request.arrival_s - real.begin_s)
        trace.append(SimRequest(request=moved, arrival_s=moved.arrival_s, output_len=moved.max_tokens))
    found = simulate("fcfs", trace, fitted, limits)
    real_s = max(real.last_s.values()) - real.begin_s
    real_ttft = statistics.median(real.first_s[r.request_id] - r.arrival_s for r in real.requests)
    ttft = statistics.median(r.first_token_s - r.arrival_s for r in found.requests if r.first_token_s is not None)
    return {
        "load": load,
        "requests": count,
        "rate": rate,
        "real_s": real_s,
        "simulated_s": found.duration_s,
        "throughput_ratio": real_s / found.duration_s,
        "real_ttft_p50_ms": 1e3 * real_ttft,
        "simulated_ttft_p50_ms": 1e3 * ttft,
        "ttft_ratio": ttft / real_ttft,
        "fit_error": fitted.errors["device"]["decode"].median,
    }


def serve(engine: AnyEngine, name: str, count: int, rate: float) -> Run:
    """Sends requests at random times to an engine that has its thread; waits for all."""
    rng = random.Random(name)
    run, done, due_s = Run(begin_s=time.monotonic()), threading.Event(), 0.0
    for i in range(count):
        due_s += rng.expovariate(rate)
        prompt = [rng.randint(5, 200) for _ in range(rng.randint(10, 150))]
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(8, 60), ignore_eos=True, detokenize=False)
        time.sleep(max(0.0, run.begin_s + due_s - time.monotonic()))
        request = engine.prepare(prompt, sampling, RequestOptions(request_id=f"{name}/{i}"))

        def sink(update: Update, request_id: str = request.request_id) -> None:
            run.first_s.setdefault(request_id, time.monotonic())
            if update.last:
                run.last_s[request_id] = time.monotonic()
                if len(run.last_s) == count:
                    done.set()

        run.requests.append(request)
        engine.submit(request, sink)
    if not done.wait(PATIENCE_S):
        sys.exit(f"{count - len(run.last_s)} of {count} requests have not ended in {PATIENCE_S:.0f} s")
    return run


def _others(records: Iterable[StepRecord], name: str) -> Iterator[StepRecord]:
    """Steps of other runs than `name`. A step belongs to the run whose request began last."""
    current = ""
    for record in records:
        if record.plan.setups:
            current = record.plan.setups[-1].request_id.split("/")[0]
        if not current.endswith("-warm") and current != name:
            yield record


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares the simulator with the engine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
