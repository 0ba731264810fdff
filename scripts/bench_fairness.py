"""What the policy `fair` gives to two owners, one of whom asks for a hundred times as much as the other, and its cost.

    python scripts/bench_fairness.py [--seconds 60] [--rounds 7] [--json benchmarks/fairness_cpu.json]

The larger owner begins alone, and the smaller one comes `LEAD_S` later; from then on both always have requests waiting.
Prompts and answers of both have the same lengths. Two servers of eight rows run this:

simulated   a minute on the virtual clock, in which every step takes 20 ms
demo        the demo model on this machine's CPU, in this process; each line takes `--seconds` of time

The share is that of the smaller owner among all tokens that are generated while both wait; by its weight it should have
w / (w + 1). `first token` is the time from its first request to the first token of any of its answers. The same is run
under `fcfs`, and with the larger owner alone. The last table is `schedule` + `commit` of 256 rows in steady decode, of
two owners, as `bench_scheduler.py` times it: medians over rounds, in each of which the policies take turns.
"""

import argparse
import dataclasses
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import bench_scheduler
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine, Update
from jaxserve.lab.simulation.simulate import FixedCost, SimRequest, StepCost, simulate
from jaxserve.sched import Bucket, Limits
from jaxserve.testing import make_request

TIMES = 100  # the larger owner asks for so many times as much
ROWS = 8
PROMPT_LEN, SHORTEST, LONGEST = 32, 50, 150  # tokens; lengths of answers are drawn evenly
LEAD_S = 5.0  # that the larger owner is alone
SIMULATED_S = 60.0
LATEST_S = 120.0  # without any answer, something is wrong
LARGE, SMALL = "large", "small"
POLICIES = ("fair", "fcfs")

LIMITS = Limits(
    max_rows=ROWS, num_pages=400, page_size=16, max_model_len=256, buckets=(Bucket(8, 8, True), Bucket(64, 8, False))
)
DEMO: dict[str, object] = {
    "model.path": "demo",
    "model.max_len": 256,
    "sched.max_rows": ROWS,
    "sched.max_step_tokens": 64,
    "runtime.token_buckets": [8, 64],
    "runtime.row_buckets": [ROWS],
    "runtime.background_buckets": False,
}


class Case(NamedTuple):
    """What one line of the table runs. `weight`: of the smaller owner, where the other has 1; None: it stays away."""

    policy: str
    weight: float | None


class Served(NamedTuple):
    """What one case gave.

    Attributes:
      share: of the smaller owner, in the tokens that were generated while both had requests waiting.
      first_token_s: from the smaller owner's first request to its first token; None where it stays away, or got none.
      tokens_per_s: of both, in that time.
    """

    share: float
    first_token_s: float | None
    tokens_per_s: float

    @classmethod
    def of(cls, times: dict[str, list[float]], begin_s: float, seconds: float) -> "Served":
        """Of the times of all tokens, by owner, in the window of `seconds` from `begin_s` on."""
        counts = {name: sum(begin_s <= at < begin_s + seconds for at in times[name]) for name in (LARGE, SMALL)}
        first_s = min(times[SMALL], default=None)
        total = sum(counts.values())
        return cls(counts[SMALL] / total, None if first_s is None else first_s - begin_s, total / seconds)


CASES = (Case("fair", 1.0), Case("fair", 4.0), Case("fair", None), Case("fcfs", 1.0), Case("fcfs", None))


def run_simulated(case: Case, seconds: float = SIMULATED_S) -> Served:
    """On a virtual clock: all requests of an owner are there from its begin on, more than can be served."""
    step_s = 0.02
    end_s = LEAD_S + seconds
    count = int(ROWS * seconds / step_s / ((SHORTEST + LONGEST) / 2))  # what the smaller one would get alone
    trace = [*_asked(LARGE, 1.0, 0.0, TIMES * count, end_s)]
    if case.weight is not None:
        trace += _asked(SMALL, case.weight, LEAD_S, count, end_s)
    cost = FixedCost(cost=StepCost(0.0, step_s))
    result = simulate(case.policy, trace, cost, LIMITS, keep_token_times=True)
    times: dict[str, list[float]] = {LARGE: [], SMALL: []}
    waiting = set()
    for request in result.requests:
        times[request.owner] += request.token_times_s
        if request.admitted_s is None:
            waiting.add(request.owner)
    assert waiting == {one.request.owner for one in trace}, "an owner had nothing more to ask for"
    return Served.of(times, LEAD_S, seconds)


def _asked(owner: str, weight: float, begin_s: float, count: int, end_s: float) -> Iterator[SimRequest]:
    """Requests that arrive together, and end at `end_s` whether they are done or not."""
    rng = random.Random(owner)
    for number in range(count):
        length = rng.randint(SHORTEST, LONGEST)
        prompt = (LARGE, SMALL).index(owner), number, *range(PROMPT_LEN - 2)
        name = f"{owner}-{number}"
        asked = make_request(name, prompt, length, owner=owner, owner_weight=weight, arrival_s=begin_s)
        asked = dataclasses.replace(asked, deadline_s=end_s)
        yield SimRequest(request=asked, arrival_s=begin_s, output_len=length)


