"""`Source`: the float weights of a checkpoint, layer by layer, as the decoder has them and as the files name them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.layout import Index
from jaxserve.models.loading import decoder_config, split_abstract
from jaxserve.models.partition import Partition
from jaxserve.models.quantised.choosing import modules_of
from jaxserve.models.quantised.reading import read_scheme
from jaxserve.models.quantised.scheme import Module, ModuleKind
from jaxserve.models.safetensors_files import ReadableTensor
from jaxserve.models.shard_reading import checked_tensors, shard_reader, tensors_of
from jaxserve.models.sharding import arrays_of, axes_of
from jaxserve.models.weights import Path, Piece, fold_names, plan_weights

Arrays = dict[str, np.ndarray]  # parameters of one layer, or of all that is beside the layers, by their paths there


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One weight that could be rounded.

    Attributes:
      source: its name in the files, `X.weight`.
      module: its name and kind.
      layer: its layer; None: it is beside the layers.
      param: the parameter that it fills, alone or with others, by its path within the layer.
      shape: [out, in].
      is_expert: of one expert, whose inputs are not measured.
    """

    source: str
    module: Module
    layer: int | None
    param: str
    shape: tuple[int, int]
    is_expert: bool

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An open checkpoint.

    Attributes:
      plan: which tensors fill which parameters of the whole decoder.
      tensors: by their names in the files; unread.
      shapes: of the parameters.
      targets: what could be rounded, by name, in the order of the plan.
      kept_float: names of experts that are one tensor of three axes, which no format here holds.
    """

    checkpoint: Checkpoint
    family: Family
    config: DecoderConfig
    plan: Mapping[Path, list[Piece]]
    tensors: Mapping[str, ReadableTensor]
    shapes: Mapping[Path, tuple[int, ...]]
    targets: Mapping[str, Target]
    kept_float: tuple[str, ...]

    def arrays(self, layer: int | None, dtype: np.dtype, replaced: Mapping[str, np.ndarray] | None = None) -> Arrays:
        """Parameters of a layer (None: of what is beside the layers), whole.

        `replaced`: tensors that take the place of those in the files, by name. Raises CheckpointError for numbers that
        are not finite.
        """
        tensors = dict(self.tensors) | {name: ArrayTensor(name, array) for name, array in (replaced or {}).items()}
        found = {}
        for path in self.paths(layer):
            shape = self.shapes[path]
            read = shard_reader(self.plan[path], tensors, shape, np.dtype(np.float32))
            array = read(tuple(slice(0, size) for size in shape))
            if not np.isfinite(array).all():
                names = fold_names(piece.source for piece in self.plan[path])
                raise CheckpointError(
                    f"{self.checkpoint.path}: {int((~np.isfinite(array)).sum())} numbers of {names} are NaN or "
                    "infinite; the checkpoint is damaged: fetch it again"
                )
            found[local_path(path)] = array.astype(dtype, copy=False)
        return found

    def paths(self, layer: int | None) -> list[Path]:
        """The parameters of a layer, or of what is beside the layers."""
        return [path for path in self.plan if (path[1] if path[0] == "layers" else None) == layer]

    def stored(self, layer: int | None) -> dict[str, np.ndarray]:
        """The tensors of a layer as they are in the files."""
        names = dict.fromkeys(piece.source for path in self.paths(layer) for piece in self.plan[path])
        tensors = {name: self.tensors[name] for name in names}
        return {name: tensor.read(tuple(slice(0, size) for size in tensor.shape)) for name, tensor in tensors.items()}

    def tensors_of(self, layer: int | None, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors that parameters of a layer are made of, by their names in the files."""
        return tensors_of({path: self.plan[path] for path in self.paths(layer)}, lambda path: arrays[local_path(path)])

    def targets_of(self, layer: int | None) -> list[Target]:
        return [target for target in self.targets.values() if target.layer == layer]


def local_path(path: Path) -> str:
    """'attention.qkv.kernel' of ("layers", 3, "attention", "qkv", "kernel")."""
    return ".".join(map(str, path[2:] if path[0] == "layers" else path))


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayTensor:
    """An array that reads as a tensor of a file (`safetensors_files.ReadableTensor`)."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    @property
    def outer_axis(self) -> int:
        return 0

    def read(self, index: Index) -> np.ndarray:
        return self.array[index]


def open_source(checkpoint: Checkpoint) -> Source:
    """Opens a float checkpoint in safetensors and checks its names and shapes.

    Raises CheckpointError for one that is quantised, of another kind, or of a family that cannot be quantised here.
    """
    origin = checkpoint.path
    scheme = None if checkpoint.kind is CheckpointKind.GGUF else read_scheme(checkpoint)
    if scheme is not None:
        raise CheckpointError(
            f"{origin} is quantised already ({scheme.label}); take the checkpoint that it was made of"
        )
    if checkpoint.kind is not CheckpointKind.HUGGING_FACE:
        raise CheckpointError(
            f"{origin} is a checkpoint of kind {checkpoint.kind}, but quantize reads safetensors of floats; take the "
            "Hugging Face directory that it was made of (`jaxserve convert` turns Orbax back)"
        )
    family, config = decoder_config(checkpoint)
    if config.module is not None:
        raise CheckpointError(
            f"{origin}: {family.architecture} has a decoder of its own ({config.module.__name__}), which cannot be run "
            "layer by layer; set model.quantization, which rounds at load, instead"
        )
    _, abstract = split_abstract(Partition.of(config, 1), np.dtype(np.float32), None)
    shapes = {path: array.shape for path, array in arrays_of(abstract).items()}
    axes = axes_of(abstract)
    plan = plan_weights(family, config, shapes, axes)
    tensors = checked_tensors(checkpoint, family, config, plan)
    modules = modules_of(plan)
    targets: dict[str, Target] = {}
    kept_float = []
    for path, pieces in plan.items():
        for piece in pieces:
            module = modules.get(piece.source)
            if module is None:
                continue
            if module.kind is ModuleKind.EXPERTS:
                kept_float.append(module.name)
                continue
            if module.kind is ModuleKind.LAYER and piece.in_major:
                raise CheckpointError(
                    f"{origin}: {family.architecture} stores inputs before outputs ({piece.source}), which "
                    "compressed-tensors does not; set model.quantization, which rounds at load, instead"
                )
            rows, columns = piece.source_shape
            targets[piece.source] = Target(
                source=piece.source,
                module=module,
                layer=path[1] if path[0] == "layers" else None,
                param=local_path(path),
                shape=(rows, columns),
                is_expert="experts" in axes[path],
            )
    return Source(
        checkpoint=checkpoint,
        family=family,
        config=config,
        plan=plan,
        tensors=tensors,
        shapes=shapes,
        targets=targets,
        kept_float=tuple(dict.fromkeys(kept_float)),
    )
