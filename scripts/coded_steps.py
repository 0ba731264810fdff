"""Steps of Llama-3.1-8B with weights as codes, compiled for chips that are not here: bytes moved over the least.

    python scripts/coded_steps.py                                  all schemes on all chips (some 20 minutes)
    python scripts/coded_steps.py --topology v5e:1 --schemes int4  some of them; the others stay as they are
    python scripts/coded_steps.py --table                          compiles nothing, and writes the table

The step decodes 64 rows of 2048 tokens. The least is what has to move: codes and scales, the output projection,
activations, logits, keys and values. Few layers are compiled, and extended to all; the largest temporary is one of the
program of few. The record is benchmarks/coded_steps.json, its table in docs/quantisation.md. Nothing in it is measured.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from kernel_runs import write_between, write_results

from jaxserve.config import load_config
from jaxserve.lab.planner.make import PlanOptions, make_plan
from jaxserve.lab.planner.report import Plan

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/coded_steps.json"
BEGIN, END = "<!-- coded steps: written by scripts/coded_steps.py -->", "<!-- end of coded steps -->"
TOPOLOGIES = ("v5e:1", "v6e:1", "h200:1")
SCHEMES = ("none", "int8", "int8-a8", "int4", "fp8")
ROWS, CONTEXT = 64, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps with weights as codes, compiled for chips that are not here.")
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--table", action="store_true", help="compile nothing")
    args = parser.parse_args()
    results = json.loads(RECORD.read_text())["results"] if RECORD.exists() else []
    for topology in () if args.table else args.topology:
        for scheme in args.schemes:
            found = step(topology, scheme)
            print(found, flush=True)
            results = [r for r in results if (r["topology"], r["scheme"]) != (topology, scheme)] + [found]
            results.sort(key=lambda r: (TOPOLOGIES.index(r["topology"]), SCHEMES.index(r["scheme"])))
            write_results(RECORD, results)
    write_between(ROOT / "docs/quantisation.md", BEGIN, END, table(results))


def step(topology: str, scheme: str) -> dict[str, Any]:
    """The figures of one scheme on one chip, or why there are none."""
    settings = {
        "model.path": str(ROOT / "configs/shapes/llama3.1-8b"),
        "model.dtype": "bfloat16",
        "model.max_len": 4096,
        "model.quantization": scheme,
        "sched.max_rows": ROWS,
    }
    config = load_config(None, settings).config
    least = plan_of(config, topology, compile=False)
    if not least.fits:
        return {"topology": topology, "scheme": scheme, "problem": least.problem}
    plan = plan_of(config, topology, compile=True)
    (compiled,) = plan.steps
    assert compiled.largest_temporary is not None, "logits are one"
    return {
        "topology": topology,
        "scheme": scheme,
        "moved_bytes": decode_bytes(plan),
        "least_bytes": decode_bytes(least),
        "weight_bytes": plan.memory.weight_bytes,
        "temporary_bytes": compiled.temporary_bytes,
        "largest_temporary": dataclasses.asdict(compiled.largest_temporary),
        "argument_bytes": compiled.argument_bytes,
        "predicted_argument_bytes": compiled.predicted_argument_bytes,
    }


def plan_of(config: Any, topology: str, *, compile: bool) -> Plan:
    options = PlanOptions(
        compile=compile, exact=False, count=False, buckets=(f"decode {ROWS}x{ROWS}",), context=CONTEXT
    )
    return make_plan(config, topology, options)


def decode_bytes(plan: Plan) -> float:
    (found,) = [p.moved_bytes for p in plan.predictions if p.decode and p.rows == ROWS]
    return found


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| chip | weights | GiB of weights | GB that must move | moved | over the least | temporaries, MB | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if "problem" in r:
            lines.append(f"| {r['topology']} | {r['scheme']} | does not fit | | | | | |")
            continue
        moved, least = r["moved_bytes"], r["least_bytes"]
        largest = r.get("largest_temporary")  # records of before lack it
        lines.append(
            f"| {r['topology']} | {r['scheme']} | {r['weight_bytes'] / 2**30:.1f} | {least / 1e9:.1f} "
            f"| {moved / 1e9:.1f} | {moved / least:.3f} | {r['temporary_bytes'] / 1e6:.0f} "
            f"| {'not counted' if largest is None else format(largest['size'] / 1e6, '.0f') + ' MB'} |"
        )
    return lines


if __name__ == "__main__":
    main()