class Owner:
    """Keeps `backlog` requests unfinished, with the help of whoever calls `fill`, and notes the times of its tokens."""

    def __init__(self, name: str, weight: float, backlog: int) -> None:
        self.times: list[float] = []
        self.error: BaseException | None = None
        self._options = RequestOptions(owner=name, owner_weight=weight)
        self._backlog = backlog
        self._rng = random.Random(name)
        self._live = 0
        self._lock = threading.Lock()

    def fill(self, engine: Engine, ended: "SimpleQueue[Owner]") -> None:
        """Submits what is missing. `ended` gets this owner when one of its requests has ended."""
        while self._live < self._backlog:
            prompt = [self._rng.randrange(10, 500) for _ in range(PROMPT_LEN)]
            length = self._rng.randint(SHORTEST, LONGEST)
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)

            def sink(update: Update) -> None:
                self.times += [time.monotonic()] * len(update.token_ids)
                if update.last:
                    self.error = self.error or update.error
                    with self._lock:
                        self._live -= 1
                    ended.put(self)

            with self._lock:
                self._live += 1
            engine.submit(engine.prepare(prompt, sampling, self._options), sink)


def run_demo(engine: Engine, case: Case, seconds: float) -> Served:
    """On an engine that has just started. The smaller owner asks for more than all rows could take."""
    backlog = ROWS + 4
    large, small = Owner(LARGE, 1.0, TIMES * backlog), Owner(SMALL, case.weight or 1.0, backlog)
    ended: SimpleQueue[Owner] = SimpleQueue()

    def serve(*owners: Owner, until_s: float) -> None:
        for owner in owners:
            owner.fill(engine, ended)
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                owner = ended.get(timeout=left_s)
            except Empty:
                return
            if owner.error is not None:
                raise owner.error
            owner.fill(engine, ended)

    serve(large, until_s=time.monotonic() + LEAD_S)
    begin_s = time.monotonic()
    owners = (large,) if case.weight is None else (small, large)
    serve(*owners, until_s=begin_s + seconds)
    return Served.of({LARGE: large.times.copy(), SMALL: small.times.copy()}, begin_s, seconds)


def measure_demo(seconds: float) -> dict[Case, Served]:
    """Each case on an engine of its own, so that none finds what another has left behind."""
    served = {}
    for case in CASES:
        engine = assemble(load_config(None, {**DEMO, "sched.policy": case.policy})).engine
        assert isinstance(engine, Engine)
        engine.start()
        try:
            served[case] = run_demo(engine, case, seconds)
        finally:
            engine.stop()
    return served


def measure_cost(rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step of 256 rows of two owners, by policy, and `ratio`: the median of those of the rounds."""
    spent: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(rounds):
        for policy in POLICIES if number % 2 else reversed(POLICIES):
            args = argparse.Namespace(rows=256, page_size=16, steps=steps, warmup=50, policy=policy, owners=2)
            spent[policy].append(bench_scheduler.measure(args, True)["median_ms"])
    ratios = [fair / fcfs for fair, fcfs in zip(spent["fair"], spent["fcfs"], strict=True)]
    return {
        "fair_ms": statistics.median(spent["fair"]),
        "fcfs_ms": statistics.median(spent["fcfs"]),
        "ratio": statistics.median(ratios),
    }


def _show(title: str, served: dict[Case, Served]) -> None:
    table = Table(title=title)
    for column in ("policy", "weights", "share", "goal", "first token s", "tokens/s"):
        table.add_column(column, justify="right")
    for case, one in served.items():
        alone = case.weight is None
        goal = case.weight / (case.weight + 1) if case.weight and case.policy == "fair" else None
        table.add_row(
            case.policy,
            "alone" if alone else f"{case.weight:g}:1",
            "" if alone else f"{one.share:.3f}",
            "" if goal is None else f"{goal:.3f}",
            "" if alone else "none" if one.first_token_s is None else f"{one.first_token_s:.2f}",
            f"{one.tokens_per_s:.0f}",
        )
    Console().print(table)


def _as_json(served: dict[Case, Served]) -> list[dict[str, Any]]:
    return [case._asdict() | one._asdict() for case, one in served.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each line of the demo model")
    parser.add_argument("--rounds", type=int, default=7, help="of the cost of a step")
    parser.add_argument("--steps", type=int, default=400, help="of each round")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    simulated = {case: run_simulated(case) for case in CASES}
    _show(f"simulated, {SIMULATED_S:g} s", simulated)
    demo = measure_demo(args.seconds)
    _show(f"the demo model, {args.seconds:g} s", demo)
    cost = measure_cost(args.rounds, args.steps)
    print(
        f"schedule + commit of 256 rows: fcfs {cost['fcfs_ms']:.3f} ms, fair {cost['fair_ms']:.3f} ms, "
        f"ratio {cost['ratio']:.3f}"
    )
    if args.json is not None:
        results = {"simulated": _as_json(simulated), "demo": _as_json(demo), "cost": cost}
        write_record(args.json, results, seconds=args.seconds, rounds=args.rounds, steps=args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
