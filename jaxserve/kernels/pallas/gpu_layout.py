"""The common part of the GPU kernels: the cache's layout, the copy of a tile of tokens, the switch for the interpreter.

Every construct that JAX's interpreter of Mosaic GPU kernels cannot run is here. Decode, prefill and the write have a
file each.

    keys, values [page, kv head, token of the page, lane]         one (page, head) is one contiguous block of memory,
                  |        |           |             |            so one bulk copy (TMA) brings it to shared memory;
                  id   grid axis   rows of a tile  64, 128, ..    lanes past the head dim hold zeros

Why heads come before tokens: a program works on one head. With tokens first, its copy would pick short pieces from
between the other heads' bytes.

Why one switch: the interpreter proves paging, barriers, masks and arithmetic, but knows neither register layouts nor
transposed or register operands of wgmma. Each function below that takes `interpret` says the same thing twice, once
for the hardware and once in plain array operations, and no kernel asks where it runs.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionUse

TILE = 64  # tokens: the rows of one wgmma
SHARED_MEMORY_BYTES = 232448  # one block's limit on Hopper, 227 KB (CUDA programming guide, compute capability 9.0)
MAX_HEAD_DIM = 256
_COMPUTE_CAPABILITY = 9
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
LOG2E = 1.4426950408889634
# Scores that are not seen, and where a running maximum starts. The gap makes exp2 of their difference exactly 0.
HIDDEN = -1e30
LOWEST = -0.5e30

_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]: public, but imported without `as`
# A stand-in for the hardware: jax's InterpretGPUParams (a private class so far), or None.
Interpret = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuPages:
    """The cache of one layer; the picture is above. H' is the head dim rounded up to a multiple of 64."""

    keys: Float[Array, "pages K page H'"]
    values: Float[Array, "pages K page H'"]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        return self.keys.dtype


