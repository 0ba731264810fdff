"""What is compiled for a model: one step for each bucket and four small functions, all as jobs of abstract arguments.

Owns the list, the shapes and how each array of the state is cut over devices. Refuses to compile (`compile`) and to
hold arrays: a model that is not loaded, for a device that is not here, has the same list as one that is about to serve.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.models.loading import split_abstract
from jaxserve.models.partition import Partition
from jaxserve.models.sharding import TENSOR_AXIS, TENSOR_PARALLEL, shardings_for, spec_for, specs_for
from jaxserve.runtime.compile import Job
from jaxserve.runtime.mesh import on_mesh, replicated
from jaxserve.runtime.pack import Layout
from jaxserve.runtime.row_state import NUM_ROW_FIELDS, PER_TOKEN, init_sampling_state, mask_words, row_state_size
from jaxserve.runtime.runner import COPY_SLOTS, MASK_SLOTS, TABLE_SLOTS
from jaxserve.runtime.step import (
    DeviceState,
    make_configure_row,
    make_copy_pages,
    make_step,
    make_write_masks,
    write_tables,
)
from jaxserve.runtime.xla_flags import compiler_options
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
class AbstractStage:
    """Structure and shapes of the layers that the devices of one mesh hold.

    Attributes:
      graphdef: with the sizes that one device sees.
      state: `nnx.State` of `jax.ShapeDtypeStruct`, over all devices.
      layers: those of this stage.
      dtype: of weights and activations.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    partition: Partition
    layers: range
    mesh: Mesh
    dtype: np.dtype

    @classmethod
    def of(cls, partition: Partition, layers: range, mesh: Mesh, dtype: np.dtype) -> "AbstractStage":
        graphdef, state = split_abstract(partition, dtype, layers)
        return cls(graphdef=graphdef, state=state, partition=partition, layers=layers, mesh=mesh, dtype=dtype)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.partition.model.num_layers

    @property
    def weights(self) -> nnx.State:
        """Shapes with shardings."""
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self.state,
            shardings_for(self.state, self.mesh),
        )


def step_name(bucket: Bucket) -> str:
    """The name of a bucket's executable in reports."""
    return f"{'decode' if bucket.decode_only else 'mixed'} {bucket.tokens}x{bucket.rows}"


def bucket_layouts(sizes: Sizes) -> Mapping[Bucket, Layout]:
    """How each bucket's integers lie in its buffer."""
    return {
        b: Layout.of(b, max_rows=sizes.max_rows, num_params=NUM_ROW_FIELDS, page_size=sizes.page_size)
        for b in sizes.buckets
    }


def make_state(stage: AbstractStage, attention: PagedAttention, sizes: Sizes, num_pages: int) -> DeviceState:
    """The state before the first step, with `num_pages` pages and the dummy; sizes are those over all devices."""
    columns = -(-sizes.max_model_len // sizes.page_size)
    model = stage.partition.padded
    return DeviceState(
        caches=tuple(
            attention.init_cache(num_pages, sizes.page_size, model.num_kv_heads, model.head_dim, sizes.cache_dtype)
            for _ in stage.layers
        ),
        block_tables=jnp.zeros((sizes.max_rows + 1, columns), jnp.int32),
        sampling=init_sampling_state(sizes.max_rows, model.vocab_size) if stage.is_last else None,
    )


def state_specs(stage: AbstractStage, attention: PagedAttention, sizes: Sizes) -> DeviceState:
    """How `make_state` is cut: pages by their heads, counts and masks by the vocabulary, the rest not at all."""
    shapes = jax.eval_shape(lambda: make_state(stage, attention, sizes, 1))
    by_heads = spec_for((None, "kv_heads"), TENSOR_PARALLEL)
    by_vocab = spec_for((None, "vocab"), TENSOR_PARALLEL)
    specs: DeviceState = jax.tree.map(lambda _: PartitionSpec(), shapes)
    cut: dict[str, Any] = {"caches": jax.tree.map(lambda _: by_heads, shapes.caches)}
    if specs.sampling is not None:
        cut["sampling"] = dataclasses.replace(specs.sampling, **dict.fromkeys(PER_TOKEN, by_vocab))
    return dataclasses.replace(specs, **cut)


def state_shardings(stage: AbstractStage, attention: PagedAttention, sizes: Sizes) -> DeviceState:
    """`state_specs` on the mesh of the stage."""
    return jax.tree.map(lambda spec: NamedSharding(stage.mesh, spec), state_specs(stage, attention, sizes))


def make_jobs(stage: AbstractStage, sizes: Sizes, attention: PagedAttention, num_pages: int) -> list[Job]:
    """Everything to compile, the largest step first: it takes longest, and a pool should not end on it."""
    everywhere, shards = replicated(stage.mesh), stage.partition.shards
    options = compiler_options(sizes.backend, stage.mesh.size)
    specs, whole = state_specs(stage, attention, sizes), PartitionSpec()
    state = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        jax.eval_shape(lambda: make_state(stage, attention, sizes, num_pages)),
        state_shardings(stage, attention, sizes),
    )

    def array(dtype: np.dtype | type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def carried(bucket: Bucket) -> jax.ShapeDtypeStruct | None:
        if not stage.is_first:
            return array(stage.dtype, bucket.tokens, stage.partition.model.hidden_size)
        return None if stage.is_last else array(np.int32, sizes.max_rows + 1)

    weight_specs = specs_for(stage.state)
    steps = [
        Job(
            name=step_name(bucket),
            fn=on_mesh(
                make_step(stage.graphdef, layout, attention, sizes.page_size, shards),
                stage.mesh,
                (weight_specs, specs, whole, whole),
                (whole, specs),
            ),
            args=(stage.weights, state, array(np.int32, layout.size), carried(bucket)),
            donate=(1,),
            options=options,
        )
        for bucket, layout in sorted(bucket_layouts(sizes).items(), reverse=True)
    ]
    changes = {
        "copy_pages": (make_copy_pages(attention), (array(np.int32, COPY_SLOTS, 2),)),
        "write_tables": (write_tables, (array(np.int32, TABLE_SLOTS, 3),)),
    }
    if stage.is_last:
        payload = array(np.int32, row_state_size(stage.partition.vocab_size))
        changes["configure_row"] = (make_configure_row(shards), (array(np.int32), payload))
        masks = array(np.int32, MASK_SLOTS, 1 + mask_words(stage.partition.vocab_size))
        changes["write_masks"] = (make_write_masks(shards), (masks,))
    return steps + [
        Job(
            name=name,
            fn=on_mesh(fn, stage.mesh, (specs, *(whole for _ in args)), specs),
            args=(state, *args),
            donate=(0,),
            options=options,
        )
        for name, (fn, args) in changes.items()
    ]


def device_bytes(shapes: Any, specs: Any, mesh: Mesh) -> int:
    """Bytes on each device of a tree of shapes that is cut by a tree of specs."""
    parts = mesh.shape[TENSOR_AXIS]
    sizes = jax.tree.map(
        lambda shape, spec: shape.size * shape.dtype.itemsize // (parts if TENSOR_AXIS in tuple(spec) else 1),
        shapes,
        specs,
    )
    return sum(jax.tree.leaves(sizes))
