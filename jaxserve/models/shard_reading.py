"""The reader of one device's share of one parameter from safetensors, piece by piece.

Files are opened in `safetensors_files`, names matched in `weights`.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.kernels.storage import Storage
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.gguf.tensors import open_gguf
from jaxserve.models.layout import Index, Pattern, plan_read, read_target, write_source
from jaxserve.models.partition import Block
from jaxserve.models.quantised.choosing import choose_formats, hint_of, modules_of, possible_names, zero_biases
from jaxserve.models.quantised.coding import GROUP, CodedTensor
from jaxserve.models.quantised.reading import read_scheme
from jaxserve.models.quantised.scheme import Format
from jaxserve.models.quantised.storing import Kept
from jaxserve.models.quantised.widening import WidenedTensor
from jaxserve.models.safetensors_files import (
    FLOAT_DTYPES,
    ReadableTensor,
    TensorSource,
    describe_origin,
    open_tensors,
)
from jaxserve.models.weights import Path, Piece, check_names, fold_names

logger = logging.getLogger(__name__)
T = TypeVar("T")
_At = tuple[Index, Index]  # a band of a piece, and its place in a share
GroupReader = Callable[[Index], tuple[np.ndarray, np.ndarray]]  # see `group_reader`

_FIELDS = {"vocab": "vocab_size", "embed": "hidden_size", "mlp": "intermediate_size"}  # axes that have a field each
_MAX_KINDS = 4  # wrong shapes that are listed one by one
_BAND_BYTES = 4 * 2**20  # bytes that are read, rearranged and converted at once
_LARGE_BYTES = 2**26  # of a share that is worth threads of its own
_BYTES_OF_CODE = 8  # with all that decoding a code has in memory


def checked_tensors(
    checkpoint: Checkpoint,
    family: Family,
    config: DecoderConfig,
    plan: Mapping[Path, list[Piece]],
    kept: Mapping[Path, Kept] = MappingProxyType({}),
    say: Callable[[str], None] | None = logger.warning,
) -> dict[str, ReadableTensor]:
    """The open tensors of a Hugging Face directory or a GGUF file, all there and of the right shapes, still unread.

    Quantised weights are there under the names of the float tensors that they would be. Those of parameters that are
    `kept` as the checkpoint's codes read as records (`quantised.coding`); others are widened as they are read. `say`:
    see `open_tensors`.

    Raises CheckpointError with every missing and unknown name, or every wrong shape, and for quantised weights as
    `quantised` says.
    """
    pieces = [piece for pieces in plan.values() for piece in pieces]
    names = {piece.source for piece in pieces}
    scheme = read_scheme(checkpoint)
    files = open_gguf(checkpoint) if checkpoint.kind is CheckpointKind.GGUF else open_tensors(checkpoint.path, say)
    origin = describe_origin(checkpoint.path, [*files.values()])
    files = respelled(files, family.spellings)
    if scheme is None:
        files = _with_prefix(files, family.prefix, names)
        check_names(family, config, files, origin, needed=names, hint=hint_of(files))
        tensors: dict[str, ReadableTensor] = {name: check_float(files[name]) for name in names}
    else:
        modules = modules_of(plan)
        files = _with_prefix(files, family.prefix, names | possible_names(scheme, modules))
        formats = choose_formats(scheme, modules, files, checkpoint.config_file)
        _check_order(pieces, formats, origin)
        plain = names - formats.keys()
        needed = plain | {name for source, found in formats.items() for name in found.required(source)}
        optional = {name for source, found in formats.items() for name in found.optional(source)}
        optional |= zero_biases(formats, files, needed)
        check_names(family, config, files, origin, needed=needed, optional=optional, ignored=scheme.ignored)
        tensors = {name: check_float(files[name]) for name in plain}
        storages = _storages(plan, kept)
        for source, found in formats.items():
            opened, storage = found.open(source, files), storages.get(source)
            tensors[source] = (
                WidenedTensor(source=opened, in_major=found.in_major)
                if storage is None
                else CodedTensor(source=opened, storage=storage, bits=found.bits, in_major=found.in_major)
            )
    wrong = [p for p in pieces if tensors[p.source].shape != p.source_shape]
    if wrong:
        raise CheckpointError(_describe_shapes(wrong, len(pieces), tensors, origin, checkpoint.config_file))
    return tensors


def _storages(plan: Mapping[Path, list[Piece]], kept: Mapping[Path, Kept]) -> dict[str, Storage]:
    """What the codes of each tensor are kept as."""
    return {
        piece.source: found.storage
        for path, pieces in plan.items()
        if path in kept
        for piece in pieces
        if (found := _of_source(kept[path], piece.source)) is not None
        and found.rounded is None
        and found.storage is not None
    }


def _of_source(kept: Kept, source: str) -> Kept | None:
    """What one tensor of a parameter is kept as."""
    return next((part.kept for part in kept.parts if source in part.sources), None) if kept.parts else kept


def window_reader(read: Callable[[Any], T], axis: int, window: range) -> Callable[[Any], T]:
    """Reads a part of a parameter, `window` of an axis."""

    def read_part(index: Index | None) -> T:
        assert index is not None
        start, stop, _ = index[axis].indices(len(window))
        moved = slice(window.start + start, window.start + stop)
        return read((*index[:axis], moved, *index[axis + 1 :]))

    return read_part


def check_float(tensor: TensorSource) -> TensorSource:
    """The tensor, if its numbers are floats. Raises CheckpointError."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} has element type {tensor.dtype}, but weights that config.json does "
            f"not call quantised are {', '.join(FLOAT_DTYPES)}; do config.json and the weights belong together?"
        )
    return tensor


