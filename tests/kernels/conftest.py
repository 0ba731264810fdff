"""Executables of one file's kernels are of no use to the next, and are large; Numba's machine code is of use to all."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def machine_code_for_all(machine_code_folder: Path) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def forget_executables() -> Iterator[None]:
    yield
    jax.clear_caches()
