"""From a checkpoint directory to a model whose arrays lie on the devices that will use them.

The dtype is chosen, the abstract model made, and filled: from safetensors or Orbax slice by slice, or at random. How a
model is cut over devices is decided in `partition`.

Weights are read slice by slice, since a host must never hold more than the share of its own devices, and little beside
it.

`nnx.split` is called once: the state is a plain tree of arrays for the compiled step; Python-side flattening of modules
in a loop costs tens of milliseconds a step on large models.
"""

import dataclasses
import functools
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.storage import array_bytes
from jaxserve.models.byte_budget import ByteBudget
from jaxserve.models.cache_scales import CacheScales, find_scales, is_scale, with_cache
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind, read_checkpoint
from jaxserve.models.coded_params import (
    backend_of,
    codes_of,
    draw_others,
    load_coded,
    padded_order,
    share_bytes,
    source_path,
    with_codes,
)
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, find_family
from jaxserve.models.layout import Index
from jaxserve.models.partition import Block, Partition, spread
from jaxserve.models.quantised import read_scheme
from jaxserve.models.quantised.coding import CODED, CodedTensor, RoundedParam
from jaxserve.models.quantised.scheme import module_name
from jaxserve.models.quantised.storing import Kept, KeptPart, Quantisation, Sizes, choose_kept
from jaxserve.models.safetensors_files import stored_names
from jaxserve.models.shard_reading import (
    GroupReader,
    block_reader,
    checked_tensors,
    group_reader,
    shard_reader,
    window_reader,
)
from jaxserve.models.sharding import EXPERT_AXIS, MESH_AXES, arrays_of, axes_of, shardings_for, with_leaves
from jaxserve.models.weights import Path, name_of, plan_weights

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")
_IN_FLIGHT = 0.05  # part of a process's share that may be in transit from the files to the devices
_Window = tuple[int, int, int]  # an axis, and where its part begins and ends
_MAX_LISTED = 8  # names in a message
_RANDOM_STD = 0.02  # the initial spread of most published checkpoints


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, or a stage of one, ready for `nnx.merge(graphdef, state)` inside a `shard_map` over `mesh`.

    Attributes:
      graphdef: of `nnx.split`, with the sizes that one device sees.
      state: arrays in their final shardings; over all devices they have the sizes of `partition.padded`.
      config: as the checkpoint says.
      partition: how it is cut over the model axis of `mesh`.
      layers: those of this stage; all of them without a pipeline.
      mesh: axes `sharding.MESH_AXES`.
      checkpoint: where it came from.
      dtype: of weights and activations.
      num_params: numbers in its arrays, padding included, whatever form they take.
      kept: parameters that are codes, by their paths in the whole model.
      cache_scales: those in its arrays, for a cache of eight bits; None: the cache has others.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    config: DecoderConfig
    partition: Partition
    layers: range
    mesh: Mesh
    checkpoint: Checkpoint
    dtype: np.dtype
    num_params: int
    kept: Mapping[Path, Kept]
    cache_scales: CacheScales | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, over all devices, replicas not counted."""
        return sum(array_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(self.state))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model, or a stage of one, whose weights are still in their files.

    Attributes:
      shapes: the model, with shapes as its `state`: enough to compile for.
      fill: reads, or draws, the weights.
      place: makes them of arrays in the checkpoint's sizes, by the name of each parameter (see `weights.name_of`).
        Raises CheckpointError for arrays that are not the model's, or not finite, and ConfigError for a model whose
        weights are codes. The arrays given are left as they are.
    """

    shapes: LoadedModel
    fill: Callable[[], nnx.State]
    place: Callable[[Mapping[str, jax.Array]], nnx.State]

    def load(self) -> LoadedModel:
        """Returns when the weights are on their devices. Raises CheckpointError."""
        return dataclasses.replace(self.shapes, state=self.fill())


