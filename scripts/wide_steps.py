"""Steps with drafts of Llama-3.1-8B, compiled for chips that are not here: bytes moved over those of a plain step.

    python scripts/wide_steps.py                              16 rows of 2048 tokens, four tokens of each, on a v5e
    python scripts/wide_steps.py --least                      the least that has to move, by arithmetic, in seconds
    python scripts/wide_steps.py --topology v5e:4 --quantization none --width 8

A draft is worth its place where a step of several tokens a row costs hardly more than one of one token. On chips that
reading the weights holds up, that is a question of bytes: weights and pages are read once for all tokens of a row, and
logits and sampling grow with them. Few layers are compiled, and extended to all. Nothing in it is measured.
"""

import argparse
from pathlib import Path

from jaxserve.config import load_config
from jaxserve.lab.planner.make import PlanOptions, make_plan

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that steps with drafts move on chips that are not here.")
    parser.add_argument("--topology", default="v5e:1")
    parser.add_argument("--quantization", default="int8", help="weights of 16 bits do not fit on one v5e")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--least", action="store_true", help="compile nothing")
    args = parser.parse_args()
    settings = {
        "model.path": str(ROOT / "configs/shapes/llama3.1-8b"),
        "model.dtype": "bfloat16",
        "model.max_len": 4096,
        "model.quantization": args.quantization,
        "sched.max_rows": args.rows,
        "speculation.method": "ngram",
        "speculation.width": args.width,
    }
    names = (
        f"decode {args.rows}x{args.rows}",
        f"decode {args.rows * args.width}x{args.rows} of {args.width}, up to 1 rounds",
    )
    options = PlanOptions(
        compile=not args.least, exact=False, count=False, tensor="auto", buckets=names, context=args.context
    )
    plan = make_plan(load_config(None, settings).config, args.topology, options)
    wanted = [p for p in plan.predictions if p.decode and p.rows == args.rows and p.compiled is not args.least]
    moved = {p.width: p.moved_bytes for p in wanted}
    for width, size in sorted(moved.items()):
        print(
            f"{args.topology}: {args.rows} rows of {args.context} tokens, {width} tokens of each: {size / 1e9:.3f} GB"
        )
    print(f"over the plain step: {moved[args.width] / moved[1]:.3f}")


if __name__ == "__main__":
    main()
