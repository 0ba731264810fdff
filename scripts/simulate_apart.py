"""Servers together and apart: goodput of simulated servers on a recorded trace's shape, at several loads and links.

    python scripts/simulate_apart.py TRACE --json benchmarks/apart_simulated.json

The trace is Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), whose conversations are drawn
again and again (`workloads.conversations`), as a Poisson process. Lengths are an eighth of the recorded ones, so that
tens of thousands of requests are simulated in minutes; times to the first token are then about an eighth, too, since
computing and sending a prompt are. Four servers of one H200 each hold Llama 3.1 8B by published peaks. "together": each
does all. "1 + 3": one computes prompts, three answer. A request is good if it keeps both targets.
"""

import argparse
import concurrent.futures
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.config import load_config
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.cluster_values import Apart
from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.world import world_of_device
from jaxserve.lab.workloads.conversations import conversations_of, drawn_again
from jaxserve.lab.workloads.traces import read_mooncake

SCALE, REPLICAS = 0.125, 4
SETTINGS = {
    "model.path": "configs/shapes/llama3.1-8b",
    "model.max_len": 16384,
    "cache.page_size": 64,
    "cache.host_bytes": 128 << 30,
    "sched.max_rows": 128,
    "sched.max_step_tokens": 8192,
}


class Run(NamedTuple):
    """`prefill` 0: together. `gb_s`: of the link of a server that computes prompts."""

    trace: Path
    rate: float
    prefill: int
    gb_s: float
    requests: int
    ttft_s: float
    tpot_s: float


def main() -> int:
    args = _parse()
    ways = [(0, 0.0), *itertools.product(args.prefill, args.gb_s)]
    runs = [
        Run(args.trace, rate, prefill, gb_s, args.requests, args.ttft, args.tpot)
        for rate, (prefill, gb_s) in itertools.product(args.rates, ways)
    ]
    results = []
    table = Table(
        "rate", "way", "link, GB/s", "good/s", "share", "ttft p50, s", "ttft p99, s", "tpot p50, ms", "tpot p99, ms"
    )
    with concurrent.futures.ProcessPoolExecutor(args.processes) as pool:
        for run, result in zip(runs, pool.map(simulate, runs), strict=True):
            results.append(result)
            print(f"{result['way']} at {run.rate:g}: {result['cpu_s']:.0f} s", file=sys.stderr, flush=True)
            figures = (f"{result[name]:.3f}" for name in ("goodput", "good_share", "ttft_p50_s", "ttft_p99_s"))
            times = (f"{1e3 * result[name]:.1f}" for name in ("tpot_p50_s", "tpot_p99_s"))
            table.add_row(f"{run.rate:g}", str(result["way"]), f"{run.gb_s:g}", *figures, *times)
    Console(width=140).print(table)
    if args.json:
        write_record(
            args.json, results, trace=args.trace.name, scale=SCALE, settings=SETTINGS, replicas=REPLICAS,
            targets={"ttft_s": args.ttft, "tpot_s": args.tpot}, requests_of_a_run=args.requests,
        )  # fmt: skip
    return 0


def simulate(run: Run) -> dict[str, float | str]:
    """The figures of one run. Rates are of conversations; each has 1.6 requests on average."""
    begin_s = time.process_time()
    world = world_of_device(load_config(None, SETTINGS).config, "h200:1")
    limits = world.limits
    shapes = drawn_again(conversations_of(read_mooncake(run.trace, None, SCALE)), run.rate, 0)
    trace = sim_requests(itertools.islice(shapes, run.requests), ClientOptions())
    apart = None
    if run.prefill:
        token_bytes = limits.slots.page_bytes / limits.page_size
        apart = Apart(prefill=run.prefill, above=64, bandwidth=1e9 * run.gb_s, token_bytes=token_bytes)
    done = simulate_cluster(
        "fcfs", trace, world.cost_model, limits, replicas=REPLICAS, options=world.options, apart=apart
    ).total
    requests = done.requests
    assert len(requests) == run.requests and not any(one.error for one in requests)
    ttft = np.array([one.first_token_s - one.arrival_s for one in requests if one.first_token_s is not None])
    tpot = np.array(
        [
            (one.last_token_s - one.first_token_s) / max(1, one.output_tokens - 1)
            for one in requests
            if one.first_token_s is not None and one.last_token_s is not None
        ]
    )
    good = (ttft <= run.ttft_s) & (tpot <= run.tpot_s)
    figures = {
        f"{name}_p{p}_s": float(np.percentile(x, p)) for name, x in (("ttft", ttft), ("tpot", tpot)) for p in (50, 99)
    }
    return {
        "way": f"{run.prefill} + {REPLICAS - run.prefill}" if run.prefill else "together",
        "conversations_a_second": run.rate,
        "gb_s": run.gb_s,
        "requests": len(requests),
        "goodput": float(good.sum() / done.duration_s),
        "good_share": float(good.mean()),
        **figures,
        "cached": sum(one.cached_tokens for one in requests) / sum(one.prompt_tokens for one in requests),
        "simulated_s": done.duration_s,
        "busy": done.device_s / done.duration_s / REPLICAS,
        "cpu_s": time.process_time() - begin_s,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=4000, help="of each run")
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 30.0], help="conversations a second")
    parser.add_argument("--prefill", type=int, nargs="+", default=[1, 2], help="servers that compute prompts")
    parser.add_argument("--gb-s", type=float, nargs="+", default=[0.5, 10.0], help="of a link")
    parser.add_argument("--ttft", type=float, default=0.25, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.015, help="seconds")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
