"""One device's share of one parameter, read from safetensors piece by piece.

Owns which bytes of which tensors a shard needs, and where they go. Refuses files (`safetensors_files`), names
(`weights`) and devices (`loading`).
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
from jaxserve.models.weights import Path, Piece, check_names

_BAND_BYTES = 4 * 2**20  # read, rearranged and converted at once


def checked_tensors(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig, plan: Mapping[Path, list[Piece]]
) -> dict[str, TensorSource]:
    """The open tensors of a Hugging Face directory, all there and of the right shapes, still unread.

    Raises CheckpointError with every missing and unknown name, or every wrong shape.
    """
    tensors, sizes = open_tensors(checkpoint.path), axis_sizes(config)
    check_names(family, config, plan, tensors, str(checkpoint.path))
    wrong = []
    for piece in (piece for pieces in plan.values() for piece in pieces):
        tensor, expected = tensors[piece.source], piece.pattern.source_shape(sizes)
        if tensor.shape != expected:
            wrong.append(f"{tensor.name} in {tensor.file} is {list(tensor.shape)}, not {list(expected)}")
    if wrong:
        raise CheckpointError(f"shapes disagree with config.json: {'; '.join(wrong)}")
    return tensors


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
    """The callback for a padded `shape`: what of each block lies in a shard is read, all else is zero."""

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
