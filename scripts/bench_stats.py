"""The cost of the statistics to the loop: python scripts/bench_stats.py [--rows 256]

The figure is microseconds a step. Two loops run the same steady decode on a runner that does nothing; one keeps
statistics, in the other every hook is empty. The cost is the difference, and what each token costs. Needs no device.
"""

import argparse
import gc
import statistics
import sys
import time
from typing import cast

from jaxserve.api import PromptInfo, SamplingParams
from jaxserve.engine import Engine, EngineStats, ModelInfo, Update
from jaxserve.engine.stats import RequestTimes, SequenceTimes
from jaxserve.sched import Bucket, ContinuousScheduler, Limits, StepPlan, StepResult, create_scheduler
from jaxserve.testing import make_request


class NoStats(EngineStats):
    """Keeps nothing. For the loop that is compared with."""

    def start_turn(self) -> float:
        return 0.0

    def add_time(self, part: str) -> float:
        return 0.0

    def note_plan(self, plan: StepPlan | None, live: object) -> float:
        return 0.0

    def note_result(self) -> None:
        self.previous_s = self.now_s = -1.0  # what every sequence begins with, so that none asks

    def take(self, sequence: SequenceTimes, times: RequestTimes, prompt: PromptInfo | None) -> None: ...

    def note_commit(self, plan: StepPlan, num_events: int) -> float:
        return 0.0


class _Nothing:
    """A runner that answers at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def dispatch(self, plan: StepPlan) -> "_Answer":
        return _Answer(len(plan.sampled_rows))


class _Answer:
    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def result(self) -> StepResult:
        return StepResult(token_ids=[7] * self._num_tokens)


def main() -> int:
    """Measures and prints."""
    args = _parse()
    kept, bare = (_engine(args.rows, args.steps, kind) for kind in (EngineStats, NoStats))
    gc.disable()
    kept_s, bare_s = [], []
    for number in range(args.steps):  # the order alternates, so that whatever else the machine does meets both
        for engine, times in ((kept, kept_s), (bare, bare_s))[:: 1 if number % 2 else -1]:
            times.append(_time(engine))
    hooks_us = _low_us(kept_s) - _low_us(bare_s)
    tokens_us = _mark_us(args.rows)
    print(f"{args.rows} rows: a turn takes {_low_us(kept_s):.1f} us with statistics, {_low_us(bare_s):.1f} us without")
    print(f"cost: hooks {hooks_us:.1f} us + tokens {tokens_us:.1f} us = {hooks_us + tokens_us:.1f} us a step")
    return 0


def _low_us(times_s: list[float]) -> float:
    """The tenth percentile: on a busy machine the upper ones are those of its other work."""
    return 1e6 * statistics.quantiles(times_s, n=10)[0]


class _Sequence:
    __slots__ = ("last_s",)

    def __init__(self) -> None:
        self.last_s = -1.0


def _mark_us(rows: int) -> float:
    """What `LiveRequest.push` does for each token: look whether there was one in the step before, note the time."""
    sequences, times = [_Sequence() for _ in range(rows)], _Sequence()
    marked_s, empty_s = [], []
    for number in range(500):
        now_s, previous_s, times.last_s = float(number), times.last_s, float(number)
        begin = time.perf_counter()
        for sequence in sequences:
            if sequence.last_s != previous_s:
                raise AssertionError(sequence.last_s)
            sequence.last_s = now_s
        middle = time.perf_counter()
        for _ in sequences:
            pass
        empty_s.append(time.perf_counter() - middle)
        marked_s.append(middle - begin)
    return _low_us(marked_s) - _low_us(empty_s)


def _engine(rows: int, steps: int, kind: type[EngineStats]) -> Engine:
    total = steps + 400
    limits = Limits(
        max_rows=rows,
        num_pages=rows * (total // 16 + 3),
        page_size=16,
        max_model_len=total + 16,
        buckets=(Bucket(rows, rows, True), Bucket(max(8192, rows), rows, False)),
    )
    scheduler = create_scheduler("fcfs", limits)
    engine = Engine(
        runner=_Nothing(limits),
        scheduler=cast(ContinuousScheduler, scheduler),
        tokenizer=None,
        model=ModelInfo(
            name="none", vocab_size=256, max_model_len=total + 16, eos_token_ids=(), max_pool_tokens=1 << 30
        ),
    )
    engine._stats = kind(scheduler, limits, time.monotonic)
    sampling = SamplingParams(temperature=0.0, max_tokens=total, detokenize=False, ignore_eos=True)
    for i in range(rows):
        engine.submit(make_request(f"r{i}", range(i, i + 8), total, sampling=sampling), _ignore)
    for _ in range(100):
        engine.step()
    return engine


def _ignore(update: Update) -> None: ...


def _time(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the statistics of the loop.")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--steps", type=int, default=1000, help="pairs of turns that are timed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