def load_model(
    source: str | FilePath | Checkpoint,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    layers: range | None = None,
    random_weights: bool = False,
    seed: int = 0,
    cache_dtype: str = "auto",
    cache_scales: FilePath | None = None,
    quantisation: Quantisation = Quantisation(),  # noqa: B008 (frozen)
) -> LoadedModel:
    """`plan_model`, then its weights."""
    return plan_model(
        source,
        dtype=dtype,
        mesh=mesh,
        layers=layers,
        random_weights=random_weights,
        seed=seed,
        cache_dtype=cache_dtype,
        cache_scales=cache_scales,
        quantisation=quantisation,
    ).load()


def plan_model(
    source: str | FilePath | Checkpoint,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    layers: range | None = None,
    random_weights: bool = False,
    seed: int = 0,
    cache_dtype: str = "auto",
    cache_scales: FilePath | None = None,
    quantisation: Quantisation = Quantisation(),  # noqa: B008 (frozen)
) -> PlannedModel:
    """A Hugging Face or Orbax directory (or 'demo') for the devices of `mesh` (None: the first local device).

    `dtype`: 'auto' is float32 on CPU and what the checkpoint states elsewhere. `layers`: those of one stage of a
    pipeline; None loads all. `random_weights` reads config.json alone and draws weights that depend on `seed` and the
    sizes, not on the mesh. `cache_dtype`: of keys and values; with eight bits the model has their scales
    (`cache_scales.find_scales`), from the file `cache_scales` where that is given. `quantisation`: which weights are
    kept as codes.

    Raises CheckpointError for anything wrong with the directory that can be seen without reading weights, ConfigError
    for a cache without the scales that it needs, or a quantisation that cannot be had.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    family, config = decoder_config(checkpoint)
    scales = find_scales(checkpoint, family, config, cache_dtype, cache_scales, random_weights=random_weights)
    config = with_cache(config, cache_dtype)
    mesh = one_device_mesh(jax.local_devices()[0]) if mesh is None else mesh
    chosen = choose_dtype(dtype, mesh.devices.flat[0].platform, checkpoint)
    partition = Partition.of(config, mesh.size, mesh.shape[EXPERT_AXIS])
    graphdef, dense = split_abstract(partition, chosen, layers)
    first_layer = 0 if layers is None else layers.start
    kept = plan_kept(checkpoint, family, partition, quantisation, backend_of(mesh))
    abstract = with_codes(dense, kept, first_layer, mesh)
    filler = _Filler(
        checkpoint=checkpoint,
        family=family,
        partition=partition,
        first_layer=first_layer,
        dense=dense,
        abstract=abstract,
        shardings=shardings_for(abstract, mesh),
        kept=kept,
        is_whole=layers is None and partition == Partition.of(config, 1),
        scales=scales,
    )
    fill = functools.partial(filler.draw, seed) if random_weights else filler.reader()
    shapes = LoadedModel(
        graphdef=graphdef,
        state=abstract,
        config=config,
        partition=partition,
        layers=range(config.num_layers) if layers is None else layers,
        mesh=mesh,
        checkpoint=checkpoint,
        dtype=chosen,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(dense)),
        kept=kept,
        cache_scales=scales,
    )
    return PlannedModel(shapes=shapes, fill=fill, place=filler.place)


def one_device_mesh(device: Any) -> Mesh:
    """A mesh of one device, here or not, with all axes."""
    return Mesh(np.array([device]).reshape((1,) * len(MESH_AXES)), MESH_AXES)


def split_abstract(partition: Partition, dtype: np.dtype, layers: range | None) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure as one device sees it, and the shapes as they are over all devices. Nothing is allocated."""
    graphdef, state = nnx.split(abstract_decoder(partition, dtype, layers, local=True))
    if partition.local != partition.padded:
        _, state = nnx.split(abstract_decoder(partition, dtype, layers, local=False))
    return graphdef, state


