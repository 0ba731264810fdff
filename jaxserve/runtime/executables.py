"""The list of executables of a model, as compile jobs with abstract arguments.

It has a step for each bucket and four small functions, with their shapes and the cut of each array over devices. There
are no arrays here: a model that is not loaded, for a device that is not here, has the same list as one that is about to
serve. `compile` builds the jobs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels.paged_attention import LayerCache, PagedAttention
from jaxserve.kernels.storage import array_bytes
from jaxserve.models.coded_params import with_codes
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts import HeadConfig
from jaxserve.models.drafts.attaching import attach_shapes
from jaxserve.models.loading import split_abstract
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept
from jaxserve.models.sharding import TENSOR_PARALLEL, shardings_for, spec_for, specs_for
from jaxserve.models.weights import Path
from jaxserve.runtime import zeros
from jaxserve.runtime.adapters import (
    AdapterSizes,
    init_slots,
    num_params,
    slot_shardings,
    slots_specs,
    write_adapter,
)
from jaxserve.runtime.compile import Job
from jaxserve.runtime.drafter import Speculation
from jaxserve.runtime.mesh import on_mesh, replicated
from jaxserve.runtime.pack import Layout
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.runtime.page_moves import gather_pages, page_words, scatter_pages
from jaxserve.runtime.picture_inputs import PictureSizes
from jaxserve.runtime.row_state import PER_TOKEN, init_sampling_state, mask_words, row_state_size
from jaxserve.runtime.runner import COPY_SLOTS, MASK_SLOTS, ROW_SLOTS, TABLE_SLOTS, TOLD_SLOTS
from jaxserve.runtime.step import (
    DeviceState,
    make_configure_row,
    make_copy_pages,
    make_enter_rows,
    make_leave_rows,
    make_step,
    make_tell_tokens,
    make_write_masks,
    write_embeddings,
    write_tables,
)
from jaxserve.runtime.step_output import StepOutput
from jaxserve.runtime.xla_flags import compiler_options
from jaxserve.sched.plan import NO_ENCODER, Bucket, Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that follows from config, checkpoint and backend before memory is known."""

    backend: str
    page_size: int
    max_rows: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    cache_dtype: np.dtype
    page_groups: PageGroups
    max_mixed_tokens: int | None = None
    speculation: Speculation | None = None
    pictures: PictureSizes | None = None
    adapters: AdapterSizes | None = None

    @property
    def widest(self) -> int:
        """The most tokens that a row feeds in a round."""
        return max(bucket.width for bucket in self.buckets)

    def limits(self, num_pages: int) -> Limits:
        """The limits that a scheduler sees of a device of these sizes, with all buckets."""
        return Limits(
            max_rows=self.max_rows,
            num_pages=num_pages,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            buckets=self.buckets,
            max_mixed_tokens=self.max_mixed_tokens,
            page_groups=self.page_groups.groups,
            encoder=NO_ENCODER if self.pictures is None else self.pictures.pool,
            adapter_slots=0 if self.adapters is None else self.adapters.num_slots,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractStage:
    """Structure and shapes of the layers that the devices of one mesh hold.

    Attributes:
      graphdef: with the sizes that one device sees.
      state: `nnx.State` of `jax.ShapeDtypeStruct`, over all devices.
      layers: those of this stage.
      mesh: abstract where nothing is to be compiled.
      dtype: of weights and activations.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    partition: Partition
    layers: range
    mesh: Mesh
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        partition: Partition,
        layers: range,
        mesh: Mesh,
        dtype: np.dtype,
        kept: Mapping[Path, Kept] = MappingProxyType({}),
        head: HeadConfig | DecoderConfig | None = None,
    ) -> "AbstractStage":
        """`kept`: parameters that are codes, by their paths in the whole model. `head`: makes drafts (`head_of`)."""
        graphdef, state = split_abstract(partition, dtype, layers)
        state = with_codes(state, kept, layers.start, mesh)
        if head is not None:
            graphdef, state = attach_shapes(graphdef, state, head, partition, dtype)
        return cls(graphdef=graphdef, state=state, partition=partition, layers=layers, mesh=mesh, dtype=dtype)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def devices(self) -> Mesh:
        """The mesh of a stage that is compiled or run."""
        assert isinstance(self.mesh, Mesh), f"{self.mesh} has no devices to compile for"
        return self.mesh

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.partition.model.num_layers

    @property
    def weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes with shardings, in the order of `flat_weights`."""
        shapes = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            self.state,
            shardings_for(self.state, self.mesh),
        )
        return flat_weights(shapes)


