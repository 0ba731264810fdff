"""Accuracy of the demo's vision model on held-out pictures, through the engine.

    python scripts/eval_demo_vision.py [--items 300] [--dtype float32] [--json benchmarks/demo_vision.json]

Every picture has one right answer to "What is in this picture?", and an answer counts only when the whole text equals
it.
"""

import argparse
import io
import sys
import time
from pathlib import Path

from demo_pictures import QUESTION, TASKS, DemoPicture, held_out
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams

ENOUGH = 0.95  # of all pictures
SIZES = {  # few shapes to compile
    "sched.max_rows": 16,
    "sched.max_step_tokens": 256,
    "runtime.token_buckets": [256],
    "runtime.row_buckets": [16],
}


def ask(llm: LLM, pictures: list[DemoPicture]) -> list[str]:
    """The greedy answers to `QUESTION` about each picture, sent as a PNG."""
    question = {"type": "text", "text": QUESTION}
    chats = [[{"role": "user", "content": [{"type": "image", "image": _png(p)}, question]}] for p in pictures]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def _png(picture: DemoPicture) -> bytes:
    file = io.BytesIO()
    picture.image.save(file, "PNG")
    return file.getvalue()


def evaluate(llm: LLM, num_items: int, seed: int) -> dict[str, float]:
    """Share of exactly right answers per task."""
    accuracy = {}
    for task in TASKS:
        pictures = list(held_out(task, num_items, seed))
        answers = ask(llm, pictures)
        right = sum(answer == picture.answer for answer, picture in zip(answers, pictures, strict=True))
        accuracy[task] = right / num_items
    return accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-vision")
    parser.add_argument("--items", type=int, default=300, help="pictures of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    columns: dict[str, dict[str, float]] = {}
    for dtype in args.dtype or ["float32"]:
        llm = LLM.from_config(None, overrides={"model.path": args.model, "model.dtype": dtype, **SIZES})
        start = time.perf_counter()
        found = evaluate(llm, args.items, args.seed)
        columns[dtype] = found | {"all": sum(found.values()) / len(found)}
        console.print(f"{dtype}: {args.items} pictures a task in {time.perf_counter() - start:.0f} s")
    table = Table("task", *columns)
    for task in (*TASKS, "all"):
        table.add_row(task, *(f"{100 * column[task]:.1f} %" for column in columns.values()))
    console.print(table)
    if args.json:
        write_record(args.json, columns, items=args.items, seed=args.seed)
    return 0 if min(column["all"] for column in columns.values()) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