def decoder_config(checkpoint: Checkpoint) -> tuple[Family, DecoderConfig]:
    """The family and the config of a checkpoint. Raises CheckpointError when it cannot be run."""
    read_scheme(checkpoint)  # refuses what is not known, before anything that takes long
    family = find_family(checkpoint.config, checkpoint.config_file, checkpoint.family)
    config = family.decoder_config(checkpoint.config, checkpoint.config_file)
    if not config.tied_embeddings and _lacks_head(checkpoint, family):
        config = dataclasses.replace(config, tied_embeddings=True, lm_head_bias=False, has_head=False)
    return family, config


def _lacks_head(checkpoint: Checkpoint, family: Family) -> bool:
    """A Hugging Face directory of a base model, as embedding models are published, whose config speaks of a head."""
    heads = {module_name(rule.source).rpartition(".")[2] for rule in family.weights if rule.target == "lm_head"}
    if checkpoint.kind is not CheckpointKind.HUGGING_FACE or not heads:
        return False
    try:
        names = stored_names(checkpoint.path)
    except CheckpointError:  # there are none yet, or whoever reads them says what is wrong
        return False
    return not any(head in name.split(".") for name in names for head in heads)


def plan_kept(
    checkpoint: Checkpoint, family: Family, partition: Partition, quantisation: Quantisation, backend: str
) -> dict[Path, Kept]:
    """What each parameter that is not kept in floats is kept as, of all layers. Reads config.json alone.

    Raises ConfigError as `choose_kept` does.
    """
    scheme = read_scheme(checkpoint)
    if (
        quantisation.scheme in ("auto", "none")
        and not quantisation.rules
        and (scheme is None or quantisation.scheme == "none")
    ):
        return {}
    _, whole = split_abstract(Partition.of(partition.model, 1), np.dtype("float32"), None)
    _, local = nnx.split(abstract_decoder(partition, np.dtype("float32"), None, local=True))
    axes = axes_of(whole)
    shapes = {path: param.shape for path, param in arrays_of(whole).items() if not is_scale(path)}
    of_device = arrays_of(local)
    sizes = {path: Sizes(whole=shape[-1], local=of_device[path].shape[-1]) for path, shape in shapes.items()}
    plan = plan_weights(family, partition.model, shapes, axes)
    return choose_kept(quantisation, scheme, plan, axes, sizes, backend)


def abstract_decoder(partition: Partition, dtype: np.dtype, layers: range | None, *, local: bool) -> Decoder:
    """A decoder of shapes alone, of one device (`local`) or over all of them; nothing is allocated."""
    config = partition.local if local else partition.padded
    return nnx.eval_shape(
        lambda: (config.module or Decoder)(config, dtype, layers=layers, placement=partition.placement)
    )


def choose_dtype(name: str, platform: str, checkpoint: Checkpoint) -> np.dtype:
    """The dtype that 'auto', 'float32' or 'bfloat16' means for this checkpoint on this platform."""
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    if name == "auto":
        # XLA computes bfloat16 on CPUs up to 17 times slower than float32.
        stated = stated_dtype(checkpoint)
        name = "float32" if platform == "cpu" or stated == "float32" else "bfloat16"
    return jnp.dtype(name)


