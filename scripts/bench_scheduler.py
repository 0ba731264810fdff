"""What a step costs on the host: `schedule` + `commit` with many rows in steady decode.

Owns the measurement only. All features are on: overlap, prefix cache, page growth, events for every token. No device
and no fake takes part: results are made before the clock starts, so what is timed is the scheduler alone.

    python scripts/bench_scheduler.py [--rows 256] [--page-size 16] [--steps 1000] [--policy fcfs] [--json FILE]
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

from jaxserve.sched import Bucket, Limits, Scheduler, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.testing import make_request

PROMPT_LEN = 64


def main() -> int:
    args = _parse()
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
        scheduler.add(make_request(f"request-{i}", prompt, total_len - len(prompt), stop=(7,), arrival_s=i))
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
    parser.add_argument("--policy", default="fcfs", help="name of a policy")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
