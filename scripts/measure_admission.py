"""The gain from admission that looks ahead: preemptions and throughput of one trace under several settings.

The defaults of `sched.watermark`, `sched.growth` and `sched.lengths` come from this measurement. No device takes part:
results are made up here, and a step takes `--base-ms` plus `--token-us` for each of its tokens on a virtual clock, so
that the run is the same on every machine.

The trace is random, of the shape that is known of ShareGPT: log-normal prompts and outputs (means of about 220 and 190
tokens, outputs ended by the model), while each request asks for a round limit well above its output; `--shape essay`
has short prompts and long outputs, so that nearly all of the cache is growth. All arrive at once: the cache is short
all the time.

    python scripts/measure_admission.py [--requests 1500] [--rows 256] [--pages 2500] [--json FILE]
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.sched import Bucket, ContinuousScheduler, Limits, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.testing import ManualClock, make_request

PAGE_SIZE = 16
MAX_LEN = 2048
STOP = 1
SETTINGS = (
    ("nothing", SchedulerOptions(watermark=0.0, growth=0.0)),
    ("watermark 1 %", SchedulerOptions(watermark=0.01, growth=0.0)),
    ("watermark 3 %", SchedulerOptions(watermark=0.03, growth=0.0)),
    ("watermark 5 %", SchedulerOptions(watermark=0.05, growth=0.0)),
    ("learned, 1 %", SchedulerOptions(watermark=0.01, growth=1.0)),
    ("learned, 3 %", SchedulerOptions(watermark=0.03, growth=1.0)),
    ("learned, 5 %", SchedulerOptions(watermark=0.05, growth=1.0)),
    ("half of learned, 3 %", SchedulerOptions(watermark=0.03, growth=0.5)),
    ("asked, 1 %", SchedulerOptions(watermark=0.01, growth=1.0, lengths="asked")),
    ("half of asked, 1 %", SchedulerOptions(watermark=0.01, growth=0.5, lengths="asked")),
)  # fmt: skip


def main() -> int:
    args = _parse()
    figures = [{"setting": name, **measure(args, options)} for name, options in SETTINGS]
    if args.json:
        write_record(args.json, figures, rows=args.rows, pages=args.pages, requests=args.requests)
    table = Table(title=f"{args.requests} requests, {args.rows} rows, {args.pages} pages of {PAGE_SIZE}")
    for column in ("admission", "preemptions", "computed twice", "tokens/s", "mean rows", "median end s"):
        table.add_column(column, justify="right")
    for f in figures:
        table.add_row(
            str(f["setting"]),
            str(f["preemptions"]),
            f"{f['recomputed_share']:.1%}",
            f"{f['tokens_per_s']:.0f}",
            f"{f['mean_rows']:.0f}",
            f"{f['median_end_s']:.1f}",
        )
    Console().print(table)
    return 0


def trace(num_requests: int, seed: int, shape: str) -> list[tuple[int, int, int]]:
    """Tokens of (prompt, output, limit) for each request."""
    rng = random.Random(seed)
    made = []
    for _ in range(num_requests):
        prompt_mu, output_mu = (4.8, 4.7) if shape == "chat" else (3.0, 5.8)
        prompt_len = min(1024, 4 + int(rng.lognormvariate(prompt_mu, 1.1)))
        output_len = min(900, 1 + int(rng.lognormvariate(output_mu, 1.1)))
        limit = next(size for size in (64, 128, 256, 512, 1000) if size >= output_len or size == 1000)
        made.append((prompt_len, output_len, rng.choice([limit, 512 if limit <= 512 else 1000, 1000])))
    return made


def measure(args: argparse.Namespace, options: SchedulerOptions) -> dict[str, int | float]:
    """Runs the trace to its end."""
    clock = ManualClock()
    limits = Limits(
        max_rows=args.rows,
        num_pages=args.pages,
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        buckets=(Bucket(args.rows, args.rows, True), Bucket(2048, args.rows, False)),
    )
    scheduler = create_scheduler(args.policy, limits, options=options, clock=clock)
    assert isinstance(scheduler, ContinuousScheduler)
    lengths: dict[str, int] = {}
    for number, (prompt_len, output_len, limit) in enumerate(trace(args.requests, args.seed, args.shape)):
        prompt = [number + 2, *range(2, prompt_len + 1)]
        request_id = f"r{number}"
        lengths[request_id] = output_len
        scheduler.add(make_request(request_id, prompt, limit, stop=(STOP,), arrival_s=number * 1e-6))
    ends: list[float] = []
    owners: dict[int, str] = {}
    drawn: dict[str, int] = dict.fromkeys(lengths, 0)
    num_computed = num_rows = num_steps = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        owners.update((setup.row, setup.request_id) for setup in plan.setups)
        clock.advance(args.base_ms / 1e3 + plan.num_tokens * args.token_us / 1e6)
        num_computed += plan.num_tokens
        num_rows += plan.num_rows
        num_steps += 1
        events = scheduler.commit(plan, _draw(plan, owners, drawn, lengths))
        ends += [clock() for event in events if event.finish_reason is not None]
    useful = sum(drawn.values()) + sum(p for p, _, _ in trace(args.requests, args.seed, args.shape)) - args.requests
    return {
        "preemptions": scheduler.num_preemptions,
        "recomputed_share": num_computed / useful - 1,
        "tokens_per_s": sum(drawn.values()) / clock(),
        "mean_rows": num_rows / num_steps,
        "median_end_s": statistics.median(ends),
    }


def _draw(plan: StepPlan, owners: dict[int, str], drawn: dict[str, int], lengths: dict[str, int]) -> StepResult:
    tokens = []
    for row in plan.sampled_rows:
        request_id = owners[row]
        drawn[request_id] += 1
        tokens.append(STOP if drawn[request_id] == lengths[request_id] else 1_000_000 + drawn[request_id])
    return StepResult(token_ids=tokens)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Counts preemptions under several settings of admission.")
    parser.add_argument("--requests", type=int, default=1500, help="requests, all at once")
    parser.add_argument("--rows", type=int, default=256, help="rows of the device")
    parser.add_argument("--pages", type=int, default=2500, help="pages of the cache")
    parser.add_argument("--shape", choices=("chat", "essay"), default="chat", help="essay: short prompts, long outputs")
    parser.add_argument("--policy", default="fcfs", help="name of a policy")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--base-ms", type=float, default=10.0, help="milliseconds of an empty step")
    parser.add_argument("--token-us", type=float, default=20.0, help="microseconds more for each token")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