def stated_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the weights in config.json; float32 when it says nothing."""
    return checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"


def describe_rounding(name: str, dtype: np.dtype, checkpoint: Checkpoint) -> str | None:
    """A sentence when 'auto' has chosen a `dtype` with fewer digits than the checkpoint's; None when it has not."""
    stated = stated_dtype(checkpoint)
    if name != "auto" or stated in ("float32", dtype.name) or dtype.name == "float32":
        return None
    return (
        f"the checkpoint is {stated}, and model.dtype auto rounds its weights to {dtype.name}: 8 bits of precision, "
        "where float16 has 11. Set model.dtype to float32 to keep them, at twice the memory"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The files of a checkpoint.

    Attributes:
      reader: of a parameter, a function that reads any part of it.
      groups: of a parameter of codes, or a part of it, with groups of so many inputs: its `group_reader`, where it has
        one.
      order: of the inputs of one that is ordered, or of a part of it.
    """

    reader: Callable[[Path, np.dtype], Callable[[Index | None], np.ndarray]]
    groups: Callable[[Path, KeptPart | None, int], GroupReader | None]
    order: Callable[[Path, KeptPart | None], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A parameter: its paths in this stage and in the whole model, its shape in the checkpoint, and the padded one."""

    path: Path
    source: Path
    shape: tuple[int, ...]
    param: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Filler:
    """The common part of the ways of filling an abstract model.

    Attributes:
      dense: the model with all its weights as floats.
      abstract: the model as it will be.
      kept: parameters that are codes, by their paths in the whole model.
      is_whole: `dense` has the shapes of the checkpoint, and all its layers.
      scales: of a cache of eight bits, in parameters that are in no checkpoint.
    """

    checkpoint: Checkpoint
    family: Family
    partition: Partition
    first_layer: int
    dense: nnx.State
    abstract: nnx.State
    shardings: nnx.State
    kept: Mapping[Path, Kept]
    is_whole: bool
    scales: CacheScales | None

    def reader(self) -> Callable[[], nnx.State]:
        """Checks the names and shapes of the files. Returns a function that reads every parameter: a few at once, each
        device's share by itself."""
        params, placed = self._weights(), dict(nnx.to_flat_state(self.shardings))
        variables, shapes = dict(nnx.to_flat_state(self.abstract)), self._checkpoint_shapes()
        open_source = self._orbax_reader if self.checkpoint.kind is CheckpointKind.ORBAX else self._safetensors_reader
        source = open_source(shapes)

        share = {path: share_bytes(variable, placed[path]) for path, variable in variables.items()}
        budget = ByteBudget(int(sum(share.values()) * _IN_FLIGHT))

        def load(path: Path) -> list[jax.Array]:
            whole = _Whole(
                path=path,
                source=source_path(path, self.first_layer),
                shape=shapes[source_path(path, self.first_layer)],
                param=params[path],
            )
            weight, where = variables[path].get_raw_value(), placed[path].get_raw_value()
            kept = self.kept.get(whole.source)
            with budget.of(share[path]):
                if kept is None or not kept.parts:
                    arrays = self._load_weight(whole, weight, where, kept, source)
                else:
                    arrays = []
                    for part, own, own_where in zip(kept.parts, weight.parts, where.parts, strict=True):
                        arrays += self._load_weight(whole, own, own_where, part.kept, source, part, weight.axis)
                return jax.block_until_ready(arrays)  # until then the host's copy is held

        # Parameters in transit come on top of those already on the devices.
        largest_first = sorted(params, key=lambda path: -share[path])

        def read() -> nnx.State:
            # Copies and transpositions release the interpreter lock, so threads keep all cores and the disk busy.
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                arrays = dict(zip(largest_first, pool.map(load, largest_first), strict=True)) | self._scale_arrays()
            return nnx.map_state(lambda path, param: with_leaves(param, arrays[path]), self.abstract)

        return read

    def _load_weight(
        self,
        whole: "_Whole",
        weight: Any,
        placed: Any,
        kept: Kept | None,
        source: "_Source",
        part: KeptPart | None = None,
        axis: int = 0,
    ) -> list[jax.Array]:
        """The arrays of a weight, or of `part` of one along `axis`, in the order of its leaves."""
        param, storage = whole.param, None if kept is None else kept.storage
        dtype = param.dtype if storage is None else CODED
        if kept is None or kept.rounded is None:
            reader = source.reader(whole.source, dtype)
        else:
            rounded = RoundedParam(
                read_floats=source.reader(whole.source, np.dtype(np.float32)),
                shape=whole.shape,
                num_in=1 if kept.is_experts else max(1, codes_of(weight).num_in),
                storage=kept.rounded,
            )
            reader = rounded.read if storage is not None else functools.partial(rounded.read_numbers, dtype=dtype)
        blocks = self._blocks(whole.path, whole.shape)
        if param.shape != whole.shape:
            reader = block_reader(reader, blocks, param.shape, dtype)
        if part is not None:
            reader = window_reader(reader, axis, part.window.bounds(param.shape[axis]))
        if storage is None:
            (leaf,), (sharding,) = jax.tree.leaves(weight), jax.tree.leaves(placed)
            return [jax.make_array_from_callback(leaf.shape, sharding, reader)]
        order = None
        if storage.ordered:
            in_shape = whole.shape[len(whole.shape) - weight.order.ndim :]
            order = functools.partial(self._order, whole, source, part, in_shape, weight.order.shape)
        groups = None
        if kept is not None and kept.rounded is None and storage.group is not None and param.shape == whole.shape:
            groups = source.groups(whole.source, part, storage.group)
        if groups is not None and part is not None:
            groups = window_reader(groups, axis, part.window.bounds(param.shape[axis]))
        return load_coded(weight, placed, reader, groups, order, storage, ".".join(map(str, whole.source)))

    def _order(
        self,
        whole: "_Whole",
        source: "_Source",
        part: KeptPart | None,
        in_shape: tuple[int, ...],
        padded: tuple[int, ...],
    ) -> np.ndarray:
        """The order of the inputs of a weight, or of `part` of it, as it is padded."""
        blocks = self._blocks(whole.path, whole.shape)
        return padded_order(source.order(whole.source, part), in_shape, padded, blocks)

    def _safetensors_reader(self, shapes: Mapping[Path, tuple[int, ...]]) -> "_Source":
        config = self.partition.model
        plan = plan_weights(self.family, config, shapes, axes_of(self._checkpoint_state()))
        # The stages of a pipeline open the same files: the first says what is in them.
        say = logger.warning if self.first_layer == 0 else None
        tensors = checked_tensors(self.checkpoint, self.family, config, plan, self.kept, say)

        def order(source: Path, part: KeptPart | None) -> np.ndarray:
            names = part.sources if part is not None else {piece.source for piece in plan[source]}
            (tensor,) = (tensors[name] for name in names)
            assert isinstance(tensor, CodedTensor), tensor
            return tensor.order

        def groups(source: Path, part: KeptPart | None, group: int) -> GroupReader | None:
            pieces = [piece for piece in plan[source] if part is None or piece.source in part.sources]
            return group_reader(pieces, tensors, shapes[source], group)

        return _Source(
            reader=lambda source, dtype: shard_reader(plan[source], tensors, shapes[source], dtype),
            groups=groups,
            order=order,
        )

    def _orbax_reader(self, shapes: Mapping[Path, tuple[int, ...]]) -> "_Source":
        from jaxserve.models.orbax_store import open_arrays  # Orbax takes a quarter of a second to import

        wanted = {source_path(path, self.first_layer) for path in self._weights()}
        stored = open_arrays(self.checkpoint.path, shapes, wanted)

        def no_order(source: Path, part: KeptPart | None) -> np.ndarray:
            raise AssertionError((source, part))

        return _Source(
            reader=lambda source, dtype: functools.partial(stored[source].read, dtype=dtype),
            groups=lambda source, part, group: None,
            order=no_order,
        )

    def draw(self, seed: int) -> nnx.State:
        """Weights of a common spread, norms at one, biases at zero. One key per parameter name."""
        shapes, params = self._checkpoint_shapes(), self._weights()
        placed, variables = dict(nnx.to_flat_state(self.shardings)), dict(nnx.to_flat_state(self.abstract))

        def drawn(path: Path, param: jax.ShapeDtypeStruct) -> list[jax.Array]:
            source, sharding = source_path(path, self.first_layer), jax.tree.leaves(placed[path])[0]
            if path[-1] == "weight":
                one = 0 if self.partition.model.norm.zero_centred else 1
                return [jnp.full(param.shape, one, param.dtype, device=sharding)]
            if path[-1] == "sinks" or path[-1].endswith("bias"):
                return [jnp.zeros(param.shape, param.dtype, device=sharding)]
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(map(str, source)).encode()))
            blocks, reach = tuple(self._blocks(path, shapes[source])), _RANDOM_STD * 3**0.5

            def leaves_of(weight: Any, where: Any, kept: Kept | None, window: _Window | None) -> list[jax.Array]:
                is_coded = kept is not None and kept.storage is not None
                leaf, sharding = jax.tree.leaves(weight)[0], jax.tree.leaves(where)[0]
                most, others = draw_others(weight, where, reach) if is_coded else (reach, [])
                return [
                    _drawer(shapes[source], blocks, param.shape, leaf.dtype, most, sharding, window)(key),
                    *others,
                ]

            weight, where = variables[path].get_raw_value(), placed[path].get_raw_value()
            kept = self.kept.get(source)
            if kept is None or not kept.parts:
                return leaves_of(weight, where, kept, None)
            made = []
            for part, own, own_where in zip(kept.parts, weight.parts, where.parts, strict=True):
                bounds = part.window.bounds(param.shape[weight.axis])
                made += leaves_of(own, own_where, part.kept, (weight.axis, bounds.start, bounds.stop))
            return made

        arrays = {path: drawn(path, param) for path, param in params.items()} | self._scale_arrays()
        return nnx.map_state(lambda path, param: with_leaves(param, arrays[path]), self.abstract)

    def place(self, params: Mapping[str, jax.Array]) -> nnx.State:
        """See `PlannedModel.place`."""
        if self.kept:
            raise ConfigError(
                f"{len(self.kept)} weights of {self.checkpoint.path.name} are kept as codes, and arrays of floats are "
                "given for them; load the engine with model.quantization none, or give a directory, which is rounded "
                "as the first one was"
            )
        shapes, weights = self._checkpoint_shapes(), self._weights()
        names = {path: name_of(source_path(path, self.first_layer)) for path in weights}
        _check_arrays(params, {name_of(path): shape for path, shape in shapes.items()})
        _check_finite({name: params[name] for name in names.values()})
        placed = dict(nnx.to_flat_state(self.shardings))
        arrays = self._scale_arrays()
        for path, param in weights.items():
            shape = shapes[source_path(path, self.first_layer)]
            (sharding,) = jax.tree.leaves(placed[path])
            blocks = tuple(self._blocks(path, shape))
            arrays[path] = [_placed(params[names[path]], blocks, param.shape, param.dtype, sharding)]
        return nnx.map_state(lambda path, param: with_leaves(param, arrays[path]), self.abstract)

    def _weights(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The parameters that come from a checkpoint, as floats."""
        return {path: param for path, param in arrays_of(self.dense).items() if not is_scale(path)}

    def _scale_arrays(self) -> dict[Path, list[jax.Array]]:
        """The scales of the cache, copied with their heads; 1 for heads of padding, whose keys and values are 0."""
        found, placed = {}, dict(nnx.to_flat_state(self.shardings))
        for path, param in arrays_of(self.dense).items():
            if not is_scale(path):
                continue
            assert self.scales is not None, path
            scales = self.scales.of(source_path(path, self.first_layer))
            padded = np.ones(param.shape, param.dtype)
            for ((to, start, size),) in self._blocks(path, scales.shape):
                padded[to : to + size] = scales[start : start + size]
            (sharding,) = jax.tree.leaves(placed[path])
            found[path] = [
                jax.make_array_from_callback(param.shape, sharding, lambda index, padded=padded: padded[index])
            ]
        return found

    def _checkpoint_shapes(self) -> dict[Path, tuple[int, ...]]:
        """Shapes before padding and copying, of all layers: names are checked against the whole checkpoint."""
        state = arrays_of(self._checkpoint_state())
        return {path: param.shape for path, param in state.items() if not is_scale(path)}

    def _checkpoint_state(self) -> nnx.State:
        if self.is_whole:
            return self.dense
        return split_abstract(Partition.of(self.partition.model, 1), np.dtype("float32"), None)[1]

    def _blocks(self, path: Path, shape: tuple[int, ...]) -> list[Block]:
        return self.partition.blocks(axes_of(self.dense)[path], shape)


def _check_arrays(params: Mapping[str, jax.Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError for names, shapes or types that are not those of the model."""
    if wrong := sorted(params.keys() ^ shapes.keys(), key=str):
        listed = ", ".join(f"{name} ({'missing' if name in shapes else 'unknown'})" for name in wrong[:_MAX_LISTED])
        raise CheckpointError(
            f"{len(wrong)} names are not those of the model's {len(shapes)} parameters: {listed}; give the tree of "
            "`jaxserve.models.load_trainable`, whole"
        )
    for name, shape in shapes.items():
        array = params[name]
        if not isinstance(array, jax.Array | np.ndarray):
            raise CheckpointError(f"{name} is a {type(array).__name__}, but must be an array of JAX or NumPy")
        if isinstance(array, jax.Array) and array.is_deleted():
            raise CheckpointError(
                f"{name} has been deleted: donated to a step of the trainer, for instance; give the arrays that the "
                "step returned"
            )
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise CheckpointError(
                f"{name} is {array.dtype}{list(array.shape)}, and the model needs floats {list(shape)}; is the tree "
                "that of another model?"
            )


def _check_finite(params: Mapping[str, jax.Array]) -> None:
    """Raises CheckpointError. One launch for each array, and one wait for all."""
    finite = {name: _is_finite(array) for name, array in params.items()}
    if broken := [name for name, found in finite.items() if not found]:
        raise CheckpointError(
            f"{len(broken)} of {len(params)} parameters have numbers that are not finite: "
            f"{', '.join(broken[:_MAX_LISTED])}; the weights before stay. Look for a step of the trainer that diverged"
        )


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _placed(
    array: jax.Array,
    blocks: tuple[Block, ...],
    padded: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """A copy of the array in its final place. On the devices where it lies already nothing passes through the host."""
    here = isinstance(array, jax.Array) and array.sharding.device_set == sharding.device_set
    copied = _placer(blocks, padded, np.dtype(dtype), sharding if here else None)(array)
    return copied if here else jax.device_put(copied, sharding)


@functools.lru_cache(maxsize=1024)
def _placer(
    blocks: tuple[Block, ...], padded: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> Callable[[jax.Array], jax.Array]:
    def place(array: jax.Array) -> jax.Array:
        # The copy is of the caller's array, who may donate that to its next step.
        return jnp.copy(spread(array.astype(dtype), list(blocks), padded))

    return jax.jit(place) if sharding is None else jax.jit(place, out_shardings=sharding)


@functools.cache
def _drawer(
    shape: tuple[int, ...],
    blocks: tuple[Block, ...],
    padded: tuple[int, ...],
    dtype: np.dtype,
    reach: float,
    sharding: jax.sharding.Sharding,
    window: _Window | None,
) -> Callable[[jax.Array], jax.Array]:
    """Draws where the array will live, so that no device holds more than its share; one compilation per shape.

    `window`: an axis and its part that is kept; None: all.
    """

    def draw(key: jax.Array) -> jax.Array:
        # Uniform: the normal distribution costs several times as much on CPUs and shows nothing more.
        drawn = jax.random.uniform(key, shape, jnp.float32, -reach, reach).astype(dtype)
        whole = spread(drawn, list(blocks), padded)
        return whole if window is None else jax.lax.slice_in_dim(whole, window[1], window[2], axis=window[0])

    return jax.jit(draw, out_shardings=sharding)