def _check_order(pieces: list[Piece], formats: Mapping[str, Format], origin: str) -> None:
    """Formats store outputs before inputs, and no family with the other order is known to be quantised."""
    for piece in pieces:
        found = formats.get(piece.source)
        if found is not None and found.in_major != piece.in_major:
            raise CheckpointError(
                f"{origin}: {piece.source} is quantised, which is not supported for a family that stores inputs before "
                "outputs; take the checkpoint without quantisation"
            )


def respelled(tensors: dict[str, TensorSource], spellings: tuple[tuple[str, str], ...]) -> dict[str, TensorSource]:
    """The tensors by the names of a table that has another beginning for some of them (`Family.spellings`)."""

    def name_of(name: str) -> str:
        for begin, known in spellings:
            if found := re.match(begin, name):
                return known + name[found.end() :]
        return name

    return {name_of(name): tensor for name, tensor in tensors.items()} if spellings else tensors


def _with_prefix(tensors: dict[str, TensorSource], prefix: str, needed: set[str]) -> dict[str, TensorSource]:
    """The tensors by the names of the family's table, for a checkpoint that leaves the prefix out."""
    return {prefix + name if name not in needed and prefix + name in needed else name: t for name, t in tensors.items()}


def _describe_shapes(
    wrong: list[Piece], count: int, tensors: Mapping[str, ReadableTensor], origin: str, config_file: str
) -> str:
    """The sizes that disagree by their names in config.json, and the tensors, those of all layers as one."""
    fields: dict[str, None] = {}
    groups: dict[str, list[str]] = {}
    for piece in wrong:
        found, expected = tensors[piece.source].shape, piece.source_shape
        for names, has, wants in zip(piece.pattern.source, found, expected, strict=False):
            if has != wants and names[0] in _FIELDS:
                fields[f"{_FIELDS[names[0]]} is {wants}, but the weights have {has}"] = None
        groups.setdefault(f"{list(found)}, not {list(expected)}", []).append(piece.source)
    kinds = [f"{fold_names(names)}: {shapes}" for shapes, names in groups.items()]
    more = f"; and {len(kinds) - _MAX_KINDS} shapes more" if len(kinds) > _MAX_KINDS else ""
    said = f"{', '.join(fields)}; " if fields else ""
    return (
        f"the shapes in {origin} disagree with {config_file}: {said}{len(wrong)} of {count} tensors are others ("
        f"{'; '.join(kinds[:_MAX_KINDS])}{more}); do config.json and the weights belong together?"
    )


