"""What drafts and rounds gain: one stream, the demo's tasks, each setting in turn in one run.

    python scripts/bench_speculation.py --json benchmarks/speculation_cpu.json
    python scripts/bench_speculation.py --settings plain,burst8,suffix4 --items 8

Each setting answers the same held-out questions, one at a time, new ones in each round, so that no round meets what
another has cached. Figures are tokens a second of all answers of a task together, medians over the rounds; ratios are
medians over the rounds of a setting to `plain` in the same round. The answers of all settings must be equal.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from demo_tasks import TASKS, held_out_items, story_turn
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    **{f"burst{k}": {"speculation.rounds": k, "speculation.adaptive": False} for k in (4, 8, 16)},
    **{
        f"{method}{width}": {"speculation.method": method, "speculation.width": width}
        for method in ("ngram", "suffix")
        for width in (4, 8)
    },
    "suffix4x4": {"speculation.method": "suffix", "speculation.width": 4, "speculation.rounds": 4},
    "suffix4x8": {"speculation.method": "suffix", "speculation.width": 4, "speculation.rounds": 8},
}


def questions(task: str, items: int, seed: int) -> list[list[dict[str, str]]]:
    """Chats of one task; stories are asked for at random, the other tasks are held out."""
    if task == "story":
        import random

        rng = random.Random(seed)
        return [[{"role": "user", "content": story_turn(rng)[0]}] for _ in range(items)]
    return [item.messages for item in held_out_items(task, items, seed)]


def answer(llm: LLM, chats: list[list[dict[str, str]]]) -> tuple[list[list[int]], float, int]:
    """Tokens of each answer, seconds for all, and steps."""
    sampling = SamplingParams(temperature=0.0, max_tokens=160)
    steps, begin_s = llm._engine.stats[0].totals().steps, time.perf_counter()
    found = [list(llm.chat(chat, sampling, use_tqdm=False)[0].outputs[0].token_ids) for chat in chats]
    return found, time.perf_counter() - begin_s, llm._engine.stats[0].totals().steps - steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--tasks", default=",".join((*TASKS, "story")))
    parser.add_argument("--items", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names, tasks = args.settings.split(","), args.tasks.split(",")
    engines = {
        name: LLM.from_config(
            None,
            overrides={
                "model.path": args.model,
                "sched.max_rows": 1,
                "runtime.background_buckets": False,
                **SETTINGS[name],
            },
        )
        for name in names
    }
    rates: dict[str, dict[str, list[float]]] = {task: {name: [] for name in names} for task in tasks}
    per_step: dict[str, dict[str, list[float]]] = {task: {name: [] for name in names} for task in tasks}
    for number in range(args.rounds + 1):  # the first teaches costs and answers, and does not count
        for task in tasks:
            chats, expected = questions(task, args.items, 100 + number), None
            for name, llm in engines.items():
                found, seconds, steps = answer(llm, chats)
                expected = expected or found
                assert found == expected, f"{name} changes tokens of {task}"
                if number:
                    rates[task][name].append(sum(map(len, found)) / seconds)
                    per_step[task][name].append(sum(map(len, found)) / steps)
    table = Table("task", *names, title="tokens/s of one stream (ratio to plain; tokens a step, prompt included)")
    results = {}
    for task in tasks:
        results[task] = {}
        for name in names:
            ratio = statistics.median(a / b for a, b in zip(rates[task][name], rates[task][names[0]], strict=True))
            rate, tokens = statistics.median(rates[task][name]), statistics.median(per_step[task][name])
            results[task][name] = {"tokens_per_s": rate, "ratio": ratio, "tokens_per_step": tokens}
        table.add_row(
            task, *(f"{r['tokens_per_s']:.0f} ({r['ratio']:.2f}; {r['tokens_per_step']:.2f})" for r in results[task].values())
        )
    graded = [task for task in tasks if task != "story"]
    means = {name: statistics.geometric_mean(results[task][name]["ratio"] for task in graded) for name in names}
    table.add_row("graded tasks", *(f"{means[name]:.2f}" for name in names))
    Console(width=180).print(table)
    if args.json:
        write_record(args.json, {"tasks": results, "graded": means}, items=args.items, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
