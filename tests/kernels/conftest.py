"""Executables of one file's kernels are of no use to the next, and are large; machine code of Numba's is of use to all,
other processes included."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.kernels.cpu import machine_code


@pytest.fixture(autouse=True, scope="session")
def machine_code_folder() -> Path:
    """Where the engines of this run keep it (tests/conftest.py), for processes that tests start, too."""
    folder = Path(os.environ["JAXSERVE_COMPILE_CACHE"])
    if machine_code.missing() is None:
        machine_code.keep_machine_code(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def forget_executables() -> Iterator[None]:
    yield
    jax.clear_caches()
