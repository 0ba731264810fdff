"""Executables of one file's kernels are of no use to the next, and are large; machine code of Numba's is of use to all,
other processes included."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.kernels.cpu import machine_code


@pytest.fixture(autouse=True, scope="session")
def machine_code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is kept, for processes that tests start."""
    folder = tmp_path_factory.mktemp("kept")
    if machine_code.missing() is None:
        machine_code.keep_machine_code(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def forget_executables() -> Iterator[None]:
    yield
    jax.clear_caches()
