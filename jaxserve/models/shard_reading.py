"""The reader of one device's share of one parameter from safetensors, piece by piece.

Files are opened in `safetensors_files`, names matched in `weights`.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, axis_sizes
from jaxserve.models.layout import Index, read_target
from jaxserve.models.partition import Block
from jaxserve.models.safetensors_files import TensorSource, open_tensors
from jaxserve.models.weights import Path, Piece, check_names, fold_names

_FIELDS = {"vocab": "vocab_size", "embed": "hidden_size", "mlp": "intermediate_size"}  # axes that have a field each
_MAX_KINDS = 4  # wrong shapes that are listed one by one
_BAND_BYTES = 4 * 2**20  # bytes that are read, rearranged and converted at once


def checked_tensors(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig, plan: Mapping[Path, list[Piece]]
) -> dict[str, TensorSource]:
    """The open tensors of a Hugging Face directory, all there and of the right shapes, still unread.

    Raises CheckpointError with every missing and unknown name, or every wrong shape.
    """
    tensors, sizes = open_tensors(checkpoint.path), axis_sizes(config)
    check_names(family, config, plan, tensors, str(checkpoint.path))
    pieces = [piece for pieces in plan.values() for piece in pieces]
    wrong = [p for p in pieces if tensors[p.source].shape != p.pattern.source_shape(sizes)]
    if wrong:
        raise CheckpointError(_describe_shapes(wrong, len(pieces), tensors, sizes, checkpoint.config_file))
    return tensors


def _describe_shapes(
    wrong: list[Piece], count: int, tensors: Mapping[str, TensorSource], sizes: Mapping[str, int], config_file: str
) -> str:
    """The sizes that disagree by their names in config.json, and the tensors, those of all layers as one."""
    fields: dict[str, None] = {}
    groups: dict[str, list[str]] = {}
    for piece in wrong:
        found, expected = tensors[piece.source].shape, piece.pattern.source_shape(sizes)
        for names, has, wants in zip(piece.pattern.source, found, expected, strict=False):
            if has != wants and names[0] in _FIELDS:
                fields[f"{_FIELDS[names[0]]} is {wants}, but the weights have {has}"] = None
        groups.setdefault(f"{list(found)}, not {list(expected)}", []).append(piece.source)
    kinds = [f"{fold_names(names)}: {shapes}" for shapes, names in groups.items()]
    more = f"; and {len(kinds) - _MAX_KINDS} shapes more" if len(kinds) > _MAX_KINDS else ""
    said = f"{', '.join(fields)}; " if fields else ""
    return (
        f"shapes disagree with {config_file}: {said}{len(wrong)} of {count} tensors are others ("
        f"{'; '.join(kinds[:_MAX_KINDS])}{more}); do config.json and the weights belong together?"
    )


def shard_reader(
    pieces: list[Piece],
    tensors: Mapping[str, TensorSource],
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Callable[[Index | None], np.ndarray]:
    """A callback of `make_array_from_callback`: one shard's share of one parameter, from all pieces it overlaps."""

    def read_shard(index: Index | None) -> np.ndarray:
        assert index is not None, shape
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        out = np.empty([len(b) for b in bounds], dtype)
        for piece in pieces:
            cuts = [slice(b.start, b.stop) for b in bounds]
            into: list[slice] = [slice(None)] * len(shape)
            if piece.part is not None:
                axis, want = piece.part.axis, bounds[piece.part.axis]
                start, stop = max(want.start, piece.part.start), min(want.stop, piece.part.stop)
                if start >= stop:
                    continue
                cuts[axis] = slice(start - piece.part.start, stop - piece.part.start)
                into[axis] = slice(start - want.start, stop - want.start)
            for band, target in _bands(piece, cuts, out[tuple(into)]):
                target[...] = read_target(tensors[piece.source].read, piece.pattern, sizes, band)
        return out

    return read_shard


def _bands(piece: Piece, cuts: list[slice], out: np.ndarray) -> Iterator[tuple[Index, np.ndarray]]:
    """A share of a piece in parts of some megabytes: where to read each, and the window of `out` that it fills.

    They are cut along the axis that is outermost in the file, so that each is read in as long runs as the whole.
    """
    axis = piece.pattern.target.index(piece.pattern.source[0][0])
    size, start = out.shape[axis], cuts[axis].start
    step = max(1, _BAND_BYTES * size // max(1, out.nbytes))
    for low in range(0, size, step):
        high = min(low + step, size)
        before = (slice(None),) * axis
        yield (*cuts[:axis], slice(start + low, start + high), *cuts[axis + 1 :]), out[(*before, slice(low, high))]


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
