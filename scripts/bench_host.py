"""What the host costs a decode step, and how long a device would wait for it.

    python scripts/bench_host.py [--rows 1 16 64 256] [--device-ms 2 5 10] [--width 1 4] [--json benchmarks/host.json]

The loop, the scheduler, packing, text and streams are the real ones; the device is a clock. `dispatch` packs the step
as the runner does and notes when it was launched; `result` sleeps until the step would be over. So the device's time
line is known exactly:

    begin(N+1) = max(launch(N+1), end(N))      idle(N+1) = begin(N+1) - end(N)      end = begin + device_ms

`idle` is the host time that the device waits for: 0 as long as a turn of the loop fits into a step. `turn` is the time
of the loop's thread in a turn, less the sleep: what `idle` would be on a device that takes no time. Clients are
`streams` (one asyncio task for each request, in this process, on a thread of its own, each reading text) or `none`
(a sink that returns at once). `churn` ends a request every few steps and sends another: prompts, admissions and
first tokens are then among the steps. Only steps of decode rows alone are counted, whatever comes between them.

With a `width` rows draw that many tokens of a step or fewer, as with drafts of which some are right.

A second, slower pass times the parts of a turn one by one.

`--model` runs a real model besides: 16 streams of the random Llama with 125 M parameters of `bench_engine.py`. What a
device does is then not known exactly, so its idle time is bounded from above: where a step has ended before the next
one is launched, all the time since the loop had the step before counts as idle.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_engine import MODEL
from clock_device import WARM_STEPS, Case, Clients, ClockDevice, make_engine
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.assemble import build_devices
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.interpreter import Interpreter
from jaxserve.models import resolve_model_path
from jaxserve.progress import Quiet
from jaxserve.runtime import pack as packing
from jaxserve.runtime.runner import DeviceInFlight, DeviceRunner
from jaxserve.sched import StepPlan, StepResult, create_scheduler
from jaxserve.text import Tokenizer, load_tokenizer
from jaxserve.text.detokenizer import Detokenizer


def run(case: Case, tokenizer: Tokenizer) -> dict[str, float]:
    """Runs the loop on its own thread, as a server does; returns the figures of the steps after the first ones."""
    engine, device, max_tokens = make_engine(case, tokenizer)
    clients = Clients(engine, case, tokenizer, max_tokens)
    engine.start()
    clients.start()
    while sum(device.is_decode[-WARM_STEPS:]) < (1 if case.churn else WARM_STEPS) or len(device.idle_s) < WARM_STEPS:
        time.sleep(0.02)
    first = len(device.idle_s)
    slept_s, begin_s, read = device.slept_s, time.perf_counter(), clients.num_read
    while len(device.idle_s) < first + case.steps:
        time.sleep(0.02)
    last = len(device.idle_s)
    slept_s, wall_s, read = device.slept_s - slept_s, time.perf_counter() - begin_s, clients.num_read - read
    clients.stop()
    engine.stop()
    clients.join()
    assert engine.failure is None, engine.failure
    assert read > 0, "the clients read nothing"
    steps = engine.stats[0].steps()[-(last - first) :]
    turns_ms = [1e3 * (s.schedule_s + s.dispatch_s + s.commit_s) for s in steps if not s.chunks]
    idle_ms = [
        1e3 * idle
        for idle, decodes in zip(device.idle_s[first:last], device.is_decode[first:last], strict=True)
        if decodes
    ]
    return {
        "idle_p50_ms": quantile(idle_ms, 0.5),
        "idle_p99_ms": quantile(idle_ms, 0.99),
        "idle_max_ms": max(idle_ms),
        "idle_share": sum(device.idle_s[first:last]) / wall_s,
        "turn_p50_ms": quantile(turns_ms, 0.5),
        "turn_p99_ms": quantile(turns_ms, 0.99),
        "step_ms": 1e3 * wall_s / (last - first),
        "decode_steps": len(idle_ms),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- a real model ----------------------------------------------------------------------------------------------------


class WatchedRunner:
    """A real runner; notes for how long its device can have been idle at most. Mutated by the loop's thread."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.limits = runner.limits
        self.idle_s: list[float] = []
        self.result_s = time.perf_counter()  # when the latest result was had: the step after it had not ended before
        self._runner = runner
        self._newest: _WatchedFlight | None = None

    def dispatch(self, plan: StepPlan) -> "_WatchedFlight":
        flight = self._runner.dispatch(plan)
        now_s = time.perf_counter()
        late = self._newest is not None and self._newest.is_ready()
        self.idle_s.append(now_s - self.result_s if late else 0.0)
        self._newest = _WatchedFlight(self, flight)
        return self._newest


