"""A replica that hangs beside one that goes on: python scripts/bench_hang.py [--config FILE] [--floor-s 2] [--rounds 3]

Two replicas of the model in one process, each with streams of its own. The device of the first one is made to hang by
an event, in the middle of its streams. The figures are when it was fenced, against twice the deadline; whether its
streams went on at the other replica with the same tokens; and the inter-token times of the other replica's own streams,
with the first one idle ("undisturbed") and while it hangs, turns red and is fenced.

On a CPU both replicas share the cores, so an idle neighbour is the fair comparison: a hung one computes nothing either.
"""

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path

from record import write_record

from jaxserve.api import SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine, EngineGroup, Update
from jaxserve.sched import InFlight, Limits, Runner, StepPlan, StepResult

PROMPT = "Once upon a time there was a little"
QUIET_S = 6.0
LOOK_S = 0.02  # whoever looks more often takes time from the replica that is measured


class Hanging:
    """A runner whose steps do not end while `open` is not set."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.open = threading.Event()
        self.open.set()
        self.hung_s = 0.0

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        flight, runner = self._inner.dispatch(plan), self

        class Held:
            def result(self) -> StepResult:
                if not runner.open.is_set():
                    runner.hung_s = runner.hung_s or time.monotonic()
                runner.open.wait()
                return flight.result()

        return Held()


class Stream:
    """A request that begins again when it ends, until it is told to stop; the times of its tokens."""

    def __init__(self, group: EngineGroup, sampling: SamplingParams, *, again: bool, to: Engine | None = None) -> None:
        """`to`: the replica that it stays at; None: the group chooses."""
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.again = again
        self._group = group
        self._to = group if to is None else to
        self._sampling = sampling
        self.submit()

    def submit(self) -> None:
        self._to.submit(self._group.prepare(PROMPT, self._sampling), self.take)

    def take(self, update: Update) -> None:
        if update.token_ids:
            self.times.append(time.monotonic())
            self.tokens += update.token_ids
        if update.last:
            self.error = update.error
            if self.again and update.error is None:
                threading.Thread(target=self.submit).start()  # a sink must not call the engine's front
            else:
                self.done.set()

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        inside = [t for t in self.times.copy() if begin_s <= t < end_s]
        return [1000 * (b - a) for a, b in itertools.pairwise(inside)]


def one_round(config: str, floor_s: float, num_streams: int) -> dict[str, float | bool]:
    """Builds, hangs and measures once."""
    resolved = load_config(
        config,
        {
            "parallel.data": 2,
            "runtime.background_buckets": False,  # their compiling would slow the undisturbed part
            "runtime.cpu_devices": 2,
            "watchdog.floor_s": floor_s,
            "watchdog.restarts": 0,
            "route.policy": "round_robin",
        },
    )
    group = assemble(resolved).engine
    assert isinstance(group, EngineGroup)
    first = group.replicas[0]
    first._runner = runner = Hanging(first._runner)
    group.start()
    steady = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    doomed: list[Stream] = []
    others: list[Stream] = []
    alone = Stream(group, steady, again=False)  # by turns: this one is the first replica's, for the tokens
    alone.done.wait()
    for _ in range(num_streams):
        others.append(Stream(group, steady, again=True, to=group.replicas[1]))
    time.sleep(1.0)
    begin_s = time.monotonic()
    time.sleep(QUIET_S)
    quiet = [gap for stream in others for gap in stream.gaps(begin_s, time.monotonic())]
    for _ in range(num_streams):
        group._balancer._router._next = 0  # pyright: ignore[reportAttributeAccessIssue]
        doomed.append(Stream(group, steady, again=False))
    while min(len(stream.tokens) for stream in doomed) < 20:
        time.sleep(0.001)
    runner.open.clear()
    while not runner.hung_s:
        time.sleep(0.001)
    red_s = 0.0
    while first.failure is None:
        if first.red and not red_s:
            red_s = time.monotonic()
        time.sleep(LOOK_S)
    fenced_s = time.monotonic()
    hung = [gap for stream in others for gap in stream.gaps(runner.hung_s, fenced_s)]
    moved_s = fenced_s
    while not all(stream.times[-1] > fenced_s for stream in doomed):
        time.sleep(0.001)
        moved_s = time.monotonic()
    for stream in others:
        stream.again = False
    for stream in (*others, *doomed):
        stream.done.wait()
    group_ok = all(stream.error is None and stream.tokens == alone.tokens for stream in doomed)
    runner.open.set()
    group.stop()
    return {
        "deadline_s": floor_s,
        "red_after_s": red_s - runner.hung_s,
        "fenced_after_s": fenced_s - runner.hung_s,
        "first_moved_tokens_after_s": moved_s - fenced_s,
        "streams_moved_with_equal_tokens": group_ok,
        "itl_p50_undisturbed_ms": statistics.median(quiet),
        "itl_p50_hung_ms": statistics.median(hung),
        "itl_p99_undisturbed_ms": statistics.quantiles(quiet, n=100)[98],
        "itl_p99_hung_ms": statistics.quantiles(hung, n=100)[98],
        "itl_p50_ratio": statistics.median(hung) / statistics.median(quiet),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--floor-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="of each replica")
    parser.add_argument("--json", type=Path, help="where the record goes")
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append(one_round(arguments.config, arguments.floor_s, arguments.streams))
        print(json.dumps(rounds[-1], indent=1), flush=True)
    if arguments.json is not None:
        write_record(arguments.json, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
