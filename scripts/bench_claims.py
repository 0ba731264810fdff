"""Two promises about the first token and the ones after it, measured on the whole engine.

    python scripts/bench_claims.py [--json benchmarks/claims_cpu.json] [--repeats 5]

A random-weight Llama of 125 M parameters (hidden 768, 12 layers, 12/4 heads, ffn 2048, vocabulary 32000, float32).

`intrusion`: 16 streams decode; their inter-token latencies are taken undisturbed, and again while the prompt of a
newcomer, 4096 tokens long, is computed beside them. With the limit of the backend's defaults on steps that hold both
(`sched.max_mixed_tokens`), and without it. The promise: p99 at most twice the undisturbed p99.

`prefix`: 64 requests arrive at once, which share their first 400 tokens, with the prefix cache on and off. The
promise: time to first token, the mean over the requests, at least 5 times shorter.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_engine import MODEL
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import SamplingParams
from jaxserve.assemble import build_devices
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.engine.interpreter import Interpreter
from jaxserve.progress import Quiet
from jaxserve.sched import Runner, SchedulerOptions, create_scheduler

STREAMS = 16
LONG_PROMPT = 4096
UNDISTURBED_STEPS = 60
SHARED, OWN, REQUESTS = 400, 16, 64


class Limited:
    """A runner whose limits say something else about mixed steps."""

    def __init__(self, runner: Runner, max_mixed_tokens: int | None) -> None:
        self.limits = dataclasses.replace(runner.limits, max_mixed_tokens=max_mixed_tokens)
        self.dispatch = runner.dispatch


def make_runner() -> Runner:
    with tempfile.TemporaryDirectory() as directory:
        config = MODEL | {"max_position_embeddings": 8192}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        overrides = {
            "model.path": directory,
            "model.random_weights": True,
            "model.skip_tokenizer": True,
            "model.dtype": "float32",
            "cache.num_pages": 2560,
        }
        return build_devices(load_config(None, overrides).config, Quiet())[0].runner


def make_engine(runner: Runner, *, prefix_caching: bool = True) -> Engine:
    limits = runner.limits
    return Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", limits, options=SchedulerOptions(prefix_caching=prefix_caching)),
        tokenizer=None,
        model=ModelInfo(
            name="bench",
            vocab_size=MODEL["vocab_size"],
            max_model_len=limits.max_model_len,
            eos_token_ids=(),
        ),
        observers=[Interpreter()],
    )


class Arrivals:
    """A sink that notes when tokens come."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, update: Update) -> None:
        self.times_s.append(time.perf_counter())

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between tokens of which the later one came in that time."""
        times_s = self.times_s
        return [b - a for a, b in itertools.pairwise(times_s) if begin_s < b <= end_s]


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Arrivals:
    arrivals = Arrivals()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.submit(engine.prepare(prompt, sampling), arrivals)
    return arrivals


def intrude(runner: Runner, rng: np.random.Generator) -> dict[str, float]:
    """Inter-token latencies before and while the long prompt is computed, and its time to first token."""
    engine = make_engine(runner)
    streams = [submit(engine, rng.integers(0, 32000, 64).tolist(), 4000) for _ in range(STREAMS)]
    while not all(stream.times_s for stream in streams):
        engine.step()
    for _ in range(5):
        engine.step()
    begin_s = time.perf_counter()
    for _ in range(UNDISTURBED_STEPS):
        engine.step()
    arrived_s = time.perf_counter()
    newcomer = submit(engine, rng.integers(0, 32000, LONG_PROMPT).tolist(), 2)
    while not newcomer.times_s:
        engine.step()
    first_s = newcomer.times_s[0]
    engine.stop()
    alone = [gap for stream in streams for gap in stream.gaps_s(begin_s, arrived_s)]
    beside = [gap for stream in streams for gap in stream.gaps_s(arrived_s, first_s)]
    return {
        "alone_p50_ms": 1e3 * statistics.median(alone),
        "alone_p99_ms": 1e3 * quantile(alone, 0.99),
        "beside_p50_ms": 1e3 * statistics.median(beside),
        "beside_p99_ms": 1e3 * quantile(beside, 0.99),
        "ratio_p50": statistics.median(beside) / statistics.median(alone),
        "ratio_p99": quantile(beside, 0.99) / quantile(alone, 0.99),
        "newcomer_ttft_s": first_s - arrived_s,
    }


def share(runner: Runner, rng: np.random.Generator, prefix_caching: bool) -> dict[str, float]:
    """Times to first token of requests that share a prefix."""
    engine = make_engine(runner, prefix_caching=prefix_caching)
    shared = rng.integers(0, 32000, SHARED).tolist()
    begin_s = time.perf_counter()
    requests = [submit(engine, shared + rng.integers(0, 32000, OWN).tolist(), 4) for _ in range(REQUESTS)]
    engine.run_until_idle()
    ttft_s = [request.times_s[0] - begin_s for request in requests]
    return {"mean_s": statistics.mean(ttft_s), "p50_s": statistics.median(ttft_s), "last_s": max(ttft_s)}


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of them lie."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure_intrusion(runner: Runner, rng: np.random.Generator, args: argparse.Namespace, console: Console) -> dict:
    """One entry for each limit."""
    default = runner.limits.max_mixed_tokens
    found: dict[str, object] = {"default_max_mixed_tokens": default}
    table = Table(title=f"inter-token latency of {STREAMS} streams beside a prompt of {LONG_PROMPT} tokens")
    for heading in ("mixed step", "alone p50", "p99", "beside p50", "p99", "ratio of p99", "TTFT of the prompt"):
        table.add_column(heading, justify="right")
    for limit in dict.fromkeys([default, None, *(limit or None for limit in args.limits or ())]):
        one = medians([intrude(Limited(runner, limit), rng) for _ in range(args.repeats)])
        found[str(limit or "no limit")] = one
        times = [f"{one[n]:.1f} ms" for n in ("alone_p50_ms", "alone_p99_ms", "beside_p50_ms", "beside_p99_ms")]
        table.add_row(str(limit), *times, f"{one['ratio_p99']:.2f}", f"{one['newcomer_ttft_s']:.2f} s")
        console.print(limit, one)
    console.print(table)
    return found


def measure_prefix(runner: Runner, rng: np.random.Generator, args: argparse.Namespace, console: Console) -> dict:
    """With the cache on and off, one after the other."""
    pairs = [(share(runner, rng, True), share(runner, rng, False)) for _ in range(args.repeats)]
    on, off = (medians(runs) for runs in zip(*pairs, strict=True))
    ratio = statistics.median(b["mean_s"] / a["mean_s"] for a, b in pairs)
    console.print(
        f"{REQUESTS} requests that share {SHARED} of {SHARED + OWN} tokens: mean TTFT {on['mean_s']:.2f} s with the "
        f"prefix cache, {off['mean_s']:.2f} s without: {ratio:.1f} times"
    )
    return {"on": on, "off": off, "ratio_of_means": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limits", type=int, nargs="*", help="more limits on mixed steps to try; 0: none")
    parser.add_argument("--only", choices=["intrusion", "prefix"])
    args = parser.parse_args()
    runner, rng, console = make_runner(), np.random.default_rng(0), Console(stderr=True)
    results = {}
    if args.only != "prefix":
        results["intrusion"] = measure_intrusion(runner, rng, args, console)
    if args.only != "intrusion":
        results["prefix"] = measure_prefix(runner, rng, args, console)
    if args.json:
        write_record(args.json, results, repeats=args.repeats)


if __name__ == "__main__":
    main()
