"""Times products of rows with weights on this CPU, in the forms that were tried: milliseconds, Gop/s and GB/s.

    python scripts/bench_products.py [--json benchmarks/products_cpu.json] [--rounds 15] [--only packed]

It keeps the forms that lost, so that a claim in docs/performance.md can be measured again. The forms are checked
against each other only: tests/kernels has the exact results. The rates of the machine are measured before and after,
since one that is shared or slow shows in them.
"""

import argparse
import dataclasses
import functools
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

from jaxserve.kernels.block_codes import BLOCK_CODES, SPAN
from jaxserve.kernels.coded_weight import round_weight
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Weight
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.packed_codes import BLOCK
from jaxserve.kernels.packed_codes import pack as pack_code_weight
from jaxserve.kernels.packed_weight import pack
from jaxserve.kernels.storage import Arithmetic, Storage
from jaxserve.lab.bench.rates import machine_rates

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


def packed(x: Array, w: Weight) -> Array:
    """The kernels of this package."""
    return w.multiply(x)


def then_gated(x: Array, w: Weight) -> Array:
    """The kernels of this package, with gate before up, and loops of XLA for silu(gate) * up."""
    gate, up = jnp.split(w.multiply(x).astype(x.dtype), 2, axis=1)
    return jax.nn.silu(gate) * up


def gated(x: Array, w: Weight) -> Array:
    """The kernels of this package, silu(gate) * up included."""
    return w.multiply_gated(x, "silu")


def lay_panels(w: Array) -> Weight:
    return pack(w, 1, find_target().width)


def lay_halves(w: Array) -> Weight:
    return lay_panels(w.reshape(2, -1, IN))


def lay_codes(w: Array, storage: Storage, block: int | None) -> Weight:
    """Codes by rounding to nearest."""
    rounded = round_weight(np.asarray(w), 1, storage, "float32", Arithmetic(block=block))
    return pack_code_weight(rounded, find_target().width)


def lay_blocks(w: Array, name: str) -> Weight:
    """Codes of a GGUF type, in blocks, by rounding to nearest."""
    code = "int4" if BLOCK_CODES[name].bits == 4 else "int8"
    storage = Storage(code=code, group=BLOCK_CODES[name].group, blocks=name)
    rounded = round_weight(np.asarray(w), 1, storage, "float32", Arithmetic(activations="int8", block=SPAN))
    return make_matmul(Device(backend="cpu", kind="cpu")).convert(rounded)


def lay_row_codes(w: Array) -> Weight:
    return lay_codes(w, Storage(code="int8"), BLOCK)


def lay_half_codes(w: Array) -> Weight:
    return lay_row_codes(w.reshape(2, -1, IN))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """One way to multiply: the product, and how a weight [out, in] must lie for it."""

    name: str
    product: Callable[[Array, Array], Array]
    lay: Callable[[Array], Array | Weight]
    dtype: str = "float32"  # of activations, and of weights before they are laid
    storage: str | None = None  # of weights where it is another


