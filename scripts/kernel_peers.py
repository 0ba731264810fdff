"""Attention kernels of others on the same shapes and bytes: JAX's for GPUs and TPUs, cuDNN through JAX, PyTorch's SDPA.

Each peer is called here, or refuses a case; `device_check` compares times.

Keys and values are dense, but for the two of JAX that read pages. All get the same number of tokens; of the dense ones
a decode row under a window gets the window's tokens alone. None of them writes a cache, so they do a little less than
an implementation does.
"""

import dataclasses
import functools
import importlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from kernel_pool import error_lines
from kernel_runs import LAYERS, ROUNDS, layers_of, seconds_per_call

from jaxserve.kernels.cases import Case
from jaxserve.kernels.oracle import attend_row
from jaxserve.kernels.paged_attention import AttentionSpec
from jaxserve.values.chips import Chip, chip_of_kind

# Peers of one case: they are not told to be as exact as an implementation, only to compute the same thing.
PEER_TOLERANCE = 3e-2


class NoPeerError(Exception):
    """Why a peer cannot run a case."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One setting of a peer: `attend(*prepare(q, k, v))` of the arrays that `Dense.arrays` gives. Only it is timed."""

    setting: str
    attend: Callable[[Array, Array, Array], Array]
    prepare: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda *arrays: arrays


