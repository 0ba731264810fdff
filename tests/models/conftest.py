"""Models run on Numba's kernels here, without an engine that would keep their machine code."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def machine_code_for_all(machine_code_folder: Path) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def quick_models(compiled_quickly: None) -> None:
    """They are compared with other implementations, and so with a tolerance."""
