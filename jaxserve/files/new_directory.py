"""A new directory that appears as a whole or not at all, since half a checkpoint would be mistaken for a whole one.

It is filled under another name beside the target and renamed at the end.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import CheckpointError

_TRIES, _PAUSE_S = 50, 0.2


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `target` when the block ends; after any exception nothing of it is left.

    Raises CheckpointError when `target` exists and is not an empty directory, or nothing can be written beside it.
    """
    check_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write in {target.parent}: {error}") from error
    made = work / target.name
    try:
        made.mkdir()
        yield made
        made.replace(target)  # an empty directory gives way
    finally:
        _remove(work)


def check_new(target: Path) -> None:
    """Raises CheckpointError when `target` exists and is not an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"target {target} exists already; give a new or empty directory")


def _remove(directory: Path) -> None:
    """Removes it, again and again: threads of an interrupted library may still be writing into it."""
    for _ in range(_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(_PAUSE_S)