class _WatchedFlight:
    def __init__(self, watched: WatchedRunner, flight: DeviceInFlight) -> None:
        self._watched, self._flight = watched, flight

    def is_ready(self) -> bool:
        return all(part._output.token_ids.is_ready() for part in self._flight._parts)  # pyright: ignore

    def result(self) -> StepResult:
        result = self._flight.result()
        self._watched.result_s = time.perf_counter()
        return result


def run_model(rows: int, num_tokens: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Figures of a real model that decodes `rows` streams with text."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        overrides = {
            "model.path": directory,
            "model.random_weights": True,
            "model.skip_tokenizer": True,
            "model.dtype": "float32",
            "cache.num_pages": 512,
            "sched.max_rows": rows,
            "runtime.row_buckets": [rows],
            "runtime.token_buckets": [512],
        }
        runner = build_devices(load_config(None, overrides).config, Quiet())[0].runner
    assert isinstance(runner, DeviceRunner)
    watched = WatchedRunner(runner)
    limits = runner.limits
    engine = Engine(
        runner=watched,
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=tokenizer,
        model=ModelInfo(
            name="125m", vocab_size=MODEL["vocab_size"], max_model_len=limits.max_model_len, eos_token_ids=()
        ),
        observers=[Interpreter()],
    )
    case = Case(rows=rows, device_ms=0.0, clients="streams", churn=False, steps=num_tokens)
    clients = Clients(engine, case, tokenizer, num_tokens)
    engine.start()
    clients.start()
    clients.join()
    engine.stop()
    # The last steps have fewer rows, the first ones are of prompts.
    steps = [s for s in engine.stats[0].steps() if not s.chunks and s.decode_rows == rows][5:-1]
    idle_s = watched.idle_s[-len(steps) - 1 : -1]
    return {
        "step_p50_ms": 1e3 * statistics.median(b.time_s - a.time_s for a, b in itertools.pairwise(steps)),
        "schedule_p50_ms": 1e3 * statistics.median(s.schedule_s for s in steps),
        "dispatch_p50_ms": 1e3 * statistics.median(s.dispatch_s for s in steps),
        "commit_p50_ms": 1e3 * statistics.median(s.commit_s for s in steps),
        "wait_p50_ms": 1e3 * statistics.median(s.wait_s for s in steps),
        "idle_share_at_most": sum(idle_s) / (steps[-1].time_s - steps[0].time_s),
        "late_steps": sum(idle > 0 for idle in idle_s) / len(idle_s),
    }


# ---- the parts of a turn ---------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the time spent in functions that it wraps, by name."""

    def __init__(self) -> None:
        self.total_s: dict[str, float] = {}

    def wrap(self, owner: object, name: str, part: str) -> Callable[[], None]:
        """Times `owner.name` from now on. Returns what undoes it."""
        inner = getattr(owner, name)
        total = self.total_s
        total.setdefault(part, 0.0)

        @functools.wraps(inner)
        def timed(*args, **kwargs):
            begin_s = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                total[part] += time.perf_counter() - begin_s

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, inner)


