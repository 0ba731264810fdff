"""Trains, judges and exports draft heads for the demo model that ships in ``jaxserve/demo_model``.

The training itself is that of ``jaxserve train-draft`` (``jaxserve.lab.training``); here are the prompts, which are the
demo model's own tasks, and the judgement by task on held-out items.

    XLA_FLAGS=--xla_cpu_enable_fast_math=true python scripts/train_draft.py --kind eagle3 --work runs/eagle3

A run that was stopped, or that `--stop-after` ended, goes on with the same command.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

from demo_tasks import TASKS, conversation, held_out_items, list_conversation, long_conversation
from record import write_record
from rich.console import Console
from rich.table import Table

from jaxserve import LLM
from jaxserve.config import load_config
from jaxserve.lab.training.answers import Example, Question, answer_questions, read_examples, split_examples
from jaxserve.lab.training.evaluate import Accepted, measure
from jaxserve.lab.training.heads import HeadOptions
from jaxserve.lab.training.losses import LossOptions
from jaxserve.lab.training.pipeline import RunOptions, begin_run, export, make_answers, plot_log
from jaxserve.lab.training.trainer import LOG_NAME, Trainer, TrainOptions
from jaxserve.models.drafts.config import HeadKind
from jaxserve.models.loading import LoadedModel
from jaxserve.progress import show_progress

# Share of the questions of each task. Stories have the longest answers, and are what visitors ask for.
MIX = {
    "story": 0.16,
    "talk": 0.08,
    "add": 0.09,
    "add_steps": 0.09,
    "lookup": 0.09,
    "lookup_long": 0.02,
    "sort": 0.12,
    "sort_letters": 0.12,
    "reverse": 0.07,
    "reverse_dashes": 0.07,
    "json": 0.09,
}
MAX_TOKENS = 160  # of an answer; a story has some 80
FREE_TASKS = ("story", "talk")  # without a right answer; judged by the answers that the engine gives
FFN = 512  # columns of the layer of EAGLE-3, so that a head takes less than 2.5 MB in bfloat16
SCRATCH_SEED = 1_000_003  # of held-out questions of the free tasks: training draws from another


def demo_questions(count: int, seed: int) -> list[Question]:
    """`count` chats of the tasks of the demo model, each up to its last question; the same ones for the same seed."""
    rng = random.Random(f"draft {seed}")
    questions = []
    for _ in range(count):
        task = rng.choices(list(MIX), list(MIX.values()))[0]
        questions.append(_question(rng, task))
    return questions


def _question(rng: random.Random, task: str) -> Question:
    if task == "lookup_long":
        chat = long_conversation(rng, lambda messages: sum(len(m["content"]) for m in messages) < 1900)
    elif task == "lookup" and rng.random() < 0.5:
        chat = list_conversation(rng, rng.randint(2, 40), rng.randint(1, 3))
    else:
        chat = conversation(rng, task, rng.choices((1, 2, 3), (0.8, 0.13, 0.07))[0])
    return Question(given=chat.messages[:-1], max_tokens=MAX_TOKENS)


def held_out_questions(task: str, count: int) -> list[Question]:
    """Questions that training never drew (for stories and talk: drawn afresh, since nothing keeps them apart)."""
    if task in FREE_TASKS:
        rng = random.Random(f"draft {task} {SCRATCH_SEED}")
        chats = [conversation(rng, task).messages[:-1] for _ in range(count)]
    else:
        chats = [[*item.messages] for item in held_out_items(task, count, 1)]
    return [Question(given=messages, max_tokens=MAX_TOKENS) for messages in chats]


def held_out_answers(work: Path, count: int) -> dict[str, list[Example]]:
    """The engine's greedy answers to held-out questions, by task; kept in `work`."""
    found = {}
    with LLM.from_config(None, overrides={"model.path": "demo"}) as llm:
        for task in (*TASKS, *FREE_TASKS):
            number = max(8, count // 8) if task == "lookup_long" else count
            file = work / f"held_out_{task}.jsonl"
            answer_questions(llm, held_out_questions(task, number), file, temperature=0.0, seed=0)
            found[task] = [*read_examples(file)]
    return found


def judge(
    model: LoadedModel, trainer: Trainer, answers: dict[str, list[Example]], options: RunOptions
) -> dict[str, Accepted]:
    """What steps would give on each task's greedy answers, and on those of the nine graded tasks together."""
    found = {}
    for task, examples in answers.items():
        long_enough = [e for e in examples if len(e.answer) >= 3]
        if long_enough:
            found[task] = measure(
                model, trainer.graphdef, trainer.averaged, long_enough, options.loss, options.train.row_len
            )
    graded = [found[task] for task in TASKS if task in found]
    found["nine tasks"] = sum(graded[1:], graded[0])
    return found


def main() -> int:
    """Answers, training, judgement, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kind", choices=("eagle3", "medusa"), default="eagle3")
    add("--work", type=Path, required=True, help="folder of answers, checkpoints, log and plot")
    add("--export", type=Path, help="new folder of the head; an existing one is replaced")
    add("--questions", type=int, default=16384)
    add("--steps", type=int, default=2400)
    add("--rows", type=int, default=1, help="rows of 1024 tokens in a step")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate")
    add("--stop-after", type=float, help="seconds of training after which the run stops, to be gone on with later")
    add("--items", type=int, default=64, help="held-out items of each task")
    add("--json", type=Path, help="record of the judgement")
    add("--evaluate", action="store_true", help="only judge and export what is in --work")
    args = parser.parse_args()
    console = Console()
    kind = HeadKind(args.kind)
    options = RunOptions(
        head=HeadOptions(kind=kind, ffn_size=FFN if kind is HeadKind.EAGLE3 else None),
        train=TrainOptions(steps=args.steps, num_rows=args.rows, peak_rate=args.rate),
        loss=LossOptions(),
        stop_after_s=args.stop_after,
    )
    resolved = load_config(None, ["model.path=demo"])
    with show_progress() as progress:
        questions = demo_questions(args.questions, options.train.seed)
        file = make_answers(
            lambda: LLM.from_config(None, overrides={"model.path": "demo"}, progress=False),
            questions,
            args.work,
            options.train.seed,
            progress,
        )
        examples, _ = split_examples(read_examples(file), options.held_out)
        progress.begin("loading the target")
        model, trainer = begin_run(resolved, examples, options, args.work)
        finished = trainer.step >= options.train.steps
        if not args.evaluate:
            progress.begin("training")
            finished = trainer.train(
                stop_after_s=options.stop_after_s,
                tell=lambda facts: progress.count(int(facts["step"]), options.train.steps, f"loss {facts['loss']:.3f}"),
            )
            plot_log(args.work / LOG_NAME, args.work / "training.png")
        if not finished and not args.evaluate:
            console.print(f"stopped at step {trainer.step} of {options.train.steps}; the same command goes on")
            return 0
        progress.begin("judging the head")
        found = judge(model, trainer, held_out_answers(args.work, args.items), options)
    table = Table("task", "tokens a step", *(f"taken to place {i + 1}" for i in range(options.loss.num_places)))
    for task, accepted in found.items():
        table.add_row(task, f"{accepted.tokens_per_step:.2f}", *(f"{100 * s:.1f} %" for s in accepted.shares))
    console.print(table)
    if args.export:
        shutil.rmtree(args.export, ignore_errors=True)
        export(model, trainer, options, "demo", args.export)
        size = sum(f.stat().st_size for f in args.export.iterdir())
        console.print(f"wrote {args.export}, {size / 1e6:.2f} MB")
    if args.json:
        facts = {
            task: {"tokens_per_step": accepted.tokens_per_step, "taken": accepted.shares}
            for task, accepted in found.items()
        }
        write_record(args.json, json.loads(json.dumps(facts)), kind=args.kind, steps=trainer.step, items=args.items)
    met = found["nine tasks"].shares[0] >= 0.75 and found["nine tasks"].tokens_per_step >= 2.3
    return 0 if met and found["story"].tokens_per_step >= 2.5 else 1


if __name__ == "__main__":
    sys.exit(main())
