"""The table of `jaxserve quantize` over schemes and methods on the demo model, in docs/quantisation.md.

    python scripts/quantize_table.py --work DIRECTORY [--calibrate 24] [--judge 16] [--done]

Calibrates on questions of the demo's tasks with their answers, judges on others that the model was never trained on,
and checks what docs/quantisation.md promises. Writes benchmarks/quantize.json. Some ten minutes on two cores; a run
that was interrupted goes on with what is in DIRECTORY, and `--done` makes the table of what is finished there.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from demo_tasks import TASKS, held_out_items
from kernel_runs import write_between
from record import write_record

from jaxserve.assemble.quantise import quantise_checkpoint
from jaxserve.config import load_config
from jaxserve.progress import show_progress
from jaxserve.quantise.choice import Options

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- quantize: written by scripts/quantize_table.py -->", "<!-- end of quantize -->"
RUNS: list[dict[str, Any]] = [
    {"scheme": "int8"},
    {"scheme": "int8", "method": "gptq"},
    {"scheme": "int8", "method": "awq"},
    {"scheme": "int8-a8"},
    {"scheme": "int8-a8", "method": "gptq"},
    {"scheme": "int8-a8", "method": "awq"},
    {"scheme": "fp8"},
    {"scheme": "fp8", "method": "gptq"},
    {"scheme": "fp8", "method": "awq"},
    {"scheme": "int4"},
    {"scheme": "int4", "method": "gptq"},
    {"scheme": "int4", "method": "awq"},
    {"scheme": "int4", "method": "gptq", "group": 32},
    {"scheme": "int4", "method": "gptq", "budget_bits": 5.0},
    {"scheme": "int4", "method": "gptq", "budget_bits": 6.0},
    {"scheme": "int4", "method": "gptq", "embedding": "int8"},
]
# Mean divergence of the probe that the schemes were chosen by, in NumPy: a run may have three times as much.
PROBE = {"int8": 1.3e-6, "int8-a8": 7.6e-6, "fp8": 1.5e-5, "int4": 3.8e-4}
RECOMMENDED = [{"scheme": "int8"}, {"scheme": "int8-a8"}, {"scheme": "fp8"}, {"scheme": "int4", "method": "gptq"}]


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of `jaxserve quantize` on the demo model.")
    parser.add_argument("--calibrate", type=int, default=24, help="questions of each task")
    parser.add_argument("--judge", type=int, default=16, help="questions of each task")
    parser.add_argument("--done", action="store_true", help="begin no run that is not finished")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints and texts")
    args = parser.parse_args()
    # XLA's attention compiles in a second; the others would be chosen, built and checked anew in each run.
    config = load_config(None, ["model.path=demo", "kernels.paged_attention=xla"]).config
    results = []
    args.work.mkdir(parents=True, exist_ok=True)
    with show_progress() as progress:
        data, judge = args.work / "calibrate.jsonl", args.work / "judge.jsonl"
        write_chats(data, args.calibrate, seed=2)
        write_chats(judge, args.judge, seed=1)
        for run in RUNS:
            target = args.work / "_".join(map(str, run.values()))
            if args.done and not target.is_dir():
                continue
            if not target.is_dir():
                quantise_checkpoint(config, Options(**run), data, target, judge=judge, progress=progress)
            report = json.loads((target / "quality.json").read_text(encoding="utf-8"))
            results.append(
                {"options": run, **{name: report[name] for name in ("bits_per_weight", "quality", "tokens")}}
            )
            print(run, report["quality"], flush=True)
    write_record(ROOT / "benchmarks/quantize.json", results, calibrate=args.calibrate, judge=args.judge)
    write_between(ROOT / "docs/quantisation.md", BEGIN, END, table(results))
    check(results)


def write_chats(file: Path, count: int, seed: int) -> None:
    """Questions with their right answers, task after task in turn."""
    by_task = [held_out_items(task, count, seed) for task in TASKS]
    with file.open("w", encoding="utf-8") as opened:
        for items in zip(*by_task, strict=True):
            for item in items:
                chat = [*item.messages, {"role": "assistant", "content": item.answer}]
                opened.write(json.dumps({"messages": chat}) + "\n")


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| options | bits a weight | KL, mean | 99 % | largest | same likeliest token | perplexity | right answers |"
    yield "|---|---|---|---|---|---|---|---|"
    first = results[0]["quality"]
    floats = f"{first['perplexity_float']:.5f} | {100 * first['right_float']:.1f} %"
    yield f"| floats (bfloat16) | 16 | 0 | 0 | 0 | 100.0 % | {floats} |"
    for result in results:
        q = result["quality"]
        said = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in result["options"].items())
        quality = f"{100 * q['same_top']:.2f} % | {q['perplexity']:.5f} | {100 * q['right']:.1f} %"
        divergence = f"{q['kl_mean']:.1e} | {q['kl_p99']:.1e} | {q['kl_max']:.1e}"
        yield f"| `{said}` | {result['bits_per_weight']:.2f} | {divergence} | {quality} |"


def check(results: list[dict[str, Any]]) -> None:
    """What the documents promise. Raises AssertionError."""

    found = {json.dumps(result["options"]): result["quality"] for result in results}

    def of(**options: Any) -> Mapping[str, Any]:
        return found[json.dumps(options)]

    for result in results:
        scheme = result["options"]["scheme"]
        assert result["quality"]["kl_mean"] <= 3 * PROBE[scheme], (result["options"], result["quality"])
    for options in (options for options in RECOMMENDED if json.dumps(options) in found):
        quality = of(**options)
        assert abs(quality["right"] - quality["right_float"]) <= 0.01, (options, quality)
    assert of(scheme="int4", method="gptq")["kl_mean"] < of(scheme="int4")["kl_mean"]


if __name__ == "__main__":
    main()
