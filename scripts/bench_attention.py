"""Times formulations of paged attention on this machine's CPU: microseconds a layer, and GB/s of keys and values.

    python scripts/bench_attention.py [--json benchmarks/attention_cpu.json] [--rounds 15]

It keeps the formulations that were tried and lost, so that a claim in docs/attention-cpu.md can be measured again. The
formulations are checked against each other only: tests/kernels has the oracle.

They are timed in rounds: other work on the machine disturbs all formulations alike only when they take turns.
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
from jax import Array
from record import write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxserve.kernels.cases import MIXES, MODELS, Case, make_batch
from jaxserve.kernels.cpu.implementation import make_attention
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.kernels.xla_softmax import PageArrays

IMPLEMENTATIONS = (make_attention(Device(backend="cpu", kind="cpu")), XLA_ATTENTION)
LAYERS = 4  # in one jit, each with its own cache: the cost of a launch is shared, and caches push each other out
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "1 row of 100": ((1, 100),),
    "1 row of 1024": ((1, 1024),),
    "16 rows of 128": ((1, 128),) * 16,
    "16 rows of 1024": ((1, 1024),) * 16,
    "16 ragged rows, 1..1024": MIXES["ragged16"],
    "prefill of 512": MIXES["prefill"],
}
# One attention without the write: (q [R, K, G, H] scaled, keys, values, tables, context_lens) -> [R, K, G, H]
Formulation = Callable[[Array, Array, Array, Array, Array], Array]


def gather(q: Array, keys: Array, values: Array, tables: Array, lens: Array) -> Array:
    """All pages of the block table at once, then einsum. Keys [pages, K, page, H]."""
    page = keys.shape[2]
    scores = jnp.einsum("rkgh,rpksh->rkgps", q, keys[tables])
    position = jnp.arange(tables.shape[1] * page).reshape(-1, page)
    scores = jnp.where(position < lens[:, None, None, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=(-2, -1))
    return jnp.einsum("rkgps,rpksh->rkgh", weights, values[tables])


def scan(q: Array, keys: Array, values: Array, tables: Array, lens: Array) -> Array:
    """All rows together, page after page until the longest ends, by multiply and reduce. Keys [pages, K, page, H]."""
    page = keys.shape[2]

    def step(c: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        scores = (q[:, :, :, None, :] * keys[tables[:, c]][:, :, None]).sum(-1)
        seen = c * page + jnp.arange(page) < lens[:, None, None, None]
        return _online(jnp.where(seen, scores, -1e30), state, lambda p: _weigh(p, values[tables[:, c]]))

    return _divide(jax.lax.fori_loop(0, -(-lens.max() // page), step, _initial(q)))


def alone(q: Array, keys: Array, values: Array, tables: Array, lens: Array) -> Array:
    """One row after the other, each for its own length, by dots. Keys [pages, K, page, H]."""
    page = keys.shape[2]

    def row(r: Array, out: Array) -> Array:
        def step(c: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            scores = jnp.einsum("kgh,ksh->kgs", q[r], keys[tables[r, c]])
            seen = c * page + jnp.arange(page) < lens[r]
            mix = values[tables[r, c]]
            return _online(jnp.where(seen, scores, -1e30), state, lambda p: jnp.einsum("kgs,ksh->kgh", p, mix))

        return out.at[r].set(_divide(jax.lax.fori_loop(0, -(-lens[r] // page), step, _initial(q[r]))))

    return jax.lax.fori_loop(0, q.shape[0], row, jnp.zeros_like(q))


def _weigh(weights: Array, values: Array) -> Array:
    return (weights[..., None] * values[:, :, None]).sum(-2)


def _initial(q: Array) -> tuple[Array, Array, Array]:
    return jnp.full(q.shape[:-1], -1e30), jnp.zeros(q.shape[:-1]), jnp.zeros_like(q)


def _online(scores: Array, state: tuple[Array, Array, Array], mix: Callable[[Array], Array]):
    top, total, acc = state
    new_top = jnp.maximum(top, scores.max(-1))
    weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    return new_top, total * shrink + weights.sum(-1), acc * shrink[..., None] + mix(weights)


def _divide(state: tuple[Array, Array, Array]) -> Array:
    return state[2] / state[1][..., None]


def dense_prefill(q: Array, keys: Array, values: Array) -> Array:
    """Causal attention of one whole prompt: all scores at once."""
    count = q.shape[0]
    scores = jnp.einsum("tkgh,skh->kgts", q, keys)
    scores = jnp.where(jnp.tril(jnp.ones((count, count), bool)), scores, -1e30)
    return jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores, -1), values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One compiled program of LAYERS layers; `run` launches it and waits."""

    shape: str
    name: str
    page_size: int | None
    run: Callable[[], Array]
    kv_bytes: int


