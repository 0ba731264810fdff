"""Decoding with 1, 4 and 8 steps a launch, on the same executables in the same run.

    PYTHONPATH=. python scripts/bench_burst.py [--model demo] [--streams 1 8] [--bursts 1 4 8] [--json FILE]

One runner is built with the largest burst, and a scheduler for each setting drives it in turn: rounds go through all
settings, and medians over the rounds are printed. Streams decode greedily to a fixed length, end of sequence ignored.

    tokens/s    of all streams together, from the first token of the last of them to the end
    TPOT        mean time of a token of one stream
    gap p50, p99, longest   between two tokens of one stream, as a client sees them; tokens of a burst come together
    newcomer    time to first token of a short prompt that arrives in the middle, one row being free for it
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from pathlib import Path

import numpy as np
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve.api import SamplingParams
from jaxserve.assemble import Device, build_device
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.sched import create_scheduler

PROMPT = 32
FIGURES = ("tokens/s", "TPOT ms", "gap p50 ms", "gap p99 ms", "longest ms", "newcomer ms")


def make_engine(device: Device, burst: int) -> Engine:
    limits = dataclasses.replace(device.runner.limits, max_burst=burst)
    return Engine(
        runner=device.runner,
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=None,
        model=ModelInfo(
            name="bench", vocab_size=device.vocab_size, max_model_len=limits.max_model_len, eos_token_ids=()
        ),
    )


def run_round(engine: Engine, vocab_size: int, streams: int, num_tokens: int, rng: np.random.Generator) -> list[float]:
    """The figures, in the order of `FIGURES`."""
    seen: dict[str, list[float]] = {}

    def sink(update) -> None:
        seen.setdefault(update.request_id, []).append(time.perf_counter())

    def submit(count: int) -> str:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        request = engine.prepare(rng.integers(3, vocab_size, PROMPT).tolist(), sampling)
        engine.submit(request, sink)
        return request.request_id

    names = [submit(num_tokens) for _ in range(streams)]
    while len(seen) < streams:
        engine.step()
    while len(seen[names[0]]) < num_tokens // 2:  # half undisturbed, then somebody comes
        engine.step()
    middle = time.perf_counter()
    undisturbed = {name: [t for t in seen[name] if t <= middle] for name in names}
    newcomer = submit(1)
    engine.run_until_idle()
    gaps = [b - a for times in undisturbed.values() for a, b in itertools.pairwise(times)]
    start = max(times[0] for times in undisturbed.values())
    counted = sum(t > start for times in undisturbed.values() for t in times)
    end = max(times[-1] for times in undisturbed.values())
    return [
        counted / (end - start),
        1e3 * statistics.mean((t[-1] - t[0]) / (len(t) - 1) for t in undisturbed.values()),
        1e3 * float(np.percentile(gaps, 50)),
        1e3 * float(np.percentile(gaps, 99)),
        1e3 * max(gaps),
        1e3 * (seen[newcomer][0] - middle),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--bursts", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each stream; half of them are measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later; their number is recorded")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [*args.streams, max(args.streams) + 1]
    overrides = {
        "model.path": args.model,
        "model.skip_tokenizer": True,
        "cache.num_pages": rows[-1] * -(-(PROMPT + args.tokens) // 16) + 16,
        "cache.page_size": 16,
        "cache.prefix_caching": False,
        "sched.max_rows": rows[-1],
        "sched.max_step_tokens": 64,
        "sched.burst": max(args.bursts),
        "runtime.row_buckets": sorted(set(rows)),
        "runtime.token_buckets": [64],
    }
    device = build_device(load_config(None, overrides).config, lambda done, total, name: None, 0)
    engines = {burst: make_engine(device, burst) for burst in args.bursts}
    rng = np.random.default_rng(0)
    found: dict[tuple[int, int], list[list[float]]] = {}
    begun = time.perf_counter()
    for number in range(args.rounds + 1):
        if number > 1 and time.perf_counter() - begun > args.seconds:
            break
        for streams, (burst, engine) in itertools.product(args.streams, engines.items()):
            figures = run_round(engine, device.vocab_size, streams, args.tokens, rng)
            if number:  # the first touches the pages
                found.setdefault((streams, burst), []).append(figures)
    num_rounds = len(next(iter(found.values())))
    table = Table(title=f"{args.model}: medians of {num_rounds} rounds")
    for heading in ("streams", "burst", *FIGURES, "of burst 1"):
        table.add_column(heading, justify="right")
    results = []
    for (streams, burst), rounds in found.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        base = found[streams, args.bursts[0]]
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(rounds, base, strict=True))
        table.add_row(str(streams), str(burst), *(f"{value:.2f}" for value in medians), f"{ratio:.2f}")
        results.append({"streams": streams, "burst": burst, "ratio": ratio, **dict(zip(FIGURES, medians, strict=True))})
    Console(stderr=True, width=120).print(table)
    if args.json:
        write_record(args.json, {"model": Path(args.model).name, "rows": results}, repeats=num_rounds)


if __name__ == "__main__":
    main()
