"""Times products of rows with weights on this CPU, in the forms that were tried: milliseconds and GFLOP/s.

    python scripts/bench_products.py [--json benchmarks/products_cpu.json] [--rounds 15]

It keeps the forms that lost, so that a claim in docs/performance.md can be measured again. The forms are checked
against each other only: tests/kernels has the exact results.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from record import write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.packed_weight import PackedWeight, pack

IN, OUT, WEIGHTS = 768, 4096, 24  # 302 MB of float32: far more than any cache, as in a model


def right_in_out(x: Array, w: Array) -> Array:
    """XLA, the weight [in, out] to the right."""
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def right_out_in(x: Array, w: Array) -> Array:
    """XLA, the weight [out, in] to the right."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def left_out_in(x: Array, w: Array) -> Array:
    """XLA, the weight [out, in] to the left, kept apart from its transpositions."""
    columns = lax.optimization_barrier(x.T)
    product = lax.dot_general(w, columns, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(product).T


def packed(x: Array, w: PackedWeight) -> Array:
    """The kernel of this package."""
    return w.multiply(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to multiply: the product, and how a weight [out, in] must lie for it."""

    name: str
    product: Callable[[Array, Array], Array]
    lay: Callable[[Array], Array | PackedWeight]
    dtype: str = "float32"


FORMS = (
    Form(name="right, in x out", product=right_in_out, lay=lambda w: jnp.array(w.T)),
    Form(name="right, out x in", product=right_out_in, lay=lambda w: w),
    Form(name="left, out x in", product=left_out_in, lay=lambda w: w),
    Form(name="packed", product=packed, lay=lambda w: pack(w, 1, find_target().width)),
    Form(name="right, out x in", product=right_out_in, lay=lambda w: w, dtype="bfloat16"),
    Form(name="packed", product=packed, lay=lambda w: pack(w, 1, find_target().width), dtype="bfloat16"),
)


def make_run(form: Form, weights: list[Array], x: Array) -> Callable[[], Array]:
    """All weights one after the other in one program, each with what the last one gave."""

    def chain(x: Array, laid: list[Array]) -> Array:
        y = x
        for weight in laid:
            y = x + (1e-6 * form.product(y, weight)[:, :IN]).astype(x.dtype)
        return y

    laid = [form.lay(w.astype(form.dtype)) for w in weights]
    x = x.astype(form.dtype)
    program = jax.jit(chain).lower(x, laid).compile()
    return lambda: program(x, laid).block_until_ready()


def measure(rows: int, weights: list[Array], rounds: int) -> list[dict[str, object]]:
    """All forms in turns, on the clock and in processor time."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, IN), np.float32))
    runs = [make_run(form, weights, x) for form in FORMS]
    for form, run in zip(FORMS, runs, strict=True):
        tolerance = 1e-3 if form.dtype == "float32" else 5e-2
        np.testing.assert_allclose(run().astype(jnp.float32), runs[0](), atol=tolerance, rtol=tolerance)
    clock: list[list[float]] = [[] for _ in FORMS]
    processor: list[list[float]] = [[] for _ in FORMS]
    for _ in range(rounds):
        for run, own_clock, own_processor in zip(runs, clock, processor, strict=True):
            begin_s, begin_processor_s = time.perf_counter(), time.process_time()
            run()
            own_clock.append(time.perf_counter() - begin_s)
            own_processor.append(time.process_time() - begin_processor_s)
    return [
        {
            "rows": rows,
            "form": form.name,
            "dtype": form.dtype,
            "ms": round(statistics.median(c) * 1e3, 2),
            "best_processor_ms": round(min(p) * 1e3, 2),
            "gflop_per_s": round(2 * rows * IN * OUT * WEIGHTS / statistics.median(c) / 1e9, 1),
            "gb_per_s": round(IN * OUT * WEIGHTS * jnp.dtype(form.dtype).itemsize / statistics.median(c) / 1e9, 2),
        }
        for form, c, p in zip(FORMS, clock, processor, strict=True)
    ]


def show(results: list[dict[str, object]]) -> None:
    table = Table(title=f"{WEIGHTS} weights of {OUT} x {IN}")
    for column in ("rows", "form", "dtype", "ms", "processor ms, best", "GFLOP/s", "GB/s of weights"):
        table.add_column(column, justify="left" if column in ("form", "dtype") else "right")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write the results here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((OUT, IN), np.float32)) for _ in range(WEIGHTS)]
    results: list[dict[str, object]] = []
    for rows in track(args.rows, description="rows", console=Console(stderr=True)):
        results += measure(rows, weights, args.rounds)
    show(results)
    if args.json:
        write_record(args.json, results, weights=WEIGHTS, shape=[OUT, IN])


if __name__ == "__main__":
    main()
