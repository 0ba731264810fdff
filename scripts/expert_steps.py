"""Steps of expert models, compiled for chips that are not here: what each does with its experts.

    python scripts/expert_steps.py                           compiles every bucket of every config (some 40 minutes)
    python scripts/expert_steps.py --configs mixtral-8x7b-v6e-4 --buckets 'decode 1x1'
                                                             some of them; the others stay as they are
    python scripts/expert_steps.py --table                   writes the table of the record into docs/planning.md

One layer of each kind is compiled, as a stage in the middle of a pipeline has it: all others are alike, and what comes
before and after them has no experts. The record is benchmarks/expert_steps.json. Nothing in it is measured.
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
from jaxserve.lab.compiled.ahead import AbsentModel, compile_stage, inner_layers, place_ahead
from jaxserve.lab.planner.experts import expert_facts
from jaxserve.lab.planner.fit import fit_memory
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.loading import decoder_config
from jaxserve.runtime.executables import step_name
from jaxserve.runtime.hlo import parse_hlo
from jaxserve.sched.plan import Bucket
from jaxserve.values.chips import parse_topology

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/expert_steps.json"
BEGIN, END = "<!-- experts: written by scripts/expert_steps.py -->", "<!-- end of experts -->"
CONFIGS = {
    "qwen3-30b-a3b-v6e-4": "v6e:2x2",
    "mixtral-8x7b-v6e-4": "v6e:2x2",
    "qwen3-30b-a3b-h200": "h200:1",
    "gpt-oss-20b-h200": "h200:1",
}
LIMIT = 1.10  # bytes moved for each that has to be


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--buckets", nargs="+", help="names such as 'decode 64x64'; default: all")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    args = parser.parse_args()
    results = json.loads(RECORD.read_text())["results"] if RECORD.exists() else []
    if not args.table:
        jax.config.update("jax_platforms", "cpu")
        for name in args.configs:
            absent, num_pages = place(name)
            for bucket in absent.sizes.buckets:
                if args.buckets is None or step_name(bucket) in args.buckets:
                    compiled = compile_stage(absent, num_pages=num_pages, only={step_name(bucket)})
                    text = compiled[step_name(bucket)].call.as_text()
                    assert text is not None, f"{step_name(bucket)} has no text"
                    results = with_result(results, result_of(name, absent, bucket, text))
                    write_results(RECORD, results, command="python scripts/expert_steps.py")
                    print(results[-1], flush=True)
    write_between(ROOT / "docs/planning.md", BEGIN, END, table(results))


def place(name: str) -> tuple[AbsentModel, int]:
    """The layers to compile of a config, and the number of pages that a server with all layers would have."""
    topology = CONFIGS[name]
    config = load_config(ROOT / f"configs/{name}.yaml", (), environ={}).config
    model = decoder_config(configured_checkpoint(config.model))[1]
    absent = place_ahead(config, model, topology=topology)
    plan = fit_memory(absent, parse_topology(topology)).plan
    assert plan is not None, f"{name} does not fit {topology}"
    return inner_layers(absent), plan.num_pages


def result_of(name: str, absent: AbsentModel, bucket: Bucket, text: str) -> dict[str, Any]:
    """One bucket's result, from the text of its compiled step."""
    facts = expert_facts(parse_hlo(text), absent, bucket)
    return {
        "config": name,
        "topology": CONFIGS[name],
        "step": step_name(bucket),
        **dataclasses.asdict(facts),
        "excess": round(facts.excess, 3),
    }


def with_result(results: Sequence[dict[str, Any]], fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """The results with one replaced or added, at the end."""
    same = (fresh["config"], fresh["step"])
    return [r for r in results if (r["config"], r["step"]) != same] + [fresh]


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: for each kind of step and number of tokens the bytes moved for each that has to be, by config."""

    def size(result: Mapping[str, Any]) -> tuple[str, int]:
        kind, shape = result["step"].split()
        return kind, int(shape.split("x")[0])

    yield f"| step, tokens | {' | '.join(CONFIGS)} |"
    yield "|---" * (len(CONFIGS) + 1) + "|"
    for kind, tokens in sorted({size(r) for r in results}):
        found = {r["config"]: r["excess"] for r in results if size(r) == (kind, tokens)}
        cells = (_cell(found[name]) if name in found else "" for name in CONFIGS)
        yield f"| {kind}, {tokens} | {' | '.join(cells)} |"


def _cell(excess: float) -> str:
    """A step over the limit is bold."""
    return f"**{excess:.2f}**" if excess > LIMIT else f"{excess:.2f}"


if __name__ == "__main__":
    main()