def shard_reader(
    pieces: list[Piece],
    tensors: Mapping[str, ReadableTensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Callable[[Index | None], np.ndarray]:
    """A callback of `make_array_from_callback`: one shard's share of one parameter, from all pieces it overlaps."""

    def read_shard(index: Index | None) -> np.ndarray:
        assert index is not None, shape
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        out = np.empty([len(b) for b in bounds], dtype)
        for piece in pieces:
            cuts, into = _overlap(piece, bounds)
            if all(cut.start < cut.stop for cut in cuts):
                tensor, target = tensors[piece.source], out[tuple(into)]
                read = _rows_from(tensor.read, piece.first)

                def fill(
                    at: _At,
                    target: np.ndarray = target,
                    read: Callable[[Index], np.ndarray] = read,
                    pattern: Pattern = piece.pattern,
                ) -> None:
                    band, place = at
                    target[place] = read_target(read, pattern, band)

                _on_all_cores(fill, _bands(piece, tensor.outer_axis, cuts, target.nbytes), target.nbytes)
        return out

    return read_shard


def group_reader(
    pieces: Sequence[Piece], tensors: Mapping[str, ReadableTensor], shape: tuple[int, ...], group: int
) -> GroupReader | None:
    """Reads any part of a parameter of codes that cuts no group: codes, and a `coding.GROUP` for each group.

    `pieces`: those that will be read. None where the groups of one are not runs of the last axis of the parameter.
    """
    for piece in pieces:
        tensor, window = tensors[piece.source], piece.window[-1]
        if not (isinstance(tensor, CodedTensor) and tensor.in_runs and tensor.storage.group == group):
            return None
        source, inputs = piece.pattern.source, piece.pattern.target[-1]
        if source[-1][-1] != inputs or source[tensor.outer_axis][0] == inputs:
            return None
        if window.start % group or len(window) % group:
            return None

    def read(index: Index) -> tuple[np.ndarray, np.ndarray]:
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        lengths = [len(b) for b in bounds]
        codes, groups = np.empty(lengths, np.int8), np.empty((*lengths[:-1], lengths[-1] // group), GROUP)
        for piece in pieces:
            cuts, into = _overlap(piece, bounds)
            if any(cut.start >= cut.stop for cut in cuts):
                continue
            tensor, pattern = tensors[piece.source], piece.pattern
            assert isinstance(tensor, CodedTensor), tensor
            of_groups = dataclasses.replace(pattern, shape=(*pattern.shape[:-1], pattern.shape[-1] // group))
            read_pair = _rows_from(tensor.read_groups, piece.first)
            own_codes, own_groups = codes[tuple(into)], groups[(*into[:-1], _in_groups(into[-1], group))]

            def fill(
                at: _At,
                own_codes: np.ndarray = own_codes,
                own_groups: np.ndarray = own_groups,
                read_pair: GroupReader = read_pair,
                pattern: Pattern = pattern,
                of_groups: Pattern = of_groups,
            ) -> None:
                band, place = at
                source_index, arrange = plan_read(pattern, band)
                _, arrange_groups = plan_read(of_groups, (*band[:-1], _in_groups(band[-1], group)))
                found, found_groups = read_pair(source_index)
                own_codes[place], own_groups[place] = arrange(found), arrange_groups(found_groups)

            num_bytes = _BYTES_OF_CODE * own_codes.size
            _on_all_cores(fill, _bands(piece, tensor.outer_axis, cuts, num_bytes), num_bytes)
        return codes, groups

    return read


def tensors_of(plan: Mapping[Path, list[Piece]], array_of: Callable[[Path], np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse: the tensors of a checkpoint, by name, from the whole parameters that they fill."""
    tensors: dict[str, np.ndarray] = {}
    for path, pieces in plan.items():
        whole = array_of(path)
        for piece in pieces:
            share = write_source(whole[tuple(slice(w.start, w.stop) for w in piece.window)], piece.pattern)
            tensor = tensors.setdefault(piece.source, np.empty(piece.source_shape, share.dtype))
            tensor[piece.first : piece.first + len(share)] = share
    return tensors


def _on_all_cores(fill: Callable[[_At], None], bands: Iterable[_At], num_bytes: int) -> None:
    """Fills the bands of a share. Parameters are read side by side, but the largest takes as long as all others."""
    if num_bytes < _LARGE_BYTES:
        for band in bands:
            fill(band)
        return
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jaxserve-read") as pool:
        for _ in pool.map(fill, bands):
            pass


def _overlap(piece: Piece, bounds: Sequence[range]) -> tuple[list[slice], list[slice]]:
    """The part of a piece that lies in a share with these bounds: its cuts of the piece, and of the share."""
    cuts, into = [], []
    for want, window in zip(bounds, piece.window, strict=True):
        start, stop = max(want.start, window.start), min(want.stop, window.stop)
        cuts.append(slice(start - window.start, stop - window.start))
        into.append(slice(start - want.start, stop - want.start))
    return cuts, into


def _in_groups(cut: slice, group: int) -> slice:
    return slice(cut.start // group, cut.stop // group)


def _rows_from(read: Callable[[Index], T], first: int) -> Callable[[Index], T]:
    """Reads as if the tensor began at index `first` of its first axis."""
    if first == 0:
        return read
    return lambda index: read((slice(index[0].start + first, index[0].stop + first), *index[1:]))


def _bands(piece: Piece, outer_axis: int, cuts: list[slice], num_bytes: int) -> Iterator[tuple[Index, Index]]:
    """A share of a piece, of `num_bytes`, in parts of some megabytes: where to read each, and its place in the share.

    They are cut along the axis of the tensor that is outermost in the file, so that each is read in as long runs as the
    whole.
    """
    axis = piece.pattern.target.index(piece.pattern.source[outer_axis][0])
    size, start = cuts[axis].stop - cuts[axis].start, cuts[axis].start
    step = max(1, _BAND_BYTES * size // max(1, num_bytes))
    for low in range(0, size, step):
        high = min(low + step, size)
        before = (slice(None),) * axis
        yield (*cuts[:axis], slice(start + low, start + high), *cuts[axis + 1 :]), (*before, slice(low, high))


def block_reader(
    read: Callable[[Index], np.ndarray], blocks: list[Block], shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[Index | None], np.ndarray]:
    """The callback for a padded `shape`: the part of each block in a shard is read, the rest is zero."""

    def read_shard(index: Index | None) -> np.ndarray:
        assert index is not None, shape
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        out = np.zeros([len(b) for b in bounds], dtype)
        for block in blocks:
            into, source = [], []
            for want, (to, start, size) in zip(bounds, block, strict=True):
                first, last = max(want.start, to), min(want.stop, to + size)
                into.append(slice(first - want.start, last - want.start))
                source.append(slice(first - to + start, last - to + start))
            if all(cut.start < cut.stop for cut in into):
                out[tuple(into)] = read(tuple(source))
        return out

    return read_shard
