"""Times of whole steps by count: what `jaxserve plan` guesses for Llama-3.1-8B on TPUs.

    python scripts/step_ledger.py                    compiles the steps (some minutes a chip), writes record and table
    python scripts/step_ledger.py --chips v6e v7x    some of them; the others stay as they are
    python scripts/step_ledger.py --table            writes the table of the record into docs/planning.md

The record is benchmarks/step_ledger.json. Nothing in it is measured.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from kernel_runs import write_between, write_results

from jaxserve.config import load_config
from jaxserve.lab.ledger import PARTS
from jaxserve.lab.planner import PlanOptions, make_plan

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/step_ledger.json"
BEGIN, END = "<!-- steps: written by scripts/step_ledger.py -->", "<!-- end of steps -->"
# A v5e cannot hold the model: four of them share it.
CHIPS = {"v5e": ("v5e:2x2", 4), "v5p": ("v5p:2x2x1", 1), "v6e": ("v6e:1x1", 1), "v7x": ("v7x:2x2x1", 1)}
BUCKETS = ("decode 64x64", "mixed 1024x64")
CONTEXT = 1536  # of each of 64 rows, as many tokens as the pages of one v6e hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=tuple(CHIPS), default=list(CHIPS))
    parser.add_argument("--table", action="store_true", help="count nothing")
    args = parser.parse_args()
    results = json.loads(RECORD.read_text())["results"] if RECORD.exists() else []
    if not args.table:
        jax.config.update("jax_platforms", "cpu")
        for chip in args.chips:
            found = count(chip)
            results = [r for r in results if r["chip"] != chip] + found
            write_results(RECORD, results, command="python scripts/step_ledger.py")
            print("\n".join(table(found)), flush=True)
    write_between(ROOT / "docs/planning.md", BEGIN, END, table(results))


def count(chip: str) -> list[dict[str, Any]]:
    """One result for each bucket."""
    topology, tensor = CHIPS[chip]
    config = load_config(ROOT / "configs/llama3.1-8b-v6e-1.yaml", (), environ={}).config
    options = PlanOptions(tensor=tensor, buckets=BUCKETS, context=CONTEXT)
    plan = make_plan(config, topology, options, say=lambda line: print(line, flush=True))
    assert plan.fits, plan.problem
    assert all(step.counted for step in plan.steps), plan.notes
    return [
        {"chip": chip, "topology": topology, "tensor": tensor, "step": step.name, "plan_seconds": round(plan.seconds)}
        | (dataclasses.asdict(step.counted) if step.counted is not None else {})
        for step in plan.steps
    ]


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown, in milliseconds."""
    yield f"| step | chip, tensor | bytes | flops | guess | {' | '.join(PARTS)} | spills |"
    yield "|---" * (len(PARTS) + 6) + "|"
    for step in BUCKETS:
        for r in sorted((r for r in results if r["step"] == step), key=lambda r: list(CHIPS).index(r["chip"])):
            seconds = (r["byte_seconds"], r["flop_seconds"], r["seconds"], *(r["parts"][part] for part in PARTS))
            spills = max(kernel["spills"] for kernel in r["kernels"])
            cells = (f"{step}, {r['rows']} x {r['context']}", f"{r['chip']}, {r['tensor']}")
            yield f"| {' | '.join((*cells, *(f'{1e3 * s:.2f}' for s in seconds), f'{spills:.0f}'))} |"


if __name__ == "__main__":
    main()
