"""How many requests a second one core simulates, alone and as a cluster, and how that grows with replicas.

The trace is like ShareGPT's: log-normal lengths of 161 tokens in and 338 out on average. Alone, the engine has 256 rows
that are always full. In a cluster requests arrive at random, as many for each replica as keep a given number of its
rows busy; the cost of a run is that of its requests and grows with them, so that of a longer one is extrapolated from
two lengths, or with --goal run to its end.

    python scripts/bench_simulator.py [--requests 20000] [--clusters 10 30 100] [--per-replica 240] [--goal]
        [--json FILE]
"""

import argparse
import itertools
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import Request, SamplingParams
from jaxserve.lab import SimRequest, simulate
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.roofline import LLAMA_3_8B, Roofline
from jaxserve.lab.simulation.values import SimulationResult
from jaxserve.sched import Bucket, Limits

MEAN_INPUT, MEAN_OUTPUT = 161, 338
MAX_TOKENS = 2048
GOAL_REQUESTS = 1_000_000


def main() -> int:
    args = _parse()
    model = Roofline("h200:1", LLAMA_3_8B)
    results: list[dict[str, float | int | str]] = []
    for page_size in args.page_sizes:
        trace = list(sharegpt_like(args.requests, rate=math.inf, seed=0))
        limits = _limits(args.rows, page_size)
        results.append(
            measure("one engine", page_size, 1, args.requests, lambda t=trace, m=limits: simulate("fcfs", t, model, m))
        )
    for router, replicas in itertools.product(args.routers, args.clusters):
        whole = replicas * args.per_replica
        for count in (GOAL_REQUESTS,) if args.goal else (whole // 2, whole):
            rate = replicas * args.replica_rate
            trace = sharegpt_like(count, rate=rate, seed=1)
            limits = _limits(args.rows, args.page_sizes[-1])

            def run(trace=trace, limits=limits, replicas=replicas, router=router) -> SimulationResult:
                return simulate_cluster("fcfs", trace, model, limits, replicas=replicas, router=router).total

            results.append(measure(f"cluster, {router}", args.page_sizes[-1], replicas, count, run))
    if args.json:
        write_record(args.json, results, rows=args.rows, replica_rate=args.replica_rate)
    _print(results, extrapolate=not args.goal)
    return 0


def measure(
    what: str, page_size: int, replicas: int, count: int, run: Callable[[], SimulationResult]
) -> dict[str, float | int | str]:
    """Runs it once; seconds are those of the processor, and those of a clock on the wall beside them."""
    wall, begin = time.perf_counter(), time.process_time()
    result = run()
    seconds, wall_s = time.process_time() - begin, time.perf_counter() - wall
    assert len(result.requests) == count, (len(result.requests), count)
    assert not any(r.error for r in result.requests)
    output = sum(r.output_tokens for r in result.requests)
    return {
        "what": what,
        "page_size": page_size,
        "replicas": replicas,
        "requests": count,
        "cpu_s": seconds,
        "wall_s": wall_s,
        "requests_per_s": count / seconds,
        "steps": result.num_steps,
        "us_per_step": 1e6 * seconds / result.num_steps,
        "tokens_per_step": result.tokens / result.num_steps,
        "mean_input": sum(r.prompt_tokens for r in result.requests) / count,
        "mean_output": output / count,
        "simulated_s": result.duration_s,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def sharegpt_like(count: int, *, rate: float, seed: int) -> Iterator[SimRequest]:
    """Poisson arrivals at `rate` requests a second (inf: all at once), log-normal lengths."""
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    now_s = 0.0
    for i in range(count):
        now_s += rng.expovariate(rate) if rate < math.inf else 0.0
        prompt_len, output_len = _length(rng, MEAN_INPUT, 1.0, 1024), _length(rng, MEAN_OUTPUT, 0.8, MAX_TOKENS)
        request = Request(
            request_id=f"request-{i}",
            prompt_token_ids=(i,) * prompt_len,
            sampling=sampling,
            max_tokens=MAX_TOKENS,
            seed=0,
            stop_token_ids=_STOP,
            arrival_s=now_s,
        )
        yield SimRequest(request=request, arrival_s=now_s, output_len=output_len)


_STOP = frozenset({2**31})


def _length(rng: random.Random, mean: float, sigma: float, most: int) -> int:
    # The cut at `most` and the floor take a little off the mean, which the factor gives back.
    return min(most, 1 + int(rng.lognormvariate(math.log(1.02 * mean) - sigma * sigma / 2, sigma)))


def _limits(rows: int, page_size: int) -> Limits:
    decode = [Bucket(1 << i, 1 << i, True) for i in range(rows.bit_length() - 1)] + [Bucket(rows, rows, True)]
    mixed = [Bucket(t, min(t, rows), False) for t in (32, 64, 128, 256, 512, 1024, 2048)]
    return Limits(
        max_rows=rows,
        num_pages=400_000 // page_size,  # of an H200 with Llama 3 8B about 640,000 tokens fit
        page_size=page_size,
        max_model_len=4096,
        buckets=tuple(sorted(decode + mixed)),
    )


def _print(results: list[dict[str, float | int | str]], *, extrapolate: bool) -> None:
    table = Table(title="simulated requests a second of one core")
    for column in ("what", "page", "replicas", "requests", "CPU s", "requests/s", "us/step", "tokens/step", "MB"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r["what"]),
            f"{r['page_size']}",
            f"{r['replicas']}",
            f"{r['requests']}",
            f"{r['cpu_s']:.1f}",
            f"{r['requests_per_s']:.0f}",
            f"{r['us_per_step']:.0f}",
            f"{r['tokens_per_step']:.0f}",
            f"{r['peak_memory_mb']:.0f}",
        )
    console = Console()
    console.print(table)
    if not extrapolate:
        return
    clusters = [r for r in results if r["replicas"] != 1]
    for half, whole in zip(clusters[::2], clusters[1::2], strict=True):
        slope = (float(whole["cpu_s"]) - float(half["cpu_s"])) / (int(whole["requests"]) - int(half["requests"]))
        goal_s = float(whole["cpu_s"]) + slope * (GOAL_REQUESTS - int(whole["requests"]))
        console.print(
            f"{whole['what']}, {whole['replicas']} replicas: {slope * 1e6:.0f} us for one more request, so "
            f"{goal_s / 60:.1f} minutes for {GOAL_REQUESTS:,} requests"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the simulator.")
    parser.add_argument("--requests", type=int, default=20_000, help="of the engine alone")
    parser.add_argument("--rows", type=int, default=256, help="of each engine")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64], help="tokens of a page")
    parser.add_argument("--clusters", type=int, nargs="*", default=[10, 30, 100], help="numbers of replicas")
    parser.add_argument("--routers", nargs="*", default=["least_load", "prefix"], help="names of routers")
    parser.add_argument("--per-replica", type=int, default=240, help="requests for each replica of a cluster")
    parser.add_argument("--goal", action="store_true", help=f"each cluster runs {GOAL_REQUESTS:,} requests instead")
    parser.add_argument("--replica-rate", type=float, default=40.0, help="requests a second for each replica")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
