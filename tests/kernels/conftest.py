"""Executables of one file's kernels are of no use to the next, and are large."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def forget_executables() -> Iterator[None]:
    yield
    jax.clear_caches()