def time_parts(case: Case, tokenizer: Tokenizer) -> dict[str, float]:
    """Microseconds a step by part, on one thread. A watch costs a little: parts called for each token look bigger."""
    engine, device, max_tokens = make_engine(dataclasses.replace(case, device_ms=0.0), tokenizer)
    clients = Clients(engine, dataclasses.replace(case, clients="none", churn=False), tokenizer, max_tokens)
    clients.start()
    for _ in range(WARM_STEPS + 2 * case.rows // 8):
        engine.step()
    watch = Stopwatch()
    undo = watch_parts(watch, engine, device)
    begin_s = time.perf_counter()
    steps = min(case.steps, 300)
    for _ in range(steps):
        engine.step()
    wall_s = time.perf_counter() - begin_s
    for restore in undo:
        restore()
    engine.stop()
    total = {part: 1e6 * seconds / steps for part, seconds in watch.total_s.items()}
    total["turn"] = 1e6 * wall_s / steps
    return total


def watch_parts(watch: Stopwatch, engine: Engine, device: ClockDevice) -> list[Callable[[], None]]:
    return [
        watch.wrap(engine._scheduler, "schedule", "schedule"),
        watch.wrap(engine._masks, "put", "masks"),
        watch.wrap(packing, "pack", "pack"),
        watch.wrap(device, "dispatch", "dispatch with pack"),
        watch.wrap(engine._scheduler, "commit", "commit"),
        watch.wrap(Detokenizer, "push", "text"),
        watch.wrap(engine._live, "deliver", "deliver with text"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--device-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0])
    parser.add_argument("--clients", nargs="+", default=["none", "streams"], choices=["none", "streams"])
    parser.add_argument("--churn", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--read-us", type=float, nargs="+", default=[0.0], help="of Python that a stream's reader runs")
    parser.add_argument("--width", type=int, nargs="+", default=[1], help="tokens that a row feeds in a step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--model", action="store_true", help="run the 125 M model, too")
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    cases = [
        Case(
            rows=rows,
            device_ms=ms,
            clients=clients,
            churn=bool(churn),
            steps=args.steps,
            read_us=read_us,
            width=width,
        )
        for rows in args.rows
        for ms in args.device_ms
        for clients in args.clients
        for churn in args.churn
        for width in args.width
        for read_us in (args.read_us if clients == "streams" else [0.0])
    ]
    console, results = Console(stderr=True, width=140), {}
    table = Table(title="milliseconds a decode step")
    for heading in ("load", "idle p50", "p99", "max", "share", "turn p50", "p99", "step"):
        table.add_column(heading, justify="left" if heading == "load" else "right")
    for case in cases:
        runs = []
        for _ in range(args.repeats):
            runs.append(run(case, tokenizer))
            gc.collect()
        found = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        results[case.name] = dataclasses.asdict(case) | found
        names = ("idle_p50_ms", "idle_p99_ms", "idle_max_ms", "idle_share", "turn_p50_ms", "turn_p99_ms", "step_ms")
        table.add_row(case.name, *(f"{found[n]:.1%}" if n == "idle_share" else f"{found[n]:.3f}" for n in names))
    console.print(table)
    parts = {}
    if not args.no_parts:
        for rows in args.rows:
            case = Case(rows=rows, device_ms=0.0, clients="none", churn=False, steps=args.steps)
            parts[rows] = time_parts(case, tokenizer)
        table = Table(title="microseconds a step, by part (with the watch)")
        table.add_column("part")
        for rows in args.rows:
            table.add_column(f"{rows} rows", justify="right")
        for part in next(iter(parts.values())):
            table.add_row(part, *(f"{parts[rows][part]:.0f}" for rows in args.rows))
        console.print(table)
    model = {}
    if args.model:
        model = run_model(16, 160, tokenizer)
        console.print("125 M parameters, 16 streams:", {name: round(value, 4) for name, value in model.items()})
    if args.json:
        write_record(
            args.json, {"cases": results, "parts_us": parts, "model_125m_16_streams": model}, repeats=args.repeats
        )


if __name__ == "__main__":
    main()