def flat_weights(state: nnx.State) -> tuple[Any, ...]:
    """The arrays of a model as executables take them: flattening an `nnx.State` runs Python code for every layer, and
    each call would do it again (12 layers 80 us, 80 layers half a millisecond)."""
    return tuple(jax.tree.leaves(state))


def _from_flat(fn: Callable[..., Any], state: nnx.State) -> Callable[..., Any]:
    """`fn`, whose first argument has the structure of `state`, as a function of its leaves."""
    structure = jax.tree.structure(state)
    return lambda leaves, *args: fn(jax.tree.unflatten(structure, leaves), *args)


def step_name(bucket: Bucket) -> str:
    """The name of a bucket's executable in reports."""
    shape = f"{'decode' if bucket.decode_only else 'mixed'} {bucket.tokens}x{bucket.rows}"
    return shape if bucket.plain else f"{shape} of {bucket.width}, up to {bucket.rounds} rounds"


def first_buckets(sizes: Sizes) -> tuple[Bucket, ...]:
    """The shapes without which nothing is answered: they hold every plan that all of them hold, with more padding.

    The smallest decode shape is for a stream that is alone, the smallest mixed one that has all rows is for short
    prompts and for several streams, at nearly the cost of a decode step; the largest holds the rest. The mixed ones may
    be the same.
    """
    plain = [b for b in sizes.buckets if b.plain]
    mixed = [b for b in plain if not b.decode_only]
    whole = [b for b in mixed if b.rows == sizes.max_rows]
    return tuple(sorted({min(b for b in plain if b.decode_only), min(whole), max(mixed)}))


def state_job(stage: AbstractStage, attention: PagedAttention, sizes: Sizes, num_pages: int) -> Job:
    """The job that makes the first `DeviceState`, on the devices where it will live."""
    fn = functools.partial(make_state, stage, attention, sizes, num_pages)
    if sizes.backend == "cpu" and stage.mesh.size == 1 and zeros.can_be_fresh():
        zeros.register()
        fn = functools.partial(_with_fresh_pages, fn)
    return Job(
        name="make_state",
        fn=fn,
        args=(),
        donate=(),
        options={},
        out_shardings=state_shardings(stage, attention, sizes),
    )


def bucket_layouts(sizes: Sizes) -> Mapping[Bucket, Layout]:
    """The layout of each bucket's integers in its buffer."""
    return {
        b: Layout.of(
            b,
            max_rows=sizes.max_rows,
            num_params=num_params(sizes.adapters),
            page_size=sizes.page_size,
            num_groups=len(sizes.page_groups.groups),
            pictures=sizes.pictures,
        )
        for b in sizes.buckets
    }


