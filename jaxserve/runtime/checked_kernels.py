"""Kernels that an earlier start has found right, so that the next one need not compute their small batches again.

A kernel is proven for a processor, its source, and the versions of the libraries. All of these are in the name of the
file that says so, whose text is the error that was found. For CPUs only: on a GPU or TPU the driver and the card itself
may change under a server, and each start looks again.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxserve.runtime.store import digest_of, source_digest

_KEPT_S = 30 * 86400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedKernels:
    """The files of checks, in a folder of one machine's caches."""

    folder: Path

    def error_of(self, device: jax.Device, *facts: Any) -> float | None:  # pyright: ignore[reportInvalidTypeForm]
        """The error that an earlier start has found of a kernel with these facts; None where there was none."""
        with contextlib.suppress(OSError, ValueError):
            error = float(self._path(device, facts).read_text())
            return error if math.isfinite(error) else None
        return None

    def keep(self, error: float, device: jax.Device, *facts: Any) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """The kernel is right to this error. Where nothing can be written, the next start looks again."""
        path = self._path(device, facts)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
                file.write(repr(error))
            os.replace(file.name, path)
            for other in path.parent.iterdir():  # of versions of the source that are gone
                if other.stat().st_mtime < time.time() - _KEPT_S:
                    other.unlink(missing_ok=True)

    def _path(self, device: jax.Device, facts: tuple[Any, ...]) -> Path:  # pyright: ignore[reportInvalidTypeForm]
        return self.folder / digest_of([device], [source_digest(), *map(repr, facts)])
