"""The write of a step's keys and values into the pages, on TPUs.

Numbers come already rounded to the cache's type.

A token is one line of a page, but the hardware moves whole tiles (8, 16 or 32 lines by bytes of a number). So the new
lines are first laid out as the tiles they fall into (a gather by XLA), and the kernel reads each tile of the cache,
puts the new lines in, and writes it back to where it was:

    tile of the cache   [old old old old ... ]
    new lines           [ -   -  new new ... ]   ->  [old old new new ... ]

A decode row costs one tile in and out, 1/64 of what it reads at 1024 tokens of bfloat16; tokens of a prompt cost
themselves. A copy takes about a microsecond to begin, so tiles are handled in batches of a MiB: all copies of a batch
are under way at once, and the next batch comes while one is changed and goes back. That is safe as no tile comes twice:
a page is written by one row only (`sched` copies shared pages before anyone writes), and each row's tokens follow one
another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.kernels.pallas.tpu_layout import LANES, PageShape
from jaxserve.kernels.pallas.tpu_scalars import div_up, power_of_two, short_turns

_BATCH_BYTES = 2**20  # of the tiles of a batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of the cache that a step touches; entries from `count` on are not visited.

    Attributes:
      page, tile: which tile of which page.
      token: the first new token.
      first, last: lines [first, last) are new.
    """

    count: Int[Array, " 1"]
    page: Int[Array, " W"]
    tile: Int[Array, " W"]
    token: Int[Array, " W"]
    first: Int[Array, " W"]
    last: Int[Array, " W"]


def touched_tiles(batch: AttentionBatch, shape: PageShape) -> Tiles:
    """Every tile that a real token of the batch falls into. Padding tokens are written nowhere."""
    num_tokens, num_rows = batch.positions.shape[0], batch.context_lens.shape[0]
    height = shape.tile_rows
    slot = batch.positions % batch.page_size
    real = batch.token_rows < num_rows
    row = jnp.minimum(batch.token_rows, num_rows - 1)
    own_first = jnp.arange(num_tokens) == batch.q_starts[row]
    opens = real & (own_first | (slot % height == 0))
    limit = num_rows if batch.decode_only else min(num_tokens, _most(num_tokens, num_rows, batch.page_size, height))
    count = opens.sum(dtype=jnp.int32)
    token = jnp.nonzero(opens, size=limit, fill_value=0)[0].astype(jnp.int32)
    used = jnp.arange(limit) < count
    at, slot, row = batch.positions[token], slot[token], row[token]
    first = slot % height
    room = jnp.minimum(height - first, batch.page_size - slot)
    length = jnp.minimum(room, batch.q_starts[row + 1] - token)
    page = batch.block_tables.at[row, at // batch.page_size].get(mode="clip")
    return Tiles(
        count=count[None],
        page=jnp.where(used, page, 0),
        tile=jnp.where(used, slot // height, 0),
        token=token,
        first=first,
        last=jnp.where(used, first + length, first),
    )


def _most(num_tokens: int, num_rows: int, page_size: int, height: int) -> int:
    """Tiles that the tokens can fall into: full ones, and for each row one torn at either end."""
    per_page = -(-page_size // height)
    return -(-num_tokens * per_page // page_size) + 2 * num_rows


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))  # traced and lowered once for all layers
def write(
    lines: Float[Array, "T K planes 128"],
    cache: Float[Array, "pages K planes rows 128"],
    tiles: Tiles,
    shape: PageShape,
    interpret: pltpu.InterpretParams | None,
) -> Float[Array, "pages K planes rows 128"]:
    """The cache with the lines of the step in place. DONATES the cache in all but name: it is updated in place."""
    height, kv_heads = shape.tile_rows, cache.shape[1]
    token = tiles.token[:, None] - tiles.first[:, None] + jnp.arange(height)
    cache = pltpu.with_memory_space_constraint(cache, pltpu.HBM)
    staged = lines[jnp.clip(token, 0, lines.shape[0] - 1)].transpose(0, 2, 3, 1, 4)  # [W, K, planes, height, 128]
    tile_bytes = staged.nbytes // staged.shape[0]
    batch = min(power_of_two(_BATCH_BYTES // tile_bytes), power_of_two(staged.shape[0]))
    block = (batch, kv_heads, shape.planes, height, LANES)
    return pl.pallas_call(
        functools.partial(_kernel, batch, height),
        out_shape=pltpu.HBM(cache.shape, cache.dtype),  # a small cache would be staged in VMEM, there and back
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(jnp.maximum(div_up(tiles.count[0], batch), 1),),
            in_specs=[pl.BlockSpec(block, lambda g, *_: (g, 0, 0, 0, 0)), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((2, *block), cache.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,  # as in `tpu_attention`
        ),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=3 * staged.nbytes),
        interpret=False if interpret is None else interpret,
        name="paged_kv_write",
    )(tiles.count, tiles.page, tiles.tile, tiles.first, tiles.last, staged, cache)


def _kernel(
    batch: int, height: int, count, pages, tiles, firsts, lasts, new, _, cache, old, read_sems, write_sems
) -> None:
    """One batch of tiles, into one of two buffers; meanwhile the tiles of the next come into the other."""
    g, slot = pl.program_id(0), pl.program_id(0) & 1
    line = lax.broadcasted_iota(jnp.int32, (height, 1), 0)

    def number(of) -> Array:
        return jnp.clip(count[0] - of * batch, 0, batch)

    def place(tile) -> Array:
        return cache.at[pages[tile], :, :, pl.ds(pl.multiple_of(tiles[tile] * height, height), height)]

    def read(of, into) -> None:
        def start(at, k) -> None:
            pltpu.make_async_copy(place(of * batch + at + k), old.at[into, at + k], read_sems.at[into]).start()

        short_turns(0, number(of), start)

    def wait(of, buffer, sems) -> None:
        """A semaphore counts bytes: one wait for each power of two in the number of tiles."""
        for bit in range(batch.bit_length()):
            some = old.at[buffer, pl.ds(0, 1 << bit)]
            copies = pltpu.make_async_copy(some, some, sems.at[buffer])
            pl.when((number(of) & (1 << bit)) != 0)(copies.wait)

    pl.when(g == 0)(lambda: read(0, 0))

    @pl.when(g + 1 < pl.num_programs(0))
    def _() -> None:
        pl.when(g > 0)(lambda: wait(g - 1, 1 - slot, write_sems))
        read(g + 1, 1 - slot)

    wait(g, slot, read_sems)

    def change(at, k) -> None:
        tile = g * batch + at + k
        fresh = (line >= firsts[tile]) & (line < lasts[tile])
        mine = old.at[slot, at + k]
        # Through 32 bits, which every dtype of a cache fits into and every generation can select.
        both = (x[...].astype(jnp.float32) for x in (new.at[at + k], mine))
        mine[...] = jnp.where(fresh, *both).astype(mine.dtype)
        pltpu.make_async_copy(mine, place(tile), write_sems.at[slot]).start()

    short_turns(0, number(g), change)

    @pl.when(g + 1 == pl.num_programs(0))
    def _() -> None:
        pl.when(g > 0)(lambda: wait(g - 1, 1 - slot, write_sems))
        wait(g, slot, write_sems)