def make_state(stage: AbstractStage, attention: PagedAttention, sizes: Sizes, num_pages: int) -> DeviceState:
    """The state before the first step, with `num_pages` pages and the dummy; sizes are those over all devices."""
    columns = -(-sizes.max_model_len // sizes.page_size)
    model = stage.partition.padded
    return DeviceState(
        caches=tuple(
            attention.init_cache(num_pages, sizes.page_size, model.num_kv_heads, model.head_dim, sizes.cache_dtype)
            for _ in range(sizes.page_groups.num_slots(stage.layers))
        )
        + draft_caches(stage, attention, sizes, num_pages),
        block_tables=jnp.zeros((len(sizes.page_groups.groups) * (sizes.max_rows + 1), columns), jnp.int32),
        length=jnp.zeros(sizes.max_rows + 1, jnp.int32),
        sampling=init_sampling_state(sizes.max_rows, model.vocab_size, sizes.widest) if stage.is_last else None,
        drafter=() if sizes.speculation is None else sizes.speculation.init_state(sizes.max_rows, sizes.max_model_len),
        embeddings=None
        if sizes.pictures is None
        else jnp.zeros((sizes.pictures.pool_lines, model.hidden_size), stage.dtype),
        adapters=None if sizes.adapters is None else init_slots(sizes.adapters, stage.state, stage.dtype),
    )


def head_of(sizes: Sizes) -> HeadConfig | DecoderConfig | None:
    """The draft head, or draft model, of an engine of these sizes."""
    return None if sizes.speculation is None else sizes.speculation.drafter.config


def draft_caches(
    stage: AbstractStage, attention: PagedAttention, sizes: Sizes, num_pages: int
) -> tuple[LayerCache, ...]:
    """Pages of the drafter's layers beside those of the model's; none where it has no layers that attend.

    Their keys and values have the dtype of the weights: an eight-bit cache needs scales, which belong to a model.
    """
    decoder = None if sizes.speculation is None else sizes.speculation.drafter.decoder
    if decoder is None:
        return ()
    padded = Partition.of(decoder, stage.partition.devices).padded
    return tuple(
        attention.init_cache(num_pages, sizes.page_size, padded.num_kv_heads, padded.head_dim, stage.dtype)
        for _ in decoder.layers
    )


def _with_fresh_pages(make: Callable[[], DeviceState]) -> DeviceState:
    """Pages of a CPU are resident once they are used, and not before."""
    state = make()
    caches = jax.tree.map(lambda pages: zeros.fresh_zeros(pages.shape, pages.dtype), state.caches)
    return dataclasses.replace(state, caches=caches)


def state_specs(stage: AbstractStage, attention: PagedAttention, sizes: Sizes) -> DeviceState:
    """The cut of `make_state`: pages by their heads, counts and masks by the vocabulary, the rest not at all."""
    shapes = jax.eval_shape(lambda: make_state(stage, attention, sizes, 1))
    by_heads = spec_for((None, "kv_heads"), TENSOR_PARALLEL)
    by_vocab = spec_for((None, "vocab"), TENSOR_PARALLEL)
    specs: DeviceState = jax.tree.map(lambda _: PartitionSpec(), shapes)
    cut: dict[str, Any] = {"caches": jax.tree.map(lambda _: by_heads, shapes.caches)}
    if specs.sampling is not None:
        cut["sampling"] = dataclasses.replace(specs.sampling, **dict.fromkeys(PER_TOKEN, by_vocab))
    if sizes.adapters is not None:
        cut["adapters"] = slots_specs(sizes.adapters, stage.state, stage.dtype)
    return dataclasses.replace(specs, **cut)


def state_shardings(stage: AbstractStage, attention: PagedAttention, sizes: Sizes) -> DeviceState:
    """`state_specs` on the mesh of the stage."""
    return jax.tree.map(lambda spec: NamedSharding(stage.mesh, spec), state_specs(stage, attention, sizes))


def packed_sharding(stage: AbstractStage) -> NamedSharding:
    """The cut of packed pages [S, W * devices]: each device has the words of its own part of a page."""
    return NamedSharding(stage.mesh, spec_for((None, "kv_heads"), TENSOR_PARALLEL))


def packed_words(stage: AbstractStage, attention: PagedAttention, sizes: Sizes) -> int:
    """W: words of a page that one device of the stage packs."""
    shapes = jax.eval_shape(lambda: make_state(stage, attention, sizes, 1)).caches
    specs = state_specs(stage, attention, sizes).caches

    def on_one_device(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(stage.mesh, spec).shard_shape(shape.shape), shape.dtype)

    return page_words(jax.tree.map(on_one_device, shapes, specs))


def make_jobs(
    stage: AbstractStage,
    sizes: Sizes,
    attention: PagedAttention,
    num_pages: int,
    move_counts: Sequence[int] = (),
) -> list[Job]:
    """Everything to compile, the largest step first: it takes longest, and a pool should not end on it.

    `move_counts`: numbers of pages that one launch moves to or from host memory; empty without host slots.
    """
    everywhere, shards = replicated(stage.mesh), stage.partition.placement.shards
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

    weight_specs = flat_weights(specs_for(stage.state))

    def step(bucket: Bucket, layout: Layout) -> Job:
        fn = make_step(
            stage.graphdef,
            layout,
            attention,
            sizes.page_size,
            shards,
            sizes.page_groups.groups,
            sizes.page_groups.places(stage.layers),
            None if sizes.speculation is None else sizes.speculation.drafter,
        )
        return Job(
            name=step_name(bucket),
            fn=on_mesh(_from_flat(fn, stage.state), stage.mesh, (weight_specs, specs, whole, whole), (whole, specs)),
            args=(stage.weights, state, array(np.int32, layout.size), carried(layout.bucket)),
            donate=(1,),
            options=options,
        )

    steps = [step(bucket, layout) for bucket, layout in sorted(bucket_layouts(sizes).items(), reverse=True)]
    changes = {
        "copy_pages": (make_copy_pages(attention), (array(np.int32, COPY_SLOTS, 2),)),
        "write_tables": (write_tables, (array(np.int32, TABLE_SLOTS, 3),)),
    }
    if stage.is_last:
        payload = array(np.int32, row_state_size(stage.partition.vocab_size))
        changes["configure_row"] = (make_configure_row(shards), (array(np.int32), payload))
        masks = array(np.int32, MASK_SLOTS, 1 + mask_words(stage.partition.vocab_size))
        changes["write_masks"] = (make_write_masks(shards), (masks,))
    if sizes.speculation is not None:
        told = array(np.int32, TOLD_SLOTS, 3)
        drafter = sizes.speculation.drafter
        changes["tell_tokens"] = (make_tell_tokens(drafter), (told,))
        if drafter.learner is not None:
            changes["enter_rows"] = (make_enter_rows(drafter.learner), (array(np.int32, ROW_SLOTS, 3),))
            changes["leave_rows"] = (make_leave_rows(drafter.learner), (array(np.int32, ROW_SLOTS, 2),))
    if sizes.pictures is not None:
        width = stage.partition.model.hidden_size
        for count in dict.fromkeys(sizes.pictures.num_lines):
            lines = (array(stage.dtype, count, width), array(np.int32, count))
            changes[embeddings_name(count)] = (write_embeddings, lines)
    moves: list[Job] = []
    if sizes.adapters is not None:
        weights = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            sizes.adapters.shapes(stage.dtype),
            slot_shardings(sizes.adapters, stage.mesh),
        )
        write = on_mesh(write_adapter, stage.mesh, (specs.adapters, whole, sizes.adapters.specs), specs.adapters)
        args = (state.adapters, array(np.int32), weights)
        moves.append(Job(name="write_adapter", fn=write, args=args, donate=(0,), options=options))
    if move_counts:
        sharding = packed_sharding(stage)
        words = packed_words(stage, attention, sizes) * stage.mesh.size
        for count in move_counts:
            ids = array(np.int32, count)
            packed = jax.ShapeDtypeStruct((count, words), np.uint32, sharding=sharding)
            gather = on_mesh(gather_pages, stage.mesh, (specs, whole), sharding.spec)
            scatter = on_mesh(scatter_pages, stage.mesh, (specs, whole, sharding.spec), (specs, whole))
            moves += [
                Job(name=gather_name(count), fn=gather, args=(state, ids), donate=(), options=options),
                Job(name=scatter_name(count), fn=scatter, args=(state, ids, packed), donate=(0,), options=options),
            ]
    return [
        *steps,
        *(
            Job(
                name=name,
                fn=on_mesh(fn, stage.mesh, (specs, *(whole for _ in args)), specs),
                args=(state, *args),
                donate=(0,),
                options=options,
            )
            for name, (fn, args) in changes.items()
        ),
        *moves,
    ]


