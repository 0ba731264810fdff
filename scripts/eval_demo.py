"""Accuracy of the demo model on held-out items, through the engine.

    python scripts/eval_demo.py [--items 512] [--dtype float32] [--stress] [--json benchmarks/demo_accuracy.json]

Every item has one right answer, and an answer counts only when the whole text equals it. `--stress` uses tiny chunks, a
page pool so small that sequences are preempted, and repeats each prompt, so that the second is a prefix hit: paging or
scheduling mistakes show as lost points here.
"""

import argparse
import sys
import time
from pathlib import Path

from demo_tasks import TASKS, check, held_out_items
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams

STRESS = {
    "cache.page_size": 4,
    "cache.num_pages": 264,  # one sequence of 1024 tokens takes 256; 32 chats of a short task want more
    "sched.max_rows": 32,
    "sched.max_step_tokens": 48,
    "sched.watermark": 0.0,
    "sched.growth": 0.0,  # so that rows are preempted
    "runtime.token_buckets": [32, 48],
    "runtime.row_buckets": [1, 32],
}


def evaluate(llm: LLM, num_items: int, seed: int, tasks: tuple[str, ...] = TASKS, repeat: int = 1) -> dict[str, float]:
    """Share of exactly right answers per task. With `repeat` each item is asked that often and must be right always."""
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    accuracy = {}
    for task in tasks:
        items = held_out_items(task, num_items, seed)
        right = [True] * num_items
        for _ in range(repeat):
            outputs = llm.chat([item.messages for item in items], sampling, use_tqdm=False)
            for i, (item, output) in enumerate(zip(items, outputs, strict=True)):
                right[i] &= check(item, output.outputs[0].text)
        accuracy[task] = sum(right) / num_items
    return accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--stress", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    columns: dict[str, dict[str, float]] = {}
    for dtype in args.dtype or ["float32"]:
        overrides = {"model.path": args.model, "model.dtype": dtype, **(STRESS if args.stress else {})}
        llm = LLM.from_config(None, overrides=overrides)
        start = time.perf_counter()
        columns[dtype] = evaluate(llm, args.items, args.seed, repeat=2 if args.stress else 1)
        console.print(f"{dtype}: {args.items} items a task in {time.perf_counter() - start:.0f} s")
    table = Table("task", *columns)
    for task in TASKS:
        table.add_row(task, *(f"{100 * column[task]:.1f} %" for column in columns.values()))
    console.print(table)
    if args.json:
        write_record(args.json, columns, items=args.items, seed=args.seed, stress=args.stress)
    return 0 if min(min(column.values()) for column in columns.values()) >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
