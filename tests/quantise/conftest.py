"""Every job makes its functions anew, mostly for the same model: what one test has compiled the others find."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def machine_code_for_all(machine_code_folder: Path) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def shared_programs(compiled_once: None, compiled_quickly: None) -> None:
    pass