def output_shapes(last: AbstractStage, attention: PagedAttention, sizes: Sizes) -> Mapping[Bucket, StepOutput]:
    """What the last stage of a pipeline leaves of a step of each bucket. Of its layers one is traced, since the logits
    and what is drawn from them have the same shapes after any of them."""
    num_layers = last.layers.stop
    short = AbstractStage.of(last.partition, range(num_layers - 1, num_layers), last.mesh, last.dtype)
    jobs = {job.name: job for job in make_jobs(short, sizes, attention, 1)}
    with jax.sharding.use_abstract_mesh(last.devices.abstract_mesh):
        outputs = {b: jax.eval_shape(jobs[step_name(b)].fn, *jobs[step_name(b)].args)[0] for b in sizes.buckets}
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), outputs)


def gather_name(count: int) -> str:
    """The name of an executable that packs so many pages."""
    return f"gather_pages {count}"


def scatter_name(count: int) -> str:
    """The name of an executable that unpacks so many pages."""
    return f"scatter_pages {count}"


def embeddings_name(count: int) -> str:
    """The name of an executable that writes so many lines of the encoder's pool."""
    return f"write_embeddings {count}"


def device_bytes(shapes: Any, specs: Any, mesh: Mesh) -> int:
    """Bytes on each device of a tree of shapes that is cut by a tree of specs, whatever axes these name."""

    def one(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        axes = [
            axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))
        ]
        return array_bytes(shape.size, shape.dtype) // math.prod(mesh.shape[axis] for axis in axes)

    return sum(jax.tree.leaves(jax.tree.map(one, shapes, specs)))