def padded_head_dim(head_dim: int) -> int:
    """Lanes a head takes: whole rows of the 128-byte pattern that wgmma reads (64 numbers of 16 bits)."""
    return -(-head_dim // 64) * 64


def init_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> GpuPages:
    """Zeros for num_pages + 1 pages; page 0 is the dummy."""
    shape = (num_pages + 1, num_kv_heads, page_size, padded_head_dim(head_dim))
    return GpuPages(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def copy_pages(cache: GpuPages, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> GpuPages:
    """All sources are read before any target is written. The cache is donated by the caller."""
    return jax.tree.map(lambda leaf: leaf.at[targets].set(leaf[sources]), cache)


def read_pages(leaves: Sequence[np.ndarray], page_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """`HostPages.read`."""
    keys, values = leaves
    assert keys.shape[2:] == (page_size, padded_head_dim(head_dim)), (keys.shape, page_size, head_dim)
    return keys[..., :head_dim].swapaxes(1, 2), values[..., :head_dim].swapaxes(1, 2)


def write_pages(keys: np.ndarray, values: np.ndarray) -> Sequence[np.ndarray]:
    """`HostPages.write`."""

    def padded(x: np.ndarray) -> np.ndarray:
        num_pages, page_size, heads, head_dim = x.shape
        out = np.zeros((num_pages, heads, page_size, padded_head_dim(head_dim)), x.dtype)
        out[..., :head_dim] = x.swapaxes(1, 2)
        return out

    return padded(keys), padded(values)


def refuses_device(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None. They multiply by wgmma, which no other generation has: ptxas
    refuses it for 10.0 (Blackwell), too."""
    found = device.compute_capability
    if device.backend == "gpu" and found is not None and found[0] == _COMPUTE_CAPABILITY:
        return None
    shown = "none" if found is None else ".".join(map(str, found))
    needed = f"compute capability {_COMPUTE_CAPABILITY}.x (Hopper)"
    return f"it needs the instructions of {needed}, and {device.kind} has {shown}"


def refuses_layout(use: AttentionUse) -> str | None:
    """Why this layout cannot hold a use, or None."""
    remedy = "kernels.paged_attention: xla_batched runs it"
    if use.query_dtype != "bfloat16":
        return f"queries in {use.query_dtype}, but GPU kernels take bfloat16; set model.dtype to it, or {remedy}"
    if use.cache_dtype not in CACHE_DTYPES:
        return f"keys and values in {use.cache_dtype}, but GPU kernels take {', '.join(CACHE_DTYPES)}; {remedy}"
    if use.spec.head_dim > MAX_HEAD_DIM:
        return f"head dim {use.spec.head_dim}, but GPU kernels go up to {MAX_HEAD_DIM}; {remedy}"
    page = use.page_size
    if page < 8 or (TILE % page and page % TILE):
        return f"page size {page}, but GPU kernels take 8, 16, 32, or a multiple of {TILE} tokens; set cache.page_size"
    return None


# --- tiles in shared memory -----------------------------------------------------------------------------------------


def tile_type(shape: Sequence[int], dtype: jnp.dtype, max_swizzle: int = 128) -> Any:
    """Shared memory for matrices (the last two axes) in the pattern that TMA writes and wgmma reads.

    The pattern interleaves `max_swizzle` bytes of a row, or as many as divide the row. Slices along a row have to be
    multiples of that.
    """
    bits = dtype_bits(dtype)
    swizzle = next(s for s in (128, 64, 32) if s <= max_swizzle and shape[-1] * bits % (8 * s) == 0)
    transforms = (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def tile_bytes(shape: Sequence[int], dtype: jnp.dtype | str) -> int:
    """Shared memory of `tile_type(shape, dtype)`, which starts at a multiple of 1024 bytes."""
    size = math.prod(shape) * dtype_bits(dtype) // 8
    return -(-size // 1024) * 1024


def dtype_bits(dtype: jnp.dtype | str) -> int:
    """Bits of a number on a device; NumPy gives those of four a byte."""
    return 4 if jnp.dtype(dtype) == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def copies_per_tile(page_size: int, tokens: int = TILE) -> int:
    """Number of copies that `copy_tile` starts: the arrivals that its barrier waits for."""
    return max(1, tokens // page_size)


def pad_tables(block_tables: Int[Array, "R P"], page_size: int) -> Int[Array, "R P'"]:
    """The tables with a page id for each copy of their last tile; the dummy page fills up."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % copies_per_tile(page_size))))


def tile_page_ids(tables_ref: Any, row: Array, first_token: Array, page_size: int, tokens: int = TILE) -> list[Array]:
    """Page ids of the tile that starts at `first_token`, a multiple of `tokens`. Scalar loads, all independent."""
    column = lax.div(first_token, jnp.int32(page_size))
    return [tables_ref[row, column + j] for j in range(copies_per_tile(page_size, tokens))]


def copy_tile(
    pages_ref: Any, page_ids: Sequence[Array], head: Array, first_token: Array, tile_ref: Any, barrier: Any
) -> None:
    """Starts the copies of one tile [tokens, H'] of keys or values. `page_ids` are those of `tile_page_ids`."""
    page_size = pages_ref.shape[2]
    rows = min(page_size, tile_ref.shape[0])
    offset = lax.rem(first_token, jnp.int32(page_size)) if page_size > rows else 0
    for j, page_id in enumerate(page_ids):
        source = pages_ref.at[page_id, head, pl.ds(offset, rows)]
        plgpu.copy_gmem_to_smem(source, tile_ref.at[pl.ds(j * rows, rows)], barrier)


def copyable(lines: Float[Array, "K G"]) -> Float[Array, "K G'"]:
    """Float32 numbers padded so that those of one line (a kv head) can be copied: a multiple of 128 bytes."""
    return jnp.pad(lines, ((0, 0), (0, -lines.shape[1] % 32)))


# --- what the interpreter of jax 0.10 and 0.11 does not know ---------------------------------------------------------


def launch(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: Mapping[str, int],
    scratch: Any = (),
    warpgroups: int = 1,
    own_barriers: bool = False,
    interpret: Interpret = None,
) -> Callable[..., Any]:
    """`plgpu.kernel` with what all kernels here agree on. The warpgroups' axis is called 'wg'.

    Lane semantics: registers' layouts are written in the kernel, rather than found by a search that changes between
    releases of jax. Approximate math: exp2 in one instruction, off by 2 units in the last place.

    Mosaic puts a barrier of the warpgroup before and after each store to shared memory, and before each copy into it.
    With `own_barriers` it puts none: then the body itself must see to it that all four warps have read a place before
    one of them writes it, or starts a copy into it. `commit_smem`, sums and maxima across warps, and waits for stores
    to HBM are barriers of the warpgroup; a thread may change what it alone has read. The interpreter runs a warpgroup
    as one thread, so it sees no mistake in this.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=REDUCTION_BYTES,
            unsafe_no_auto_barriers=own_barriers,
        ),
        interpret=interpret,
    )


REDUCTION_BYTES = 2048  # shared memory that Mosaic sets aside for maxima and sums across warps


def launch_in_place(
    body: Callable[..., None], *, grid: Mapping[str, int], interpret: Interpret = None
) -> Callable[..., Any]:
    """A kernel of one warpgroup without outputs, which writes to those of its operands that are `jax.Ref`s.

    Scratch memory is for the body to ask for (`pl.run_scoped`, collective over 'wg'), and barriers are its own, as with
    `own_barriers` of `launch`.
    """
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
    return pl.kernel(
        body, out_type=(), mesh=mesh, compiler_params=params, interpret=interpret or False, name=body.__name__
    )


def cast(x: Array, layout: Any, interpret: Interpret) -> Array:
    """`x` with its registers in `layout`. Arrays that meet in one operation need the same one."""
    return x if interpret is not None else plgpu.layout_cast(x, layout)


def load(ref: Any, layout: Any, interpret: Interpret) -> Array:
    """All of `ref`, read straight into `layout`."""
    return cast(ref[...], layout, interpret)


def full(
    shape: Sequence[int], value: float, layout: Any, interpret: Interpret, dtype: jax.typing.DTypeLike = jnp.float32
) -> Array:
    """A constant, as a loop carries it."""
    return cast(jnp.full(tuple(shape), value, dtype), layout, interpret)


def iota(shape: Sequence[int], axis: int, layout: Any, interpret: Interpret) -> Array:
    """Int32 positions along `axis`."""
    if interpret is not None:
        return lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
    return plgpu.broadcasted_iota(jnp.int32, tuple(shape), axis, layout=layout)


def product(
    a: Any,
    b: Any,
    interpret: Interpret,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Float[Array, "M N"]:
    """a @ b in float32 (layout WGMMA); both lie in shared memory, `a` may also be in registers.

    `meanwhile` runs once the tensor cores have begun. On return they have finished reading.
    """
    shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
    if interpret is not None:
        meanwhile()
        return _dot(a, b, transpose_a, transpose_b)

    def run(acc: Any) -> Array:
        plgpu.wgmma(acc, _turned(a, transpose_a), _turned(b, transpose_b))
        meanwhile()
        return acc[...]

    return pl.run_scoped(run, _ACC(shape, jnp.float32))


def accumulate(
    acc: Float[Array, "M N"],
    a: Any,
    b: Any,
    interpret: Interpret,
    *,
    more: Sequence[Any] = (),
    transpose_a: bool = False,
    transpose_b: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Float[Array, "M N"]:
    """acc + `product(a, b)`, and the product of `a` with each of `more`, added by the tensor cores themselves."""
    if interpret is not None:
        meanwhile()
        return sum((_dot(a, x, transpose_a, transpose_b) for x in (b, *more)), acc)

    def run(acc_ref: Any) -> None:
        for x in (b, *more):
            plgpu.wgmma(acc_ref, _turned(a, transpose_a), _turned(x, transpose_b))
        meanwhile()

    return pl.run_state(run)(_ACC.init(acc))  # pyright: ignore[reportReturnType]: typed as the reference it comes from


def _turned(ref: Any, transpose: bool) -> Any:
    return ref.transpose((1, 0)) if transpose else ref


def _dot(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Array:
    x, y = a[...], b[...]
    plgpu.commit_smem()  # wgmma reads as copies write; after plain loads, a copy into their place would need this fence
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.dot(x.T if transpose_a else x, y.T if transpose_b else y, preferred_element_type=sums)


def store_transposed(ref: Any, x: Array, interpret: Interpret) -> None:
    """ref[...] = x.T for an `x` in layout WGMMA: one shuffle, then plain stores."""
    if interpret is not None:
        ref[...] = x.T
    else:
        ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def widen(x: Array) -> Array:
    """Numbers of 8 bits as bfloat16, exactly. Hopper converts them to float16 only, so this goes by way of float32."""
    return x.astype(jnp.float32).astype(jnp.bfloat16)


def widened_codes(ref: Any, interpret: Interpret) -> Array:
    """Codes of 4 or 8 bits in shared memory as bfloat16 (layout WGMMA), exactly.

    They are read 32 bits at a time, and change places between threads while they are narrow.
    """
    codes = ref[...]
    if interpret is None:
        wide = plgpu.Layout.WGMMA_UPCAST_4X if codes.dtype == jnp.int4 else plgpu.Layout.WGMMA_UPCAST_2X
        codes = plgpu.layout_cast(plgpu.layout_cast(codes, wide), plgpu.Layout.WGMMA)
    return widen(codes) if jnp.isdtype(codes.dtype, "real floating") else codes.astype(jnp.bfloat16)


def soft_capped(scores: Array, cap: float) -> Array:
    """cap * tanh(scores / cap). Not lax.tanh: its approximate instruction is off by up to 5e-4 of the cap."""
    grown = jnp.exp2(scores * (2 * LOG2E / cap))
    return cap - (2 * cap) / (grown + 1.0)
