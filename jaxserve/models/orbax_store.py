"""The weights of an Orbax directory: a flat table from parameter path to array.

The rest of the directory is handled in `orbax_io`.

Arrays are read by TensorStore, on which Orbax itself is built: Orbax restores the array that is stored, and a parameter
that is padded or copied for its devices would first lie whole on every one of them.
"""

from collections.abc import Mapping, Set
from pathlib import Path as FilePath

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import ORBAX_MARKER, read_json
from jaxserve.models.layout import Index
from jaxserve.models.sharding import Axes
from jaxserve.models.weights import Path, path_of

WEIGHTS_NAME = "weights"  # subdirectory
LAYOUT_VERSION = 2  # of parameter names, axes and the order in them; raised when one of these changes
_CHUNK_BYTES = 2**20  # read at once: a device's share should touch few numbers of others
_CUT_FIRST = ("experts", "kv_heads", "heads")  # short axes, of which a device has a few entries whole


def save_arrays(directory: FilePath, arrays: Mapping[Path, jax.Array], axes: Mapping[Path, Axes]) -> None:
    """Writes `arrays` below `directory`, which must not hold weights yet, and returns when they are on disk.

    `axes` are their logical axes: an array is stored in chunks that follow the cuts.
    """
    chunks = {
        _name(path): ocp.SaveArgs(
            chunk_byte_size=_CHUNK_BYTES, shard_axes=tuple(i for i, axis in enumerate(axes[path]) if axis in _CUT_FIRST)
        )
        for path in arrays
    }
    with ocp.StandardCheckpointer() as checkpointer:
        weights = (directory / WEIGHTS_NAME).absolute()
        checkpointer.save(weights, {_name(path): a for path, a in arrays.items()}, save_args=chunks)
        checkpointer.wait_until_finished()


def read_shapes(directory: FilePath) -> dict[Path, jax.ShapeDtypeStruct]:
    """Shape and stored dtype of every array. Raises CheckpointError when it is missing or unreadable."""
    marker = read_json(directory / ORBAX_MARKER)
    if marker.get("layout_version") != LAYOUT_VERSION:
        raise CheckpointError(
            f"{directory / ORBAX_MARKER}: layout_version is {marker.get('layout_version')!r}, but only "
            f"{LAYOUT_VERSION} is supported; convert the original checkpoint again"
        )
    weights = (directory / WEIGHTS_NAME).absolute()
    if not weights.is_dir():
        raise CheckpointError(f"{weights} is missing; an Orbax checkpoint directory needs it")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(weights).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{weights} is incomplete or no Orbax checkpoint: {error}") from error
    return {path_of(name): jax.ShapeDtypeStruct(m.shape, m.dtype) for name, m in metadata.items()}


class StoredArray:
    """One array on disk."""

    def __init__(self, weights: FilePath, name: str) -> None:
        """Raises CheckpointError when it is missing or unreadable."""
        self._weights = weights
        kvstore = {"driver": "ocdbt", "base": f"file://{weights}", "path": name}
        try:
            self._store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{weights} is truncated or corrupt: {error}") from error

    def read(self, index: Index | None, dtype: np.dtype) -> np.ndarray:
        """That part of it, in `dtype`; never None, which is in the type of `make_array_from_callback` alone.

        Raises CheckpointError.
        """
        assert index is not None, self._weights
        try:
            return np.asarray(self._store[index].read().result()).astype(dtype, copy=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._weights} is truncated or corrupt: {error}") from error


def open_arrays(
    directory: FilePath, known: Mapping[Path, tuple[int, ...]], wanted: Set[Path] | None = None
) -> dict[Path, StoredArray]:
    """The arrays of `wanted`, all by default, none of them read yet. `known`: all that there must be, and their shapes.

    Raises CheckpointError with the full lists when names or shapes differ.
    """
    weights = (directory / WEIGHTS_NAME).absolute()
    stored = read_shapes(directory)
    _check_same(weights, "missing", set(known) - set(stored))
    _check_same(weights, "unknown", set(stored) - set(known))
    wrong = [
        f"{_name(path)} is {list(stored[path].shape)}, not {list(shape)}"
        for path, shape in known.items()
        if stored[path].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{weights}: shapes disagree with config.json: {'; '.join(wrong)}")
    return {path: StoredArray(weights, _name(path)) for path in (known if wanted is None else wanted)}


def _check_same(weights: FilePath, what: str, paths: set[Path]) -> None:
    if paths:
        names = ", ".join(sorted(_name(path) for path in paths))
        raise CheckpointError(f"{weights}: {len(paths)} weights are {what}: {names}")


def _name(path: Path) -> str:
    return ".".join(str(step) for step in path)
