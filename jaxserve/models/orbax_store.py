"""The weights of an Orbax directory: a flat table from parameter path to array.

Owns reading and writing that table. Refuses the rest of the directory (`orbax_io`) and to know a module.
"""

from collections.abc import Mapping, Set
from pathlib import Path as FilePath
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import ORBAX_MARKER, read_json
from jaxserve.models.weights import Path, path_of

WEIGHTS_NAME = "weights"  # subdirectory
LAYOUT_VERSION = 1  # of parameter names and axes; raised when either changes


def save_arrays(directory: FilePath, arrays: Mapping[Path, jax.Array]) -> None:
    """Writes `arrays` below `directory`, which must not hold weights yet, and returns when they are on disk."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / WEIGHTS_NAME).absolute(), {_name(path): a for path, a in arrays.items()})
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


def restore_arrays(
    directory: FilePath, wanted: Mapping[Path, jax.ShapeDtypeStruct], *, known: Set[Path] | None = None
) -> dict[Path, jax.Array]:
    """The arrays of `wanted`, cast to its dtypes, each device reading its share of the shardings there.

    `known` are all arrays that there may be, for a stage that wants some of them; None: those wanted.

    Raises CheckpointError with the full lists when names differ, or when shapes differ or data is unreadable.
    """
    weights = (directory / WEIGHTS_NAME).absolute()
    stored = read_shapes(directory)
    _check_same(weights, "missing", set(wanted) - set(stored))
    _check_same(weights, "unknown", set(stored) - (set(wanted) if known is None else known))
    wrong = [
        f"{_name(path)} is {list(stored[path].shape)}, not {list(want.shape)}"
        for path, want in wanted.items()
        if stored[path].shape != want.shape
    ]
    if wrong:
        raise CheckpointError(f"{weights}: shapes disagree with config.json: {'; '.join(wrong)}")
    target: dict[str, Any] = {_name(path): want for path, want in wanted.items()}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arguments = ocp.checkpoint_utils.construct_restore_args(target)
            restored = checkpointer.restore(
                weights, ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=True)
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{weights} is truncated or corrupt: {error}") from error
    return {path_of(name): array for name, array in restored.items()}


def _check_same(weights: FilePath, what: str, paths: set[Path]) -> None:
    if paths:
        names = ", ".join(sorted(_name(path) for path in paths))
        raise CheckpointError(f"{weights}: {len(paths)} weights are {what}: {names}")


def _name(path: Path) -> str:
    return ".".join(str(step) for step in path)
