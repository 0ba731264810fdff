"""The cost of a step log to the loop: python scripts/bench_step_log.py [--rows 256] [--device-ms 5]

Two engines decode the same steady batch on a runner that only waits; one of them writes a log. They take turns in
blocks, so that other work of the machine disturbs both. Waiting gives the interpreter away, as waiting for a device
does, and that is when the lines are made. With --device-ms 0 nothing waits, and the whole work of a line is in the way.
Needs no device.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.engine.step_log import StepLogWriter
from jaxserve.sched import Bucket, Limits, StepPlan, StepResult, create_scheduler
from jaxserve.sched.record import LogHeader
from jaxserve.testing import make_request

BLOCK = 25  # turns
WARM_UP = 100


class _Waiting:
    """A runner whose every step takes `step_s`, from its launch or from the end of the step before."""

    def __init__(self, limits: Limits, step_s: float) -> None:
        self.limits = limits
        self._step_s = step_s
        self._free_s = 0.0

    def dispatch(self, plan: StepPlan) -> "_Answer":
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        return _Answer(len(plan.sampled_rows), self._free_s)


class _Answer:
    def __init__(self, num_tokens: int, ready_s: float) -> None:
        self._num_tokens = num_tokens
        self._ready_s = ready_s

    def result(self) -> StepResult:
        if (left_s := self._ready_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return StepResult(token_ids=[1000 + i for i in range(self._num_tokens)])


def main() -> int:
    """Measures and prints."""
    args = _parse()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        (bare, _), (logged, log) = _engine(args, None), _engine(args, path)
        gc.disable()
        wall_us: dict[bool, list[float]] = {False: [], True: []}
        cpu_us: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * args.blocks):
            is_logged = bool((number + number // 2) % 2)  # off on on off off on on …
            wall, cpu = _block(logged, log) if is_logged else _block(bare, None)
            wall_us[is_logged].append(wall)
            cpu_us[is_logged].append(cpu)
        logged.stop()
        bare.stop()
        num_steps = args.blocks * BLOCK + WARM_UP
        print(f"{args.rows} rows, steps of {args.device_ms:g} ms, {args.blocks} blocks of {BLOCK} turns each way:")
        for name, found in (("a turn", wall_us), ("processor time a turn", cpu_us)):
            off, on = (statistics.median(found[key]) for key in (False, True))
            print(f"  {name}: {off:.0f} us without a log, {on:.0f} us with one: {on - off:+.0f} us")
        print(f"  {path.stat().st_size / num_steps:,.0f} bytes a step")
    return 0


def _block(engine: Engine, log: StepLogWriter | None) -> tuple[float, float]:
    """Microseconds a turn: on the clock, and of all threads' processor time."""
    if log is not None:
        _settle(log)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        engine.step()
    wall = time.perf_counter() - wall
    if log is not None:
        _settle(log)  # lines that are still to be made are paid here, not by the next block
    return 1e6 * wall / BLOCK, 1e6 * (time.process_time() - cpu) / BLOCK


def _settle(log: StepLogWriter) -> None:
    while not log._queue.empty():
        time.sleep(0.001)


def _engine(args: argparse.Namespace, path: Path | None) -> tuple[Engine, StepLogWriter | None]:
    total = args.blocks * BLOCK + WARM_UP + 16
    limits = Limits(
        max_rows=args.rows,
        num_pages=args.rows * (total // 16 + 3),
        page_size=16,
        max_model_len=total + 16,
        buckets=(Bucket(args.rows, args.rows, True), Bucket(max(8192, args.rows), args.rows, False)),
    )
    header = LogHeader(limits=limits, model="none", policy="fcfs", vocab_size=32000)
    log = None if path is None else StepLogWriter(path, header, start_s=time.monotonic())
    engine = Engine(
        runner=_Waiting(limits, args.device_ms / 1e3),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=None,
        model=ModelInfo(
            name="none", vocab_size=32000, max_model_len=total + 16, eos_token_ids=(), max_pool_tokens=1 << 30
        ),
        observers=[] if log is None else [log],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=total, detokenize=False, ignore_eos=True)
    for i in range(args.rows):
        engine.submit(make_request(f"r{i}", range(i, i + 8), total, sampling=sampling), _ignore)
    for _ in range(WARM_UP):
        engine.step()
    return engine, log


def _ignore(update: Update) -> None: ...


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the step log of the loop.")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--device-ms", type=float, default=5.0, help="milliseconds of a step; 0: nothing waits")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of turns each way")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
