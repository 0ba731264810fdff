"""What is compiled for a model: one step for each bucket and three small functions, all as jobs of abstract arguments.

Owns the list and the shapes. Refuses to compile (`compile`) and to hold arrays: a model that is not loaded, for a
device that is not here, has the same list as one that is about to serve.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.runtime.compile import Job
from jaxserve.runtime.pack import Layout
from jaxserve.runtime.row_state import NUM_ROW_FIELDS, init_sampling_state, row_state_size
from jaxserve.runtime.runner import COPY_SLOTS, TABLE_SLOTS
from jaxserve.runtime.step import DeviceState, configure_row, make_copy_pages, make_step, write_tables
from jaxserve.sched.plan import Bucket


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that follows from config, checkpoint and backend before memory is known."""

    backend: str
    page_size: int
    max_rows: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    cache_dtype: np.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractModel:
    """A model's structure and shapes: `weights` is a tree of `jax.ShapeDtypeStruct` with shardings."""

    graphdef: nnx.GraphDef
    weights: Any
    config: DecoderConfig


def step_name(bucket: Bucket) -> str:
    """The name of a bucket's executable in reports."""
    return f"{'decode' if bucket.decode_only else 'mixed'} {bucket.tokens}x{bucket.rows}"


def bucket_layouts(sizes: Sizes) -> Mapping[Bucket, Layout]:
    """How each bucket's integers lie in its buffer."""
    return {
        b: Layout.of(b, max_rows=sizes.max_rows, num_params=NUM_ROW_FIELDS, page_size=sizes.page_size)
        for b in sizes.buckets
    }


def make_state(model: DecoderConfig, attention: PagedAttention, sizes: Sizes, num_pages: int) -> DeviceState:
    """The state before the first step, with `num_pages` pages and the dummy."""
    columns = -(-sizes.max_model_len // sizes.page_size)
    return DeviceState(
        caches=tuple(
            attention.init_cache(num_pages, sizes.page_size, model.num_kv_heads, model.head_dim, sizes.cache_dtype)
            for _ in range(model.num_layers)
        ),
        block_tables=jnp.zeros((sizes.max_rows + 1, columns), jnp.int32),
        sampling=init_sampling_state(sizes.max_rows, model.vocab_size),
    )


def abstract_state(
    model: DecoderConfig, attention: PagedAttention, sizes: Sizes, num_pages: int, sharding: jax.sharding.Sharding
) -> DeviceState:
    """Shapes of `make_state`, placed by `sharding`."""
    shapes = jax.eval_shape(lambda: make_state(model, attention, sizes, num_pages))
    return placed(shapes, sharding)


def placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """The shapes of a tree of arrays, all with one sharding."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def make_jobs(
    model: AbstractModel,
    sizes: Sizes,
    attention: PagedAttention,
    num_pages: int,
    sharding: jax.sharding.Sharding,
) -> list[Job]:
    """Everything to compile, the largest step first: it takes longest, and a pool should not end on it."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    state = abstract_state(model.config, attention, sizes, num_pages, sharding)
    steps = [
        Job(
            name=step_name(bucket),
            fn=make_step(model.graphdef, layout, attention, sizes.page_size),
            args=(model.weights, state, ints(layout.size)),
            donate=(1,),
        )
        for bucket, layout in sorted(bucket_layouts(sizes).items(), reverse=True)
    ]
    payload = ints(row_state_size(model.config.vocab_size))
    return [
        *steps,
        Job(name="copy_pages", fn=make_copy_pages(attention), args=(state, ints(COPY_SLOTS, 2)), donate=(0,)),
        Job(name="write_tables", fn=write_tables, args=(state, ints(TABLE_SLOTS, 3)), donate=(0,)),
        Job(name="configure_row", fn=configure_row, args=(state, ints(), payload), donate=(0,)),
    ]