FORMS = (
    Form(name="right, in x out", product=right_in_out, lay=lambda w: jnp.array(w.T)),
    Form(name="right, out x in", product=right_out_in, lay=lambda w: w),
    Form(name="left, out x in", product=left_out_in, lay=lambda w: w),
    Form(name="packed", product=packed, lay=lay_panels),
    Form(name="right, out x in", product=right_out_in, lay=lambda w: w, dtype="bfloat16"),
    Form(name="packed", product=packed, lay=lay_panels, dtype="bfloat16"),
    *(
        Form(name=f"gate and up, {name}", product=product, lay=lay, dtype=dtype, storage=storage)
        for dtype, storage, plain, halves in (
            ("float32", None, lay_panels, lay_halves),
            ("bfloat16", None, lay_panels, lay_halves),
            ("float32", "int8, rounded rows", lay_row_codes, lay_half_codes),
        )
        for name, product, lay in (("then silu in XLA", then_gated, plain), ("with silu", gated, halves))
    ),
    *(
        Form(
            name="packed" if block is None else "packed, rounded rows",
            product=packed,
            lay=functools.partial(lay_codes, storage=Storage(code=code, group=group), block=block),
            storage=code if group is None else f"{code}, groups {group}",
        )
        for code, group, block in (
            ("int8", None, None),
            ("int8", None, BLOCK),
            ("int8", 32, BLOCK),
            ("int8", 32, None),
            ("int8", 16, None),
            ("int4", 128, None),
            ("int4", 128, BLOCK),
            ("int4", 32, BLOCK),
            ("int4", 32, None),
            ("float8_e4m3fn", None, None),
        )
    ),
    *(
        Form(name="blocks", product=packed, lay=functools.partial(lay_blocks, name=name), storage=name)
        for name in BLOCK_CODES
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All weights one after the other in one program, and their bytes."""

    once: Callable[[], Array]
    num_bytes: int


def make_run(form: Form, laid: list[Array | Weight], x: Array) -> Run:
    """Each product takes what the last one gave."""

    def chain(x: Array, laid: list[Array]) -> Array:
        y = x
        for weight in laid:
            y = x + (1e-6 * form.product(y, weight)[:, :IN]).astype(x.dtype)
        return y

    x = x.astype(form.dtype)
    program = jax.jit(chain).lower(x, laid).compile()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(laid))
    return Run(once=lambda: program(x, laid).block_until_ready(), num_bytes=num_bytes)


def measure(rows: int, laid: list[list[Array | Weight]], rounds: int, forms: list[Form]) -> list[dict[str, object]]:
    """All forms in turns, on the clock and in processor time."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, IN), np.float32))
    runs = [make_run(form, own, x) for form, own in zip(forms, laid, strict=True)]
    first: dict[bool, Array] = {}  # of products, and of products whose halves are multiplied
    for form, run in zip(forms, runs, strict=True):
        tolerance = 1e-3 if form.dtype == "float32" else 5e-2
        found = run.once().astype(jnp.float32)
        wanted = first.setdefault(form.name.startswith("gate"), found)
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)
    clock: list[list[float]] = [[] for _ in forms]
    processor: list[list[float]] = [[] for _ in forms]
    for _ in range(rounds):
        for run, own_clock, own_processor in zip(runs, clock, processor, strict=True):
            begin_s, begin_processor_s = time.perf_counter(), time.process_time()
            run.once()
            own_clock.append(time.perf_counter() - begin_s)
            own_processor.append(time.process_time() - begin_processor_s)
    return [
        {
            "rows": rows,
            "form": form.name,
            "weights": form.storage or form.dtype,
            "ms": round(statistics.median(c) * 1e3, 2),
            "best_ms": round(min(c) * 1e3, 2),
            "best_processor_ms": round(min(p) * 1e3, 2),
            "gop_per_s": round(2 * rows * IN * OUT * WEIGHTS / statistics.median(c) / 1e9, 1),
            "gb_per_s": round(run.num_bytes / statistics.median(c) / 1e9, 2),
        }
        for form, run, c, p in zip(forms, runs, clock, processor, strict=True)
    ]


def show(results: list[dict[str, object]], rates: list[dict[str, dict[str, float]] | None]) -> None:
    table = Table(title=f"{WEIGHTS} weights of {OUT} x {IN}")
    for column in ("rows", "form", "weights", "ms", "best", "processor ms, best", "Gop/s", "GB/s of weights"):
        table.add_column(column, justify="left" if column in ("form", "weights") else "right")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    console = Console(width=120)
    console.print(table)
    for when, rate in zip(("before", "after"), rates, strict=True):
        console.print(f"the machine {when}: {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write the results here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--only", default="", help="forms whose name and weights begin so: 'blocks Q4|packed int8'")
    parser.add_argument("--cache", type=pathlib.Path, help="keep machine code here")
    args = parser.parse_args()
    wanted = tuple(args.only.split("|"))
    forms = [form for form in FORMS if f"{form.name} {form.storage or form.dtype}".startswith(wanted)]
    if args.cache:
        machine_code.keep_machine_code(args.cache)
    rates = [machine_rates()]
    jax.config.update("jax_platforms", "cpu")
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((OUT, IN), np.float32)) for _ in range(WEIGHTS)]
    laid = [[form.lay(w.astype(form.dtype)) for w in weights] for form in forms]
    results: list[dict[str, object]] = []
    for rows in track(args.rows, description="rows", console=Console(stderr=True)):
        results += measure(rows, laid, args.rounds, forms)
    rates.append(machine_rates())
    show(results, rates)
    if args.json:
        write_record(args.json, results, weights=WEIGHTS, shape=[OUT, IN], rates_before=rates[0])


if __name__ == "__main__":
    main()
