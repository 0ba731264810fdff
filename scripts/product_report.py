"""How far the GPU's products with codes are proven: compiled for an H200, interpreted, measured on a card.

    PYTHONPATH=. python scripts/product_report.py --compile --interpret [--only int4]   finds out (an hour on two cores)
    python scripts/product_report.py                                                    writes the table of the record

The record is benchmarks/products_gpu.json; measurements are read from benchmarks/device_check_*.json. The table is in
docs/kernels.md between two markers. A case is compiled whole, and interpreted with few columns, inputs and rows; a case
without a record is 'unproven'.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from kernel_builds import ENVIRONMENT, capture, kernels_of
from kernel_runs import write_between, write_results

from jaxserve.kernels.cases import CODED_MATMUL_CASES, MatmulCase
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.self_check import matmul_error, matmul_limit
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/products_gpu.json"
BEGIN, END = "<!-- products: written by scripts/product_report.py -->", "<!-- end of products -->"
TOPOLOGY, NAME = "h200:1", "mosaic_gpu"

Facts = dict[str, dict[str, Any]]  # case -> 'compiled' and 'interpreted'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--only", default="", help="regular expression of names of cases")
    args = parser.parse_args()
    facts: Facts = json.loads(RECORD.read_text())["results"] if RECORD.exists() else {}
    os.environ.update(ENVIRONMENT)
    for name, case in CODED_MATMUL_CASES.items():
        if not re.search(args.only, name):
            continue
        found = facts.setdefault(name, {})
        if args.compile:
            found["compiled"] = compile_case(case)
        if args.interpret:
            found["interpreted"] = interpret(case)
        if args.compile or args.interpret:
            print(name, found, flush=True)
            write_results(RECORD, facts)
    write_between(ROOT / "docs/kernels.md", BEGIN, END, table(facts))


def compile_case(case: MatmulCase) -> dict[str, Any]:
    """Registers, spills and shared memory of the kernel, and bytes of XLA's temporaries; gate and up are gated."""
    sharding = jax.sharding.SingleDeviceSharding(absent_devices(TOPOLOGY)[0])
    there: Any = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
    assert case.storage is not None
    num_in = len(case.in_shape)
    group = case.storage.group
    by_scale = (*case.in_shape[:-1], case.in_shape[-1] // group) if group else (1,) * num_in
    weight = MATMUL.make(NAME, device_of_topology(TOPOLOGY)).shapes(
        CodedWeight(
            codes=there((*case.out_shape, *case.in_shape), case.storage.dtype("gpu")),
            scales=there((*case.out_shape, *by_scale), jnp.float32),
            zeros=None,
            num_in=num_in,
            storage=case.storage,
            arithmetic=case.arithmetic,
            dtype=case.dtype,
        )
    )
    weight = jax.tree.map(lambda leaf: there(leaf.shape, leaf.dtype), weight)
    is_gated = "gate_up" in case.name
    multiply = jax.jit(lambda w, x: w.multiply_gated(x, "silu") if is_gated else w.multiply(x))
    jax.clear_caches()  # a kernel that this process has compiled before is not reported on again
    with capture() as printed:
        traced = multiply.trace(weight, there((case.rows, *case.in_shape), jnp.dtype(case.dtype)))
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return {"kernels": kernels_of(printed[0]), "temporary_bytes": memory.temp_size_in_bytes}


def interpret(case: MatmulCase) -> dict[str, Any]:
    """The error of a short form against float64, and whether there was a race.

    Imported late, since interpreting needs private modules of JAX, and pytest.
    """
    from jaxserve.kernels.pallas.gpu_matmul import make_matmul
    from tests.kernels.gpu_interpreter import H200, INTERPRETER, watched

    with watched() as watch:
        error = matmul_error(make_matmul(H200, INTERPRETER), short(case))
        return {"error": error, "races": watch.found_races()}


def short(case: MatmulCase) -> MatmulCase:
    """Of 128 outputs, 512 inputs and at most 130 rows."""
    out_shape = (2, 64) if len(case.out_shape) > 1 else (128,)
    in_shape = (4, 128) if len(case.in_shape) > 1 else (512,)
    rows = min(case.rows, 130)
    return dataclasses.replace(case, name=f"{case.name}/small", rows=rows, out_shape=out_shape, in_shape=in_shape)


def measurements() -> dict[str, Mapping[str, Any]]:
    """What the records of scripts/device_check.py say of each case, of the last card by name, and XLA's time there."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted((ROOT / "benchmarks").glob("device_check_*.json")):
        checks = json.loads(path.read_text())["results"].get("products", ())
        others = {check["case"]: check.get("ms") for check in checks if check["implementation"] == "xla"}
        for check in checks:
            if check["implementation"] == NAME:
                found[check["case"]] = check | {"xla_ms": others.get(check["case"])}
    return found


def table(facts: Facts) -> Iterator[str]:
    """Markdown lines, one for each case."""
    measured = measurements()
    yield "| case | registers x threads | shared memory | compiled | largest error, interpreted | measured |"
    yield "|---|---|---|---|---|---|"
    for name, case in CODED_MATMUL_CASES.items():
        found = facts.get(name, {})
        own = found.get("compiled", {}).get("kernels", [])
        registers = ", ".join(f"{k['registers']} x {k['threads']}" for k in own) or "-"
        shared = ", ".join(f"{k['shared_bytes'] / 1024:.0f} KiB" for k in own) or "-"
        yield (
            f"| {name} | {registers} | {shared} | {_compiled(found.get('compiled'))} "
            f"| {_interpreted(case, found.get('interpreted'))} | {_measured(measured.get(name))} |"
        )


def _compiled(fact: Mapping[str, Any] | None) -> str:
    if fact is None:
        return "unproven"
    spilled = sum(kernel["spill_bytes"] for kernel in fact["kernels"])
    if spilled or any(kernel.get("serialized") for kernel in fact["kernels"]):
        return f"**wrong: {spilled} B spilled, or products serialized**"
    return "right" if fact["kernels"] else "**no kernel**"


def _interpreted(case: MatmulCase, fact: Mapping[str, Any] | None) -> str:
    if fact is None:
        return "unproven"
    limit = matmul_limit(MATMUL.make(NAME, device_of_topology(TOPOLOGY)), _use(case))
    wrong = fact["races"] or not fact["error"] <= limit
    return f"**wrong, {fact['error']:.1e}**" if wrong else f"{fact['error']:.1e}"


def _use(case: MatmulCase) -> MatmulUse:
    return MatmulUse(dtype=case.dtype, num_devices=1, storage=case.storage, arithmetic=case.arithmetic)


def _measured(check: Mapping[str, Any] | None) -> str:
    if check is None:
        return "unproven"
    if "passed" not in check:
        return "**failed**"
    if not check["passed"]:
        return f"**wrong, {check['error']:.1e}**"
    beside = "" if check["xla_ms"] is None else f" (XLA {check['xla_ms']:.3g})"
    return f"right, {check['ms']:.3g} ms{beside}, {check['gb_per_s']:.0f} GB/s"


if __name__ == "__main__":
    main()