class Dense:
    """A case whose rows are alike, as queries [R, q_len, N, H] and keys, values [R, S, K, H] in bfloat16.

    Raises NoPeerError where one call of a dense kernel would not do the same work.
    """

    def __init__(self, case: Case) -> None:
        (q_len, context), *others = set(case.rows)
        if others:
            raise NoPeerError("rows of different lengths: a dense kernel would do other work")
        if case.cache_dtype != "bfloat16":
            raise NoPeerError(f"no peer reads keys and values of {case.cache_dtype}")
        if case.sinks or case.alibi:
            raise NoPeerError("no peer has " + ("attention sinks" if case.sinks else "ALiBi without a bias matrix"))
        if q_len not in (1, context):
            raise NoPeerError("a piece of a prompt: peers align their causal mask differently")
        self.case, self.spec = case, case.spec
        self.decode = q_len == 1
        self.window = case.spec.window if not self.decode and (case.spec.window or context) < context else None
        self.rows, self.q_len = len(case.rows), q_len
        self.kv_len = min(context, case.spec.window or context) if self.decode else context

    def arrays(self, seed: int = 0) -> tuple[Array, Array, Array]:
        """Normal random numbers."""
        shape_kv = (self.rows, self.kv_len, self.spec.num_kv_heads, self.spec.head_dim)
        shape_q = (self.rows, self.q_len, self.spec.num_query_heads, self.spec.head_dim)
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = (shape_q, shape_kv, shape_kv)
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))

    def error(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> float:
        """Of a few queries of the first row, which are given alone: [S, heads, H] each."""
        chosen = np.unique(np.linspace(0, self.q_len - 1, 5).astype(int))
        return worst_error(self.spec, q[chosen], k, v, out[chosen], self.kv_len - self.q_len + chosen)


def worst_error(
    spec: AttentionSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, positions: np.ndarray
) -> float:
    """The largest relative error of `out` among some queries of a row, over all of its keys and values."""
    exact = attend_row(q, k, v, spec, positions=positions)
    off = np.linalg.norm(out.astype(np.float64) - exact, axis=(1, 2))
    return float((off / np.linalg.norm(exact, axis=(1, 2))).max())


# --- JAX ------------------------------------------------------------------------------------------------------------


def time_jax_peer(name: str, case: Case, alone: Any, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Times each setting of a peer of `JAX_PEERS`; one result a setting. `alone` gives the device to one process."""
    dense = Dense(case)
    peers = list(JAX_PEERS[name](dense))
    stage("inputs")
    arrays = dense.arrays()
    programs: list[tuple[str, Callable[[], list[Array]]]] = []
    for peer in peers:
        try:
            programs.append((peer.setting, _compiled(peer, arrays, stage)))
        except Exception as error:  # another setting may still compile
            yield {"setting": peer.setting, "refused": error_lines(error, 2)}
    stage("wait")
    with alone():  # once for all settings: to wait for the others' work costs more than to time
        stage("run")
        timed = [(setting, run()[0], seconds_per_call(run, LAYERS)) for setting, run in programs]
    stage("host")
    for setting, out, seconds in timed:
        first = [np.asarray(x[0]).astype(np.float32) for x in (*arrays, out)]
        yield {"setting": setting, "ms": seconds * 1e3, "error": dense.error(*first)}


def _compiled(
    peer: Peer, arrays: tuple[Array, Array, Array], stage: Callable[[str], None]
) -> Callable[[], list[Array]]:
    stage("inputs")
    q, k, v = peer.prepare(*arrays)
    copies = jax.block_until_ready([(k, v), *((jnp.copy(k), jnp.copy(v)) for _ in range(LAYERS - 1))])
    stage("compile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some are deprecated, and here to compare with
        run = jax.jit(lambda q, copies: [peer.attend(q, k, v) for k, v in copies])
        return functools.partial(run.lower(q, copies).compile(), q, copies)


def _stock(dense: Dense) -> Iterator[Peer]:
    return _stock_decode(dense) if dense.decode else _stock_prefill(dense)


def _stock_decode(dense: Dense) -> Iterator[Peer]:
    """jax.experimental.pallas.ops.gpu.paged_attention (Triton), the pages of a row in order."""
    page_size, spec = dense.case.page_size, dense.spec
    stock = _import("jax.experimental.pallas.ops.gpu.paged_attention", "paged_attention")
    if dense.kv_len % page_size:
        raise NoPeerError("a row is not a whole number of pages")
    if spec.head_dim & (spec.head_dim - 1):
        raise NoPeerError("Triton blocks are powers of two")
    columns = dense.kv_len // page_size
    tables = jnp.arange(dense.rows * columns, dtype=jnp.int32).reshape(dense.rows, columns)
    lengths = jnp.full(dense.rows, dense.kv_len, jnp.int32)

    def attend(q: Array, k: Array, v: Array, splits: int, pages: int) -> Array:
        sizes = {"k_splits": splits, "pages_per_compute_block": pages, "attn_logits_soft_cap": spec.soft_cap}
        return stock(q, k, v, tables, lengths, **sizes)[:, None]

    def prepare(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        paged = lambda x: x.reshape(-1, page_size, spec.num_kv_heads, spec.head_dim).transpose(2, 0, 1, 3)  # noqa: E731
        return q[:, 0] * jnp.asarray(spec.scale, q.dtype), paged(k), paged(v)

    # Blocks of more tokens do not fit in shared memory.
    for splits, tokens in ((4, 128), (16, 64), (16, 128), (64, 64)):
        pages = max(1, tokens * 128 // max(spec.head_dim, 128) // page_size)
        if columns % splits == 0 and (columns // splits) % pages == 0:
            own = functools.partial(attend, splits=splits, pages=pages)
            yield Peer(setting=f"{splits} splits, {pages} pages", attend=own, prepare=prepare)


def _stock_prefill(dense: Dense) -> Iterator[Peer]:
    """jax.experimental.pallas.ops.gpu.attention_mgpu (Mosaic GPU, after FlashAttention-3): float16 alone."""
    _plain(dense)
    if dense.spec.head_dim % 64:
        raise NoPeerError("it needs head_dim in multiples of 64")
    stock = _import("jax.experimental.pallas.ops.gpu.attention_mgpu", "attention")
    config = _import("jax.experimental.pallas.ops.gpu.attention_mgpu", "TuningConfig")

    def attend(q: Array, k: Array, v: Array, block_kv: int) -> Array:
        blocks = config(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True)
        return stock(q, k, v, blocks)

    def prepare(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        scaled = q.astype(jnp.float32) * dense.spec.scale
        return scaled.astype(jnp.float16), k.astype(jnp.float16), v.astype(jnp.float16)

    for block_kv in (256, 128) if dense.spec.head_dim < 128 else (128, 64):
        own = functools.partial(attend, block_kv=block_kv)
        yield Peer(setting=f"block_kv {block_kv}", attend=own, prepare=prepare)


def _dot_product(dense: Dense, implementation: str) -> Iterator[Peer]:
    """jax.nn.dot_product_attention."""
    if dense.spec.soft_cap is not None:
        raise NoPeerError("it has no soft cap")

    def attend(q: Array, k: Array, v: Array, lengths: bool) -> Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=dense.spec.scale,
            is_causal=not dense.decode,
            key_value_seq_lengths=jnp.full(dense.rows, dense.kv_len, jnp.int32) if lengths else None,
            local_window_size=None if dense.window is None else (dense.window - 1, 0),
            implementation=implementation,
        )

    yield Peer(setting="no lengths", attend=functools.partial(attend, lengths=False))
    if dense.decode:
        yield Peer(setting="lengths", attend=functools.partial(attend, lengths=True))


def _import(module: str, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NoPeerError(f"this JAX has no {module}.{name}: {error}") from error


def _plain(dense: Dense) -> None:
    if dense.window is not None or dense.spec.soft_cap is not None:
        raise NoPeerError("it has no window" if dense.window is not None else "it has no soft cap")


JAX_PEERS: dict[str, Callable[[Dense], Iterator[Peer]]] = {
    "jax-stock": _stock,
    "jax-cudnn": functools.partial(_dot_product, implementation="cudnn"),
    "jax-xla": functools.partial(_dot_product, implementation="xla"),
}


# --- JAX on TPUs ----------------------------------------------------------------------------------------------------

_MOST_PAGES = 64  # of a block of keys; the kernel refuses a block that is longer than the table, if it were empty


def time_ragged(case: Case, alone: Any, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Times JAX's ragged paged attention on a TPU; one result a setting."""
    tpu_peers, name = _import("tpu_peers", "tpu_peers"), _import("tpu_peers", "RAGGED")
    peers = [peer for peer in tpu_peers(case, _tpu_at_hand(), None) if peer.by == name]
    if not peers:
        raise NoPeerError("it takes heads of 128 over a cache in bfloat16, without attention sinks or ALiBi")
    stage("inputs")
    q, pages, lens, tables, starts, num_rows = peers[0].args
    q, pages = (jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate((q, pages)))
    wide = np.pad(tables, ((0, 0), (0, max(0, _MOST_PAGES - tables.shape[1]))))
    integers = tuple(map(jnp.asarray, (lens, wide, starts, num_rows)))
    copies = layers_of(pages)
    stage("compile")
    programs: list[tuple[str, Callable[[], list[Array]]]] = []
    for peer in peers:

        def attend(q: Array, copies: list[Array], *integers: Array, peer: Any = peer) -> list[Array]:
            return [peer.function(q, pages, *integers) for pages in copies]

        try:
            compiled = jax.jit(attend).lower(q, copies, *integers).compile()
        except Exception as error:  # another setting may still compile
            yield {"setting": peer.setting, "refused": error_lines(error, 2)}
        else:
            programs.append((peer.setting, functools.partial(compiled, q, copies, *integers)))
    stage("wait")
    with alone():
        stage("run")
        timed = [(setting, run()[0], seconds_per_call(run, LAYERS)) for setting, run in programs]
    stage("host")
    q_len, context = case.rows[0]
    row = np.asarray(pages[tables[0, : -(-context // case.page_size)]]).astype(np.float32)
    row = row.reshape(-1, *row.shape[2:])[:context]  # [context, 2K, H]: a key, its value, the next key
    chosen = np.unique(np.linspace(0, q_len - 1, 5).astype(int))
    queries = np.asarray(q[:q_len]).astype(np.float32)[chosen]
    for setting, out, seconds in timed:
        found = np.asarray(out[:q_len]).astype(np.float32)[chosen]
        error = worst_error(case.spec, queries, row[:, 0::2], row[:, 1::2], found, context - q_len + chosen)
        yield {"setting": setting, "ms": seconds * 1e3, "error": error}


def _tpu_at_hand() -> Chip:
    kind = jax.devices()[0].device_kind
    chip = chip_of_kind(kind)
    if chip is None or chip.backend != "tpu":
        raise NoPeerError(f"it runs on TPUs that jaxserve.values.chips knows, and this is {kind!r}")
    return chip


# --- PyTorch, in a process that never starts a JAX device ------------------------------------------------------------

_SDPA = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def time_torch(case: Case, alone: Any, stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Times scaled_dot_product_attention with each of its kernels; one result a kernel, or its refusal."""
    dense = Dense(case)
    _plain(dense)
    torch, functional, attention = (
        _import_torch(name) for name in ("torch", "torch.nn.functional", "torch.nn.attention")
    )
    if not torch.cuda.is_available():
        raise NoPeerError("this PyTorch sees no GPU")
    stage("inputs")
    torch.manual_seed(0)
    new = lambda heads, count: torch.randn(  # noqa: E731
        dense.rows, heads, count, dense.spec.head_dim, dtype=torch.bfloat16, device="cuda"
    )
    q = new(dense.spec.num_query_heads, dense.q_len)
    copies = [[new(dense.spec.num_kv_heads, dense.kv_len) for _ in "kv"] for _ in range(LAYERS)]
    options = {
        "scale": dense.spec.scale,
        "is_causal": not dense.decode,
        "enable_gqa": dense.spec.num_query_heads != dense.spec.num_kv_heads,
    }
    for name in _SDPA:
        run = lambda: [functional.scaled_dot_product_attention(q, k, v, **options) for k, v in copies]  # noqa: E731
        stage("wait")
        try:
            with alone(), attention.sdpa_kernel([attention.SDPBackend.__members__[name]]):
                stage("run")
                out = run()[0]
                milliseconds = _torch_ms(torch, run) / LAYERS
        except RuntimeError as error:  # how PyTorch says that a kernel does not take these arguments
            yield {"setting": name, "refused": str(error).strip().splitlines()[0][:300]}
            continue
        first = [x[0].transpose(0, 1).float().cpu().numpy() for x in (q, *copies[0], out)]
        stage("host")
        yield {"setting": name, "ms": milliseconds, "error": dense.error(*first)}


def _torch_ms(torch: Any, run: Callable[[], Any]) -> float:
    """Median milliseconds of a launch between two events; launches of a round queue up behind each other."""

    def measure(launches: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(launches):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / launches

    measure(2)
    launches = int(np.clip(30 / measure(1), 1, 200))
    return statistics.median(measure(launches) for _ in range(ROUNDS))


def _import_torch(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoPeerError(f"PyTorch is not installed: {error}") from error
