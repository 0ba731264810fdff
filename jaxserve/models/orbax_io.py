"""Orbax checkpoint directories, and conversion from and to Hugging Face ones, exact to the bit.

The layout of such a directory:

    jaxserve_orbax.json      marker, with the version of this layout
    weights/                 Orbax: one array per decoder parameter, in the dtype of the checkpoint it came from
    config.json, generation_config.json, tokenizer files     as they were

Arrays have the layout of the decoder's parameters and not that of the checkpoint, so that loading is a plain read of
each device's share.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path as FilePath

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.config.model_path import CONFIG_NAME
from jaxserve.errors import CheckpointError
from jaxserve.files.new_directory import new_directory
from jaxserve.models.checkpoint import (
    INDEX_NAME,
    ORBAX_MARKER,
    SINGLE_NAME,
    Checkpoint,
    CheckpointKind,
    read_checkpoint,
)
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.loading import decoder_config, split_abstract
from jaxserve.models.orbax_store import LAYOUT_VERSION, open_arrays, read_shapes, save_arrays
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import read_scheme
from jaxserve.models.safetensors_files import ReadableTensor
from jaxserve.models.shard_reading import checked_tensors, shard_reader, tensors_of
from jaxserve.models.sharding import Axes, arrays_of, axes_of
from jaxserve.models.weights import Path, Piece, plan_weights
from jaxserve.progress import Progress, Quiet

MAX_FILE_BYTES = 5_000_000_000  # of one safetensors file, as transformers cuts them
_NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def convert(
    source: str | FilePath,
    target: str | FilePath,
    *,
    progress: Progress = Quiet(),  # noqa: B008 (does nothing)
) -> CheckpointKind:
    """Converts a Hugging Face directory to an Orbax one, or an Orbax one back, and returns the kind of `target`.

    Every weight that the model uses keeps its bytes, but for float64, which becomes float32. Tensors that the model
    does not use are dropped: an output projection beside tied embeddings, stored rotation frequencies.

    Raises CheckpointError when the source is unusable or quantised, or the target exists and is not an empty directory.
    The target appears when all of it is there.
    """
    checkpoint = read_checkpoint(source)
    if checkpoint.kind is CheckpointKind.GGUF:
        raise CheckpointError(
            f"{checkpoint.config_file} is a GGUF file, which is not converted; serve it as it is, or convert the "
            "safetensors checkpoint that it was made of"
        )
    with new_directory(FilePath(target).expanduser()) as directory:
        if checkpoint.kind is CheckpointKind.HUGGING_FACE:
            _to_orbax(checkpoint, directory, progress)
            return CheckpointKind.ORBAX
        _to_hugging_face(checkpoint, directory, progress)
        return CheckpointKind.HUGGING_FACE


def _plan(
    checkpoint: Checkpoint,
) -> tuple[Family, DecoderConfig, dict[Path, list[Piece]], dict[Path, tuple[int, ...]], dict[Path, Axes]]:
    """The last two are the shapes and the logical axes of all parameters."""
    family, config = decoder_config(checkpoint)
    _, abstract = split_abstract(Partition.of(config, 1), np.dtype("float32"), None)
    shapes = {path: array.shape for path, array in arrays_of(abstract).items()}
    axes = axes_of(abstract)
    return family, config, plan_weights(family, config, shapes, axes), shapes, axes


def _to_orbax(checkpoint: Checkpoint, directory: FilePath, progress: Progress) -> None:
    if (scheme := read_scheme(checkpoint)) is not None:
        raise CheckpointError(
            f"{checkpoint.path} is quantised ({scheme.label}), and an Orbax directory holds float weights; serve the "
            "Hugging Face directory as it is, or convert the checkpoint that it was quantised from"
        )
    family, config, plan, shapes, axes = _plan(checkpoint)
    if not config.has_head:
        raise CheckpointError(
            f"{checkpoint.path} has no output projection, and {checkpoint.config_file} does not tie it to the "
            "embeddings; an Orbax directory has all weights that its config speaks of: serve this one as it is"
        )
    tensors = checked_tensors(checkpoint, family, config, plan)
    arrays = {}
    progress.begin("reading the weights")
    for number, (path, shape) in enumerate(shapes.items()):
        progress.count(number, len(shapes))
        reader = shard_reader(plan[path], tensors, shape, _common_dtype(path, plan[path], tensors))
        arrays[path] = jax.device_put(reader((slice(None),) * len(shape)), _on_host())
    num_bytes = sum(array.nbytes for array in arrays.values())
    progress.begin(f"writing {num_bytes / 2**30:.2f} GiB")
    save_arrays(directory, arrays, axes)
    copy_small_files(checkpoint.path, directory)
    marker = {"layout_version": LAYOUT_VERSION, "architecture": family.architecture}
    (directory / ORBAX_MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _common_dtype(path: Path, pieces: list[Piece], tensors: Mapping[str, ReadableTensor]) -> np.dtype:
    names = {piece.source: tensors[piece.source].dtype for piece in pieces}
    if len(set(names.values())) > 1:
        raise CheckpointError(f"tensors that share one parameter have different element types: {names}")
    stored = jax.numpy.dtype(next(iter(names.values())))
    return np.dtype(np.float32) if stored == np.float64 else stored


def _to_hugging_face(checkpoint: Checkpoint, directory: FilePath, progress: Progress) -> None:
    _, _, plan, shapes, _ = _plan(checkpoint)
    progress.begin("reading the weights")
    arrays, stored = open_arrays(checkpoint.path, shapes), read_shapes(checkpoint.path)
    tensors = tensors_of(plan, lambda path: arrays[path].read((slice(None),) * len(shapes[path]), stored[path].dtype))
    progress.begin(f"writing {sum(tensor.nbytes for tensor in tensors.values()) / 2**30:.2f} GiB")
    _write_safetensors(directory, tensors)
    copy_small_files(checkpoint.path, directory)


def _on_host() -> jax.sharding.Sharding:
    """The mesh of a conversion: it passes through host memory, even where there is an accelerator."""
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


def _write_safetensors(directory: FilePath, tensors: Mapping[str, np.ndarray]) -> None:
    """One file, or numbered files with an index when they would exceed MAX_FILE_BYTES."""
    files: list[dict[str, np.ndarray]] = [{}]
    for name in sorted(tensors):
        used = sum(t.nbytes for t in files[-1].values())
        if files[-1] and used + tensors[name].nbytes > MAX_FILE_BYTES:
            files.append({})
        files[-1][name] = tensors[name]
    metadata = {"format": "pt"}  # transformers refuses files without this entry
    if len(files) == 1:
        save_file(files[0], str(directory / SINGLE_NAME), metadata=metadata)
        return
    weight_map = {}
    for number, part in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, str(directory / file_name), metadata=metadata)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_small_files(source: FilePath, target: FilePath) -> None:
    """config.json, generation_config.json, tokenizer and chat template files: all top-level files but weights."""
    assert (source / CONFIG_NAME).is_file(), source
    for file in source.iterdir():
        if file.is_file() and file.name != ORBAX_MARKER and not any(file.match(p) for p in _NOT_COPIED):
            shutil.copyfile(file, target / file.name)
