"""How costs grow: the host's time with rows, a step's with rows, context and pages.

    python scripts/bench_growth.py [--json benchmarks/growth_cpu.json] [--plot benchmarks/growth_cpu.png]

The host is that of `bench_host.py`: the real loop and scheduler with text, a device that takes no time, one thread.
A line is fitted to the medians, and the largest distance from it is told.

Steps are those of a random-weight Llama of 125 M parameters, float32. They are plans made by hand: so many rows, each
at such a position, over pages that hold nothing in particular. What a step costs does not depend on what it reads.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_engine import MODEL
from clock_device import Case, Clients, make_engine
from record import write_record
from rich.console import Console

from jaxserve.api import SamplingParams
from jaxserve.assemble import build_devices
from jaxserve.config import load_config
from jaxserve.models import resolve_model_path
from jaxserve.progress import Quiet
from jaxserve.sched import Runner, StepPlan
from jaxserve.sched.plan import PageGrant, RowSetup
from jaxserve.text import Tokenizer, load_tokenizer

HOST_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
ROWS, ROWS_CONTEXT = (1, 4, 16, 64, 256), 256
CONTEXTS, CONTEXT_ROWS = (128, 512, 1024, 2048, 4096, 8192), 4
POOLS, POOL_ROWS, POOL_CONTEXT = (256, 1024, 4096), 4, 512


def host_turn_ms(rows: int, tokenizer: Tokenizer, steps: int) -> float:
    """A turn of the loop: plan, pack, commit, text, sinks."""
    case = Case(rows=rows, device_ms=0.0, clients="none", churn=False, steps=steps)
    engine, _, max_tokens = make_engine(case, tokenizer)
    Clients(engine, case, tokenizer, max_tokens).start()
    for _ in range(50 + rows // 4):
        engine.step()
    times_s = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        engine.step()
        times_s.append(time.perf_counter() - begin_s)
    engine.stop()
    gc.collect()
    return 1e3 * statistics.median(times_s)


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """y = intercept + slope * x by least squares, and how far the farthest point lies from it."""
    slope, intercept = np.polyfit(x, y, 1)
    return {
        "us_per_row": 1e3 * float(slope),
        "us_fixed": 1e3 * float(intercept),
        "us_off_at_most": 1e3 * float(np.max(np.abs(np.polyval([slope, intercept], x) - y))),
    }


def make_runner(rows: Sequence[int], num_pages: int, max_len: int) -> Runner:
    """One decode bucket for each of `rows`."""
    with tempfile.TemporaryDirectory() as directory:
        config = MODEL | {"max_position_embeddings": max_len}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        overrides = {
            "model.path": directory,
            "model.random_weights": True,
            "model.skip_tokenizer": True,
            "model.dtype": "float32",
            "cache.num_pages": num_pages,
            "sched.max_rows": max(rows),
            "sched.max_step_tokens": max(rows),
            "runtime.row_buckets": list(rows),
            "runtime.token_buckets": [max(rows)],
        }
        return build_devices(load_config(None, overrides).config, Quiet())[0].runner


class Plans:
    """Makes plans of decode rows for one runner. Mutated by `time_steps`."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._step_id = 0
        self._rows = 0

    def time_steps(self, rows: int, context: int, steps: int) -> float:
        """Milliseconds of a step in which each of `rows` reads `context` tokens: the median."""
        times_s = []
        for number in range(steps + 3):
            plan = self._plan(rows, context, first=number == 0)
            begin_s = time.perf_counter()
            self.runner.dispatch(plan).result()
            if number >= 3:
                times_s.append(time.perf_counter() - begin_s)
        return 1e3 * statistics.median(times_s)

    def _plan(self, rows: int, context: int, *, first: bool) -> StepPlan:
        self._step_id += 1
        decoding = StepPlan(
            step_id=self._step_id, decode_rows=tuple(range(rows)), decode_positions=(context - 1,) * rows
        )
        if not first:
            return decoding
        limits = self.runner.limits
        num_pages = -(-context // limits.page_size)
        # Rows read different pages as far as there are any.
        pages = [[1 + (row * num_pages + i) % limits.num_pages for i in range(num_pages)] for row in range(rows)]
        freed, self._rows = self._rows, rows
        return dataclasses.replace(
            decoding,
            freed_rows=tuple(range(freed)),
            setups=tuple(_setup(row) for row in range(rows)),
            grants=tuple(PageGrant(row, 0, tuple(ids)) for row, ids in enumerate(pages)),
        )


def _setup(row: int) -> RowSetup:
    return RowSetup(
        row=row,
        request_id=f"r{row}",
        index=0,
        seed=row,
        prompt_len=1,
        num_tokens=1,
        token_ids=(),
        sampling=SamplingParams(temperature=0.0, max_tokens=8),
        stop_token_ids=(),
        bad_word_ids=(),
    )


def draw(path: Path, results: dict) -> None:
    """Four panels: host by rows with its line, steps by rows, by context and by pages of the pool."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(16, 3.8), layout="constrained")
    host, line = results["host_ms_by_rows"], results["host_line"]
    rows = [int(row) for row in host]
    axes[0].plot(rows, list(host.values()), "o")
    fitted = [(line["us_fixed"] + line["us_per_row"] * row) / 1e3 for row in rows]
    axes[0].plot(rows, fitted, "-", label=f"{line['us_fixed']:.0f} us + {line['us_per_row']:.2f} us a row")
    axes[0].legend()
    axes[0].set(title="host time of a decode step", xlabel="rows")
    for axis, (name, title, label) in zip(axes[1:], PANELS, strict=True):
        values = results[name]
        axis.plot([int(x) for x in values], list(values.values()), "o-")
        axis.set(title=title, xlabel=label)
    for axis in axes:
        axis.set_ylabel("ms")
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


PANELS = (
    ("step_ms_by_rows", f"step, {ROWS_CONTEXT} tokens of context", "rows"),
    ("step_ms_by_context", f"step, {CONTEXT_ROWS} rows", "tokens of context"),
    ("step_ms_by_pages", f"step, {POOL_ROWS} rows of {POOL_CONTEXT} tokens", "pages of the pool"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--steps", type=int, default=15, help="steps of each size; the host gets 20 times as many")
    args = parser.parse_args()
    console, tokenizer = Console(stderr=True), load_tokenizer(resolve_model_path("demo"))
    host = {rows: host_turn_ms(rows, tokenizer, 20 * args.steps) for rows in HOST_ROWS}
    results: dict = {"host_ms_by_rows": host, "host_line": fit_line(list(host), list(host.values()))}
    console.print("host", {rows: round(ms, 3) for rows, ms in host.items()}, results["host_line"])
    plans = Plans(make_runner(ROWS, 2048, max(CONTEXTS) + 16))
    results["step_ms_by_rows"] = {rows: plans.time_steps(rows, ROWS_CONTEXT, args.steps) for rows in ROWS}
    console.print("by rows", results["step_ms_by_rows"])
    results["step_ms_by_context"] = {n: plans.time_steps(CONTEXT_ROWS, n, args.steps) for n in CONTEXTS}
    console.print("by context", results["step_ms_by_context"])
    del plans
    results["step_ms_by_pages"] = {}
    for num_pages in POOLS:
        plans = Plans(make_runner([POOL_ROWS], num_pages, 2048))
        results["step_ms_by_pages"][num_pages] = plans.time_steps(POOL_ROWS, POOL_CONTEXT, args.steps)
        del plans
    console.print("by pages", results["step_ms_by_pages"])
    if args.json:
        write_record(args.json, results, steps=args.steps)
    if args.plot:
        draw(args.plot, results)


if __name__ == "__main__":
    main()
