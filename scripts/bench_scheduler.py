"""The cost of a step on the host: `schedule` + `commit` in steady decode, or `schedule` with a long queue.

All features are on: overlap, prefix cache, page growth, events for every token. No device and no fake takes part:
results are made before the clock starts, so what is timed is the scheduler alone.

    python scripts/bench_scheduler.py [--rows 256] [--page-size 16] [--steps 1000] [--policy fcfs] [--json FILE]
    python scripts/bench_scheduler.py --owners 2 --policy fair
    python scripts/bench_scheduler.py --waiting 4000        every policy, with rows or pages as what is short
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.sched import (
    SCHEDULERS,
    Bucket,
    ContinuousScheduler,
    Limits,
    Policy,
    Scheduler,
    SchedulerOptions,
    Sequence,
    StepPlan,
    StepResult,
    create_scheduler,
)
from jaxserve.testing import make_request

PROMPT_LEN = 64


def main() -> int:
    args = _parse()
    if args.waiting:
        return _show_queues(args)
    figures = [measure(args, prefix_caching) for prefix_caching in (True, False)]
    if args.json:
        write_record(args.json, figures, rows=args.rows, policy=args.policy)
    table = Table(title=f"schedule + commit, {args.rows} rows in steady decode, policy {args.policy}")
    for column in ("prefixes", "page size", "steps", "median ms", "mean ms", "p95 ms", "schedule ms", "commit ms"):
        table.add_column(column, justify="right")
    for f in figures:
        table.add_row(
            "on" if f["prefix_caching"] else "off",
            str(f["page_size"]),
            str(f["steps"]),
            f"{f['median_ms']:.3f}",
            f"{f['mean_ms']:.3f}",
            f"{f['p95_ms']:.3f}",
            f"{f['schedule_ms']:.3f}",
            f"{f['commit_ms']:.3f}",
        )
    Console().print(table)
    return 0


def measure(args: argparse.Namespace, prefix_caching: bool) -> dict[str, int | float]:
    """Median milliseconds over `args.steps` steps, each launched before the one before is committed."""
    total_len = PROMPT_LEN + args.page_size + args.steps + args.warmup + 4
    limits = _limits(args.rows, total_len, args.page_size)
    scheduler = create_scheduler(args.policy, limits, options=SchedulerOptions(prefix_caching=prefix_caching))
    for i in range(args.rows):
        # Lengths differ, so that in every step some rows need a page and fill one, as in real traffic.
        prompt = [i, *range(1, PROMPT_LEN + i % args.page_size)]
        max_tokens, owner = total_len - len(prompt), f"owner {i % args.owners}"
        scheduler.add(make_request(f"request-{i}", prompt, max_tokens, stop=(7,), arrival_s=i, owner=owner))
    plan = _start(scheduler, args.rows)
    result = StepResult(token_ids=[1000] * args.rows)
    schedule_ms, commit_ms = [], []
    gc.collect()
    for step in range(args.steps + args.warmup):
        begin = time.perf_counter()
        following = scheduler.schedule()
        middle = time.perf_counter()
        events = scheduler.commit(plan, result)
        end = time.perf_counter()
        assert len(events) == args.rows, (len(events), args.rows)
        assert following is not None and len(following.decode_rows) == args.rows, following
        plan = following
        if step >= args.warmup:
            schedule_ms.append(1000 * (middle - begin))
            commit_ms.append(1000 * (end - middle))
    both = sorted(a + b for a, b in zip(schedule_ms, commit_ms, strict=True))
    return {
        "rows": args.rows,
        "page_size": args.page_size,
        "prefix_caching": prefix_caching,
        "steps": args.steps,
        "median_ms": statistics.median(both),
        "mean_ms": statistics.fmean(both),
        "p95_ms": both[int(len(both) * 0.95)],
        "schedule_ms": statistics.median(schedule_ms),
        "commit_ms": statistics.median(commit_ms),
    }


class CheapestPrompt(Policy):
    """The policy of the README: its keys look into the prefix cache, which changes while sequences wait."""

    dynamic_order = True

    def key(self, seq: Sequence, now_s: float) -> float:
        num_cached = self.memory.place(seq, None).start
        return len(seq.tokens) - num_cached + 20 * seq.request.arrival_s


def _show_queues(args: argparse.Namespace) -> int:
    policies = [*SCHEDULERS.names(), CheapestPrompt]
    figures = [measure_queue(args, policy, short) for policy in policies for short in ("pages", "rows")]
    if args.json:
        write_record(args.json, figures, rows=args.rows, waiting=args.waiting)
    table = Table(title=f"schedule with {args.waiting} waiting of 64 tenants, {args.rows} rows")
    for column in ("policy", "short are", "running", "median ms", "mean ms", "p95 ms", "max ms"):
        table.add_column(column, justify="right")
    for f in figures:
        times = [f"{f[name]:.3f}" for name in ("median_ms", "mean_ms", "p95_ms", "max_ms")]
        table.add_row(str(f["policy"]), str(f["short"]), str(f["running"]), *times)
    Console().print(table)
    return 0


def measure_queue(args: argparse.Namespace, policy: str | type[Policy], short: str) -> dict[str, str | int | float]:
    """Milliseconds of `schedule` while `args.waiting` wait, and now and then one of them is let in."""
    rows, size = args.rows, args.page_size
    most_tokens = 16 * size
    num_pages = rows * 17 if short == "rows" else rows * 4
    buckets = (Bucket(rows, rows, True), Bucket(max(2048, rows), rows, False))
    limits = Limits(
        max_rows=rows, num_pages=num_pages, page_size=size, max_model_len=most_tokens + PROMPT_LEN, buckets=buckets
    )
    scheduler = create_scheduler(policy, limits, options=SchedulerOptions(ttft_target_s=60.0))
    assert isinstance(scheduler, ContinuousScheduler)
    begin_s, num_added = time.monotonic(), 0
    spent: list[float] = []
    previous: StepPlan | None = None
    gc.collect()
    for step in range(args.warmup + args.steps):
        while scheduler.num_waiting < args.waiting:
            prompt = [num_added % 500, *range(1, PROMPT_LEN + num_added % size)]
            max_tokens = most_tokens - (num_added * 37) % (most_tokens // 2) - len(prompt)
            tenant = f"tenant {num_added % 64}"
            arrival_s = begin_s + num_added / 1000
            scheduler.add(make_request(f"r{num_added}", prompt, max_tokens, tenant=tenant, arrival_s=arrival_s))
            num_added += 1
        before = time.perf_counter()
        plan = scheduler.schedule()
        if step >= args.warmup:
            spent.append(1000 * (time.perf_counter() - before))
        if previous is not None:
            scheduler.commit(previous, StepResult(token_ids=[1000] * len(previous.sampled_rows)))
        previous = plan
    spent.sort()
    return {
        "policy": policy if isinstance(policy, str) else policy.__name__,
        "short": short,
        "waiting": args.waiting,
        "running": scheduler.num_running,
        "median_ms": statistics.median(spent),
        "mean_ms": statistics.fmean(spent),
        "p95_ms": spent[int(len(spent) * 0.95)],
        "max_ms": spent[-1],
    }


def _start(scheduler: Scheduler, rows: int) -> StepPlan:
    """Runs all prompts; returns the first plan that decodes every row, in flight."""
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        if len(plan.decode_rows) == rows:
            return plan
        scheduler.commit(plan, StepResult(token_ids=[1000] * len(plan.sampled_rows)))


def _limits(rows: int, total_len: int, page_size: int) -> Limits:
    num_pages = rows * (-(-total_len // page_size) + 1) + rows
    buckets = (Bucket(rows, rows, True), Bucket(max(8192, rows), rows, False))
    return Limits(max_rows=rows, num_pages=num_pages, page_size=page_size, max_model_len=total_len, buckets=buckets)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times schedule + commit in steady decode.")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=100, help="steps before that")
    parser.add_argument("--waiting", type=int, default=0, help="times `schedule` with so many in the queue instead")
    parser.add_argument("--policy", default="fcfs", help="name of a policy")
    parser.add_argument("--owners", type=int, default=1, help="of the sequences that decode, in turn")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