class Data:
    """Arrays of one shape and page size, the same for all formulations."""

    def __init__(self, rows: tuple[tuple[int, int], ...], page_size: int) -> None:
        self.case = Case(name="", spec=MODELS["bench125m"], rows=rows, page_size=page_size)
        spec = self.case.spec
        self.batch, num_pages = make_batch(self.case, np.random.default_rng(0))
        num_tokens, group = self.batch.positions.shape[0], spec.num_query_heads // spec.num_kv_heads
        self.q = jax.random.normal(jax.random.key(0), (num_tokens, spec.num_kv_heads, group, spec.head_dim))
        pages = (num_pages + 1, spec.num_kv_heads, page_size, spec.head_dim)
        self.keys, self.values = (
            [jax.random.normal(jax.random.key(10 * i + layer), pages) for layer in range(LAYERS)] for i in (1, 2)
        )

    def newest(self, pages: Array) -> Array:
        """[T, K, H] of this step's tokens, as they lie in the cache: writing them again changes nothing."""
        page_ids = self.batch.block_tables[self.batch.token_rows, self.batch.positions // self.case.page_size]
        return pages[page_ids, :, self.batch.positions % self.case.page_size]


def run_implementation(shape: str, data: Data, implementation: PagedAttention) -> Candidate:
    """What the engine runs, the write of the step's keys and values included."""
    spec, batch = data.case.spec, data.batch
    news = [(data.newest(k), data.newest(v)) for k, v in zip(data.keys, data.values, strict=True)]
    cache = [PageArrays(keys=k.swapaxes(2, 3), values=v + 0) for k, v in zip(data.keys, data.values, strict=True)]

    def chain(cache: list[PageArrays], q: Array, news: list[tuple[Array, Array]]) -> tuple[list[PageArrays], Array]:
        for layer, (k, v) in enumerate(news):
            flat, cache[layer] = implementation.attend(
                q.reshape(len(q), -1, q.shape[-1]), k, v, cache[layer], batch, spec
            )
            q = flat.reshape(q.shape)
        return cache, q

    program = jax.jit(chain, donate_argnums=0)
    held = [cache]

    def run() -> Array:
        held[0], out = program(held[0], data.q, news)
        return out.block_until_ready()

    return Candidate(
        shape=shape, name=implementation.name, page_size=data.case.page_size, run=run, kv_bytes=data.case.kv_bytes
    )


def loser(shape: str, data: Data, formulation: Formulation) -> Candidate:
    """A formulation that is not used, without the write."""

    @jax.jit
    def chain(q: Array, keys: list[Array], values: list[Array], tables: Array, lens: Array) -> Array:
        for layer_keys, layer_values in zip(keys, values, strict=True):
            q = formulation(q * data.case.spec.scale, layer_keys, layer_values, tables, lens)
        return q

    def run() -> Array:
        arrays = (data.keys, data.values, data.batch.block_tables, data.batch.context_lens)
        return chain(data.q, *arrays).block_until_ready()

    name = formulation.__name__
    return Candidate(shape=shape, name=name, page_size=data.case.page_size, run=run, kv_bytes=data.case.kv_bytes)


def dense(shape: str, data: Data) -> Candidate:
    """A prompt without any cache."""

    @jax.jit
    def chain(q: Array, news: list[tuple[Array, Array]]) -> Array:
        for k, v in news:
            q = dense_prefill(q * data.case.spec.scale, k, v)
        return q

    news = [(data.newest(k), data.newest(v)) for k, v in zip(data.keys, data.values, strict=True)]
    run = lambda: chain(data.q, news).block_until_ready()  # noqa: E731
    return Candidate(shape=shape, name="dense", page_size=None, run=run, kv_bytes=data.case.kv_bytes)


def candidates(shape: str, page_sizes: list[int]) -> list[Candidate]:
    """All formulations of a shape, proven to agree."""
    found: list[Candidate] = []
    for page_size in page_sizes:
        data = Data(SHAPES[shape], page_size)
        others = [loser(shape, data, f) for f in (gather, scan, alone)] if data.case.decode_only else []
        if not data.case.decode_only:
            others = [dense(shape, data)]
        same = [*(run_implementation(shape, data, implementation) for implementation in IMPLEMENTATIONS), *others]
        outputs = [np.asarray(c.run()) for c in same]
        for candidate, out in zip(same[1:], outputs[1:], strict=True):
            np.testing.assert_allclose(out, outputs[0], atol=1e-4, err_msg=f"{shape}, {candidate.name}")
        found += same if data.case.decode_only or not found else same[: len(IMPLEMENTATIONS)]
    return found


def measure(found: list[Candidate], rounds: int) -> list[dict[str, object]]:
    """Seconds of each candidate, taken in turns."""
    times: list[list[float]] = [[] for _ in found]
    for _ in range(rounds):
        for candidate, own in zip(found, times, strict=True):
            start = time.perf_counter()
            candidate.run()
            own.append((time.perf_counter() - start) / LAYERS)
    return [
        {
            "shape": c.shape,
            "formulation": c.name,
            "page_size": c.page_size,
            "us_per_layer": round(statistics.median(own) * 1e6, 1),
            "best_us_per_layer": round(min(own) * 1e6, 1),
            "kv_gb_per_s": round(c.kv_bytes / statistics.median(own) / 1e9, 2),
        }
        for c, own in zip(found, times, strict=True)
    ]


def show(results: list[dict[str, object]]) -> None:
    table = Table(title="Attention of one layer, 12 query and 4 key/value heads of 64, float32")
    for column in ("shape", "formulation", "page size", "us", "best us", "GB/s of KV"):
        table.add_column(column, justify="left" if column in ("shape", "formulation") else "right")
    for r in results:
        keys = ("shape", "formulation", "page_size", "us_per_layer", "best_us_per_layer", "kv_gb_per_s")
        table.add_row(*("-" if r[k] is None else str(r[k]) for k in keys))
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write the results here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results: list[dict[str, object]] = []
    for shape in track(SHAPES, description="shapes", console=Console(stderr=True)):
        results += measure(candidates(shape, args.page_sizes), args.rounds)
    show(results)
    if args.json:
        write_record(args.json, results, layers_in_one_program=LAYERS)


if __name__ == "__main__":
    main()
